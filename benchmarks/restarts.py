"""Time from the loss of a rank to the next iteration, under torchrun --max-restarts on this machine.

    $ python -m benchmarks.restarts --kills=7

Two ranks train a small model on the CPU. One of them is killed after each checkpoint, in turn. The medians are split into

    notice      the rank is killed, until torchrun has ended the other one and starts new processes
    start       imports, and the ranks find each other
    load        dataset, checkpoint, model, optimizer, log
    iteration   the evaluation of a resumed run and its first iteration
"""

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PHASES = {"start": "tokens per iteration will be", "load": "mfu is relative to", "iteration": "iter "}
SETTINGS = [
    *("--device=cpu", "--compile=False", "--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=16", "--batch_size=2"),
    *("--gradient_accumulation_steps=2", "--max_iters=1000000", "--eval_interval=20", "--eval_iters=2", "--init_from=auto"),
]


def main() -> None:
    """Kill ranks and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=7)
    kills = parser.parse_args().kills
    with tempfile.TemporaryDirectory() as folder:
        for split in ("train", "val"):
            np.random.default_rng(0).integers(65, size=4000).astype(np.uint16).tofile(os.path.join(folder, f"{split}.bin"))
        out = os.path.join(folder, "out")
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", f"--max-restarts={kills}"]
        line = [sys.executable, *torchrun, os.path.join(ROOT, "train.py"), *SETTINGS, f"--dataset={folder}", f"--out_dir={out}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as agent:
            printed: list[tuple[float, str]] = []
            reader = threading.Thread(target=lambda: printed.extend((time.monotonic(), text) for text in agent.stdout or ()))
            reader.start()
            try:
                splits = [_lose_a_rank(agent.pid, os.path.join(out, "ckpt.pt"), kill % 2, printed) for kill in range(kills)]
            finally:
                agent.kill()
                reader.join()
    for phase in splits[0]:
        times = [split[phase] for split in splits]
        print(f"{phase:<10} {statistics.median(times):5.2f} s   ({min(times):.2f} to {max(times):.2f})")


def _lose_a_rank(agent: int, checkpoint: str, rank: int, printed: list[tuple[float, str]]) -> dict[str, float]:
    """Kill a rank after the next checkpoint, and return the seconds by phase and their sum."""
    before = _written(checkpoint)
    _wait_until(lambda: _written(checkpoint) != before)
    old = _children(agent)
    first, begin = len(printed), time.monotonic()
    os.kill(old[rank], signal.SIGKILL)
    _wait_until(lambda: len(set(_children(agent)) - set(old)) == 2)
    split, last = {"notice": time.monotonic() - begin}, time.monotonic()
    for phase, text in PHASES.items():
        found: list[float] = []
        _wait_until(lambda found=found, text=text, last=last: found.extend(_times(printed[first:], text, last)) or found)
        split[phase], last = found[0] - last, found[0]
    return {**split, "all": last - begin}


def _times(printed: list[tuple[float, str]], text: str, after: float) -> list[float]:
    return [at for at, line in printed if at > after and line.startswith(text)]


def _written(path: str) -> int:
    return os.stat(path).st_mtime_ns if os.path.exists(path) else 0


def _children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return sorted(map(int, re.findall(r"\d+", file.read())))


def _wait_until(condition, timeout_s: float = 120.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise SystemExit("error: the job does not come back")
        time.sleep(0.01)


if __name__ == "__main__":
    main()
