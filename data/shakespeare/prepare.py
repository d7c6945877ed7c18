"""Tiny Shakespeare as GPT-2 BPE tokens, for fine-tuning.

    $ python data/shakespeare/prepare.py

This gives 301,966 tokens for training and 36,059 for validation. tiktoken downloads GPT-2's vocabulary the first time.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
from data.common import exit_with_error, input_argument, tiny_shakespeare, write_tokens
from data.vocabulary import DataError, gpt2_encoding

DIRECTORY = os.path.dirname(os.path.abspath(__file__))
VOCAB_SIZE = None  # for plan.py: GPT-2's, without a meta.pkl

if __name__ == "__main__":
    text = tiny_shakespeare(DIRECTORY, input_argument(__doc__.splitlines()[0]))
    try:
        encoding = gpt2_encoding()
    except DataError as error:
        exit_with_error(str(error))
    split = int(len(text) * 0.9)
    for name, part in (("val", text[split:]), ("train", text[:split])):
        write_tokens(DIRECTORY, name, encoding.encode_ordinary(part))
