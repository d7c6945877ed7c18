"""run/guard.py: no rank makes an update that is not finite, with any implementation; a run that diverges keeps what it has."""

import contextlib
import io
import math
import os
import re
from functools import partial

import faults
import pytest
import torch
import torch.distributed as dist
from ranks import run_in_turn
from scripts import FEW, run, train, training
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from toy import MODES, assert_equal, batch, build_toy, make_toy, weights

from run.checkpoint_folder import find
from run.guard import Guard
from zero import ShardedGradScaler
from zero import checkpoint as ckpt
from zero.build import clip_grad_norm_

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
