"""distributed/signals.py in train.py: a signal to one rank saves, or saves and ends, the run of all ranks."""

import contextlib
import io
import json
import os
import re
import signal
import time

import torch.distributed as dist
from ranks import run_ranks
from scripts import FEW, NO_LIMIT, Forked, torch_load, train, training

from distributed.signals import Action, Signals

LONG = [FEW, "--max_iters=100000", "--eval_interval=100000"]


def state(out):
    return json.loads((out / "run.json").read_text())["state"]


def started(out, data, limit=NO_LIMIT):
    """Two ranks in training, once iteration 3 has been logged. They can write files of at most `limit` bytes."""
    run = Forked(*training(out, data, *LONG), ranks=2, limit=limit)
    run.wait_for("iter 3:")
    return run


def test_a_signal_to_one_rank_saves_and_ends_all(data, tmp_path):
    """The run then goes on bit for bit as if there had been no signal, with the same dropout."""
    with started(tmp_path, data) as run:
        assert state(tmp_path) == "running"
        os.kill(run.pids[-1], signal.SIGTERM)
        finished = run.finish().succeeded()
    stopped = int(re.search(r"stopped by a signal before iteration (\d+)", finished.stdout)[1])
    assert (torch_load(tmp_path)["iter_num"], state(tmp_path)) == (stopped, "stopped")
    card = (tmp_path / "report.md").read_text()
    assert card.startswith(f"# Report: stopped by a signal before iteration {stopped}\n")
    assert "- resume: `the same command with --init_from=resume`\n" in card
    end = f"--max_iters={stopped + 6}"
    schedule = FEW, end, "--eval_interval=7", "--lr_decay_iters=20"
    resumed, _, _ = train(tmp_path, data, "--init_from=resume", *schedule, "--dtype=float32", ranks=2)
    assert state(tmp_path) == "ended"
    whole, _, _ = train(tmp_path / "whole", data, *schedule, ranks=2)
    assert [resumed[i] for i in range(stopped, stopped + 7)] == [whole[i] for i in range(stopped, stopped + 7)]


def test_sigusr1_saves_and_goes_on_and_a_second_sigint_ends_at_once(data, tmp_path):
    with started(tmp_path, data) as run:
        first, second = run.pids
        os.kill(first, signal.SIGUSR1)
        run.wait_for("saving checkpoint")
        printed = run.wait_for("\niter ", after="saving checkpoint")
        assert re.search(r"saving checkpoint.*\niter ", printed), "it goes on"
        os.kill(first, signal.SIGSTOP)  # rank 1 hangs in a collective
        os.kill(second, signal.SIGINT)
        time.sleep(1.5)
        assert run.processes[1].is_alive()
        os.kill(second, signal.SIGINT)
        run.processes[1].join(60)
        assert run.processes[1].exitcode == 130, run.printed("stderr")
        os.kill(first, signal.SIGCONT)
    assert torch_load(tmp_path)["iter_num"] > 3


def test_a_signal_whose_checkpoint_cannot_be_written(data, tmp_path):
    """The run does not say that it was saved, and its exit code is 1 on all ranks."""
    with started(tmp_path, data, limit=100_000) as run:
        os.kill(run.pids[-1], signal.SIGHUP)  # as torchrun does when its terminal is closed
        printed = run.finish().failed("the run ends without its last checkpoint").stdout
    assert "SIGHUP: saving and stopping at the next step boundary" in printed
    assert "WARNING: the checkpoint was not written" in printed
    assert "stopped by a signal" not in printed
    assert state(tmp_path) == "failed"


def decisions():
    """What both ranks agree on after signals to one of them and requests of the other."""
    signals, rank, printed = Signals(), dist.get_rank(), io.StringIO()

    def send(number):
        os.kill(os.getpid(), number)
        while signal.Signals(number).name not in printed.getvalue():
            time.sleep(0.001)

    with contextlib.redirect_stdout(printed):
        found = [signals.agree()]
        if rank == 1:
            send(signal.SIGUSR1)
        found.append(signals.agree())
        if rank == 1:
            send(signal.SIGINT)
        found.append(signals.agree(Action.SAVE if rank == 0 else Action.CONTINUE))
        found += [signals.agree(Action.FAIL if rank == 0 else Action.SAVE), signals.agree()]
    assert printed.getvalue().count("\n") == (2 if rank == 1 else 0)
    return [action.name for action in found]


def test_what_was_ignored_at_the_start_stays_ignored():
    """As SIGHUP under nohup; but a launcher may let ranks ignore SIGINT."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGHUP, signal.SIGINT)}
    wakeup = signal.set_wakeup_fd(-1)
    try:
        Signals()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) != signal.SIG_IGN
    finally:
        signal.set_wakeup_fd(wakeup)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU):
            signal.signal(number, signal.SIG_DFL)
        for number, handler in before.items():
            signal.signal(number, handler)


def test_the_largest_action_of_any_rank_is_agreed_on_once():
    assert run_ranks(decisions, 2) == [["CONTINUE", "SAVE", "SAVE_AND_STOP", "FAIL", "CONTINUE"]] * 2
