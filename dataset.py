"""Token files: `data/<name>/train.bin` and `val.bin` (uint16), and `meta.pkl` where the vocabulary is not GPT-2's.

The files are nanoGPT's: what its prepare.py scripts wrote works here, and the other way round.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

DATA_DIR = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data")
SPLITS = ("train", "val")
_GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)  # (sqrt(5) - 1) / 2 of 2**64
EMBEDDED = "stdlib_char"  # needs no download, so it is prepared when it is missing


class DataError(ValueError):
    """A dataset that is missing or cannot be used; the message says what, where, and what to do."""


class Dataset:
    """The splits of one dataset, memory-mapped.

    Args:
        name: a folder of `data/`, or the absolute path of one elsewhere.
        block_size: tokens per sequence.

    Raises:
        DataError: if a file is missing, has an odd number of bytes, or is too short for one sequence.
    """

    def __init__(self, name: str, block_size: int) -> None:
        self.directory = os.path.join(DATA_DIR, name)
        self.name, self.block_size = name, block_size
        self.meta = load_meta(self.directory)
        self.tokens = {split: _open(self.directory, split, block_size) for split in SPLITS}  # (tokens,) uint16

    @property
    def vocab_size(self) -> int | None:
        """Of the dataset's own vocabulary; None where the tokens are GPT-2's."""
        return self.meta["vocab_size"] if self.meta else None

    def offsets(self, split: str, stream: tuple[int, int], first: int, count: int) -> np.ndarray:
        """Where sequences number `first` to `first + count` of a stream begin, (count,) int64: a function of its arguments.

        A stream visits the whole split again and again, evenly: its sequences lie a golden ratio of the split apart, from
        a random beginning on (an additive recurrence, as in quasi-Monte Carlo). Independent draws, nanoGPT's way, would
        visit some places several times before others at all, and reach a higher loss in the same number of iterations.
        """
        beginning = np.random.default_rng((*stream, SPLITS.index(split))).integers(2**64, dtype=np.uint64)
        numbers = np.arange(first, first + count, dtype=np.uint64)
        places = beginning + numbers * _GOLDEN_RATIO  # in units of 2**-64 of the split; the product wraps around
        return (places / 2.0**64 * (len(self.tokens[split]) - self.block_size)).astype(np.int64)

    def micro_batches(
        self, seed: int, first: int, batch_size: int, count: int, rank: int = 0, world_size: int = 1
    ) -> Iterator[np.ndarray]:
        """The offsets, (batch_size,) int64, of one rank's micro-batches of the training split, without end.

        Which sequences make up an iteration depends on the seed and `first` only, not on the ranks that share it.

        Args:
            first: the number of sequences that all ranks together have seen.
            batch_size: sequences per micro-batch.
            count: micro-batches of all ranks together in one iteration.
        """
        while True:
            offsets = self.offsets("train", (seed, 0), first, count * batch_size).reshape(count, batch_size)
            yield from offsets[rank::world_size]
            first += count * batch_size

    def batch(self, split: str, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets, each (len(offsets), block_size) int64."""
        tokens = self.tokens[split]
        rows = np.stack([tokens[start : start + self.block_size + 1] for start in offsets]).astype(np.int64)
        return rows[:, :-1], rows[:, 1:]

    def check(self, vocab_size: int, part: int = 0, parts: int = 1) -> None:
        """Read through one of `parts` equal parts of the data.

        Raises:
            DataError: if the dataset's vocabulary, or a token in that part, is outside a model's one of `vocab_size`.
        """
        if self.vocab_size is not None and self.vocab_size > vocab_size:
            raise DataError(
                f"dataset {self.name} has a vocabulary of {self.vocab_size}, the model one of {vocab_size}; "
                "use the dataset that the model was trained on"
            )
        for split, tokens in self.tokens.items():
            begin, end = (len(tokens) * number // parts for number in (part, part + 1))
            for start in range(begin, end, 1 << 24):
                largest = tokens[start : min(start + (1 << 24), end)].max()
                if largest >= vocab_size:
                    raise DataError(
                        f"{os.path.join(self.directory, split)}.bin holds token {largest}, but the model's vocabulary has "
                        f"{vocab_size}; prepare the dataset again, or train a model with its vocabulary"
                    )


def prepare_if_embedded(name: str) -> None:
    """Write the embedded dataset if it is wanted and missing. One rank per machine only.

    Raises:
        DataError: if its script fails.
    """
    directory = os.path.join(DATA_DIR, name)
    files = ("meta.pkl", "train.bin", "val.bin")
    if name != EMBEDDED or all(os.path.exists(os.path.join(directory, file)) for file in files):
        return
    script = os.path.join(directory, "prepare.py")
    if subprocess.run([sys.executable, script], check=False).returncode:
        raise DataError(f"{script} failed; run it by hand to see why")


def load_meta(directory: str) -> dict[str, Any] | None:
    """The dataset's `meta.pkl`: `vocab_size`, `stoi`, `itos`; None if it has none. Runs no code from the file.

    Raises:
        DataError: if the file is damaged or asks for more than plain containers.
    """
    path = os.path.join(directory, "meta.pkl")
    if not os.path.exists(path):
        return None
    try:
        with open(path, "rb") as file:
            meta = _PlainUnpickler(file).load()
        if not isinstance(meta["vocab_size"], int):
            raise pickle.UnpicklingError("vocab_size is not an integer")
    except Exception as error:  # whatever damaged bytes provoke
        raise DataError(f"{path} is no vocabulary ({error}); run the dataset's prepare.py again") from error
    return meta


class Codec(NamedTuple):
    """A vocabulary: text to tokens and back."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    vocab_size: int


def load_codec(meta: dict[str, Any] | None) -> Codec:
    """The dataset's own vocabulary, or GPT-2's byte pairs where it has none."""
    if meta is None:
        import tiktoken

        encoding = tiktoken.get_encoding("gpt2")
        return Codec(lambda text: encoding.encode(text, allowed_special={"<|endoftext|>"}), encoding.decode, encoding.n_vocab)
    stoi, itos = meta["stoi"], meta["itos"]

    def encode(text: str) -> list[int]:
        unknown = sorted(set(text) - set(stoi))
        if unknown:
            raise DataError(f"the vocabulary has no {''.join(unknown)!r}; leave it out of the prompt")
        return [stoi[character] for character in text]

    return Codec(encode, lambda tokens: "".join(itos[token] for token in tokens), meta["vocab_size"])


class _PlainUnpickler(pickle.Unpickler):
    """Admits what pickle builds without looking anything up: dicts, lists, tuples, strings, numbers."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _open(directory: str, split: str, block_size: int) -> np.ndarray:
    path = os.path.join(directory, f"{split}.bin")
    if not os.path.exists(path):
        script = os.path.join(directory, "prepare.py")
        remedy = f"run: python {os.path.relpath(script)}" if os.path.exists(script) else "--dataset names a folder of data/"
        raise DataError(f"dataset file {os.path.relpath(path)} is missing; {remedy}")
    size = os.path.getsize(path)  # bytes
    if size % 2:
        raise DataError(f"{path} has an odd number of bytes ({size}), but its tokens take 2 each; prepare it again")
    if size // 2 < block_size + 1:
        raise DataError(
            f"{path} holds {size // 2} tokens, too few for one sequence of block_size={block_size} and its targets; "
            "use a smaller --block_size"
        )
    return np.memmap(path, dtype=np.uint16, mode="r")
