"""Functions of the prepare.py scripts: the command line, the download, and token files that are either complete or missing."""

import argparse
import hashlib
import http.client
import os
import pickle
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO, NoReturn

import numpy as np

from data.vocabulary import token_dtype

TINY_SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
TINY_SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def exit_with_error(message: str) -> NoReturn:
    """End the script with one line and exit code 2. (The function in `distributed.exits` would import PyTorch.)"""
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    sys.exit(2)


def input_argument(description: str) -> str | None:
    """Parse the command line of a prepare.py script and return FILE of `--input FILE`, or None."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--input", metavar="FILE", help="a local text file to use instead of the download")
    return parser.parse_args().input


def tiny_shakespeare(directory: str, local: str | None) -> str:
    """Return the text of the file `local`, or of `directory`/input.txt, which is downloaded if it is missing."""
    path = local or os.path.join(directory, "input.txt")
    if local is None and not os.path.exists(path):
        download(TINY_SHAKESPEARE_URL, path, TINY_SHAKESPEARE_SHA256)
    return read_text(path)


def read_text(path: str) -> str:
    """Return the text of a UTF-8 file. Line ends are not changed."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        exit_with_error(f"cannot read {path} as UTF-8 text: {error}")
    if not text:
        exit_with_error(f"{path} is empty; give a text file with --input FILE")
    return text


def download(url: str, path: str, sha256: str) -> None:
    """Download a small file to `path`. The file is created only if its checksum is `sha256`."""
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            content = response.read()
        if (found := hashlib.sha256(content).hexdigest()) != sha256:
            raise ValueError(f"its checksum is {found}, not {sha256}")
        with atomic(path) as file:
            file.write(content)
    except (OSError, http.client.HTTPException, ValueError) as error:
        exit_with_error(
            f"cannot download {url} ({error}); download it in another way and save it as {path}, or use --input FILE"
        )


@contextmanager
def atomic(path: str) -> Iterator[BinaryIO]:
    """Yield a temporary binary file that replaces `path` if the block ends without an error. Otherwise it is removed."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as file:
            yield file
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


def write_tokens(directory: str, split: str, tokens: Sequence[int] | np.ndarray, vocab_size: int | None = None) -> None:
    """Write tokens to `split`.bin, in the dtype of a vocabulary of `vocab_size` tokens, None: GPT-2's."""
    with atomic(os.path.join(directory, f"{split}.bin")) as file:
        file.write(np.asarray(tokens, dtype=token_dtype(vocab_size)).tobytes())
    print(f"{split}: {len(tokens):,} tokens")


def write_characters(directory: str, text: str, vocabulary: list[str]) -> None:
    """Write a text with one token per character: vocabulary to meta.pkl, first 90 % to train.bin, the rest to val.bin."""
    stoi = {character: token for token, character in enumerate(vocabulary)}
    print(f"{len(text):,} characters, vocabulary of {len(vocabulary)}: {''.join(vocabulary)!r}")
    table = np.zeros(max(map(ord, vocabulary)) + 1, dtype=token_dtype(len(vocabulary)))
    table[[ord(character) for character in vocabulary]] = range(len(vocabulary))
    tokens = table[np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)]
    split = int(len(tokens) * 0.9)
    with atomic(os.path.join(directory, "meta.pkl")) as file:
        pickle.dump({"vocab_size": len(vocabulary), "stoi": stoi, "itos": dict(enumerate(vocabulary))}, file)
    write_tokens(directory, "val", tokens[split:], len(vocabulary))
    write_tokens(directory, "train", tokens[:split], len(vocabulary))
