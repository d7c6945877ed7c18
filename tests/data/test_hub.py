"""data/fineweb_edu/prepare.py and openwebtext/prepare.py: from a small server that stands for the hub, and from local files."""

import io
import json
import lzma
import os
import re
import sys
import tarfile
from itertools import chain
from types import SimpleNamespace
from unittest import mock

import hub
import numpy as np
import pytest
from hub import parquet, refusal

from data import common
from data.dataset import Dataset

SHARD = 50
TEXTS = ["a" * length for length in (7, 0, 60, 1, 130, 9, 3, 49, 8, 20, 31)]  # several shards of one, shards that end with one
STREAM = [token for text in TEXTS for token in (0, *map(ord, text))]
FILES = {
    "sample/10BT/001.parquet": parquet(*TEXTS[7:], rows=2),
    "sample/10BT/000.parquet": parquet(*TEXTS[:7], rows=3),
    "sample/100BT/000.parquet": parquet("not this"),
    "README.md": b"",
}


@pytest.fixture
def prepare(tmp_path, monkeypatch):
    """Runs a copy of the script that writes shards of 50 tokens, reading one document at a time."""
    script, run = hub.script_with("fineweb_edu", tmp_path, {"SHARD = 100_000_000": f"SHARD = {SHARD}"}, monkeypatch)
    monkeypatch.setattr(common, "_BATCH", 1)
    with hub.serving("HuggingFaceFW/fineweb-edu", monkeypatch) as server:
        server.files = FILES
        run.folder, run.server = script.parent, server
        yield run


def shards(folder):
    """Content of the files by name, in the order of their numbers."""
    paths = sorted(folder.glob("*.bin"), key=lambda path: path.name[-10:])
    return {path.name: np.fromfile(path, np.uint16).tolist()[512:] for path in paths}


def names(count):
    return [f"fineweb_edu_{'train' if number else 'val'}_{number:06d}.bin" for number in range(count)]


@pytest.mark.parametrize("stop", range(1, len(TEXTS)))
def test_a_run_that_was_stopped_goes_on_to_the_same_files(prepare, stop):
    """After any document, twice. Whole shards are not written again."""
    encode = hub.Letters().encode_ordinary
    for batches in (stop, 1):
        ends = [*batches * [mock.DEFAULT], KeyboardInterrupt]  # the last one comes in place of a batch
        stopped = mock.patch.object(hub.Letters, "encode_ordinary", wraps=encode, side_effect=ends)
        with stopped, pytest.raises(KeyboardInterrupt):
            prepare()
    whole = {path: path.stat().st_mtime_ns for path in prepare.folder.glob("*.bin")}
    assert all(len(tokens) == SHARD for tokens in shards(prepare.folder).values())
    prepare()
    assert list(chain(*shards(prepare.folder).values())) == STREAM
    assert whole == {path: path.stat().st_mtime_ns for path in whole}
    assert not list(prepare.folder.glob("*.tmp"))


def test_a_part_and_later_the_rest(prepare, capsys):
    for part in (40, SHARD):  # what fits in one shard
        prepare(f"--tokens={part}")
        assert shards(prepare.folder) == dict(zip(names(2), (STREAM[: part // 10], STREAM[part // 10 : part]), strict=True))
    prepare("--tokens=1.2e2")
    assert shards(prepare.folder) == dict(zip(names(3), (STREAM[:50], STREAM[50:100], STREAM[100:120]), strict=True))
    for part in (90, 110):
        prepare(f"--tokens={part}")
        assert list(chain(*shards(prepare.folder).values())) == STREAM[:120], "they are there already"
    prepare()
    parts = [STREAM[begin : begin + SHARD] for begin in range(0, len(STREAM), SHARD)]
    assert shards(prepare.folder) == dict(zip(names(7), parts, strict=True)), "the documents one after another"
    data = Dataset(str(prepare.folder), 8)
    data.check(ord("a") + 1)
    assert f"train: {len(data.tokens['train'])} tokens" in capsys.readouterr().out
    assert "--tokens=-1.0: give a number of tokens, such as --tokens=1e9" in refusal(capsys, prepare, "--tokens=-1")


@pytest.mark.parametrize("limit", ["--tokens=45", "--tokens=1e9"])
@pytest.mark.parametrize("moves", range(4))
def test_a_stop_between_the_shards_leaves_those_of_before(prepare, limit, moves):
    """The first two shards of a part are put away, and then replaced: no token is in both splits."""
    prepare("--tokens=40")
    before = shards(prepare.folder)
    ends = [*moves * [mock.DEFAULT], *9 * [KeyboardInterrupt]]  # in place of moves
    with mock.patch("os.rename", wraps=os.rename, side_effect=ends), pytest.raises(KeyboardInterrupt):
        prepare(limit)
    whole = limit == "--tokens=1e9" and moves == 3  # the first shard alone is replaced, the second one written later
    assert shards(prepare.folder) == (before if not whole else {names(1)[0]: STREAM[:SHARD]})
    prepare()
    assert list(chain(*shards(prepare.folder).values())) == STREAM


def test_local_files_of_fineweb_edu(prepare, tmp_path):
    folder = tmp_path / "texts" / "more"
    folder.mkdir(parents=True)
    (folder / "a.parquet").write_bytes(parquet(*TEXTS[:4]))
    (folder / "b.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS[4:7]))
    (folder.parent / "n.txt").write_text("one line\n\nanother\n")
    (folder.parent / "z.md").write_text("not this")
    prepare("--input", str(folder.parent), "--tokens=150")
    prepare("--input", str(folder.parent))
    lines = [token for line in ("one line\n", "another\n") for token in (0, *map(ord, line))]
    expected = [token for text in TEXTS[:7] for token in (0, *map(ord, text))] + lines
    assert list(chain(*shards(prepare.folder).values())) == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", None, "cannot read PATH: "),
        ("a.parquet", b"no parquet", "cannot read PATH: "),
        ("a.parquet", b"", "cannot read PATH: "),
        ("a.parquet", parquet(), "there are no documents"),
        ("a.parquet", parquet("other"), "are not of this input; move them away, or give their input"),
        ("a.parquet", parquet("other", None), 'PATH has None in place of a text in "text"; leave it out'),
        ("a.jsonl", b'{"text": "other"}\n{"text": 7}', 'PATH line 2 has 7 in place of a text in "text"; leave it out'),
    ],
)
def test_wrong_input_takes_one_line_and_the_shards_stand(prepare, tmp_path, capsys, name, content, message):
    prepare("--tokens=100")
    before = shards(prepare.folder)
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    assert message.replace("PATH", str(path)) in refusal(capsys, prepare, "--input", str(path))
    assert shards(prepare.folder) == before


NAME = "Skylion007/openwebtext"
DOCUMENTS = [f"document {number}" for number in range(6)]


@pytest.fixture
def openwebtext(tmp_path, monkeypatch):
    """Runs a copy of the script, which believes that OpenWebText has six documents and takes every third for validation."""
    constants = {"DOCUMENTS = 8_013_769": "DOCUMENTS = 6", "VALIDATION_EVERY = 2000": "VALIDATION_EVERY = 3"}
    script, run_script = hub.script_with("openwebtext", tmp_path, constants, monkeypatch)
    with hub.serving(NAME, monkeypatch) as server:

        def run(files):
            server.files = files
            run_script()
            tokens = {split: np.fromfile(script.with_name(f"{split}.bin"), dtype=np.uint16) for split in ("train", "val")}
            return {split: "".join(map(chr, tokens)).split("\0") for split, tokens in tokens.items()}

        run.folder = script.parent
        yield run


def tar(files):
    with tarfile.open(fileobj=(archive := io.BytesIO()), mode="w") as members:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            members.addfile(member, io.BytesIO(content))
    return archive.getvalue()


def subset(number, *texts):
    """A tar file of one .xz file per text, each of which is a tar file of one document."""
    name = f"openwebtext/urlsf_subset{number:02d}"
    parts = {f"{name}-{i}_data.xz": lzma.compress(tar({f"{i}.txt": text.encode()})) for i, text in enumerate(texts)}
    return tar({"openwebtext/readme": b"no document", **parts})


SCRIPT = {"openwebtext.py": b"", "README.md": b""}
PARQUET = {f"plain_text/train-0000{i}-of-00002.parquet": parquet(*DOCUMENTS[3 * i : 3 * i + 3]) for i in (1, 0)}
ARCHIVES = {f"subsets/urlsf_subset{i:02d}.tar": subset(i, *DOCUMENTS[3 * i : 3 * i + 3]) for i in (1, 0)}
OTHERS = {"subsets/urlsf_subset00.tar": subset(0, "not this")}
HALF = {"plain_text/partial-train/0000.parquet": parquet(*DOCUMENTS[:3])}


@pytest.mark.parametrize(
    "files",
    [{**PARQUET, **OTHERS}, {**ARCHIVES, **HALF}, {**PARQUET, **ARCHIVES, **HALF}, {**SCRIPT, **ARCHIVES}],
    ids=["parquet", "a part as parquet", "two versions as parquet", "archives"],
)
def test_where_the_documents_come_from(openwebtext, files):
    assert openwebtext(files) == {"train": [*DOCUMENTS[1:3], *DOCUMENTS[4:], ""], "val": [DOCUMENTS[0], DOCUMENTS[3], ""]}


def test_blank_lines_of_the_archives_are_removed(openwebtext):
    archives = {"subsets/urlsf_subset00.tar": subset(0, "\n\none\n\n\n\ntwo\n\nthree\n", *DOCUMENTS[1:])}
    assert openwebtext(archives)["val"][0] == "one\n\ntwo\n\nthree"


BROKEN = mock.Mock(side_effect=RuntimeError("of two\nlines"))


@pytest.mark.parametrize(
    ("files", "library", "message"),
    [
        ({"subsets/0.tar": subset(0, *DOCUMENTS[:5])}, {}, "has only 5 of the 6 documents of Skylion007/openwebtext"),
        ({**SCRIPT, **HALF}, {}, "has only 0 of the 6 documents"),
        ({"subsets/0.tar": subset(0, *DOCUMENTS[:3]), "subsets/1.tar": None}, {}, "after 3 documents (HfHubHTTPError: "),
        ({"subsets/0.tar": subset(0, *DOCUMENTS)[:5000]}, {}, "after 4 documents (ReadError: unexpected end of data)"),
        ({"train.parquet": b"no parquet"}, {}, "after 0 documents (ArrowInvalid: "),
        ({}, {}, "Skylion007/openwebtext (repository not found)"),
        ({}, {"huggingface_hub": SimpleNamespace(HfFileSystem=BROKEN)}, "(RuntimeError: of two lines)"),
        ({}, {"huggingface_hub": None}, "the download needs huggingface_hub; pip install -e '.[openwebtext]', or "),
        (SCRIPT, {"pyarrow": None}, "the download needs pyarrow; pip install -e '.[openwebtext]', or "),
    ],
)  # fmt: skip
def test_errors_take_one_line_and_the_old_file_stands(openwebtext, files, library, message, monkeypatch, capsys):
    (openwebtext.folder / "train.bin").write_bytes(b"old")
    for name, module in library.items():
        monkeypatch.setitem(sys.modules, name, module)
    assert re.search(f"{re.escape(message)}.*give a local copy with --input FILE$", refusal(capsys, openwebtext, files))
    assert sorted(os.listdir(openwebtext.folder)) == ["prepare.py", "train.bin"]
    assert (openwebtext.folder / "train.bin").read_bytes() == b"old"
