"""The batches of a dataset: a folder with token files (`shards.py`), and `meta.pkl` if the vocabulary is not GPT-2's.

This program reads the files of nanoGPT's prepare.py scripts, and nanoGPT reads the `train.bin` and `val.bin` of this program.
"""

import glob
import math
import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any

import numpy as np

from data.shards import SPLITS, Shards, paths_of
from data.vocabulary import DataError, bytes_of_tokens, load_meta, texts_of, tokenizer_of

DATA_DIR = os.path.dirname(os.path.abspath(__file__))
EVALUATION_BATCH = 12  # sequences per `eval_iters`, for any batch_size and number of ranks; nanoGPT's default batch_size
_PIECE, _PIECES = 2**19, 64  # tokens per piece (1 MB) and pieces that a fingerprint covers
WITHOUT_DOWNLOAD = "stdlib_char"  # this dataset needs no download, so train.py prepares it if it is missing


class Dataset:
    """The splits of one dataset, read from the disk where they are needed.

    Args:
        name: name of a folder in `data/`, or the absolute path of another folder.
        block_size: tokens per sequence.
        splits: those that are needed.

    Raises:
        DataError: if files of a split are missing, do not fit the vocabulary, or are too short for one sequence.
    """

    def __init__(self, name: str, block_size: int, splits: tuple[str, ...] = SPLITS) -> None:
        self.directory = os.path.join(DATA_DIR, name)
        self.name, self.block_size = name, block_size
        self.meta = load_meta(self.directory)
        self.tokens = {split: _open(self.directory, split, self.vocab_size, block_size) for split in splits}

    @property
    def vocab_size(self) -> int | None:
        """The size of the dataset's own vocabulary, or None if the tokens are GPT-2's."""
        return self.meta["vocab_size"] if self.meta else None

    def bytes_per_token(self, split: str) -> float | None:
        """Return the mean length of the tokens of a split in UTF-8, or None if that of a token is unknown."""
        lengths, tokens = bytes_of_tokens(self.meta), self.tokens[split]
        total = sum(float(lengths[tokens[start : start + _PIECE]].sum()) for start in range(0, len(tokens), _PIECE))
        return None if math.isnan(total) else total / len(tokens)

    def offsets(self, split: str, stream: tuple[int, int], first: int, count: int) -> np.ndarray:
        """Return the start positions of sequences `first`, ..., `first + count - 1` of a stream, (count,) int64.

        The result depends on the arguments only. A stream has epochs without end, see `_epoch`. nanoGPT draws independent
        positions, so it trains some tokens several times before it trains others.
        """
        length, key = len(self.tokens[split]), (*stream, SPLITS.index(split))
        windows, found = max(1, (length - 1) // self.block_size - 1), [np.empty(0, np.int64)]
        while count > 0:
            epoch, place = divmod(first, windows)
            phase, order = _epoch(length, self.block_size, windows, (*key, epoch))
            found.append(phase + order[place : place + count].astype(np.int64) * self.block_size)
            first, count = first + len(found[-1]), count - len(found[-1])
        return np.concatenate(found)

    def micro_batches(
        self, seed: int, first: int, batch_size: int, count: int, rank: int = 0, world_size: int = 1
    ) -> Iterator[np.ndarray]:
        """Yield the offsets of the training micro-batches of one rank, (batch_size,) int64 each, without end.

        The sequences of an iteration depend on the seed and on `first` only. They do not depend on the number of ranks.

        Args:
            seed: seed of the run.
            first: number of sequences that all ranks together have seen.
            batch_size: sequences per micro-batch.
            count: micro-batches per iteration, all ranks together.
            rank, world_size: this rank and the number of ranks.
        """
        while True:
            offsets = self.offsets("train", (seed, 0), first, count * batch_size).reshape(count, batch_size)
            yield from offsets[rank::world_size]
            first += count * batch_size

    def evaluation(
        self, split: str, seed: int, count: int, batch_size: int, rank: int = 0, world_size: int = 1
    ) -> list[np.ndarray]:
        """Return the offsets of the batches that one rank evaluates, (batch_size,) int64 each.

        All ranks together evaluate the first `count` sequences of a stream that depends on the seed and the split only. The
        last batch is padded with -1, because a compiled model would be recompiled for another size.
        """
        own = self.offsets(split, (seed, 1), 0, count)[rank::world_size]
        return list(np.pad(own, (0, -len(own) % batch_size), constant_values=-1).reshape(-1, batch_size))

    def batch(self, split: str, offsets: np.ndarray) -> np.ndarray:
        """Return the inputs and the targets, (2, len(offsets), block_size) int64. Offset -1 has no targets: they are -1.

        They are contiguous: only such memory is copied to a GPU without a wait.
        """
        tokens = self.tokens[split]
        rows = np.stack([tokens[start : start + self.block_size + 1] for start in np.maximum(offsets, 0)])
        batch = np.stack((rows[:, :-1], rows[:, 1:])).astype(np.int64)
        batch[1, offsets < 0] = -1
        return batch

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """The size and a checksum (CRC-32) of each token file, and a checksum of `meta.pkl`, by name of the file.

        The checksums cover the whole of a split of up to 64 MB. Of a larger one they cover 64 evenly spaced pieces of 1 MB,
        among them the first and the last one, so that they read the same 64 MB at any size; of many files as much of each. A
        file that was cut off, shifted or made from other text is found. A change that lies between the pieces of a large file
        is not. The files are read once.
        """
        result = {}
        for tokens in self.tokens.values():
            pieces = max(1, _PIECES // len(tokens.files))  # of each file
            length = _PIECE * _PIECES // (pieces * len(tokens.files))
            for file in filter(attrgetter("tokens"), tokens.files):
                starts, checksum = np.linspace(0, file.tokens - length, pieces, dtype=int).tolist(), 0
                whole = [(0, file.tokens)] if file.tokens <= pieces * length else []
                for piece in whole or [(start, start + length) for start in starts]:
                    checksum = zlib.crc32(file.read(*piece).data, checksum)
                result[os.path.basename(file.path)] = f"{file.tokens} tokens with checksum {checksum:08x}"
        if self.meta:
            with open(os.path.join(self.directory, "meta.pkl"), "rb") as pickled:
                result["meta.pkl"] = f"checksum {zlib.crc32(pickled.read()):08x}"
        return result

    def identity(self) -> dict[str, Any]:
        """Return what a checkpoint stores about its data."""
        return {"vocabulary": vocabulary_of(self.meta), "dataset": self.fingerprint}

    def check(self, vocab_size: int, part: int = 0, parts: int = 1) -> None:
        """Check the tokens of one of `parts` equal parts of the data against the vocabulary of a model.

        Args:
            vocab_size: vocabulary size of the model.
            part, parts: number of the part to check, and number of parts.

        Raises:
            DataError: if the vocabulary of the dataset is larger than `vocab_size`, or a token is not less than it.
        """
        if self.vocab_size is not None and self.vocab_size > vocab_size:
            raise DataError(
                f"dataset {self.name} has a vocabulary of {self.vocab_size}, the model has a vocabulary of {vocab_size}; "
                "use the dataset that the model was trained on"
            )
        for tokens in self.tokens.values():
            begin, end = (len(tokens) * number // parts for number in (part, part + 1))
            for start in range(begin, end, _PIECE):
                for path, content in tokens.parts(start, min(start + _PIECE, end)):
                    if (largest := content.max(initial=0)) >= vocab_size:
                        raise DataError(
                            f"{path} holds token {largest}, but the model's vocabulary has {vocab_size}; prepare the "
                            "dataset again, or train a model with its vocabulary"
                        )


@lru_cache(maxsize=3)  # a training epoch, and one of each split for evaluations: 39 MB for 10^10 tokens in windows of 1024
def _epoch(length: int, block_size: int, windows: int, key: tuple[int, ...]) -> tuple[int, np.ndarray]:
    """Return where an epoch cuts `length` tokens, and the order in which it takes the windows, (windows,) of unsigned integers.

    An epoch cuts the tokens into windows of `block_size` from a random position, the phase, and takes each window once. The
    last target needs one token more. One window less than would fit lets the phase take all values modulo `block_size`, so
    that a small file has as many different sequences as in nanoGPT. An epoch leaves out less than two windows at the ends.
    """
    generator = np.random.default_rng(key)
    phase, order = int(generator.integers(length - windows * block_size)), np.arange(windows, dtype=np.min_scalar_type(windows))
    generator.shuffle(order)
    return phase, order


def vocabulary_of(meta: dict[str, Any] | None) -> str:
    """Return what identifies the vocabulary of `load_meta`: its size, and a checksum (CRC-32) of its tokens."""
    if not meta:
        return "GPT-2's"
    tokens = sorted((meta.get("itos") or {}).items())
    return f"{meta['vocab_size']} tokens with checksum {zlib.crc32(repr(tokens).encode()):08x}"


def check_tokenizer(folder: str, meta: dict[str, Any] | None, dataset: str) -> None:
    """Check that the tokens of a dataset, with `meta` as its `Dataset.meta`, are those of the tokenizer in a folder, if any.

    Raises:
        DataError: if they are not. Tokens that only one of them has do not matter, nor those without texts.
    """
    if (tokenizer := tokenizer_of(folder)) is None:
        return
    if meta is None:
        texts = {token: text for text, token in tokenizer.get_vocab().items() if token < 50257}
        is_same = vocabulary_of({"vocab_size": 50257, "itos": texts}) == "50257 tokens with checksum a024cacd"  # GPT-2's
    else:
        pairs = (
            (token, text if isinstance(text, str) else text.decode(errors="replace")) for token, text in texts_of(meta).items()
        )
        is_same = all(token < len(tokenizer) and tokenizer.decode([token]) == text for token, text in pairs)
    if not is_same:
        remedy = "write token files with it, and a meta.pkl with vocab_size (the model's) and itos"
        raise DataError(f"dataset {dataset} has other tokens than the tokenizer in {folder}; {remedy}")


def names() -> list[str]:
    """Return the names of the datasets in `data/`: the folders with a `prepare.py`, or with token files of another script."""
    found = [glob.glob(os.path.join(DATA_DIR, "*", file)) for file in ("prepare.py", "*train*.bin")]
    return sorted({os.path.basename(os.path.dirname(path)) for paths in found for path in paths})


def prepare_if_missing(name: str) -> None:
    """Prepare the dataset `name` if it is the embedded one and it is missing. Call this on one rank per machine.

    Raises:
        DataError: if the script of the dataset fails.
    """
    directory = os.path.join(DATA_DIR, name)
    files = ("meta.pkl", "train.bin", "val.bin")
    if name != WITHOUT_DOWNLOAD or all(os.path.exists(os.path.join(directory, file)) for file in files):
        return
    script = os.path.join(directory, "prepare.py")
    sys.stdout.flush()
    if subprocess.run([sys.executable, script], check=False).returncode:
        raise DataError(f"{script} failed; run it yourself to see the reason")


def _open(directory: str, split: str, vocab_size: int | None, block_size: int) -> Shards:
    paths = paths_of(directory, split)
    if not paths:
        script = os.path.join(directory, "prepare.py")
        others = f"--dataset takes {', '.join(names())}, or the absolute path of a folder with train.bin and val.bin, or shards"
        remedy = f"run: python {os.path.relpath(script)}" if os.path.exists(script) else others
        path = os.path.join(directory, f"{split}.bin")
        raise DataError(f"dataset file {min(path, os.path.relpath(path), key=len)} is missing; {remedy}")
    tokens = Shards(paths, vocab_size)
    if len(tokens) < block_size + 1:
        raise DataError(
            f"{', '.join(paths[:2])}{', ...' * (len(paths) > 2)}: {len(tokens)} tokens, too few for one sequence of "
            f"block_size={block_size} and its targets; use a smaller --block_size"
        )
    return tokens
