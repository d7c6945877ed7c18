"""Functions of the prepare.py scripts: the command line, the download, and token files that are either complete or missing."""

import argparse
import glob
import gzip
import hashlib
import http.client
import itertools
import json
import os
import pickle
import re
import sys
import urllib.request
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from data.shards import HEADER_BYTES, MAGIC
from data.vocabulary import DataError, token_dtype

if TYPE_CHECKING:
    import tiktoken

TINY_SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
TINY_SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
_BATCH = 1024  # documents to read or to tokenize at once
_JSON = (".jsonl", ".json", ".ndjson")
_ENDINGS = (".parquet", *_JSON, ".txt", *(f"{ending}.gz" for ending in (*_JSON, ".txt")))  # of files of documents


@contextmanager
def exit_on_error() -> Iterator[None]:
    """End the script with one line and exit code 2 for a DataError. (`distributed.exits` would import PyTorch.)"""
    try:
        yield
    except DataError as error:  # said only here, when a progress bar has ended
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
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
    """Return the text of a UTF-8 file without its byte order mark. Line ends are not changed."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path} as UTF-8 text: {error}; convert it, as with iconv -f UTF-16 -t UTF-8") from error
    if not text:
        raise DataError(f"{path} is empty; give a text file with --input FILE")
    if returns := text.count("\r"):
        print(f"note: {path} has {returns:,} carriage returns, which become tokens; remove them with dos2unix")
    return text


def download(url: str, path: str, sha256: str) -> None:
    """Download a small file to `path`. The file is created only if its checksum is `sha256`."""
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            content = response.read()
        if (found := hashlib.sha256(content).hexdigest()) != sha256:
            raise ValueError(f"its checksum is {found}, not {sha256}")
        with atomic(path) as [file]:
            file.write(content)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DataError(
            f"cannot download {url} ({error}); download it in another way and save it as {path}, or use --input FILE"
        ) from error


@contextmanager
def atomic(*paths: str, without: str = "") -> Iterator[list[BinaryIO]]:
    """Yield a temporary binary file for each path. If the block ends without an error, they replace the files at the paths.

    Otherwise no file changes. `without`: a file that is gone while others are replaced. Without it, a dataset is refused. So a
    dataset that is half new, because the process was killed, is never used.

    Raises:
        DataError: if a file cannot be written, for example because the disk is full.
    """
    new = [f"{path}.{os.getpid()}.tmp" for path in paths]
    old = {path: f"{path}.{os.getpid()}.old" for path in dict.fromkeys((without, *paths)) if os.path.isfile(path)}
    try:
        with ExitStack() as files:
            yield [files.enter_context(open(path, "wb")) for path in new]
        for source, path in [*old.items()]:
            os.rename(source, path)
        for source, path in zip(new, paths, strict=True):
            os.rename(source, path)
    except BaseException as error:
        for path, kept in old.items():
            if os.path.exists(kept):
                os.replace(kept, path)
        if isinstance(error, OSError):
            reason = error.strerror or error
            raise DataError(f"cannot write {', '.join(paths)}: {reason}; the files of before are unchanged") from error
        raise
    finally:
        for path in filter(os.path.isfile, [*new, *old.values()]):
            os.remove(path)


def local_documents(path: str) -> Iterator[str]:
    """Yield the documents of a local file, or of the files of a folder and of those inside it, in the order of their paths.

    A file has a column "text" (`.parquet`), JSON lines with a "text" key (`.jsonl`, `.json`), or one document per line (`.txt`,
    or no ending). All but parquet may be compressed, `.gz`. Prints which files of a folder are left out.

    Raises:
        DataError: if a file cannot be read.
    """
    inside = sorted(filter(os.path.isfile, glob.glob(os.path.join(glob.escape(path), "**"), recursive=True)))
    files = [file for file in inside if file.endswith(_ENDINGS)]
    if os.path.isdir(path):
        left_out = sorted(set(inside) - set(files))
        if not files:
            raise DataError(f"{path} has no file that ends in {', '.join(_ENDINGS)}")
        if left_out:
            print(f"note: left out of {path}: {', '.join(left_out[:3])} ({len(left_out)} in all)")
    elif not path.endswith(_ENDINGS) and os.path.splitext(path)[1]:
        raise DataError(f"{path}: a file of documents ends in {', '.join(_ENDINGS)}; rename it to .txt if it is plain text")
    for file in files or [path]:
        try:
            yield from parquet_documents([file]) if file.endswith(".parquet") else _lines(file)
        except DataError:
            raise
        except ImportError as error:
            raise DataError(f"{file} needs {error.name}; pip install -e '.[openwebtext]'") from error
        except (OSError, ValueError, EOFError, zlib.error) as error:
            raise DataError(f"cannot read {file}: {error}") from error


def _lines(path: str) -> Iterator[str]:
    is_json = path.removesuffix(".gz").endswith(_JSON)
    with gzip.open(path, "rt", encoding="utf-8-sig") if path.endswith(".gz") else open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"] if is_json else line
            except (json.JSONDecodeError, KeyError, TypeError, RecursionError) as error:
                raise DataError(f'{path} line {number} is no JSON object with a "text" key; write one per line') from error
            yield _checked(text, f"{path} line {number}")


def _checked(text: object, place: str) -> str:
    if not isinstance(text, str):
        raise DataError(f'{place} has {text!r:.40} in place of a text in "text"; leave it out')
    return text


def parquet_documents(paths: list[str], filesystem: Any = None, skip: int = 0) -> Iterator[str]:
    """Yield the column "text" of parquet files, row group by row group, without the first `skip` rows.

    Raises:
        DataError: if a file has no such column, or something else than text in it.
    """
    from pyarrow import parquet

    for path in paths:
        # the defaults would read the whole file
        with parquet.ParquetFile(path, filesystem=filesystem, buffer_size=1 << 20, pre_buffer=False) as table:
            if "text" not in table.schema_arrow.names:
                raise DataError(f'{path} has no column "text"')
            for group in range(table.num_row_groups):
                rows = table.metadata.row_group(group).num_rows
                if skip < rows:
                    batches = table.iter_batches(_BATCH, row_groups=[group], columns=["text"])
                    texts = itertools.chain.from_iterable(batch["text"].to_pylist() for batch in batches)
                    yield from (_checked(text, path) for text in itertools.islice(texts, skip, None))
                skip = max(0, skip - rows)


def from_hub(name: str, documents: Iterator[str], expected: int = 0) -> Iterator[str]:
    """Yield documents that are read from the dataset `name` of the Hugging Face hub.

    Raises:
        DataError: if the hub or the data cannot be read, or there are fewer documents than expected.
    """
    remedy = "give a local copy with --input FILE"
    count = 0
    try:
        for text in documents:
            yield text
            count += 1
    except ImportError as error:
        raise DataError(f"the download needs {error.name}; pip install -e '.[openwebtext]', or {remedy}") from error
    except Exception as error:  # huggingface_hub, its HTTP library, pyarrow, tarfile and lzma have no base class in common
        url = f"https://huggingface.co/datasets/{name}"
        raise DataError(f"cannot read {url} after {count:,} documents ({type(error).__name__}: {error}); {remedy}") from error
    if count < expected:
        raise DataError(f"the Hugging Face hub has only {count:,} of the {expected:,} documents of {name}; {remedy}")


def begun(documents: Iterator[str]) -> Iterator[str]:
    """Read the first document, so that errors appear before a progress bar, and return all of them.

    Raises:
        DataError: if there are none.
    """
    first = next(documents, None)
    if first is None:
        raise DataError("there are no documents")
    return itertools.chain([first], documents)


def tokenized(documents: Iterator[str], encoding: "tiktoken.Encoding", first: int = 1) -> Iterator[list[int]]:
    """Yield the tokens of each document. All cores tokenize some documents while the next ones are read.

    Raises:
        DataError: as `encoded`, with the number of the document, of which `first` is the first one.
    """
    names = map("document {}".format, itertools.count(first))
    with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(os.cpu_count()) as workers:
        ahead = reader.submit(lambda: list(itertools.islice(documents, _BATCH)))
        while batch := ahead.result():
            ahead = reader.submit(lambda: list(itertools.islice(documents, _BATCH)))
            yield from workers.map(encoded, batch, itertools.repeat(encoding), names)


def encoded(text: str, encoding: "tiktoken.Encoding", name: str) -> list[int]:
    """Return the tokens of a text. Raise DataError with its name if tiktoken cannot make them."""
    try:
        return encoding.encode_ordinary(text)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of Rust, which is no Exception
            raise
        longest = max(map(len, re.findall(r"\s+", text)), default=0)
        why = f"it has {longest:,} blanks in a row; shorten them" if longest > 10_000 else "split it"
        raise DataError(f"tiktoken cannot tokenize {name}, of {len(text):,} characters: {why}") from None


def write_dataset(
    directory: str, val: Sequence[int] | np.ndarray, train: Sequence[int] | np.ndarray, meta: dict[str, Any] | None = None
) -> None:
    """Write the tokens of both splits and `meta.pkl`, which GPT-2's vocabulary does not need. Raises as `atomic`."""
    dtype = token_dtype(meta["vocab_size"] if meta else None)
    contents = {"meta.pkl": pickle.dumps(meta)} if meta else {}
    contents |= {f"{name}.bin": np.asarray(tokens, dtype).tobytes() for name, tokens in (("val", val), ("train", train))}
    paths = [os.path.join(directory, name) for name in contents]
    with atomic(*paths, without=paths[-1]) as files:
        for file, content in zip(files, contents.values(), strict=True):
            file.write(content)
    print(f"val: {len(val):,} tokens\ntrain: {len(train):,} tokens")


def write_shards(shards: dict[str, np.ndarray], without: str = "") -> None:
    """Write uint16 tokens by path, in the format of llm.c. Raises as `atomic`, which says what `without` is."""
    with atomic(*shards, without=without) as files:
        for file, tokens in zip(files, shards.values(), strict=True):
            header = np.zeros(HEADER_BYTES // 4, dtype=np.int32)
            header[:3] = MAGIC[0], 1, len(tokens)
            file.write(header.tobytes())
            file.write(tokens.data)


def write_characters(directory: str, text: str, vocabulary: list[str]) -> None:
    """Write a text with one token per character: vocabulary to meta.pkl, first 90 % to train.bin, the rest to val.bin."""
    if len(text) < 20:
        raise DataError(f"a text of {len(text)} characters is too short to train and validate on; give a longer one")
    stoi = {character: token for token, character in enumerate(vocabulary)}
    print(f"{len(text):,} characters, vocabulary of {len(vocabulary)}: {''.join(vocabulary)!r}")
    table = np.zeros(max(map(ord, vocabulary)) + 1, dtype=token_dtype(len(vocabulary)))
    table[[ord(character) for character in vocabulary]] = range(len(vocabulary))
    tokens = table[np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)]
    split = int(len(tokens) * 0.9)
    meta = {"vocab_size": len(vocabulary), "stoi": stoi, "itos": dict(enumerate(vocabulary))}
    write_dataset(directory, tokens[split:], tokens[:split], meta)
