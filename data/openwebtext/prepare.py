"""OpenWebText as GPT-2 BPE tokens. The script streams the data, so it never holds the whole dataset in memory or twice on disk.

    $ pip install -e '.[openwebtext]' && python data/openwebtext/prepare.py

8,013,769 documents give about 9 billion tokens for training (18 GB) and 4.5 million for validation. Every 2000th document is
for validation, the same fraction as in nanoGPT. `--input FILE` uses your own documents: JSON lines with a "text" key
(`.jsonl`), or plain text with one document per line.

The documents come from the parquet files of the Hugging Face hub if these hold all of them, otherwise from the archives that
the files were made of. Fewer documents are refused. This is tested with a small server that has the hub's layout, and has not
been run with the hub itself yet.
"""

import io
import itertools
import json
import lzma
import os
import re
import sys
import tarfile
from collections.abc import Iterator

import numpy as np
import tiktoken
from tqdm import tqdm

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
from data.common import atomic, exit_with_error, input_argument
from data.vocabulary import DataError, gpt2_encoding

DIRECTORY = os.path.dirname(os.path.abspath(__file__))
VOCAB_SIZE = None  # for plan.py: GPT-2's, without a meta.pkl
NAME = "Skylion007/openwebtext"
DOCUMENTS = 8_013_769
VALIDATION_EVERY = 2000  # one of this many documents goes to val.bin
BATCH = 1024  # documents to tokenize at once


def downloaded() -> Iterator[str]:
    """Yield the documents of OpenWebText from the Hugging Face hub.

    Raises:
        DataError: if the hub or the data cannot be read, or there are fewer documents than OpenWebText has.
    """
    remedy = "give a local copy with --input FILE"
    count = 0
    try:
        for text in hub_texts():
            yield text
            count += 1
    except ImportError as error:
        raise DataError(f"the download needs {error.name}; pip install -e '.[openwebtext]', or {remedy}") from error
    except Exception as error:  # huggingface_hub, its HTTP library, pyarrow, tarfile and lzma have no base class in common
        url = f"https://huggingface.co/datasets/{NAME}"
        raise DataError(f"cannot read {url} after {count:,} documents ({type(error).__name__}: {error}); {remedy}") from error
    if count < DOCUMENTS:
        raise DataError(f"the Hugging Face hub has only {count:,} of the {DOCUMENTS:,} documents of {NAME}; {remedy}")


def hub_texts() -> Iterator[str]:
    """Yield the documents that the hub has, in their order: from complete parquet files, otherwise from the archives."""
    from huggingface_hub import HfFileSystem
    from pyarrow import parquet

    hub = HfFileSystem()
    files = hub.find(f"datasets/{NAME}")  # sorted
    tables = [path for path in files if path.endswith(".parquet")]
    rows = sum(parquet.read_metadata(path, filesystem=hub).num_rows for path in tables)  # reads only the ends of the files
    if rows == DOCUMENTS:  # not a part of them, and not two versions side by side
        for path in tables:
            # the defaults would read the whole file
            with parquet.ParquetFile(path, filesystem=hub, buffer_size=1 << 20, pre_buffer=False) as table:
                for batch in table.iter_batches(BATCH, columns=["text"]):
                    yield from batch["text"].to_pylist()
        return
    for path in files:
        if path.endswith(".tar"):
            with hub.open(path) as file:
                yield from archive_texts(file)


def archive_texts(file) -> Iterator[str]:
    """Yield the documents of one subset: a tar file of .xz files, each of which is a compressed tar file of .txt files.

    Of successive blank lines one is left, as in the dataset's own script openwebtext.py, which made the parquet files.
    """
    with tarfile.open(fileobj=file, mode="r|") as archive:  # "|": without seeking
        for part in members(archive, ".xz"):
            with tarfile.open(fileobj=io.BytesIO(lzma.decompress(part))) as documents:
                for document in members(documents, ".txt"):
                    yield re.sub("\n{3,}", "\n\n", document.decode()).strip()


def members(archive: tarfile.TarFile, ending: str) -> Iterator[bytes]:
    """Yield the content of the files of an archive whose names have this ending."""
    for member in archive:
        if member.isfile() and member.name.endswith(ending):
            yield archive.extractfile(member).read()


def local(path: str) -> Iterator[str]:
    """Yield the documents of a local file, which has one document per line."""
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    yield json.loads(line)["text"] if path.endswith(".jsonl") else line
                except (json.JSONDecodeError, KeyError, TypeError) as error:
                    raise DataError(f'{path} line {number} is no JSON object with a "text" key') from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}") from error


def write(documents: Iterator[str], encoding: tiktoken.Encoding) -> dict[str, int]:
    """Tokenize the documents batch by batch into train.bin and val.bin and return the number of tokens of each file.

    An end-of-text token follows every document.
    """
    counts = {"train": 0, "val": 0}
    numbers = itertools.count()
    with (
        atomic(os.path.join(DIRECTORY, "val.bin")) as val,
        atomic(os.path.join(DIRECTORY, "train.bin")) as train,
        tqdm(unit=" documents") as bar,
    ):
        files = {"train": train, "val": val}
        while batch := list(itertools.islice(documents, BATCH)):
            for tokens in encoding.encode_ordinary_batch(batch, num_threads=os.cpu_count() or 1):
                split = "train" if next(numbers) % VALIDATION_EVERY else "val"
                files[split].write(np.array([*tokens, encoding.eot_token], dtype=np.uint16).tobytes())
                counts[split] += len(tokens) + 1
            bar.update(len(batch))
    return counts


if __name__ == "__main__":
    path = input_argument(__doc__.splitlines()[0])
    documents = local(path) if path else downloaded()
    try:
        first = next(documents, None)  # read one document before the progress bar starts, so that errors appear first
        if first is None:
            raise DataError("there are no documents")
        counts = write(itertools.chain([first], documents), gpt2_encoding())
    except DataError as error:  # said only here, when the progress bar has ended
        exit_with_error(str(error))
    for split, count in counts.items():
        print(f"{split}: {count:,} tokens")
