"""run/checkpoint_writer.py: a save is whole or not there, on all ranks, also in the background, and is reported."""

import os
import resource
import threading
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from checkpoints import VALUES, write
from ranks import run_in_turn
from toy import build_toy, train

from run import checkpoint_folder
from run.checkpoint_folder import find
from run.checkpoint_writer import CheckpointWriter, DivergedError
from zero import ShardedOptimizer
from zero import checkpoint as ckpt
from zero.codecs import Encoded
from zero.flags import Flags


def ended(writer):
    """The outcomes of the saves since the last call, the last of which has ended."""
    writer.wait()
    return writer.outcomes()


def iterations(outcomes):
    return [outcome.iter_num for outcome in outcomes]


def test_nothing_counts_before_it_is_on_the_disk(tmp_path, monkeypatch):
    """Contents, then the name they have while they are written, then the name that counts."""
    steps = []

    def note(call):
        def noted(*arguments):
            paths = [os.readlink(f"/proc/self/fd/{each}") if isinstance(each, int) else str(each) for each in arguments]
            steps.append((call.__name__, *(os.path.relpath(path, tmp_path) for path in paths)))
            return call(*arguments)

        monkeypatch.setattr(os, call.__name__, noted)

    for call in (os.fsync, os.rename, os.replace):
        note(call)
    write(CheckpointWriter(str(tmp_path)), 7)
    assert steps == [("fsync", "ckpt.pt.tmp"), ("replace", "ckpt.pt.tmp", "ckpt.pt"), ("fsync", ".")]


@pytest.mark.parametrize("kind", [TypeError, RuntimeError])
@pytest.mark.parametrize("background", [False, True])
def test_an_error_that_is_not_the_disks_is_not_swallowed(tmp_path, background, kind):
    class Unpicklable:
        def __reduce__(self):
            raise kind("a mistake in the program")

    writer = CheckpointWriter(str(tmp_path), background=background)
    with pytest.raises(kind, match="a mistake in the program"):  # noqa: PT012 - in the background wait() raises it
        write(writer, 1, config=Unpicklable())
        writer.wait()
    assert not os.listdir(tmp_path)


def test_in_the_background_a_second_save_waits_for_the_first(tmp_path, monkeypatch):
    running, most, may_end = [], [], threading.Event()
    commit = checkpoint_folder.commit

    def slow(checkpoint, *args):
        running.append(checkpoint["iter_num"])
        most.append(len(running))
        assert may_end.wait(60)
        report = commit(checkpoint, *args)
        running.remove(checkpoint["iter_num"])
        return report

    monkeypatch.setattr(checkpoint_folder, "commit", slow)
    writer = CheckpointWriter(str(tmp_path), background=True)
    write(writer, 1)
    assert not writer.outcomes(), "it returns at once"
    threading.Timer(0.1, may_end.set).start()
    write(writer, 2)
    assert (iterations(ended(writer)), most) == ([1, 2], [1, 1])
    assert find(str(tmp_path))[0].endswith("ckpt.pt")


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_take_no_ones_place(tmp_path, background, value):
    writer = CheckpointWriter(str(tmp_path), keep=3, background=background)
    write(writer, 1)
    assert iterations(ended(writer)) == [1]
    before = sorted(os.listdir(tmp_path))
    write(writer, value)
    [refused] = ended(writer)
    assert (type(refused), str(refused)) == (DivergedError, "weight is not finite")
    assert sorted(os.listdir(tmp_path)) == before
    assert find(str(tmp_path)) == (str(tmp_path / "ckpt.pt"), None)
    write(writer, 2)
    assert iterations(ended(writer)) == [2]


def test_a_damaged_file_never_takes_the_place_of_the_one_before(tmp_path):
    writer = CheckpointWriter(str(tmp_path))
    write(writer, 1)
    write(writer, 2)
    (tmp_path / "ckpt.pt").write_bytes(b"damaged")
    assert find(str(tmp_path))[1] is not None
    writer = CheckpointWriter(str(tmp_path), newest_is_corrupt=True)
    with mock.patch("os.replace", side_effect=OSError("as if killed here")):
        write(writer, 3)
    assert ckpt.load(find(str(tmp_path))[0])["iter_num"] == 1
    write(writer, 3)
    assert ckpt.load(tmp_path / "ckpt_prev.pt")["iter_num"] == 1
    write(writer, 4)
    with mock.patch("os.replace", side_effect=OSError("no more names")):
        write(writer, 5)
    assert sorted(os.listdir(tmp_path)) == ["ckpt.pt", "ckpt_prev.pt"], "a save that fails leaves nothing"
    assert ckpt.load(tmp_path / "ckpt_prev.pt")["iter_num"] == 3
    assert find(str(tmp_path)) == (str(tmp_path / "ckpt.pt"), None)


def test_what_a_killed_process_left_is_swept_by_a_writer_that_may(tmp_path):
    for file in ("ckpt.pt.tmp", "other.tmp"):
        (tmp_path / file).touch()
    CheckpointWriter(str(tmp_path), sweep=False)
    assert len(os.listdir(tmp_path)) == 2
    CheckpointWriter(str(tmp_path))
    assert os.listdir(tmp_path) == ["other.tmp"]


def a_full_disk_stops_nobody_and_the_old_one_stands(folder, background):
    """The ranks send the rest of what they hold, and go on."""
    os.makedirs(folder, exist_ok=True)
    model, optimizer = build_toy("sharded")
    train(model, optimizer, rank=0, steps=1)
    writer = CheckpointWriter(folder, background=background)

    def outcomes(iteration):
        writer.write(model.module, optimizer, {**VALUES, "iter_num": iteration})
        return ended(writer)

    outcomes(4)
    limits, of_rank_0 = resource.getrlimit(resource.RLIMIT_FSIZE), dist.get_rank() == 0
    for limit in (0, 5000, 10000):  # bytes per file
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        assert list(map(str, outcomes(8))) == ["[Errno 27] File too large"] * of_rank_0
        assert os.listdir(folder) == ["ckpt.pt"] or not of_rank_0, "what was begun is gone"
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not of_rank_0 or ckpt.load(find(folder)[0])["iter_num"] == 4
    assert iterations(outcomes(9)) == [9] * of_rank_0


def save_where_one_rank_has_diverged(folder):
    """What each rank refused: rank 1 alone sees the nan, in the last of its masters."""
    model, optimizer = build_toy(Flags(param_dtype="bfloat16"))
    writer = CheckpointWriter(folder, background=True)
    for diverged in (False, True):
        if diverged and dist.get_rank() == 1:
            with torch.no_grad():
                optimizer.placed.owned[-1].local.fill_(float("nan"))
        writer.write(model.module, optimizer, VALUES)
    return [str(outcome) for outcome in ended(writer) if isinstance(outcome, DivergedError)]


def a_part_that_one_rank_cannot_read_ends_the_save_on_all(folder, background):
    """As where decoding it finds the GPU full. All ranks raise, and the file of before stands."""
    module = torch.nn.Linear(64, 64)
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.AdamW, state_dtype="int8", lr=0.1)
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    writer = CheckpointWriter(folder, background=background)
    writer.write(module, optimizer, VALUES)
    writer.wait()
    before = os.stat(f"{folder}/ckpt.pt")
    for broken in (1, 0):
        error = RuntimeError("out of memory") if dist.get_rank() == broken else None
        decode = mock.Mock(side_effect=error) if error else Encoded.decode
        with mock.patch.object(Encoded, "decode", decode), pytest.raises((RuntimeError, ValueError), match="out of memory"):
            _ = writer.write(module, optimizer, VALUES), writer.wait()
        dist.barrier()
        assert os.path.samestat(before, os.stat(f"{folder}/ckpt.pt"))
        assert not [name for name in os.listdir(folder) if name.endswith(".tmp")]


ON_TWO_RANKS = a_full_disk_stops_nobody_and_the_old_one_stands, a_part_that_one_rank_cannot_read_ends_the_save_on_all


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("check", ON_TWO_RANKS)
def test_on_two_ranks(tmp_path, check, background):
    run_in_turn(2, partial(check, str(tmp_path), background))


def test_what_one_rank_finds_not_to_be_finite_all_refuse(tmp_path):
    [[[message], on_1]] = run_in_turn(2, partial(save_where_one_rank_has_diverged, str(tmp_path)))
    assert on_1 == [message]
    assert message.endswith(" is not finite")
    assert os.listdir(tmp_path) == ["ckpt.pt"], "nothing was begun"
    assert all(tensor.isfinite().all() for tensor in ckpt.load(find(str(tmp_path))[0])["model"].values())
