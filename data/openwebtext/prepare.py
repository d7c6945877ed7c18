"""OpenWebText as GPT-2 BPE tokens. The script streams the data, so it never holds the whole dataset in memory or twice on disk.

    $ pip install -e '.[openwebtext]' && python data/openwebtext/prepare.py

8,013,769 documents give about 9 billion tokens for training (18 GB) and 4.5 million for validation. Every 2000th document is
for validation, the same fraction as in nanoGPT. `--input FILE` uses your own documents: JSON lines with a "text" key
(`.jsonl`), or plain text with one document per line.
"""

import itertools
import json
import os
import sys
from collections.abc import Iterator

import numpy as np
import tiktoken
from tqdm import tqdm

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
from data.common import atomic, exit_with_error, gpt2_encoding, input_argument

DIRECTORY = os.path.dirname(os.path.abspath(__file__))
VOCAB_SIZE = None  # for plan.py: GPT-2's, without a meta.pkl
VALIDATION_EVERY = 2000  # one of this many documents goes to val.bin
BATCH = 1024  # documents to tokenize at once


def downloaded() -> Iterator[str]:
    """Yield the documents of OpenWebText, streamed from the Hugging Face hub."""
    try:
        from datasets import load_dataset
    except ImportError:
        exit_with_error(
            "the download needs the datasets library; pip install -e '.[openwebtext]', or give a local file with --input FILE"
        )
    name = "Skylion007/openwebtext"
    try:
        documents = load_dataset(name, split="train", streaming=True)
    except OSError as error:  # the ConnectionError of the library is an OSError
        exit_with_error(
            f"cannot stream {name} from https://huggingface.co/datasets/{name} ({error}); give a local copy with --input FILE"
        )
    for document in documents:
        yield document["text"]


def local(path: str) -> Iterator[str]:
    """Yield the documents of a local file, which has one document per line."""
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    yield json.loads(line)["text"] if path.endswith(".jsonl") else line
                except (json.JSONDecodeError, KeyError, TypeError):
                    exit_with_error(f'{path} line {number} is no JSON object with a "text" key')
    except (OSError, UnicodeDecodeError) as error:
        exit_with_error(f"cannot read {path}: {error}")


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
    first = next(documents, None)  # read one document before the progress bar starts, so that errors appear first
    if first is None:
        exit_with_error("there are no documents")
    for split, count in write(itertools.chain([first], documents), gpt2_encoding()).items():
        print(f"{split}: {count:,} tokens")
