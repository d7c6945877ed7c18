"""run/guard.py: no rank makes an update that is not finite, with any implementation. And when the host reads the figures."""

import contextlib
import io
import math
import os
import re
import threading
from functools import partial
from unittest import mock

import faults
import pytest
import torch
import torch.distributed as dist
from ranks import run_in_turn
from scripts import FEW, events_of, run, train, training
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from toy import MODES, assert_equal, batch, build_toy, make_toy, weights

from distributed import ranks
from distributed.launch import Launch
from distributed.signals import Action
from distributed.watchdog import Position, Watchdog
from run import guard
from run.checkpoint_folder import find
from run.checkpoints import State
from run.guard import Guard
from run.hooks import Run
from run.meter import Iteration, Lap
from zero import ShardedGradScaler, stopwatch
from zero import checkpoint as ckpt
from zero.build import clip_grad_norm_
from zero.stopwatch import Stopwatch, awaited_collective

BAD = 3  # the step that is not finite
OFF = ShardedGradScaler("cpu", enabled=False)


def quiet(*alert):
    """In place of the log."""


def guarded(mode, limit, kind, steps, looks=range(100)):
    """Train on the steps given, looking after some; weights and state on rank 0, what was printed, and whether it failed.

    Step BAD has a loss of nan on the last rank, or a gradient of inf there.
    """
    model, optimizer = build_toy(mode)
    raw = model.module if dist.is_initialized() else model
    guard = Guard(optimizer, OFF, limit, quiet)
    rank, last = (dist.get_rank(), dist.get_world_size() - 1) if dist.is_initialized() else (0, 0)
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        for step in steps:
            loss = model(*batch(step, rank))
            hooks = []
            if step == BAD and rank == last:
                if kind == "loss":
                    loss = loss * math.nan
                else:
                    hooks = [raw.hidden.bias.register_hook(lambda gradient: gradient * math.inf)]
            loss.backward()
            guard.check(loss.detach(), clip_grad_norm_(optimizer, 0.1 if step % 2 else math.inf))
            optimizer.step()
            if step in looks:
                guard.report(step)
            optimizer.zero_grad(set_to_none=True)
            for hook in hooks:
                hook.remove()
    whole, state = ckpt.model_state_dict(raw, optimizer), ckpt.consolidate(optimizer)
    return {"model": whole, "state": state and state["state"], "printed": out.getvalue(), "failed": guard.failed}


def all_modes(*how):
    return {mode: guarded(mode, *how) for mode in MODES}


@pytest.fixture(scope="module")
def trained():
    """By run: by rank, what `all_modes` returns."""
    runs = {
        "undisturbed": partial(all_modes, 5, "loss", [step for step in range(6) if step != BAD]),
        "loss": partial(all_modes, 5, "loss", range(6)),
        "gradient": partial(all_modes, 5, "gradient", range(6)),
        "before": partial(all_modes, 1, "loss", range(BAD)),
        "stopped": partial(all_modes, 1, "loss", range(7), [6]),
    }
    return dict(zip(runs, run_in_turn(2, *runs.values()), strict=True))


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_a_skipped_step_leaves_no_trace(trained, kind):
    """Weights, moments and step counters are those of a run that never had that step."""
    (disturbed, others), undisturbed = trained[kind], trained["undisturbed"][0]
    for mode in MODES:
        assert_equal(disturbed[mode]["model"], undisturbed[mode]["model"], mode)
        assert_equal(disturbed[mode]["state"], undisturbed[mode]["state"], mode)
        assert not disturbed[mode]["failed"]
        (printed,) = disturbed[mode]["printed"].splitlines()
        assert printed.startswith("WARNING: by iteration 3, 1 more update was skipped (1 consecutive so far): "), printed
        assert ("the loss of rank 1 is nan" in printed) == (kind == "loss")
        assert not others[mode]["printed"] + undisturbed[mode]["printed"]


def test_nothing_moves_until_the_host_looks(trained):
    """On a GPU it does not look after every step. With max_nonfinite=1, no update is made after the first bad step."""
    (stopped, others), before = trained["stopped"], trained["before"][0]
    for mode in MODES:
        assert_equal(stopped[mode]["model"], before[mode]["model"], mode)
        assert_equal(stopped[mode]["state"], before[mode]["state"], mode)
        assert stopped[mode]["failed"] == others[mode]["failed"] == (not before[mode]["failed"])
        end = "the run ends at iteration 6, not finite since iteration 3: the loss of rank 1.*lower --learning_rate"
        assert re.search(end, stopped[mode]["printed"], re.DOTALL)
        assert not others[mode]["printed"]


def test_the_limit_counts_consecutive_skips_and_each_is_an_alert(capsys):
    model, alerts = torch.nn.Linear(2, 1), []
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    guard = Guard(optimizer, OFF, 3, lambda *alert: alerts.append(alert))
    good, bad = torch.tensor(1.0), torch.tensor(math.inf)
    for step, loss in enumerate([good, bad, bad, good, bad, bad]):
        guard.check(loss, good)
        guard.report(step)
        assert not guard.failed
    guard.check(good, bad)
    guard.report(6)
    assert guard.failed
    assert [text.partition(":")[0] for _, text, _ in alerts] == [f"at iteration {step}" for step in (1, 2, 4, 5, 6)]
    assert alerts[0] == ("Loss or gradients not finite", "at iteration 1: the loss of rank 0 is inf", 1)
    printed = capsys.readouterr()
    assert printed.out.count("WARNING: by iteration ") == 4
    reason = "not finite since iteration 4: the loss of rank 0 is inf; 3 consecutive updates"
    assert printed.err.startswith(f"the run ends at iteration 6, {reason}")


def test_float16_leaves_gradients_to_the_scaler(capsys):
    """The scaler skips and counts for itself. A loss that is not finite counts here, and its step is skipped."""
    model, optimizer = build_toy("adamw")
    scaler = ShardedGradScaler("cpu", init_scale=2.0**10)
    guard, moved, scales = Guard(optimizer, scaler, 1, quiet), [], []
    for iteration, (factor, loss_factor) in enumerate([(1.0, 1.0), (math.inf, 1.0), (1.0, 1.0), (1.0, math.nan)]):
        assert not guard.failed
        before = weights(model)
        loss = model(*batch(iteration, 0))
        scaler.scale(loss * factor).backward()
        scaler.unscale_(optimizer)
        guard.check(loss.detach() * loss_factor, clip_grad_norm_(optimizer, math.inf))
        scaler.step(optimizer)
        scaler.update()
        guard.report(iteration)
        optimizer.zero_grad(set_to_none=True)
        scales.append(scaler.get_scale())
        moved.append(any(not torch.equal(tensor, before[name]) for name, tensor in weights(model).items()))
    assert (moved, scales[:3], guard.failed) == ([True, False, True, False], [2.0**10, 2.0**9, 2.0**9], True)
    message = "not finite since iteration 3: the loss of rank 0 is nan; the weights are those before iteration 3"
    assert message in capsys.readouterr().err


def test_an_optimizer_without_the_kernel_skips_too():
    model = make_toy()
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], foreach=True)
    guard = Guard(optimizer, OFF, 2, quiet)
    before = weights(model)
    for factor in (math.nan, 1.0):
        loss = model(*batch(0, 0)) * factor
        loss.backward()
        guard.check(loss.detach(), clip_grad_norm_(optimizer, 1.0))
        optimizer.step()
        assert torch.equal(model.hidden.weight, before["hidden.weight"]) == math.isnan(factor)
        optimizer.zero_grad()


def test_watching_never_waits_for_the_device():
    """Fake tensors have no values that the host could ask for."""
    with FakeTensorMode():
        model = torch.nn.Linear(3, 3)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        guard = Guard(optimizer, OFF, 1, quiet)
        for _ in range(2):
            loss = model(torch.ones(3)).sum()
            loss.backward()
            guard.check(loss.detach(), clip_grad_norm_(optimizer, 1.0))
            optimizer.step()
            optimizer.zero_grad()
            guard.figures()
        with pytest.raises(DataDependentOutputException):
            guard.report(1)


DIVERGING = [  # the learning rate from iteration 8 on, ranks, flags
    ("1e30", 0, ["--log_interval=4"]),
    ("1e4", 2, ["--dtype=bfloat16"]),
    ("1e38", 2, ["--zero1_impl=torch", "--grad_clip=0.0"]),
    ("1e10", 2, ["--dtype=float16", "--async_save=True"]),
    ("1e300", 2, ["--param_dtype=bfloat16"]),
    ("1e10", 2, ["--shard_gradients=True", "--max_nonfinite=3"]),
    ("1e6", 2, ["--use_zero1=False", "--dtype=bfloat16", "--max_nonfinite=10", "--grad_clip=0.0"]),
]
MORE = pytest.mark.slow("more learning rates and modes", seconds=3)


@pytest.mark.parametrize(
    ("learning_rate", "ranks", "flags"), [*DIVERGING[:2], *(pytest.param(*case, marks=MORE) for case in DIVERGING[2:])]
)
def test_a_run_that_diverges_keeps_its_checkpoint(data, tmp_path, learning_rate, ranks, flags):
    schedule = ["--warmup_iters=8", "--lr_decay_iters=7", f"--min_lr={learning_rate}", "--max_iters=1000"]
    line = training(tmp_path, data, FEW, *schedule, *flags)
    rate_may_grow = partial(faults.returns, "run.rank_checks:check_combinations", None)
    said = run(*line, ranks=ranks, before=rate_may_grow).failed("--init_from=resume goes on from there").stderr
    [message] = [line for line in said.splitlines() if line.startswith("the run ends at iteration ")]
    assert re.search(r"not finite since iteration \d+: .*(loss of rank \d|gradient norm) is .*lower --learning_rate", message)
    card = (tmp_path / "report.md").read_text()
    assert re.match(r"# Report: failed before iteration \d+, see the last warning\n", card)
    assert re.search(r"\| warnings \| .*the last one: Loss or gradients not finite: at iteration \d+: ", card)
    checkpoint = ckpt.load(find(str(tmp_path))[0])
    assert all(tensor.isfinite().all() for tensor in checkpoint["model"].values())
    again = ["--init_from=resume", "--lr_decay_iters=2000", f"--max_iters={checkpoint['iter_num'] + 4}"]
    losses, _, _ = train(tmp_path, data, FEW, *flags, *again, ranks=ranks)
    assert max(losses) > checkpoint["iter_num"]
    assert None not in losses.values()


def test_nothing_is_saved_while_updates_are_skipped(data, tmp_path):
    """Weights with a finite loss but gradients that are not finite do not replace weights that can be trained."""
    skipped = "by iteration 4, 1 more update was skipped (5 consecutive so far): the gradient norm is inf"
    line = training(tmp_path, data, "--max_iters=5", "--max_nonfinite=10")
    run(*line, before=faults.infinite_norm).succeeded(skipped, "WARNING: not saved")
    assert sorted(os.listdir(tmp_path)) == ["metrics.jsonl", "report.md", "run.json", "run.lock"]


FLAGS = ["--dropout=0.0", "--max_iters=8", "--eval_interval=4", "--sample_interval=6", "--eval_iters=1", FEW]
TIMES = r"time/|throughput/|mfu|comm/exposed|checkpoint/.*_s$|memory/peak"


def run_of(out, data, *flags, before=None, code=0):
    """The events of a run without its times, and what it printed."""
    process = run(*training(out, data, *FLAGS, *flags), ranks=2, before=before)
    assert process.returncode == code, process.stderr
    return [{key: value for key, value in event.items() if not re.match(TIMES, key)} for event in events_of(out)], process


def test_a_later_reading_changes_neither_figures_nor_order_nor_what_a_resumed_run_has(data, tmp_path):
    flags = "--log_interval=3", "--async_save=True"
    expected, process = run_of(tmp_path / "plain", data, *flags)
    later, other = run_of(tmp_path / "later", data, *flags, before=faults.reads_as_from_a_gpu)
    assert len({event["iter/loss"] for event in later if "iter/loss" in event}) == len(range(0, 9, 3))

    figures = [[event for event in events if "checkpoint/bytes" not in event] for events in (later, expected)]
    assert figures[0] == figures[1], "but for saves in the background, which end at some time"
    lines = [re.findall(r"^(?:iter|step|sample) \d+:", text.stdout, re.M) for text in (process, other)]
    assert lines[1] == lines[0]
    run_of(tmp_path / "later", data, *flags, "--init_from=resume", "--max_iters=11", before=faults.reads_as_from_a_gpu)
    assert ([event["iter"] for event in events_of(tmp_path / "later") if "iter/loss" in event]) == list(range(0, 12, 3))


def test_an_update_that_is_not_finite_ends_the_run_with_the_same_reason(data, tmp_path):
    events, later = run_of(tmp_path, data, before=partial(faults.reads_as_from_a_gpu, faults.infinite_norm), code=1)
    line = "the run ends at iteration 0, not finite since iteration 0: the gradient norm is "
    assert later.stderr.count("the run ends") == later.stderr.count(line) == 1
    [warning] = [event for event in events if "warning" in event]
    assert warning["iter"] == 0


@pytest.mark.parametrize("later", [False, True])
def test_the_figures_are_sent_before_the_update_and_read_after_the_next_forward(data, tmp_path, later):
    fault = partial(faults.reads_as_from_a_gpu, faults.print_phases_and_collectives)
    before = fault if later else faults.print_phases_and_collectives
    _, process = run_of(tmp_path, data, "--bucket_mb=1", "--max_iters=3", before=before)
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
    assert (seen, awaited_collective()) == (["reduce-scatter"], "")
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
    assert (len(seen), awaited_collective()) == (1, "all-reduce")
