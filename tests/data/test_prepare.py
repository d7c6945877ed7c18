"""data/*/prepare.py: from a text to token files, also from a local file, and what is said without a network."""

import gzip
import json
import os
import pickle
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, shared_data

from data import common, vocabulary
from data.dataset import Dataset
from data.vocabulary import DataError, expected_vocab_size


@pytest.fixture
def scripts(tmp_path):
    """A copy of data/ that the scripts write into, in place of the project's own."""
    shutil.copytree(os.path.join(ROOT, "data"), tmp_path / "data", ignore=shutil.ignore_patterns("*.bin", "*.pkl", "*.txt"))
    return tmp_path


def prepare(scripts, name, *arguments, cwd="/", **environment):
    return subprocess.run(
        [sys.executable, str(scripts / "data" / name / "prepare.py"), *arguments],
        cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True,
    )  # fmt: skip


def tokens(scripts, name, split):
    return np.fromfile(scripts / "data" / name / f"{split}.bin", dtype=np.uint16)


def test_a_text_that_is_too_short_leaves_what_is_there(scripts, tmp_path):
    (tmp_path / "short.txt").write_text("a")
    done = prepare(scripts, "shakespeare_char", "--input", str(tmp_path / "short.txt"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: a text of 1 characters is too short to train and validate on; give a longer one\n"
    assert not (scripts / "data" / "shakespeare_char" / "meta.pkl").exists()


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".bin", ".pkl", ".tmp")}


@pytest.mark.parametrize("name", ["shakespeare_char", "stdlib_char", "shakespeare", "openwebtext"])
def test_a_full_disk_leaves_the_dataset_of_before(scripts, tmp_path, name):
    cache = {"TIKTOKEN_CACHE_DIR": shared_data("tiktoken_cache")} if name in ("shakespeare", "openwebtext") else {}
    (tmp_path / "one.txt").write_text("ab\n" * 2000)
    (tmp_path / "two.txt").write_text("".join(f"{number} xyz\n" for number in range(20_000)))
    assert prepare(scripts, name, "--input", str(tmp_path / "one.txt"), **cache).returncode == 0
    before = contents(scripts / "data" / name)
    script = str(scripts / "data" / name / "prepare.py")
    limited = f"ulimit -f 64; exec {sys.executable} {script} --input {tmp_path / 'two.txt'}"  # val.bin fits, train.bin does not
    done = subprocess.run(["bash", "-c", limited], env={**os.environ, **cache}, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: cannot write ")
    assert "train.bin: File too large; the files of before are unchanged" in done.stderr
    assert contents(scripts / "data" / name) == before


KILLED = """
import os, sys
sys.path.insert(0, {root!r})
from data import common
left, rename = {moves}, os.rename
def rename_or_die(*paths):
    global left
    left -= 1
    if left < 0:
        {end}
    rename(*paths)
os.rename = rename_or_die
common.write_characters({folder!r}, "bac" * 50, ["a", "b", "c"])
"""


@pytest.mark.parametrize("end", ["os._exit(9)", "raise KeyboardInterrupt", "raise OSError('no space')"])
def test_an_end_between_two_files_leaves_no_mixture(tmp_path, end):
    """All files are as before, unless the process was killed: then train.bin is missing."""
    for moves in range(7):  # three files are put away, then three get their names
        common.write_characters(str(tmp_path), "ab" * 50, ["a", "b"])
        before = contents(tmp_path)
        script = KILLED.format(root=ROOT, folder=str(tmp_path), moves=moves, end=end)
        process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert (process.returncode != 0) == (moves < 6), process.stderr
        found = contents(tmp_path)
        if moves == 6:
            assert pickle.loads(found["meta.pkl"])["vocab_size"] == 3
            assert len(found) == 3
        elif end == "os._exit(9)" and moves:
            assert "train.bin" not in found
        else:
            assert found == before | ({} if "exit" not in end else found)
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()


def test_a_byte_order_mark_is_no_character_and_carriage_returns_are_named(scripts, tmp_path):
    (tmp_path / "windows.txt").write_bytes(b"\xef\xbb\xbf" + b"ab\r\n" * 50)
    done = prepare(scripts, "shakespeare_char", "--input", str(tmp_path / "windows.txt"))
    assert f"note: {tmp_path}/windows.txt has 50 carriage returns, which become tokens" in done.stdout
    assert sorted(vocabulary.load_meta(str(scripts / "data" / "shakespeare_char"))["stoi"]) == ["\n", "\r", "a", "b"]


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
    "other.jsonl.gz": (b"no gzip", "cannot read"),
    "cut.txt.gz": (gzip.compress(LINES * 99)[:-9], "cannot read"),
    "damaged.txt.gz": (gzip.compress(LINES * 99)[:20] + b"xxxxxxxx" + gzip.compress(LINES * 99)[28:], "cannot read"),
    "latin.txt": ("é".encode("latin-1"), "cannot read"),
    "zip.txt": (b"PK\3\4\xff\xff", "cannot read"),
    **dict.fromkeys(
        ("a.csv", "a.tsv", "a.zst", "a.npy", "a.parquet.gz", "a.xlsx"), (b"text\none\n", "a file of documents ends in")
    ),
}


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


def test_stdlib_char(scripts):
    assert prepare(scripts, "stdlib_char").returncode == 0
    data = Dataset(str(scripts / "data" / "stdlib_char"), block_size=64)
    assert data.vocab_size == expected_vocab_size(data.directory) == 96
    assert len(data.tokens["train"]) > 8_000_000
    assert max(tokens[:].max() for tokens in data.tokens.values()) < 96
    encode, decode, _ = vocabulary.load_codec(data.meta, data.vocab_size)
    assert decode(encode("def f(x):\n")) == "def f(x):\n"
    assert "import " in decode(data.tokens["train"][:20000].tolist())
    with pytest.raises(DataError, match="has no 'é'"):
        encode("é")


def test_stdlib_char_from_a_file(scripts, tmp_path):
    (tmp_path / "code.txt").write_text("\tdéf\n" * 100, encoding="utf-8")
    assert prepare(scripts, "stdlib_char", "--input", "code.txt", cwd=tmp_path).returncode == 0
    data = Dataset(str(scripts / "data" / "stdlib_char"), block_size=8)
    assert vocabulary.load_codec(data.meta, data.vocab_size).decode(data.tokens["train"][:11].tolist()) == "        df\n"


def test_shakespeare_char(scripts):
    text = shared_data("tinyshakespeare/input.txt")
    assert prepare(scripts, "shakespeare_char", "--input", text).returncode == 0
    assert len(tokens(scripts, "shakespeare_char", "train")) == 1_003_854
    assert len(tokens(scripts, "shakespeare_char", "val")) == 111_540
    folder = str(scripts / "data" / "shakespeare_char")
    assert vocabulary.load_meta(folder)["vocab_size"] == expected_vocab_size(folder) == 65


def test_shakespeare(scripts):
    text, cache = shared_data("tinyshakespeare/input.txt"), shared_data("tiktoken_cache")
    assert prepare(scripts, "shakespeare", "--input", text, TIKTOKEN_CACHE_DIR=cache).returncode == 0
    assert len(tokens(scripts, "shakespeare", "train")) == 301_966
    assert len(tokens(scripts, "shakespeare", "val")) == 36_059


def test_openwebtext_from_a_file(scripts, tmp_path):
    import tiktoken

    cache = shared_data("tiktoken_cache")
    texts = [f"document number {number}" for number in range(2001)]
    (tmp_path / "documents.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    (tmp_path / "broken.jsonl").write_text('{"text": "fine"}\n{"title": "no text"}\n')
    run = prepare(scripts, "openwebtext", "--input", str(tmp_path / "documents.jsonl"), TIKTOKEN_CACHE_DIR=cache)
    assert run.returncode == 0, run.stderr
    os.environ["TIKTOKEN_CACHE_DIR"] = cache
    encoding = tiktoken.get_encoding("gpt2")
    ends = {split: encoding.decode(tokens(scripts, "openwebtext", split).tolist()) for split in ("train", "val")}
    assert ends["val"].split("<|endoftext|>") == [texts[0], texts[2000], ""]
    assert ends["train"].split("<|endoftext|>") == [*texts[1:2000], ""]
    run = prepare(scripts, "openwebtext", "--input", str(tmp_path / "broken.jsonl"), TIKTOKEN_CACHE_DIR=cache)
    assert run.returncode == 2
    assert 'broken.jsonl line 2 is no JSON object with a "text" key' in run.stderr
    assert ends["train"] == encoding.decode(tokens(scripts, "openwebtext", "train").tolist()), "the old file stands"


def test_offline_download_says_where_the_file_goes(scripts):
    run = prepare(scripts, "shakespeare_char", https_proxy="http://127.0.0.1:9")
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1
    assert "https://raw.githubusercontent.com/karpathy/char-rnn" in run.stderr
    assert str(scripts / "data" / "shakespeare_char" / "input.txt") in run.stderr
    assert os.listdir(scripts / "data" / "shakespeare_char") == ["prepare.py"]


def test_a_download_with_the_wrong_checksum_is_thrown_away(tmp_path):
    (tmp_path / "source").write_bytes(b"not what was expected")
    with pytest.raises(DataError, match="checksum"):
        common.download((tmp_path / "source").as_uri(), str(tmp_path / "copy"), "0" * 64)
    assert not (tmp_path / "copy").exists()
