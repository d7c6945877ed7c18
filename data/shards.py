"""The token files of a split as one array: `train.bin` alone, or shards such as `fineweb_train_000001.bin`, by hundreds.

A file is nanoGPT's, tokens and nothing else, or has the header of llm.c and modded-nanogpt: 256 int32, of which the first three
are a magic number, the version (1: uint16 tokens follow, 7: uint32) and the number of tokens.
"""

import codecs
import functools
import glob
import itertools
import os
import re
import resource
from bisect import bisect_right
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import numpy as np

from data.vocabulary import DataError, token_dtype

SPLITS = ("train", "val")
HEADER_BYTES = 256 * 4
MAGIC = (20240520, 20240801)  # of llm.c's files for GPT-2 and for Llama 3
_DTYPES: dict[int, np.dtype] = {1: np.dtype(np.uint16), 7: np.dtype(np.uint32)}  # by version
_OTHER_KINDS = b"\x93NUMPY", b"PK\3\4", b"PAR1", b"ARROW1", b"\x89HDF"  # beginnings of files of other programs
_SAMPLE = 2**13  # words of 4 bytes at the beginning and in the middle of a file that are read to know its format
_LIMIT = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
_OPEN_FILES = None if _LIMIT == resource.RLIM_INFINITY else _LIMIT // 2  # of all splits; more are closed again


class _File(NamedTuple):
    path: str
    dtype: np.dtype
    offset: int  # bytes before the tokens
    tokens: int
    inode: int  # a file that was replaced is another one

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return tokens `start`, ..., `stop - 1`. A memory map would end the process if the file became shorter.

        Raises DataError if it did, or cannot be read.
        """
        file, content = _opened(self), b""
        begin, size = self.offset + start * self.dtype.itemsize, (stop - start) * self.dtype.itemsize
        try:
            while piece := os.pread(file.fileno(), size - len(content), begin + len(content)):  # perhaps a part
                content += piece
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error}; then go on from the last checkpoint") from error
        if len(content) < size:
            raise DataError(f"{self.path} became shorter while it was read; prepare it, then go on from the last checkpoint")
        return np.frombuffer(content, self.dtype)


class Shards:
    """Token files as one array, of which slices `shards[start:stop]` are read, (tokens,) uint16 or uint32.

    At most half as many files are open as a process may open (`ulimit -n`). A sequence may begin in a file and end in the next
    one, as it may begin in a document and end in the next one.

    Args:
        paths: the files in their order.
        vocab_size: size of the vocabulary, None: GPT-2's.

    Raises:
        DataError: if the header, the size or the dtype of a file is not what it must be.
    """

    def __init__(self, paths: list[str], vocab_size: int | None) -> None:
        self.files = [_inspect(path, vocab_size) for path in paths]
        self._ends = list(itertools.accumulate(file.tokens for file in self.files))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, part: slice) -> np.ndarray:
        pieces = [tokens for _, tokens in self.parts(*part.indices(len(self))[:2])]
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, np.uint16), *pieces])

    def parts(self, start: int, stop: int) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the path of each file that has tokens in this range, and these tokens."""
        for number in range(bisect_right(self._ends, start), len(self.files)):
            file = self.files[number]
            begin = self._ends[number] - file.tokens
            if begin >= stop:
                break
            if file.tokens:
                yield file.path, file.read(max(start - begin, 0), min(stop - begin, file.tokens))


def paths_of(directory: str, split: str) -> list[str]:
    """Return the files of a split: `<split>.bin`, or if it is missing the .bin files with this word in their names, sorted.

    Raises:
        DataError: if a name has the words of both splits.
    """
    if os.path.exists(alone := os.path.join(directory, f"{split}.bin")):
        return [alone]
    names = sorted(glob.glob("*.bin", root_dir=directory))
    of_train, of_val = ([name for name in names if re.search(f"(?<![a-zA-Z]){word}(?![a-zA-Z])", name)] for word in SPLITS)
    if both := [name for name in of_train if name in of_val]:
        raise DataError(f"{os.path.join(directory, both[0])} has both train and val in its name; rename the file")
    return [os.path.join(directory, name) for name in (of_train if split == "train" else of_val)]


def _inspect(path: str, vocab_size: int | None) -> _File:
    """Return the format of a file from its size, its beginning and its middle."""
    expected, status = token_dtype(vocab_size), os.stat(path)
    size, inode = status.st_size, status.st_ino
    vocabulary = "GPT-2's vocabulary" if vocab_size is None else f"a vocabulary of {vocab_size}"
    words = np.concatenate([np.fromfile(path, np.uint32, _SAMPLE, offset=offset) for offset in (0, size // 8 * 4)])
    beginning = words[:_SAMPLE].tobytes()
    if beginning.startswith(_OTHER_KINDS) or _is_text(beginning):
        remedy = f"write the tokens as numbers alone, as in np.array(tokens, '{expected}').tofile(path)"
        raise DataError(f"{path} is no token file, but a text or a file of another program; {remedy}")
    if len(words) > 2 and words[0] in MAGIC:
        version, count = words[1:3].tolist()
        dtype = _DTYPES.get(version)
        if dtype is None:
            raise DataError(f"{path} has a header of version {version}; write version 1 (uint16 tokens) or 7 (uint32)")
        if size != HEADER_BYTES + count * dtype.itemsize:
            raise DataError(
                f"{path} has {size} bytes, but {count} {dtype} tokens and the header would take "
                f"{HEADER_BYTES + count * dtype.itemsize}; copy or prepare the file again"
            )
        if dtype.itemsize < expected.itemsize:
            raise DataError(f"{path} holds {dtype} tokens, too small for {vocabulary}; prepare the dataset again")
        return _File(path, dtype, HEADER_BYTES, count, inode)
    if size % expected.itemsize:
        raise DataError(
            f"{path} has {size} bytes, but each {expected} token takes {expected.itemsize}; prepare the dataset again"
        )
    halves = words.view(np.uint16)
    # in a uint32 file every second uint16 is 0 or a small number
    if expected == np.uint16 and len(words) >= 64 and int(halves[1::2].max()) * 256 < halves[::2].max():
        raise DataError(
            f"{path} seems to hold uint32 tokens, but {vocabulary} has uint16 tokens; write the header of llm.c before them "
            "(version 1 if they are uint16, 7 if uint32), or the true vocab_size to meta.pkl"
        )
    return _File(path, expected, 0, size // expected.itemsize, inode)


def _is_text(beginning: bytes) -> bool:
    """Return whether these are characters in UTF-8. Of tokens, some have the byte of a control character, or of none."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(beginning)
    except UnicodeDecodeError:
        return False
    return len(beginning) >= 64 and re.search(rb"[\0-\10\13\14\16-\37]", beginning) is None


@functools.lru_cache(_OPEN_FILES)  # those that leave are closed
def _opened(file: _File) -> BinaryIO:
    return open(file.path, "rb", buffering=0)
