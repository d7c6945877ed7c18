"""run/earlier.py: what stands in an output folder when another run starts there moves aside, once, whole or not at all."""

import os
import re
import shutil
from unittest import mock

import pytest
import torch
from scripts import FEW, torch_load, train

import dashboard
from run import earlier
from run.checkpoints import Checkpoints
from zero.checkpoint import CheckpointWriter


def names(folder):
    return sorted(os.listdir(folder))


def move_aside(folder):
    with earlier.moved_aside(str(folder)):
        pass


def checkpoints(folder, read_only=False):
    settings = {"out_dir": str(folder), "keep_checkpoints": 0, "async_save": False}
    return Checkpoints(settings | {"always_save_checkpoint": True, "eval_only": read_only})


def start_anew(folder, read_only=False):
    starts = checkpoints(folder, read_only)
    starts.claim()
    with starts.without_earlier_run():
        pass
    if not read_only:
        starts._lock.close()


@pytest.fixture
def out(tmp_path):
    """The files of a run that saved once, and of a user."""
    model = torch.nn.Linear(2, 2)
    values = {"model_args": {}, "iter_num": 4, "best_val_loss": 2.0, "config": {}}
    CheckpointWriter(str(tmp_path)).write(model, torch.optim.AdamW(model.parameters()), values)
    for name in ("metrics.jsonl", "run.json", "report.md", "evaluation.json", "notes.txt", "prompt.pt"):
        (tmp_path / name).write_text("of before")
    return tmp_path


def test_everything_that_a_run_writes_moves_and_can_be_used_there(data, tmp_path):
    out = tmp_path / "out"
    everything = [FEW, "--keep_checkpoints=9", "--profile=True"]
    train(out, data, *everything, "--max_iters=11")
    (out / "notes.txt").write_text("of the user")
    shutil.copy(out / "ckpt.pt", out / "best.pt")  # of the user
    old = {*names(out)} - {"run.lock", "notes.txt", "best.pt"}
    new = {"ckpt.pt", "metrics.jsonl", "report.md", "run.json", "run.lock", "notes.txt", "best.pt"}
    losses, _, printed = train(out, data, FEW, "--max_iters=1")
    [line] = [line for line in printed.splitlines() if "another run" in line]
    before = re.search(r"use --init_from=resume --out_dir=(\S+)$", line)[1]
    assert re.fullmatch(rf"{out}/before-\d{{8}}-\d{{6}}Z", before)
    assert {*names(out)} == {*new, os.path.basename(before)}
    assert {*names(before)} == old
    assert [*losses] == [0, 1]
    assert torch_load(out)["iter_num"] == 2
    losses, _, _ = train(before, data, FEW, "--init_from=resume", "--max_iters=13")
    assert [*losses] == list(range(14))
    assert [ran.curves["iter/loss"][-1][0] for ran in dashboard.read([str(out), before])] == [1, 13]


def test_a_kill_between_two_moves_leaves_a_run_that_resumes(out):
    """And one that starts afresh there moves all of it."""
    files = names(out)
    moves = len(files) - 2 + 1  # without the user's; the last one names the folder
    for moved in range(moves):
        ends = [*moved * [mock.DEFAULT], KeyboardInterrupt]  # the last one comes in place of a move
        with mock.patch("os.rename", wraps=os.rename, side_effect=ends), pytest.raises(KeyboardInterrupt):
            move_aside(out)
        assert len(names(out)) == len(files) + 1 - moved
        resumed = checkpoints(out)
        assert (resumed.load("auto") is None) == (moved == moves - 1)
        assert resumed.load("resume")["iter_num"] == 4
        resumed._lock.close()
        assert names(out) == sorted([*files, "run.lock"])
        (out / "run.lock").unlink()
    start_anew(out)
    *_, before = sorted(names(out), key=lambda name: name.startswith("before-"))
    assert names(out) == sorted([before, "notes.txt", "prompt.pt", "run.lock"])
    assert names(out / before) == sorted({*files} - {"notes.txt", "prompt.pt"})


def test_what_has_no_checkpoint_moves_too_unless_the_run_writes_nothing(out, capsys):
    """Milestones and figures are worth keeping when ckpt.pt was deleted."""
    (out / "ckpt.pt").rename(out / "ckpt_00000004.pt")
    files = names(out)
    for read_only in (True, False, False):  # the last one finds nothing
        start_anew(out, read_only)
        if read_only:
            assert (names(out), capsys.readouterr().out) == (files, "")
    [before] = out.glob("before-*")
    assert names(before) == sorted({*files} - {"notes.txt", "prompt.pt"})
    assert capsys.readouterr().out.endswith(f"are now in {before}\n")


def test_a_file_that_cannot_move_ends_the_start_with_a_line(out, monkeypatch):
    monkeypatch.setattr(earlier.time, "strftime", lambda *_: "missing/before-Z")
    with pytest.raises(ValueError, match=rf"cannot move the run in out_dir={out} aside: .*; use another --out_dir"):
        move_aside(out)


def test_two_starts_in_the_same_second_get_two_folders(out, monkeypatch):
    monkeypatch.setattr(earlier.time, "strftime", lambda *_: "before-Z")
    for _ in range(2):
        (out / "ckpt.pt").touch()
        move_aside(out)
    assert [name for name in names(out) if name.startswith("before-")] == ["before-Z", "before-Z+"]
    (out / "before-Z+.tmp").mkdir()
    assert earlier.newest(str(out)) == str(out / "before-Z+")


def test_a_resume_without_a_checkpoint_names_the_run_that_moved_aside(out):
    move_aside(out)
    with pytest.raises(ValueError, match=rf"to resume, use --out_dir={out}/before-\d+-\d+Z; to start a new run"):
        checkpoints(out).load("resume")
