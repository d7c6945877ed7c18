"""Run train.py, sample.py and bench.py: forked from a process that has imported torch already, or as a user starts them."""

import gc
import json
import os
import re
import resource
import runpy
import subprocess
import sys
import tempfile
import time
from ast import literal_eval
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

import faults
import torch
import torch.distributed as dist
from ranks import context

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SIZES = ["--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=16", "--batch_size=2", "--gradient_accumulation_steps=6"]
SETTINGS = [
    *("--device=cpu", "--compile=False", *SIZES, "--max_iters=19", "--eval_interval=5", "--eval_iters=3"),
    *("--learning_rate=1e-2", "--warmup_iters=2", "--lr_decay_iters=20", "--dropout=0.1", "--grad_clip=0.5"),
]
FEW = "--gradient_accumulation_steps=2"  # micro-steps
LAUNCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
NO_LIMIT = resource.RLIM_INFINITY
GRACE_S = 0.5  # between the first rank that fails and the end of the others; torchrun takes about 0.1


class Finished(NamedTuple):
    """The end of a script. Its ranks share one stdout and one stderr."""

    returncode: int  # 0 if all ranks have ended with 0
    returncodes: list[int]  # by rank; of torchrun's ranks, those that it reports
    stdout: str
    stderr: str

    def succeeded(self, *texts):
        """Check that all ranks have ended with 0 and that stdout has these texts, and return itself."""
        assert self.returncode == 0, self.stderr
        assert [text for text in texts if text not in self.stdout] == [], self.stdout
        return self

    def failed(self, *texts):
        """Check that all ranks have ended with 1 and that stderr has these texts, and return itself."""
        assert set(self.returncodes) == {1}, self.stderr
        assert [text for text in texts if text not in self.stderr] == [], self.stderr
        return self

    def refusal(self, *texts, is_alone=True):
        """Check that all ranks have ended with 2 and that the last line on stderr, here the only one, has these texts."""
        assert set(self.returncodes) == {2}, self.stderr
        *before, line = self.stderr.splitlines()
        assert not (is_alone and before), self.stderr
        assert [text for text in texts if text not in line] == [], line
        return line


def run(script, *arguments, ranks=0, cwd=ROOT, limit=NO_LIMIT, before=None, timeout=240):
    """Run a script to its end in forked processes.

    Args:
        ranks: 0 starts one process as `python` does, more start that many as torchrun does.
        limit: the largest file, in bytes, that it can write.
        before: a function to call in each process before the script, see `faults`.
    """
    with Forked(script, *arguments, ranks=ranks, cwd=cwd, limit=limit, before=before) as forked:
        return forked.finish(timeout)


def run_for_real(script, *arguments, ranks=0, cwd=ROOT, timeout=240):
    """Run a script to its end as a user does, by `python` or, with `ranks`, by `torchrun`."""
    line = command(script, *arguments, ranks=ranks)
    process = subprocess.run(line, cwd=cwd, capture_output=True, text=True, timeout=timeout)
    codes = [int(code) for code in re.findall(r"exitcode +: (-?\d+)", process.stderr)] if ranks else [process.returncode]
    return Finished(process.returncode, codes or [0] * ranks, process.stdout, process.stderr)


def command(script, *arguments, ranks=0):
    """The command line of a script."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks else []
    return [sys.executable, *torchrun, os.path.join(ROOT, script), *arguments]


def training(out, data, *more):
    """The command line of a small run of train.py, for `run` and `Forked`."""
    return ["train.py", *SETTINGS, f"--dataset={data}", f"--out_dir={out}", *more]


def check_mistakes(script, settings, messages, **how):
    """Each line of arguments ends a script with its message and exit code 2; one process goes through all of them."""
    process = run(script, " ".join(settings), "\n".join(messages), before=partial(faults.run_each, script), **how).succeeded()
    errors = process.stderr.splitlines()
    assert errors[1::2] == ["exit code 2"] * len(messages), process.stderr
    for error, message in zip(errors[::2], messages.values(), strict=True):
        assert error.startswith("error: ")
        assert message in error


class Forked:
    """A script under way in processes that begin with torch imported; the other arguments are those of `run`.

    With several ranks the variables are those of torchrun, and so is the store: this process holds it, at a port that the
    system has chosen. As under torchrun, when a rank fails the others are ended. Leaving the block kills what still runs.
    """

    def __init__(self, script, *arguments, ranks=0, cwd=ROOT, limit=NO_LIMIT, before=None):
        self.folder = tempfile.TemporaryDirectory()
        self.store, launches = None, [{}]
        if ranks:
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            common = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "TORCHELASTIC_USE_AGENT_STORE": True}
            common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.store.port, "TORCHELASTIC_RESTART_COUNT": 0}
            launches = [{**common, "RANK": rank, "LOCAL_RANK": rank} for rank in range(ranks)]
        self.processes = []
        for launch in launches:
            variables = {**os.environ, **{name: str(value) for name, value in launch.items()}}
            how = script, arguments, variables, str(cwd), self.folder.name, limit, before
            self.processes.append(context.Process(target=_main, args=how))
            self.processes[-1].start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()

    @property
    def pids(self):
        return [process.pid for process in self.processes]

    def printed(self, stream="stdout"):
        """What the ranks have written to stdout or stderr so far."""
        path = Path(self.folder.name, stream)
        return path.read_text() if path.exists() else ""

    def wait_for(self, text, after="", timeout=120):
        """Wait until `text` has been printed, after the first `after`; everything that has been printed then."""
        end = time.monotonic() + timeout
        while text not in (printed := self.printed()).partition(after or "\0")[2 if after else 0]:
            assert any(process.is_alive() for process in self.processes), printed + self.printed("stderr")
            assert time.monotonic() < end, printed + self.printed("stderr")
            time.sleep(0.01)
        return printed

    def finish(self, timeout=240):
        """Wait for all ranks."""
        end, first_failure = time.monotonic() + timeout, None
        while alive := [process for process in self.processes if process.exitcode is None]:
            now = time.monotonic()
            assert now < end, f"it does not end:\n{self.printed()}\n{self.printed('stderr')}"
            if first_failure is None and any(process.exitcode for process in self.processes):
                first_failure = now
            if first_failure is not None and now > first_failure + GRACE_S:
                for process in alive:
                    process.terminate()
            wait([process.sentinel for process in alive], 0.1)
        codes = [process.exitcode for process in self.processes]
        return Finished(next(filter(None, codes), 0), codes, self.printed(), self.printed("stderr"))


def _main(script, arguments, variables, cwd, folder, limit, before):
    """In the new process: be what `python script arguments` would be."""
    gc.freeze()
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd)
    for number, name in ((1, "stdout"), (2, "stderr")):
        descriptor = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
        setattr(sys, name, os.fdopen(os.dup(number), "w", buffering=1 if number == 2 else -1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    sys.argv = [os.path.join(ROOT, script), *arguments]
    sys.path[:0] = [ROOT]
    if before is not None:
        before()
    if script == "train.py":  # the fastest matrix product of this machine, which would otherwise be measured for 0.2 s
        faults.returns("distributed.machine:peak_flops", 1e12)
    runpy.run_path(sys.argv[0], run_name="__main__")


def train(out, data, *arguments, ranks=0, run=run):
    """Losses of a run from its metrics.jsonl, {iter: (train loss, val loss) or loss}, and its console output."""
    process = run(*training(out, data, *arguments), ranks=ranks).succeeded()
    events = events_of(out)
    losses = {event["iter"]: event["iter/loss"] for event in events if "iter/loss" in event}
    evaluations = {event["iter"]: (event["train/loss"], event["val/loss"]) for event in events if "val/loss" in event}
    return losses, evaluations, process.stdout


def events_of(out):
    """The lines of metrics.jsonl in a folder."""
    with open(os.path.join(out, "metrics.jsonl")) as file:
        return [json.loads(line) for line in file]


def defaults_of(script):
    """The settings of a script and their defaults, as --help lists them."""
    shown = run(script, "--help").succeeded()
    return {key: literal_eval(value) for key, value in re.findall(r"^  --(\w+)=(.+?)(?:  .*)?$", shown.stdout, re.MULTILINE)}


def torch_load(folder, name="ckpt.pt"):
    """The contents of a checkpoint's file."""
    return torch.load(os.path.join(folder, name), weights_only=True)


class Run(NamedTuple):
    """A finished run of train.py: what `train` gives, and its checkpoint."""

    losses: dict
    evaluations: dict
    printed: str
    checkpoint: dict


class Runs(dict):
    """One run by each implementation, all from the same start; each is run when somebody first asks for it.

    There is no dropout, because it draws random numbers on each rank.
    """

    HOW = {  # ranks, flags, and the way it is started
        "one": (0, [], run),
        "adamw": (2, ["--use_zero1=False"], run),
        "sharded3": (3, [], run),
        "adamw unclipped": (2, ["--use_zero1=False", "--grad_clip=0.0"], run),
        "torch unclipped": (2, ["--zero1_impl=torch", "--grad_clip=0.0"], run),
        "sharded unclipped": (2, ["--grad_clip=0.0"], run_for_real),
        "hybrid unclipped": (2, ["--shard_size=1", "--grad_clip=0.0"], run),
    }

    def __init__(self, folder, data):
        super().__init__()
        self.folder, self.data = folder, data

    def __missing__(self, name):
        ranks, flags, run = self.HOW[name]
        out = self.folder / name
        self[name] = Run(*train(out, self.data, "--dropout=0.0", *flags, ranks=ranks, run=run), torch_load(out))
        return self[name]
