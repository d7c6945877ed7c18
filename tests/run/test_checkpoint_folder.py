"""run/checkpoint_folder.py: what a folder keeps and finds."""

import os
import random
import re
from unittest import mock

import pytest
import torch
from checkpoints import CHECKPOINT, VALUES, Hostile, damaged, numbered, save_alone
from toy import assert_equal, make_toy

from run.checkpoint_folder import commit, find
from run.checkpoint_keys import load
from run.checkpoint_writer import CheckpointWriter
from zero import checkpoint as ckpt


@pytest.mark.parametrize("links", [True, False])
def test_the_file_before_is_kept_and_so_are_the_last_few(tmp_path, monkeypatch, links):
    if not links:
        no_links = OSError("a file cannot have two names on this file system")
        monkeypatch.setattr(os, "link", mock.Mock(side_effect=no_links))
    (tmp_path / "ckpt_3_best.pt").write_bytes(b"of the user")
    for iteration in (1, 2, 30, 4):
        report = commit(numbered(iteration), str(tmp_path), keep=2)
        assert (report.iter_num, report.nbytes) == (iteration, os.path.getsize(tmp_path / "ckpt.pt"))
    files = ["ckpt.pt", "ckpt_00000002.pt", "ckpt_00000004.pt", "ckpt_00000030.pt", "ckpt_3_best.pt", "ckpt_prev.pt"]
    assert sorted(os.listdir(tmp_path)) == files
    assert ckpt.load(tmp_path / "ckpt.pt")["iter_num"] == 4
    assert ckpt.load(tmp_path / "ckpt_prev.pt")["iter_num"] == 30
    assert find(str(tmp_path)) == (str(tmp_path / "ckpt.pt"), None)


def test_the_last_few_are_those_of_the_largest_iterations(tmp_path):
    """The times of the files do not count. Files of later iterations than the newest are of a run that went back, and stay."""
    for iteration in (10, 20, 30, 40):
        commit(numbered(iteration), str(tmp_path), keep=9)
    for age, iteration in enumerate((40, 10, 30, 20)):
        os.utime(tmp_path / f"ckpt_{iteration:08d}.pt", (2e9 - age, 2e9 - age))

    def kept():
        return [int(name[5:-3]) for name in sorted(os.listdir(tmp_path)) if re.fullmatch(r"ckpt_\d+\.pt", name)]

    commit(numbered(25), str(tmp_path), keep=2)
    assert kept() == [20, 25, 30, 40]
    commit(numbered(35), str(tmp_path), keep=1)
    assert kept() == [35, 40]
    commit(numbered(100_000_000), str(tmp_path), keep=2)
    assert sorted(kept()) == [40, 100_000_000]


def test_what_overwrites_the_newest_file_in_place_leaves_the_kept_ones(tmp_path):
    """A user does that with `cp` to go back to one of them, and nanoGPT when it resumes there."""
    for iteration in (1, 2, 3):
        commit(numbered(iteration), str(tmp_path), keep=2)
    (tmp_path / "ckpt.pt").write_bytes((tmp_path / "ckpt_00000002.pt").read_bytes())
    (tmp_path / "ckpt_prev.pt").write_bytes(b"")
    assert [ckpt.load(tmp_path / f"{name}.pt")["iter_num"] for name in ("ckpt", "ckpt_00000002", "ckpt_00000003")] == [2, 2, 3]


def test_a_missing_file_is_mentioned(tmp_path):
    with pytest.raises(ckpt.CheckpointError, match=r"there is no checkpoint .*ckpt\.pt$"):
        find(str(tmp_path))
    commit(numbered(1), str(tmp_path))
    os.rename(tmp_path / "ckpt.pt", tmp_path / "ckpt_prev.pt")
    path, warning = find(str(tmp_path))
    assert path == str(tmp_path / "ckpt_prev.pt")
    assert warning == f"there is no checkpoint {tmp_path / 'ckpt.pt'}"


def damages(whole, tmp_path):
    """200 damaged files, by name, as bytes; where the damage lies in the padding between entries the file may be whole."""
    rng = random.Random(0)
    yield "empty", b""
    yield "no zip", b"no zip at all"
    yield "torn head", b"PK\x03\x04 torn"
    yield "only the end", whole[-100:]
    yield "twice", whole[: len(whole) // 2] * 2
    for number, changed in enumerate(damaged(whole, rng, 80)):
        yield f"{'flipped' if len(changed) == len(whole) else 'truncated'} {number}", changed
    for number in range(20):
        position = rng.randrange(len(whole) - 512)
        yield f"zeroed {number}", whole[:position] + bytes(512) + whole[position + 512 :]
    contents = [{**CHECKPOINT, "config": Hostile()}, Hostile(), 7, [], {}, {"model": {}}]
    contents += [{key: value for key, value in CHECKPOINT.items() if key != missing} for missing in ("model", "model_args")]
    contents += [{**CHECKPOINT, "optimizer": {"state": 3}}, {**CHECKPOINT, "iter_num": "1"}, {**CHECKPOINT, "format": 99}]
    for number, content in enumerate(contents):
        torch.save(content, tmp_path / "content.pt")
        yield f"content {number}", (tmp_path / "content.pt").read_bytes()


def test_two_hundred_damaged_files(tmp_path, monkeypatch):
    """Each falls back to the file before; without one, one line names it. No code of the file runs."""
    monkeypatch.chdir(tmp_path)
    folder, alone = tmp_path / "run", tmp_path / "alone"
    alone.mkdir()
    for iteration in (1, 2):
        commit(numbered(iteration), str(folder))
    whole = (folder / "ckpt.pt").read_bytes()
    count = unharmed = 0
    for name, contents in damages(whole, tmp_path):
        count += 1
        for place in (folder, alone):
            (place / "ckpt.pt").write_bytes(contents)
        path, warning = find(str(folder))
        checkpoint = load(path)
        for key in ("model", "optimizer"):
            assert_equal(checkpoint[key], CHECKPOINT[key], f"{name}: {key}")
        if warning is None:
            assert name.startswith(("flipped", "zeroed")), f"{name} was not noticed"
            assert checkpoint["iter_num"] == 2
            unharmed += 1
            continue
        assert checkpoint["iter_num"] == 1
        assert str(folder / "ckpt.pt") in warning
        with pytest.raises(ckpt.CheckpointError, match=r"ckpt\.pt") as caught:
            find(str(alone))
        assert "\n" not in str(caught.value)
    assert count == 196
    assert unharmed < 25, "damage in the padding only"
    assert not os.path.exists("hostile-code-ran")


def test_what_went_wrong_afterwards_is_told_but_the_checkpoint_is_written(tmp_path, monkeypatch):
    save_alone(tmp_path, 1, 2, keep=2)
    monkeypatch.setattr(os, "remove", mock.Mock(side_effect=PermissionError("it cannot be removed")))
    writer = CheckpointWriter(str(tmp_path), keep=1)
    model = make_toy()
    writer.write(model, torch.optim.AdamW(model.param_groups()), {**VALUES, "iter_num": 3})
    [outcome] = writer.outcomes()
    assert outcome.iter_num == ckpt.load(str(tmp_path / "ckpt.pt"))["iter_num"] == 3
    assert "is written, but" in outcome.warning
