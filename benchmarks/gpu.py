"""Everything that only a GPU can show, in one command of less than nine minutes. It needs only torch, numpy and tqdm.

    $ make bench-gpu          # or: python -m benchmarks.gpu

The folder results/<card>/ receives the output of each part and a summary. Without a GPU, a small model runs through the same
parts on the CPU, with gloo in place of NCCL. A part that fails does not stop the others. Exit code 1: a part failed.
"""

import os
import platform
import signal
import subprocess
import sys
import time
from datetime import date
from typing import NamedTuple

import torch

from forecast.modes import MODES

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BUDGET_S, LIMIT_S = 530.0, 150.0  # for all parts together, and for one


class Part(NamedTuple):
    """A command, its number of ranks (0: a process without torchrun), and whether its shadow check must find the same bits."""

    name: str
    ranks: int
    command: list[str]
    exact: bool = False


def parts(gpus: int, out: str) -> list[Part]:
    """Return the parts in the order of their importance. `out` is the folder in results/."""
    on_gpu = gpus > 0
    alone = "nccl" if on_gpu else "gloo"
    tiny = ["--n_layer=4", "--n_embd=192", "--block_size=64", "--vocab_size=512"]
    large = [*(["--model=gpt2-xl", "--block_size=1024"] if on_gpu else tiny), "--simulate_world_size=8"]
    medium = ["--model=gpt2-medium", "--block_size=1024"] if on_gpu else tiny
    small = ["--model=gpt2", "--block_size=1024", "--batch_size=8"] if on_gpu else tiny
    gpt2 = ["--n_layer=12", "--n_head=12", "--n_embd=768", "--block_size=1024", "--batch_size=8"] if on_gpu else []
    of_a_run = (name for name, mode in MODES.items() if mode.is_built and mode.overlap and not (mode.in_place or mode.hybrid))
    modes = f"--modes={','.join(of_a_run)}"
    and_fsdp2 = f"{modes},fsdp2"

    def bench(what: str, name: str, *arguments: str) -> list[str]:
        return ["bench.py", f"--what={what}", f"--name={os.path.join(out, name)}", *arguments]

    def train(name: str, *arguments: str) -> list[str]:
        sizes = ["--n_layer=4", "--n_head=4", "--n_embd=128", "--block_size=64", "--batch_size=12"]
        steps = ["--max_iters=20", "--eval_interval=20", "--eval_iters=2", "--log_interval=5", "--warmup_iters=2"]
        folder = f"--out_dir={os.path.join('out', 'bench-gpu-' + name)}"
        return ["train.py", "--dataset=stdlib_char", "--gradient_accumulation_steps=4", *sizes, *steps, folder, *arguments]

    eager = "--compile=False"
    checked = ["--shadow_check=5", "--grad_clip=0", eager]  # the weights are compared with those of the plain optimizer
    small_buckets = ["--dtype=float32", "--bucket_mb=0.3", *checked]
    exact = ["-m", "benchmarks.exact"]
    hybrid = {size: [*exact, *train(f"hybrid-{size}", f"--shard_size={size}", *small_buckets)] for size in (1, 2)}
    several = [
        # a sum over four ranks has another order than the plain optimizer's
        *(Part(f"train-hybrid-{n}", 2 * n, command, n == 1) for n, command in hybrid.items() if gpus >= 2 * n),
        Part(f"time-{gpus}-nccl-ranks", gpus, bench("time", f"time-{gpus}-nccl-ranks", *small, and_fsdp2)),
    ]
    return [
        # two ranks: with NCCL if each has its own GPU, otherwise with gloo
        Part("train-float32", 2, [*exact, *train("float32", "--bias=True", *small_buckets)], exact=True),
        Part("train-bfloat16", 2, train("bfloat16", "--param_dtype=bfloat16", *checked)),
        Part("train-codecs", 2, train("codecs", "--param_dtype=bfloat16_remainder", "--state_dtype=int8", *checked)),
        Part("train-muon", 2, [*exact, *train("muon", "--optimizer=muon", *small_buckets)]),
        Part("train-float16", 2, train("float16", "--dtype=float16", "--shard_gradients=True", "--loss_chunk=256", *checked)),
        *(several if gpus > 1 else []),
        Part("train-resumed", 1, train("float32", "--dtype=float32", "--init_from=resume", "--max_iters=25", eager)),
        Part("memory-bfloat16", 0, bench("memory", "memory-bfloat16", *large, and_fsdp2, "--dtype=bfloat16")),
        Part("memory-float32", 0, bench("memory", "memory-float32", *large, and_fsdp2, "--dtype=float32")),
        Part("memory-2-ranks", 2, bench("memory", "memory-2-ranks", *medium, modes)),
        Part(f"time-1-{alone}-rank", 1, bench("time", "time", *small, and_fsdp2)),
        Part("profile", 1, train("profile", *gpt2, "--max_iters=10", "--profile=True", eager)),
        Part("train-compiled", 2, train("compiled", "--compile=True")),
    ]


def run(part: Part, limit_s: float, folder: str) -> tuple[str, float]:
    """Run a part, write its output to a file, and return its result and its seconds."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={part.ranks}"] if part.ranks else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    begin = time.monotonic()
    path = os.path.join(folder, f"{part.name}.txt")
    with open(path, "w") as file:
        file.write(f"$ {' '.join([*torchrun, *part.command])}\n\n")
        file.flush()
        process = subprocess.Popen(
            [sys.executable, *torchrun, *part.command],
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
            with open(path) as printed:
                checks = [line.strip() for line in printed if line.startswith("shadow check: ")]
            differs = part.exact and not any("bit-identical" in check for check in checks)
            result = f"failed with exit code {code}" if code else ", ".join(["failed" if differs else "ok", *checks])
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its ranks, which have sessions of their own
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            result = f"did not end within {limit_s:.0f} s"
    return result, time.monotonic() - begin


def main() -> None:
    on_gpu = torch.cuda.is_available()
    card = "-".join(torch.cuda.get_device_name().lower().split()) if on_gpu else "cpu"
    folder = os.path.join(ROOT, "results", card)
    os.makedirs(folder, exist_ok=True)
    begin = time.monotonic()
    lines = [
        "$ make bench-gpu",
        f"date: {date.today().isoformat()}",
        f"machine: {card}, {os.cpu_count()} cores, {platform.system()}, torch {torch.__version__}",
        "",
    ]
    print("\n".join(lines))
    results = []
    for part in parts(torch.cuda.device_count(), card):
        left = BUDGET_S - (time.monotonic() - begin)
        result, seconds = run(part, min(left, LIMIT_S), folder) if left > 5 else ("not run: no time left", 0.0)
        results.append(result)
        lines.append(f"{part.name:24} {seconds:6.1f} s  {result}")
        print(lines[-1], flush=True)
        with open(os.path.join(folder, "summary.txt"), "w") as file:
            file.write("\n".join(lines) + "\n")
    print(f"\nresults are in {os.path.relpath(folder)}")
    sys.exit(0 if all(result.startswith("ok") for result in results) else 1)


if __name__ == "__main__":
    main()
