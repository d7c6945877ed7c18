"""data/fineweb_edu/prepare.py: shards from the hub and from local files, the same ones after any number of stops."""

import json
import os
from itertools import chain
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
    constants = {"SHARD = 100_000_000": f"SHARD = {SHARD}"}
    script, run = hub.script_with("fineweb_edu", tmp_path, constants, monkeypatch)
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


def test_local_files(prepare, tmp_path):
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
