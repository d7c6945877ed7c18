"""The figures of an iteration: what they send, and when the host reads them, on a GPU later than on a CPU."""

import re
import threading
from functools import partial
from unittest import mock

import faults
import pytest
import torch
import torch.distributed as dist
from scripts import FEW, events_of, run, training

from distributed import ranks
from distributed.launch import Launch
from distributed.signals import Action
from distributed.watchdog import Position, Watchdog
from run import guard
from run.checkpoints import State
from run.hooks import Run
from run.meter import Iteration, Lap
from zero import ShardedGradScaler, stopwatch
from zero.stopwatch import Stopwatch, awaited_collective

FLAGS = ["--dropout=0.0", "--max_iters=8", "--eval_interval=4", "--sample_interval=6", "--eval_iters=1", FEW]
TIMES = r"time/|throughput/|mfu|comm/exposed|checkpoint/.*_s$|memory/peak"


def trained(out, data, *flags, before=None, code=0):
    """The events of a run without its times, and what it printed."""
    process = run(*training(out, data, *FLAGS, *flags), ranks=2, before=before)
    assert process.returncode == code, process.stderr
    return [{key: value for key, value in event.items() if not re.match(TIMES, key)} for event in events_of(out)], process


def test_a_later_reading_changes_neither_figures_nor_order_nor_what_a_resumed_run_has(data, tmp_path):
    flags = "--log_interval=3", "--async_save=True"
    expected, process = trained(tmp_path / "plain", data, *flags)
    later, other = trained(tmp_path / "later", data, *flags, before=faults.reads_as_from_a_gpu)
    assert len({event["iter/loss"] for event in later if "iter/loss" in event}) == len(range(0, 9, 3))

    figures = [[event for event in events if "checkpoint/bytes" not in event] for events in (later, expected)]
    assert figures[0] == figures[1], "but for saves in the background, which end at some time"
    lines = [re.findall(r"^(?:iter|step|sample) \d+:", text.stdout, re.M) for text in (process, other)]
    assert lines[1] == lines[0]
    trained(tmp_path / "later", data, *flags, "--init_from=resume", "--max_iters=11", before=faults.reads_as_from_a_gpu)
    numbers = [event["iter"] for event in events_of(tmp_path / "later") if "iter/loss" in event]
    assert numbers == list(range(0, 12, 3))


def test_an_update_that_is_not_finite_ends_the_run_with_the_same_reason(data, tmp_path):
    events, later = trained(tmp_path, data, before=partial(faults.reads_as_from_a_gpu, faults.infinite_norm), code=1)
    line = "the run ends at iteration 0, not finite since iteration 0: the gradient norm is "
    assert later.stderr.count("the run ends") == later.stderr.count(line) == 1
    [warning] = [event for event in events if "warning" in event]
    assert warning["iter"] == 0


@pytest.mark.parametrize("later", [False, True])
def test_the_figures_are_sent_before_the_update_and_read_after_the_next_forward(data, tmp_path, later):
    fault = partial(faults.reads_as_from_a_gpu, faults.print_phases_and_collectives)
    before = fault if later else faults.print_phases_and_collectives
    _, process = trained(tmp_path, data, "--bucket_mb=1", "--max_iters=3", before=before)
    done = re.findall(r"^([<>] \w+|all-.*|iter \d+)", process.stdout, re.M)
    iteration = done[done.index("iter 1") : done.index("iter 2")]
    others = [step for step in iteration if "iter" not in step and "data" not in step]
    gathers = others.count("all-gather")
    expected = ["> clip", "all-reduce of 1 float32", "< clip", "all-reduce of 2 float32", "> update"]
    expected += [*gathers * ["all-gather"], "< update"]
    start = others.index("> clip")
    assert others[start : start + len(expected)] == expected, "the loss is with the flag, ahead of all-gathers"
    assert (gathers > 0, sum("float32" in step for step in others)) == (True, 2), "no other one has figures"
    place = done.index("iter 2")
    assert done[place - 1] == ("< data" if later else "< update")
    assert next(step for step in done[place:] if step[0] in "<>") == ("> backward" if later else "> forward")


def test_a_stopwatch_that_is_taken_keeps_its_times_and_begins_anew():
    watch = Stopwatch()
    watch.add("lap", 1.0, 3.0)
    assert (watch.take().read_ms(), watch.read_ms()) == ({"lap": 2000.0}, {})


def test_the_watchdog_names_the_collective_that_a_stream_waits_for(monkeypatch):
    """The host has gone on and waits elsewhere. Here, events of a GPU say what is done."""
    done, not_done = events(monkeypatch)
    waits, phases = Stopwatch(of_collectives=True), Stopwatch()
    phases.add("forward", done, not_done)
    waits.add("reduce-scatter", done, done)
    waits.add("all-reduce", not_done, not_done)
    watchdog = object.__new__(Watchdog)
    watchdog._main_thread, watchdog._gpu, watchdog._timeout_s, chosen = threading.get_ident(), 1, 0.0, []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    watchdog._reason_to_end = mock.Mock(side_effect=StopIteration)
    with pytest.raises(StopIteration):
        watchdog._watch()
    assert chosen == [1], "events are asked on this GPU, not on GPU 0"
    assert watchdog._collective() == ""
    waits.add("all-gather", done, not_done)
    taken = waits.take()
    assert watchdog._collective() == "the all-gather"
    del taken
    assert watchdog._collective() == ""


def events(monkeypatch):
    """Events of a GPU, of which one is done and one is not."""

    class Event:
        def __init__(self, is_done):
            self.query, self.elapsed_time = lambda: is_done, lambda _: 0.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    return Event(True), Event(False)


def test_the_collective_of_a_logged_iteration_has_a_name_on_every_rank(monkeypatch):
    """Here, on one that writes no log."""
    done, not_done = events(monkeypatch)
    waits = Stopwatch(of_collectives=True)
    waits.add("reduce-scatter", done, not_done)
    seen, watched = [], object.__new__(Run)
    watched.guard, watched.launch = mock.Mock(), Launch(rank=1)
    figures, lap = mock.Mock(read=lambda: seen.append(awaited_collective())), Lap(1, Stopwatch(), waits.take(), {})
    watched._unread = Iteration(7, figures, 0.1, 0, lap)
    del lap
    watched.read_figures()
    assert seen == ["reduce-scatter"]
    assert awaited_collective() == ""
    watched.guard.report.assert_called_once_with(7, figures)


def test_what_all_ranks_agree_on_as_an_iteration_begins(monkeypatch):
    """A failed save belongs to the iteration before. What has been saved or loaded is not saved again for a signal."""
    monkeypatch.setattr("run.hooks.position", position := Position())
    position.begin_iteration(6)
    begun, seen = object.__new__(Run), []
    begun.state, begun.config, begun.log, begun._reached = State(iter_num=7), {"max_iters": 9}, None, False
    begun.guard, begun.signals = mock.Mock(consecutive=0, failed=False), mock.Mock(agree=lambda _: Action.SAVE_AND_STOP)
    begun.checkpoints = mock.Mock(read_only=False, newest=5, report=lambda _: seen.append(position.iteration))
    begun.agree()
    assert (seen, position.iteration) == ([6], 7)
    assert (begun.must_save, begun.must_stop) == (True, True)
    begun.checkpoints.newest = 7
    assert (begun.must_save, begun.must_stop) == (False, True)


def test_an_all_reduce_of_the_guard_has_a_name(monkeypatch):
    optimizer = torch.optim.AdamW([torch.ones(1, requires_grad=True)], fused=True)
    watched = guard.Guard(optimizer, ShardedGradScaler("cpu", enabled=False), limit=1, alert=print)
    seen, marks = [], list(events(monkeypatch))
    monkeypatch.setattr(stopwatch, "mark", lambda _: marks.pop(0))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", seen.append)
    monkeypatch.setattr(ranks, "_WAITS", Stopwatch(of_collectives=True))
    watched.check(torch.ones(()), torch.ones(()))
    assert len(seen) == 1
    assert awaited_collective() == "all-reduce"
