"""OpenWebText as GPT-2 BPE tokens. The script streams the data, so it never holds the whole dataset in memory or twice on disk.

    $ pip install -e '.[openwebtext]' && python data/openwebtext/prepare.py

8,013,769 documents give about 9 billion tokens for training (18 GB) and 4.5 million for validation. Every 2000th document is
for validation, the same fraction as in nanoGPT. `--input FILE` uses your own documents, a file or a folder of them: JSON lines
with a "text" key (`.jsonl`, `.json`, `.jsonl.gz`), a column "text" (`.parquet`), or plain text with one document per line.

The documents come from the parquet files of the Hugging Face hub if these hold all of them, otherwise from the archives that
the files were made of. Fewer documents are refused. This is tested with a small server that has the hub's layout, and has not
been run with the hub itself yet.
"""

import io
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
from data.common import atomic, begun, exit_on_error, from_hub, input_argument, local_documents, parquet_documents, tokenized
from data.vocabulary import DataError, gpt2_encoding

DIRECTORY = os.path.dirname(os.path.abspath(__file__))
VOCAB_SIZE = None  # for plan.py: GPT-2's, without a meta.pkl
NAME = "Skylion007/openwebtext"
DOCUMENTS = 8_013_769
VALIDATION_EVERY = 2000  # one of this many documents goes to val.bin


def hub_texts() -> Iterator[str]:
    """Yield the documents that the hub has, in their order: from complete parquet files, otherwise from the archives."""
    from huggingface_hub import HfFileSystem
    from pyarrow import parquet

    hub = HfFileSystem()
    files = hub.find(f"datasets/{NAME}")  # sorted
    tables = [path for path in files if path.endswith(".parquet")]
    rows = sum(parquet.read_metadata(path, filesystem=hub).num_rows for path in tables)  # reads only the ends of the files
    if rows == DOCUMENTS:  # not a part of them, and not two versions side by side
        yield from parquet_documents(tables, hub)
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


def write(documents: Iterator[str], encoding: tiktoken.Encoding) -> dict[str, int]:
    """Tokenize the documents into train.bin and val.bin and return the number of tokens of each file.

    An end-of-text token follows every document.
    """
    counts = {"train": 0, "val": 0}
    val, train = (os.path.join(DIRECTORY, f"{split}.bin") for split in ("val", "train"))
    with atomic(val, train, without=train) as opened, tqdm(unit=" documents") as bar:
        files = dict(zip(("val", "train"), opened, strict=True))
        for number, tokens in enumerate(tokenized(documents, encoding)):
            split = "train" if number % VALIDATION_EVERY else "val"
            files[split].write(np.array([*tokens, encoding.eot_token], dtype=np.uint16).tobytes())
            counts[split] += len(tokens) + 1
            bar.update()
        if not counts["train"]:
            raise DataError("the only document is for validation; give at least two")
    return counts


if __name__ == "__main__":
    path = input_argument(__doc__.splitlines()[0])
    with exit_on_error():
        documents = local_documents(path) if path else from_hub(NAME, hub_texts(), DOCUMENTS)
        counts = write(begun(documents), gpt2_encoding())
    for split, count in counts.items():
        print(f"{split}: {count:,} tokens")
