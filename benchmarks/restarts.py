"""Time from the loss of a rank to the next iteration, under torchrun --max-restarts on this machine.

    $ python -m benchmarks.restarts --kills=7

Two ranks train a small model on the CPU. One of them is killed after each checkpoint, in turn. The medians are split into

    notice      the rank is killed, until torchrun has ended the other one and starts new processes
    start       imports, and the ranks find each other
    load        dataset, checkpoint, model, optimizer, log
    iteration   the evaluation of a resumed run and its first iteration
"""

import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from configurator import PositiveInt, configure
from tests.hosts import ROOT, Job

kills: PositiveInt = 7

PHASES = {"start": "\ntokens per iteration will be", "load": "\nmfu is relative to", "iteration": "\niter "}
SETTINGS = [
    *("--device=cpu", "--compile=False", "--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=16", "--batch_size=2"),
    *("--gradient_accumulation_steps=2", "--max_iters=1000000", "--eval_interval=20", "--eval_iters=2", "--init_from=auto"),
]


def main() -> None:
    """Kill ranks and print the medians."""
    configure(globals())
    with tempfile.TemporaryDirectory() as folder:
        for split in ("train", "val"):
            np.random.default_rng(0).integers(65, size=4000).astype(np.uint16).tofile(os.path.join(folder, f"{split}.bin"))
        out = os.path.join(folder, "out")
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", f"--max-restarts={kills}"]
        line = [sys.executable, *torchrun, os.path.join(ROOT, "train.py"), *SETTINGS, f"--dataset={folder}", f"--out_dir={out}"]
        agent = Job(line, os.path.join(folder, "printed"), env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            splits = [_lose_a_rank(agent, os.path.join(out, "ckpt.pt"), kill % 2) for kill in range(kills)]
        finally:
            agent.kill()
    for phase in splits[0]:
        times = [split[phase] for split in splits]
        print(f"{phase:<10} {statistics.median(times):5.2f} s   ({min(times):.2f} to {max(times):.2f})")


def _lose_a_rank(agent: Job, checkpoint: str, rank: int) -> dict[str, float]:
    """Kill a rank after the next checkpoint, and return the seconds by phase and their sum."""
    before = _written(checkpoint)
    _wait_until(lambda: _written(checkpoint) != before)
    old, place = _children(agent.pid), len(agent.printed())
    begin = time.monotonic()
    os.kill(old[rank], signal.SIGKILL)
    ends = {"notice": _wait_until(lambda: len(set(_children(agent.pid)) - set(old)) == 2)}
    for phase, text in PHASES.items():
        ends[phase] = _wait_until(partial(_has_printed, agent, text, place))
        place = agent.printed().index(text, place)
    starts = [begin, *ends.values()]
    split = {phase: end - start for (phase, end), start in zip(ends.items(), starts, strict=False)}
    return {**split, "all": starts[-1] - begin}


def _has_printed(agent: Job, text: str, place: int) -> bool:
    return text in agent.printed()[place:]


def _written(path: str) -> int:
    return os.stat(path).st_mtime_ns if os.path.exists(path) else 0


def _children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return sorted(map(int, re.findall(r"\d+", file.read())))


def _wait_until(condition: Callable[[], bool], timeout_s: float = 120.0) -> float:
    """Return the time at which the condition holds."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise SystemExit("error: the job does not come back")
        time.sleep(0.01)
    return time.monotonic()


if __name__ == "__main__":
    main()
