"""zero/checkpoint/writer.py: a save is whole or not there, on all ranks, also in the background, and is reported."""

import os
import re
import resource
import threading
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from contents import VALUES, write
from ranks import run_in_turn
from toy import build_toy, train

from zero import checkpoint as ckpt
from zero.checkpoint import store


@pytest.mark.parametrize("format", ckpt.FORMATS)
def test_nothing_counts_before_it_is_on_the_disk(tmp_path, monkeypatch, format):
    """Contents, then the name they have while they are written, then the name that counts."""
    steps = []

    def note(call):
        def noted(*arguments):
            paths = [os.readlink(f"/proc/self/fd/{each}") if isinstance(each, int) else str(each) for each in arguments]
            names = [re.sub("[0-9a-f]{8}_?", "", os.path.relpath(path, tmp_path)) for path in paths]
            steps.append((call.__name__, *names))
            return call(*arguments)

        monkeypatch.setattr(os, call.__name__, noted)

    for call in (os.fsync, os.rename, os.replace):
        note(call)
    write(ckpt.CheckpointWriter(str(tmp_path), format=format), 7)
    commit = [("fsync", "ckpt.pt.tmp"), ("replace", "ckpt.pt.tmp", "ckpt.pt"), ("fsync", ".")]
    if format == "sharded":
        commit[1:1] = [("rename", "shards_.tmp", "shards_"), ("fsync", ".")]
        before, steps = steps[: -len(commit)], steps[-len(commit) :]
        assert ("fsync", "shards_.tmp/__0_0.distcp") in before
        assert before[-1] == ("fsync", "shards_.tmp")
    assert steps == commit


@pytest.mark.parametrize("kind", [TypeError, RuntimeError])
@pytest.mark.parametrize("background", [False, True])
def test_an_error_that_is_not_the_disks_is_not_swallowed(tmp_path, background, kind):
    class Unpicklable:
        def __reduce__(self):
            raise kind("a mistake in the program")

    writer = ckpt.CheckpointWriter(str(tmp_path), background=background)
    with pytest.raises(kind, match="a mistake in the program"):  # noqa: PT012 - in the background wait() raises it
        write(writer, 1, config=Unpicklable())
        writer.wait()
    assert not os.listdir(tmp_path)


def test_in_the_background_a_second_save_waits_for_the_first(tmp_path, monkeypatch):
    running, most, may_end = [], [], threading.Event()
    commit = store.commit

    def slow(checkpoint, *args):
        running.append(checkpoint["iter_num"])
        most.append(len(running))
        assert may_end.wait(60)
        report = commit(checkpoint, *args)
        running.remove(checkpoint["iter_num"])
        return report

    monkeypatch.setattr(store, "commit", slow)
    writer = ckpt.CheckpointWriter(str(tmp_path), background=True)
    write(writer, 1)
    assert not writer.outcomes(), "it returns at once"
    threading.Timer(0.1, may_end.set).start()
    write(writer, 2)
    writer.wait()
    assert most == [1, 1]
    assert [outcome.iter_num for outcome in writer.outcomes()] == [1, 2]
    assert ckpt.find(str(tmp_path))[0].endswith("ckpt.pt")


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("format", ckpt.FORMATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_take_no_ones_place(tmp_path, format, background, value):
    writer = ckpt.CheckpointWriter(str(tmp_path), keep=3, format=format, background=background)
    write(writer, 1)
    writer.wait()
    before = sorted(os.listdir(tmp_path))
    write(writer, value)
    writer.wait()
    written, refused = writer.outcomes()
    assert written.iter_num == 1
    assert isinstance(refused, ckpt.DivergedError)
    assert str(refused) == "weight is not finite"
    assert sorted(os.listdir(tmp_path)) == before
    assert ckpt.find(str(tmp_path)) == (str(tmp_path / "ckpt.pt"), None)
    write(writer, 2)
    writer.wait()
    assert [outcome.iter_num for outcome in writer.outcomes()] == [2]


def test_a_damaged_file_never_takes_the_place_of_the_one_before(tmp_path):
    writer = ckpt.CheckpointWriter(str(tmp_path))
    write(writer, 1)
    write(writer, 2)
    (tmp_path / "ckpt.pt").write_bytes(b"damaged")
    assert ckpt.find(str(tmp_path))[1] is not None
    writer = ckpt.CheckpointWriter(str(tmp_path), newest_is_corrupt=True)
    with mock.patch("os.replace", side_effect=OSError("as if killed here")):
        write(writer, 3)
    assert ckpt.load(ckpt.find(str(tmp_path))[0])["iter_num"] == 1
    write(writer, 3)
    assert ckpt.load(tmp_path / "ckpt_prev.pt")["iter_num"] == 1
    write(writer, 4)
    assert ckpt.load(tmp_path / "ckpt_prev.pt")["iter_num"] == 3
    assert ckpt.find(str(tmp_path)) == (str(tmp_path / "ckpt.pt"), None)


def test_what_a_killed_process_left_is_swept_by_a_writer_that_may(tmp_path):
    of_others = ["shards_00000008.tmp", "shards_notes", "shards_of_my_data"]
    for file in ("ckpt.pt.tmp", "other.tmp"):
        (tmp_path / file).touch()
    for folder in ("shards_00000001_00000000.tmp", *of_others):
        (tmp_path / folder).mkdir()
    ckpt.CheckpointWriter(str(tmp_path), sweep=False)
    assert len(os.listdir(tmp_path)) == 6
    ckpt.CheckpointWriter(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["other.tmp", *of_others]


def save_where_one_rank_cannot(folder):
    model, optimizer = build_toy("sharded")
    train(model, optimizer, rank=0, steps=1)
    writer = ckpt.CheckpointWriter(folder, format="sharded")
    writer.write(model.module, optimizer, VALUES)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))  # bytes per file
    writer.write(model.module, optimizer, {**VALUES, "iter_num": 8})
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    *written, failed = writer.outcomes()
    assert isinstance(failed, OSError)
    assert "rank 1 cannot write" in str(failed)
    assert "File too large" in str(failed)
    return len(written)


def test_when_one_rank_cannot_write_all_go_on_and_the_old_one_stands(tmp_path):
    assert run_in_turn(2, partial(save_where_one_rank_cannot, str(tmp_path))) == [[1, 0]], "rank 0 reports what was written"
    assert sorted(os.listdir(tmp_path))[0] == "ckpt.pt"
    assert len(os.listdir(tmp_path)) == 2, "what was begun is gone"
    path, warning = ckpt.find(str(tmp_path))
    assert warning is None
    assert ckpt.load(path)["iter_num"] == 4


def save_where_one_rank_has_diverged(folder):
    """What each rank refused: rank 1 alone sees the nan, in the last of its slices."""
    model, optimizer = build_toy("sharded")
    writer = ckpt.CheckpointWriter(folder, format="sharded", background=True)
    for diverged in (False, True):
        if diverged and dist.get_rank() == 1:
            with torch.no_grad():
                optimizer.owned[-1].local.fill_(float("nan"))
        writer.write(model.module, optimizer, VALUES)
        writer.wait()
    return [str(outcome) for outcome in writer.outcomes() if isinstance(outcome, ckpt.DivergedError)]


def test_what_one_rank_finds_not_to_be_finite_all_refuse(tmp_path):
    [[on_0, on_1]] = run_in_turn(2, partial(save_where_one_rank_has_diverged, str(tmp_path)))
    [message] = on_0
    assert on_0 == on_1
    assert message.endswith(" is not finite")
    assert len(os.listdir(tmp_path)) == 2, "ckpt.pt and its shards; nothing was begun"
    assert all(tensor.isfinite().all() for tensor in ckpt.load(ckpt.find(str(tmp_path))[0])["model"].values())
