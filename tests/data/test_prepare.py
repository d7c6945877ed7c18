"""data/*/prepare.py: from a text to token files, also from a local file, and what is said without a network."""

import gzip
import json
import os
import pickle
import shutil
from unittest import mock

import numpy as np
import pytest
from conftest import ROOT, shared_data
from ranks import context
from scripts import run

from data import common, vocabulary
from data.dataset import Dataset
from data.vocabulary import DataError, expected_vocab_size


@pytest.fixture
def folder(tmp_path):
    """A copy of data/ that the scripts write into, in place of the project's own."""
    ignored = shutil.ignore_patterns("*.bin", "*.pkl", "*.txt", "__pycache__")
    return shutil.copytree(os.path.join(ROOT, "data"), tmp_path / "data", ignore=ignored)


@pytest.fixture
def tiktoken_cache(monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", shared_data("tiktoken_cache"))


def prepare(folder, path=None, cwd="/", **how):
    """Run the script of a dataset, with a local file if there is one."""
    return run(str(folder / "prepare.py"), *(["--input", str(path)] if path else []), cwd=cwd, **how)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".bin", ".pkl", ".tmp")}


@pytest.mark.parametrize("name", ["shakespeare_char", "openwebtext"])
def test_a_full_disk_leaves_the_dataset_of_before(folder, tmp_path, name, tiktoken_cache):
    (tmp_path / "one.txt").write_text("ab\n" * 2000)
    (tmp_path / "two.txt").write_text("".join(f"{number} xyz\n" for number in range(20_000)))
    prepare(folder / name, tmp_path / "one.txt").succeeded()
    before = contents(folder / name)
    full = prepare(folder / name, tmp_path / "two.txt", limit=2**16)  # val.bin fits, train.bin does not
    full.refusal("error: cannot write ", "train.bin: File too large; the files of before are unchanged", is_alone=False)
    assert contents(folder / name) == before


def write_another(folder, moves, end):
    """Write a dataset; in place of a rename after this many comes an error, or a code with which the process is gone."""
    left, rename = iter(range(moves)), os.rename

    def rename_or_end(*paths):
        if next(left, None) is not None:
            rename(*paths)
        elif isinstance(end, int):
            os._exit(end)
        else:
            raise end

    with mock.patch("os.rename", rename_or_end):
        common.write_characters(folder, "bac" * 50, ["a", "b", "c"])


@pytest.mark.parametrize("end", [9, KeyboardInterrupt, OSError("no space")])
def test_an_end_between_two_files_leaves_no_mixture(tmp_path, end):
    """All files are as before, unless the process was killed: then train.bin is missing."""
    for moves in range(7):  # three files are put away, then three get their names
        folder = tmp_path / str(moves)
        folder.mkdir()
        common.write_characters(str(folder), "ab" * 50, ["a", "b"])
        before = contents(folder)
        if moves == 6:
            write_another(str(folder), moves, end)
            assert pickle.loads(contents(folder)["meta.pkl"])["vocab_size"] == 3
            assert len(contents(folder)) == 3
        elif end == 9:
            process = context.Process(target=write_another, args=(str(folder), moves, end))
            process.start()
            process.join()
            assert process.exitcode == 9
            assert moves == 0 or "train.bin" not in contents(folder)
        else:
            with pytest.raises((KeyboardInterrupt, DataError)):
                write_another(str(folder), moves, end)
            assert contents(folder) == before


LINES = b'{"text": "one"}\n\n{"text": "two"}\n'
DOCUMENTS = {  # name of a file: its content, and the documents or an error
    "a.jsonl": (LINES, ["one", "two"]),
    "a.json": (LINES, ["one", "two"]),
    "a.ndjson": (LINES, ["one", "two"]),
    "bom.jsonl": (b"\xef\xbb\xbf" + LINES, ["one", "two"]),
    "a.jsonl.gz": (gzip.compress(LINES), ["one", "two"]),
    "a.json.gz": (gzip.compress(LINES), ["one", "two"]),
    "bom.txt": (b"\xef\xbb\xbfone\r\n\r\ntwo\r\n", ["one\n", "two\n"]),
    "a.txt.gz": (gzip.compress(b"one\n"), ["one\n"]),
    "plain": (b"one\ntwo", ["one\n", "two"]),
    "array.json": (b'[{"text": "one"},\n {"text": "two"}]', "line 1 is no JSON object"),
    "one line.json": (b'[{"text": "one"}, {"text": "two"}]', "line 1 is no JSON object"),
    "indented.json": (b'{\n "text": "one"\n}', "line 1 is no JSON object"),
    "deep.jsonl": (b"[" * 100_000, "line 1 is no JSON object"),
    "number.jsonl": (b"7\n", "line 1 is no JSON object"),
    "no text.jsonl": (LINES + b'{"title": "no text"}\n', 'line 4 is no JSON object with a "text" key'),
    "other.jsonl.gz": (b"no gzip", "cannot read"),
    "cut.txt.gz": (gzip.compress(LINES * 99)[:-9], "cannot read"),
    "damaged.txt.gz": (gzip.compress(LINES * 99)[:20] + b"xxxxxxxx" + gzip.compress(LINES * 99)[28:], "cannot read"),
    "latin.txt": ("é".encode("latin-1"), "cannot read"),
    "zip.txt": (b"PK\3\4\xff\xff", "cannot read"),
}
OTHERS = "a.csv", "a.tsv", "a.zst", "a.npy", "a.parquet.gz", "a.xlsx"
DOCUMENTS |= dict.fromkeys(OTHERS, (b"text\none\n", "a file of documents ends in"))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_as_others_write_them(name, tmp_path):
    content, expected = DOCUMENTS[name]
    (tmp_path / name).write_bytes(content)
    if isinstance(expected, list):
        assert list(common.local_documents(str(tmp_path / name))) == expected
        return
    with pytest.raises(DataError, match=expected) as error:
        list(common.local_documents(str(tmp_path / name)))
    assert str(tmp_path / name) in str(error.value)


def test_what_is_left_out_of_a_folder_is_named(tmp_path, capsys):
    (tmp_path / "more.txt").mkdir()
    with pytest.raises(DataError, match=f"{tmp_path} has no file that ends in .parquet"):
        list(common.local_documents(str(tmp_path)))
    for name in ("more.txt/b.txt", "a.jsonl", "c.csv", "more.txt/README"):
        (tmp_path / name).write_bytes(LINES)
    assert list(common.local_documents(str(tmp_path)))[:2] == ["one", "two"]
    assert capsys.readouterr().out == f"note: left out of {tmp_path}: {tmp_path}/c.csv, {tmp_path}/more.txt/README (2 in all)\n"


def test_stdlib_char(folder):
    prepare(folder / "stdlib_char").succeeded()
    data = Dataset(str(folder / "stdlib_char"), block_size=64)
    assert data.vocab_size == expected_vocab_size(data.directory) == 96
    assert len(data.tokens["train"]) > 8_000_000
    assert max(tokens[:].max() for tokens in data.tokens.values()) < 96
    encode, decode, _ = vocabulary.load_codec(data.meta, data.vocab_size)
    assert decode(encode("def f(x):\n")) == "def f(x):\n"
    assert "import " in decode(data.tokens["train"][:20000].tolist())
    with pytest.raises(DataError, match="has no 'é'"):
        encode("é")


def test_local_texts(folder, tmp_path):
    """A byte order mark is no character, carriage returns are named, and the code of stdlib_char is ASCII without tabs."""
    (tmp_path / "windows.txt").write_bytes(b"\xef\xbb\xbf" + b"ab\r\n" * 50)
    (tmp_path / "code.txt").write_text("\tdéf\n" * 100, encoding="utf-8")
    (tmp_path / "short.txt").write_text("a")
    chars, code = folder / "shakespeare_char", folder / "stdlib_char"
    short = prepare(chars, tmp_path / "short.txt")
    short.refusal("error: a text of 1 characters is too short to train and validate on; give a longer one")
    assert not contents(chars)
    windows = prepare(chars, tmp_path / "windows.txt")
    windows.succeeded(f"note: {tmp_path}/windows.txt has 50 carriage returns, which become tokens")
    assert sorted(vocabulary.load_meta(str(chars))["stoi"]) == ["\n", "\r", "a", "b"]
    prepare(code, "code.txt", cwd=tmp_path).succeeded()
    data = Dataset(str(code), block_size=8)
    assert vocabulary.load_codec(data.meta, data.vocab_size).decode(data.tokens["train"][:11].tolist()) == "        df\n"


@pytest.mark.parametrize(
    ("name", "train", "val", "size"), [("shakespeare_char", 1_003_854, 111_540, 65), ("shakespeare", 301_966, 36_059, None)]
)
def test_tiny_shakespeare(name, train, val, size, folder, tiktoken_cache):
    prepare(folder / name, shared_data("tinyshakespeare/input.txt")).succeeded()
    data = Dataset(str(folder / name), 8)
    assert [len(data.tokens[split]) for split in ("train", "val")] == [train, val]
    assert data.vocab_size == expected_vocab_size(data.directory) == size


def test_openwebtext_from_a_file(folder, tmp_path, tiktoken_cache):
    folder = folder / "openwebtext"
    texts = [f"document number {number}" for number in range(2001)]
    (tmp_path / "documents.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    prepare(folder, tmp_path / "documents.jsonl").succeeded()
    files, decode = contents(folder), vocabulary.gpt2_encoding().decode
    found = {name: decode(np.frombuffer(tokens, np.uint16).tolist()).split("<|endoftext|>") for name, tokens in files.items()}
    assert found == {"val.bin": [texts[0], texts[2000], ""], "train.bin": [*texts[1:2000], ""]}


@pytest.mark.parametrize("name", ["shakespeare", "openwebtext"])
def test_documents_without_tokens_leave_the_dataset_of_before(folder, tmp_path, name, tiktoken_cache):
    """What tiktoken cannot tokenize is named, and a single document leaves nothing to train on."""
    (tmp_path / "good.txt").write_text("ab\n" * 2000)
    (tmp_path / "blanks.txt").write_text("one\ntwo\n" + 1_000_000 * " " + "x\n" + "three\n" * 40_000)
    (tmp_path / "single.txt").write_text("one document\n")
    prepare(folder / name, tmp_path / "good.txt").succeeded()
    before = contents(folder / name)
    document = "document 3" if name == "openwebtext" else f"{tmp_path}/blanks.txt"
    refused = prepare(folder / name, tmp_path / "blanks.txt")
    refused.refusal(f"error: tiktoken cannot tokenize {document}, of ", "it has 1,000,00", is_alone=False)
    if name == "openwebtext":
        prepare(folder / name, tmp_path / "single.txt").refusal("give at least two", is_alone=False)
    assert contents(folder / name) == before


def test_offline_download_says_where_the_file_goes(folder, monkeypatch):
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    source, copy = "https://raw.githubusercontent.com/karpathy/char-rnn", folder / "shakespeare_char" / "input.txt"
    prepare(folder / "shakespeare_char").refusal(source, str(copy))
    assert os.listdir(folder / "shakespeare_char") == ["prepare.py"]


def test_a_download_with_the_wrong_checksum_is_thrown_away(tmp_path):
    (tmp_path / "source").write_bytes(b"not what was expected")
    with pytest.raises(DataError, match="checksum"):
        common.download((tmp_path / "source").as_uri(), str(tmp_path / "copy"), "0" * 64)
    assert not (tmp_path / "copy").exists()
