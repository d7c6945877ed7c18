"""Signals and lost ranks: a run saves and ends, or goes on; one that hangs says why, and torchrun brings the job back."""

import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from functools import partial

import faults
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from scripts import FEW, NO_LIMIT, ROOT, SETTINGS, Forked, events_of, run, torch_load, train, training

from distributed.signals import Action, Signals

LONG = ["--max_iters=100000", "--eval_interval=100000", "--dist_timeout_s=2"]


def test_auto_starts_from_scratch_and_then_resumes(data, tmp_path):
    """From the newest checkpoint that is not damaged; where all are, it never starts from scratch silently."""
    flags = FEW, "--init_from=auto", "--eval_interval=3"
    _, _, first = train(tmp_path, data, *flags, "--max_iters=4")
    losses, _, second = train(tmp_path, data, *flags, "--max_iters=7", ranks=2)
    for begun in ("from scratch", "Resuming"):
        assert (begun in first, begun in second) == (begun == "from scratch", begun == "Resuming")
    assert sorted(losses) == list(range(8))
    names, whole = ("ckpt.pt", "ckpt_prev.pt"), (tmp_path / "ckpt.pt").read_bytes()
    middle = len(whole) // 2
    (tmp_path / "ckpt.pt").write_bytes(whole[:middle] + bytes(64) + whole[middle + 64 :])
    _, _, third = train(tmp_path, data, *flags, "--max_iters=8", "--eval_interval=20", "--async_save=True", ranks=2)
    assert re.search(r"WARNING: \S+ckpt\.pt is damaged.*; resuming from \S+ckpt_prev\.pt", third)
    assert "at iteration 6:" in third
    assert [torch_load(tmp_path, name)["iter_num"] for name in names] == [9, 6], "no damaged one has taken its place"
    metrics = (tmp_path / "metrics.jsonl").read_bytes()
    for name in names:
        (tmp_path / name).write_bytes(b"damaged")
    refused = run(*training(tmp_path, data, *flags), ranks=2)
    refused.refusal(*(f"{name} is damaged, or not a checkpoint" for name in names))
    assert (tmp_path / "metrics.jsonl").read_bytes() == metrics


def test_hosts_with_folders_of_their_own_cannot_resume(data, tmp_path):
    """After a restart, rank 0 may be on a host that has no checkpoint: auto does not begin anew then."""
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "ckpt.pt").write_bytes(b"of the host that was rank 0")
    own = {rank: [f"--out_dir={tmp_path}/{rank}", f"--wandb_run_name={rank}"] for rank in range(2)}  # hosts may differ in these
    how = {"ranks": 2, "before": partial(faults.add_arguments_by_rank, own)}
    refused = run(*training("of a rank", data, FEW, "--init_from=auto"), **how)
    refused.refusal("rank 1 has a checkpoint in out_dir, but rank 0 has none; use an out_dir that all")
    train(tmp_path / "0", data, FEW, "--max_iters=1", ranks=1)
    refused = run(*training("of a rank", data, FEW, "--init_from=resume"), **how)
    refused.refusal(f"rank 1: {tmp_path}/1/ckpt.pt")
    assert os.listdir(tmp_path / "1") == ["ckpt.pt"]


def ended(run, ranks):
    """What these ranks have written to stderr, once they have ended with exit code 1."""
    for rank in ranks:
        run.processes[rank].join(60)
        assert run.processes[rank].exitcode == 1, run.printed("stderr")
    return run.printed("stderr")


def test_the_ranks_that_wait_for_a_stopped_rank_end_and_name_it(data, tmp_path):
    with Forked(*training(tmp_path, data, *LONG), ranks=3) as run:
        run.wait_for("iter 8:")
        os.kill(run.pids[1], signal.SIGSTOP)
        errors = ended(run, (0, 2))
    for rank in (0, 2):
        waits = rf"error: rank {rank} has waited \d+ s for the \S+ at iteration \d+.*"
        assert re.search(rf"{waits}; no sign of life from rank 1, last seen at iteration \d+", errors), errors


def test_ranks_that_were_all_stopped_go_on(data, tmp_path):
    """By Ctrl-Z and fg, for longer than the time limit; that of gloo would end what waits."""
    with Forked(*training(tmp_path, data, *LONG), ranks=2) as run:
        run.wait_for("iter 8:")
        for number, seconds in ((signal.SIGSTOP, 5), (signal.SIGCONT, 3)):
            for pid in run.pids:
                os.kill(pid, number)
            time.sleep(seconds)
        os.kill(run.pids[0], signal.SIGTERM)
        run.finish().succeeded("stopped by a signal before")


def test_a_rank_that_is_stuck_elsewhere_is_named_with_its_place(data, tmp_path):
    with Forked(*training(tmp_path, data, *LONG), ranks=2, before=partial(faults.rank_1_stops_at_a_batch, 20)) as run:
        errors = ended(run, (0, 1))
    assert re.search(r"error: rank 0 has waited \d+ s for the \S+ at .*; rank 1 is at iteration \d+, data\n", errors), errors
    assert re.search(r"error: rank 1 has been at iteration \d+, data for \d+ s; rank 0 waits for the ", errors), errors


saves_take = partial(faults.takes_longer, "run.checkpoint_folder:commit")  # seconds


def test_a_slow_disk_ends_nothing(data, tmp_path):
    train(tmp_path, data, FEW, "--max_iters=1", "--dist_timeout_s=2", ranks=2, run=partial(run, before=partial(saves_take, 3)))
    assert torch_load(tmp_path)["iter_num"] == 2


def test_a_rank_that_has_stopped_during_a_save_is_noticed(data, tmp_path):
    line = training(tmp_path, data, FEW, "--eval_interval=4", "--dist_timeout_s=2")
    with Forked(*line, ranks=2, before=partial(saves_take, 1000)) as run:
        run.wait_for("saving checkpoint")
        os.kill(run.pids[1], signal.SIGSTOP)
        errors = ended(run, (0,))
    assert re.search(r"error: rank 0 has .*saving the checkpoint.*; no sign of life from rank 1", errors), errors


def children(pid):
    return [int(child) for child in subprocess.check_output(["ps", "-o", "pid=", "--ppid", str(pid)], text=True).split()]


class Job:
    """A run of train.py on two hosts. Leaving the block ends it.

    Each host is a shell that starts torchrun with one rank, and `again`, starts it again when it has ended with an error.
    """

    def __init__(self, out, data, *arguments, nodes="2", again=True):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.checkpoint, self.output, self.hosts = out / "ckpt.pt", out.with_suffix(".txt"), []
        script = [os.path.join(ROOT, "train.py"), *SETTINGS, f"--dataset={data}", f"--out_dir={out}", "--init_from=auto"]
        variables = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        for is_host in (1, 0):
            settings = f"is_host={is_host},keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1"
            line = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", "--nproc_per_node=1"]
            line += [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-backend=c10d", "--rdzv-id=job", f"--rdzv-conf={settings}"]
            line = ["sh", "-c", f'until "$@"; do {str(again).lower()} || exit 1; done', "sh", *line, "--max-restarts=20"]
            with open(self.output, "ab") as file:
                how = {"stdout": file, "stderr": file, "start_new_session": True}
                self.hosts.append(subprocess.Popen([*line, *script, *arguments], cwd=ROOT, env=variables, **how))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for host in self.hosts:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(host.pid, signal.SIGKILL)
            host.wait()

    def agent(self, host):
        (agent,) = children(self.hosts[host].pid)
        return agent

    def wait_for_checkpoint(self):
        """Wait until the job has written another checkpoint."""
        before, end = self.written(), time.monotonic() + 120
        while self.written() == before:
            assert time.monotonic() < end, self.printed()
            time.sleep(0.02)

    def finish(self, *hosts):
        """Wait until these hosts have ended without an error."""
        for host in hosts:
            assert self.hosts[host].wait(300) == 0, self.printed()

    def written(self):
        return self.checkpoint.stat().st_mtime_ns if self.checkpoint.exists() else 0

    def printed(self):
        return self.output.read_text()


@pytest.mark.slow("torchrun restarts a job ten times", seconds=200)
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends the ranks of an agent that was killed")
def test_a_job_that_loses_ranks_and_agents_reaches_its_end_by_itself(data, tmp_path):
    """Its weights are those of a job that loses nothing, bit for bit."""
    settings = FEW, "--max_iters=250", "--eval_interval=10", "--log_interval=10", "--eval_iters=2"
    with Job(tmp_path / "disturbed", data, *settings) as job:
        for kill in range(10):
            job.wait_for_checkpoint()
            agent = job.agent(kill % 2)
            ranks = children(agent)
            if kill in (4, 9):  # its ranks end with it; the agent of host 0 also holds the rendezvous
                os.kill(agent, signal.SIGKILL)
                time.sleep(0.2)
                assert not any(os.path.exists(f"/proc/{rank}/exe") for rank in ranks)
            else:
                os.kill(ranks[0], signal.SIGKILL)
        job.finish(0, 1)
        assert job.printed().count("Resuming training") >= 10
    with Job(tmp_path / "quiet", data, *settings) as job:  # on two hosts as well: the threads of a rank depend on its host
        job.finish(0, 1)
    disturbed, quiet = torch_load(tmp_path / "disturbed"), torch_load(tmp_path / "quiet")
    assert disturbed["iter_num"] == quiet["iter_num"] == 251
    assert all(torch.equal(tensor, disturbed["model"][name]) for name, tensor in quiet["model"].items())


@pytest.mark.slow("two agents of torchrun, of which one is lost", seconds=27)
def test_a_job_that_loses_a_host_goes_on_smaller_with_the_same_batches(data, tmp_path):
    settings = FEW, "--max_iters=60", "--eval_interval=10", "--dropout=0.0"
    with Job(tmp_path / "smaller", data, *settings, nodes="1:2", again=False) as job:
        job.wait_for_checkpoint()
        os.kill(job.agent(1), signal.SIGKILL)
        job.finish(0)
        assert "Resuming training from" in job.printed()
    losses, _, _ = train(tmp_path / "whole", data, *settings, ranks=2)
    smaller = {event["iter"]: event["iter/loss"] for event in events_of(tmp_path / "smaller") if "iter/loss" in event}
    assert sorted(smaller) == list(range(61))
    assert max(abs(losses[i] - smaller[i]) for i in losses) < 1e-4


ENDLESS = [FEW, "--max_iters=100000", "--eval_interval=100000"]


def state(out):
    return json.loads((out / "run.json").read_text())["state"]


def started(out, data, limit=NO_LIMIT):
    """Two ranks in training, once iteration 3 has been logged. They can write files of at most `limit` bytes."""
    run = Forked(*training(out, data, *ENDLESS), ranks=2, limit=limit)
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
    schedule = FEW, f"--max_iters={stopped + 6}", "--eval_interval=7", "--lr_decay_iters=20"
    resumed, _, _ = train(tmp_path, data, "--init_from=resume", *schedule, "--dtype=float32", ranks=2)
    assert state(tmp_path) == "ended"
    whole, _, _ = train(tmp_path / "whole", data, *schedule, ranks=2)
    assert [resumed[i] for i in range(stopped, stopped + 7)] == [whole[i] for i in range(stopped, stopped + 7)]


def test_sigusr1_saves_and_goes_on_and_a_second_sigint_ends_at_once(data, tmp_path):
    with started(tmp_path, data) as run:
        first, second = run.pids
        os.kill(first, signal.SIGUSR1)
        run.wait_for("saving checkpoint")
        assert re.search(r"saving checkpoint.*\niter ", run.wait_for("\niter ", after="saving checkpoint")), "it goes on"
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


def still_ignored():
    """Which of these signals, all of which were ignored at the start, still are."""
    numbers = signal.SIGHUP, signal.SIGINT
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
    Signals()
    return [number.name for number in numbers if signal.getsignal(number) == signal.SIG_IGN]


def test_what_was_ignored_at_the_start_stays_ignored():
    """As SIGHUP under nohup; but a launcher may let ranks ignore SIGINT."""
    assert run_ranks(still_ignored, 1) == [["SIGHUP"]]


def test_the_largest_action_of_any_rank_is_agreed_on_once():
    assert run_ranks(decisions, 2) == [["CONTINUE", "SAVE", "SAVE_AND_STOP", "FAIL", "CONTINUE"]] * 2
