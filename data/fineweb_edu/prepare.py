"""FineWeb-Edu, the sample of 10 billion tokens, as GPT-2 BPE tokens in shards of 100 million, in the format of llm.c.

    $ pip install -e '.[openwebtext]' && python data/fineweb_edu/prepare.py                    # 20 GB
    $ python data/fineweb_edu/prepare.py --tokens=1e9 && python data/fineweb_edu/prepare.py    # a part, later the rest
    $ python data/fineweb_edu/prepare.py --input FOLDER                                        # .parquet, .jsonl or .txt

An end-of-text token precedes each document. The first shard is for validation; if all tokens fit in it, a tenth of them. A run
that was stopped goes on after its last whole shard when it is started again with the same input. The files do not depend on the
stops. This is tested with a small server that has the hub's layout, and has not been run with the hub itself yet.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Iterator

import numpy as np
import tiktoken
from tqdm import tqdm

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
from data.common import begun, exit_on_error, from_hub, local_documents, parquet_documents, tokenized, write_shards
from data.shards import HEADER_BYTES, SPLITS, Shards, paths_of
from data.vocabulary import DataError, gpt2_encoding

DIRECTORY = os.path.dirname(os.path.abspath(__file__))
VOCAB_SIZE = None  # for plan.py: GPT-2's, without a meta.pkl
NAME, SAMPLE = "HuggingFaceFW/fineweb-edu", "sample/10BT"
SHARD = 100_000_000  # tokens


def path_of(number: int) -> str:
    """Return the path of a shard; number 0 is for validation."""
    return os.path.join(DIRECTORY, f"fineweb_edu_{'train' if number else 'val'}_{number:06d}.bin")


def whole(path: str) -> bool:
    """Return whether an earlier run has completed a shard. The last one of a run can be shorter, and is written again."""
    return os.path.getsize(path) == HEADER_BYTES + 2 * SHARD


def position(shards: list[str], eot: int) -> tuple[int, np.ndarray]:
    """Return the number of documents before the last one that the shards hold, and what they hold of that one."""
    count, last = 0, np.empty(0, np.uint16)
    for path in shards:
        tokens = Shards([path], VOCAB_SIZE)[:]
        starts = np.flatnonzero(tokens == eot)
        count += len(starts)
        last = tokens[starts[-1] :] if len(starts) else np.concatenate((last, tokens))
    return max(0, count - 1), last


def hub_texts(skip: int) -> Iterator[str]:
    """Yield the documents that the hub has, without the first `skip`."""
    from huggingface_hub import HfFileSystem

    hub = HfFileSystem()
    paths = [path for path in hub.find(f"datasets/{NAME}/{SAMPLE}") if path.endswith(".parquet")]  # sorted
    yield from parquet_documents(paths, hub, skip)


def write(
    documents: Iterator[str], encoding: tiktoken.Encoding, skip: int, number: int, last: np.ndarray, limit: int | None
) -> None:
    """Write documents, of which `skip` come before, to the shards `number`, `number` + 1, ..., up to `limit` tokens in all.

    Raises:
        DataError: if the first document does not begin with `last`, which the shards before have of it.
    """
    shard, filled = np.empty(SHARD, np.uint16), 0
    stream = (np.array([encoding.eot_token, *tokens], np.uint16) for tokens in tokenized(documents, encoding, skip + 1))
    if number:
        first = next(stream, last[:0])
        if not np.array_equal(first[: len(last)], last):
            raise DataError(f"the shards in {DIRECTORY} are not of this input; move them away, or give their input")
        stream = itertools.chain([first[len(last) :]], stream)
    with tqdm(total=limit, initial=number * SHARD, unit=" tokens", unit_scale=True) as bar:
        for tokens in stream:
            tokens = tokens[: limit and limit - bar.n]
            bar.update(len(tokens))
            while len(tokens):
                if filled == SHARD:  # a second shard of a smaller part holds what is in the first one now
                    write_shards({path_of(number): shard}, without="" if number else path_of(1))
                    number, filled = number + 1, 0
                part, tokens = tokens[: SHARD - filled], tokens[SHARD - filled :]
                shard[filled : filled + len(part)] = part
                filled += len(part)
            if bar.n == limit:
                break
    if number == 0:
        parts = np.split(shard[:filled], [filled // 10])
        write_shards(dict(zip(map(path_of, (0, 1)), parts, strict=True)), without=path_of(1))
    elif filled:
        write_shards({path_of(number): shard[:filled]})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--input", metavar="PATH", help="a local file, or a folder of them, to use instead of the download")
    parser.add_argument("--tokens", metavar="N", type=float, help="write only this many tokens, such as 1e9")
    arguments = parser.parse_args()
    with exit_on_error():
        if arguments.tokens is not None and not 1 <= arguments.tokens < 1e15:
            raise DataError(f"--tokens={arguments.tokens}: give a number of tokens, such as --tokens=1e9")
        limit = arguments.tokens and int(arguments.tokens)
        existing = list(itertools.takewhile(os.path.exists, map(path_of, itertools.count())))
        shards = list(itertools.takewhile(whole, existing))
        if limit is None or limit > sum(os.path.getsize(path) - HEADER_BYTES for path in existing) // 2:
            encoding = gpt2_encoding()
            skip, last = position(shards, encoding.eot_token)
            if arguments.input:
                documents = itertools.islice(begun(local_documents(arguments.input)), skip, None)
            else:
                documents = begun(from_hub(NAME, hub_texts(skip)))
            write(documents, encoding, skip, len(shards), last, limit)
    for split in SPLITS:
        if paths := paths_of(DIRECTORY, split):
            print(f"{split}: {len(Shards(paths, VOCAB_SIZE)):,} tokens")
