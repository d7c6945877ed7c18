"""data/*/prepare.py: from a text to token files, also from a local file, and what is said without a network."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, shared_data

from data import vocabulary
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


def test_a_download_with_the_wrong_checksum_is_thrown_away(scripts, tmp_path, monkeypatch, capsys):
    from data import common

    (tmp_path / "source").write_bytes(b"not what was expected")
    with pytest.raises(SystemExit):
        common.download((tmp_path / "source").as_uri(), str(tmp_path / "copy"), "0" * 64)
    assert "checksum" in capsys.readouterr().err
    assert not (tmp_path / "copy").exists()
