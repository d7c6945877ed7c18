"""Tiny Shakespeare as GPT-2 BPE tokens, for fine-tuning.

    $ python data/shakespeare/prepare.py

This gives 301,966 tokens for training and 36,059 for validation. tiktoken downloads GPT-2's vocabulary the first time.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
from data.common import encoded, exit_on_error, input_argument, tiny_shakespeare, write_dataset
from data.vocabulary import gpt2_encoding

DIRECTORY = os.path.dirname(os.path.abspath(__file__))
VOCAB_SIZE = None  # for plan.py: GPT-2's, without a meta.pkl

if __name__ == "__main__":
    local = input_argument(__doc__.splitlines()[0])
    with exit_on_error():
        text, encoding = tiny_shakespeare(DIRECTORY, local), gpt2_encoding()
        split = int(len(text) * 0.9)
        val, train = (encoded(part, encoding, local or "the text") for part in (text[split:], text[:split]))
        write_dataset(DIRECTORY, val, train)
