"""Tiny Shakespeare, one token per character.

    $ python data/shakespeare_char/prepare.py

The text has 1,115,394 characters and a vocabulary of 65. This gives 1,003,854 tokens for training and 111,540 for validation.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
from data.common import exit_on_error, input_argument, tiny_shakespeare, write_characters

DIRECTORY = os.path.dirname(os.path.abspath(__file__))
VOCAB_SIZE = 65  # of the download, for plan.py

if __name__ == "__main__":
    local = input_argument(__doc__.splitlines()[0])
    with exit_on_error():
        text = tiny_shakespeare(DIRECTORY, local)
        write_characters(DIRECTORY, text, sorted(set(text)))
