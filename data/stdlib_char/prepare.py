"""The source of the Python standard library on this machine, one token per character. No download.

    $ python data/stdlib_char/prepare.py

Without its tests, the library is about 12 MB. This gives 10.9M tokens for training and 1.2M for validation. The script reads
the files in the order of their paths. It removes characters that are not ASCII and replaces tabs by spaces. So every Python
gives the same vocabulary of 96 characters, and a checkpoint works on every machine.
"""

import os
import sys
import sysconfig

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
from data.common import exit_on_error, input_argument, read_text, write_characters
from data.vocabulary import DataError

DIRECTORY = os.path.dirname(os.path.abspath(__file__))
VOCAB_SIZE = 96  # for plan.py
VOCABULARY = ["\n"] + [chr(code) for code in range(32, 127)]
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def standard_library() -> str:
    """Return the text of all .py files of the standard library as one string."""
    root = sysconfig.get_path("stdlib")
    texts = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in LEFT_OUT)
        for name in sorted(files):
            if name.endswith(".py"):
                with open(os.path.join(folder, name), encoding="utf-8", errors="ignore") as file:
                    texts.append(file.read())
    if not texts:
        raise DataError(f"there are no .py files in {root}; give a text file with --input FILE")
    return "\n".join(texts)


if __name__ == "__main__":
    local = input_argument(__doc__.splitlines()[0])
    allowed = set(VOCABULARY)
    with exit_on_error():
        text = read_text(local) if local else standard_library()
        write_characters(DIRECTORY, "".join(filter(allowed.__contains__, text.expandtabs())), VOCABULARY)
