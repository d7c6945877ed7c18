"""data/openwebtext/prepare.py reads OpenWebText from a small server with the layout of the Hugging Face hub."""

import io
import lzma
import os
import re
import sys
import tarfile
from types import SimpleNamespace
from unittest import mock

import hub
import numpy as np
import pytest
from hub import parquet, refusal

NAME = "Skylion007/openwebtext"
TEXTS = [f"document {number}" for number in range(6)]


@pytest.fixture
def prepare(tmp_path, monkeypatch):
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
PARQUET = {f"plain_text/train-0000{i}-of-00002.parquet": parquet(*TEXTS[3 * i : 3 * i + 3]) for i in (1, 0)}
ARCHIVES = {f"subsets/urlsf_subset{i:02d}.tar": subset(i, *TEXTS[3 * i : 3 * i + 3]) for i in (1, 0)}
OTHERS = {"subsets/urlsf_subset00.tar": subset(0, "not this")}
HALF = {"plain_text/partial-train/0000.parquet": parquet(*TEXTS[:3])}


@pytest.mark.parametrize(
    "files",
    [{**PARQUET, **OTHERS}, {**ARCHIVES, **HALF}, {**PARQUET, **ARCHIVES, **HALF}, {**SCRIPT, **ARCHIVES}],
    ids=["parquet", "a part as parquet", "two versions as parquet", "archives"],
)
def test_where_the_documents_come_from(prepare, files):
    assert prepare(files) == {"train": [*TEXTS[1:3], *TEXTS[4:], ""], "val": [TEXTS[0], TEXTS[3], ""]}


def test_blank_lines_of_the_archives_are_removed(prepare):
    archives = {"subsets/urlsf_subset00.tar": subset(0, "\n\none\n\n\n\ntwo\n\nthree\n", *TEXTS[1:])}
    assert prepare(archives)["val"][0] == "one\n\ntwo\n\nthree"


BROKEN = mock.Mock(side_effect=RuntimeError("of two\nlines"))


@pytest.mark.parametrize(
    ("files", "library", "message"),
    [
        ({"subsets/0.tar": subset(0, *TEXTS[:5])}, {}, "has only 5 of the 6 documents of Skylion007/openwebtext"),
        ({**SCRIPT, **HALF}, {}, "has only 0 of the 6 documents"),
        ({"subsets/0.tar": subset(0, *TEXTS[:3]), "subsets/1.tar": None}, {}, "after 3 documents (HfHubHTTPError: "),
        ({"subsets/0.tar": subset(0, *TEXTS)[:5000]}, {}, "after 4 documents (ReadError: unexpected end of data)"),
        ({"train.parquet": b"no parquet"}, {}, "after 0 documents (ArrowInvalid: "),
        ({}, {}, "Skylion007/openwebtext (repository not found)"),
        ({}, {"huggingface_hub": SimpleNamespace(HfFileSystem=BROKEN)}, "(RuntimeError: of two lines)"),
        ({}, {"huggingface_hub": None}, "the download needs huggingface_hub; pip install -e '.[openwebtext]', or "),
        (SCRIPT, {"pyarrow": None}, "the download needs pyarrow; pip install -e '.[openwebtext]', or "),
    ],
)  # fmt: skip
def test_errors_take_one_line_and_the_old_file_stands(prepare, files, library, message, monkeypatch, capsys):
    (prepare.folder / "train.bin").write_bytes(b"old")
    for name, module in library.items():
        monkeypatch.setitem(sys.modules, name, module)
    assert re.search(f"{re.escape(message)}.*give a local copy with --input FILE$", refusal(capsys, prepare, files))
    assert sorted(os.listdir(prepare.folder)) == ["prepare.py", "train.bin"]
    assert (prepare.folder / "train.bin").read_bytes() == b"old"
