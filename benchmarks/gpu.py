"""Everything that only a GPU can show. It needs a clone of this repository, torch, numpy and tqdm, and half an hour.

    $ make bench-gpu                              # the parts without a result: call it until none is left
    $ make bench-gpu PARTS="memory-xl profile"    # these, also if they have one

A call takes at most nine minutes on a GPU. Before you give the machine back, take out-bench/<card>.tar.gz home, which has all.
On another machine, put it there first, and a call goes on from it.

The folder results/<card>/ receives the output of each part and a summary, the archive also the metrics and the profile of runs.
Every row of a table is written when it is measured, and every part before the next one begins. Without a GPU, small models run
through the same parts on the CPU, with gloo in place of NCCL, and everything may take longer. Exit code 1: a part failed or is
left.
"""

import glob
import json
import os
import platform
import signal
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
from datetime import date
from typing import Any, NamedTuple

import numpy as np
import torch

from distributed.exits import exit_on_wrong_input
from forecast.modes import LOSS_CHUNK, MODES
from zero.checkpoint.files import atomic_write

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BUDGET_S = 530  # for the parts of one call
SLOWER = 8  # so many times longer may everything take without a GPU
ARCHIVE_BYTES = 16_000_000
TOKENS = os.path.join("out-bench", "tokens")  # a dataset
SHOWN = ("memory of tensors: ", "iter ", "bit-identical: ")  # lines that a summary repeats, the last of each
DRIVER, CLOCKS = "driver_version,clocks.max.sm,clocks.max.mem,power.limit", "clocks.sm,clocks.mem,power.draw,temperature.gpu"


class Part(NamedTuple):
    """A command, and its number of ranks (0: a process without torchrun)."""

    name: str
    limit_s: int  # on a GPU
    ranks: int
    command: list[str]
    variables: dict[str, str] = {}


def parts(gpus: int, out: str) -> list[Part]:
    """Return the parts in the order of their importance. `out` is the folder in results/."""
    on_gpu = gpus > 0
    tiny = ["--n_layer=4", "--n_head=4", "--n_embd=192", "--block_size=64"]
    of_a_run = [name for name, mode in MODES.items() if mode.is_built and mode.overlap and not (mode.in_place or mode.hybrid)]
    of_a_run.remove("remainder")  # as in codecs
    if not on_gpu:  # where Newton-Schulz iterations take minutes without instructions for bfloat16
        of_a_run = [name for name in of_a_run if not MODES[name].muon]
    first = ["adamw", "adamw_in_place", "sharded", "codecs"]  # README has these
    in_place = f"--modes={','.join(dict.fromkeys([*first, *of_a_run]))}"

    def train(name: str, dataset: str, *arguments: str) -> list[str]:
        folder = f"--out_dir={os.path.join('out-bench', name)}"
        return ["train.py", f"--dataset={dataset}", folder, "--eval_iters=2", "--always_save_checkpoint=False", *arguments]

    def fast(name: str, limit_s: int, *arguments: str) -> Part:
        """A run whose speed and memory count, on random tokens of GPT-2's vocabulary. It writes no checkpoint."""
        numbers = ["--log_interval=10", "--eval_interval=1000", "--warmup_iters=20"]
        command = train(name, os.path.abspath(TOKENS), *numbers, *arguments)
        return Part(name, limit_s, 0, ["-m", "benchmarks.alone", *command])

    def right(name: str, ranks: int, *arguments: str, limit_s: int = 60, folder: str = "") -> Part:
        """A short run whose weights count."""
        sizes = ["--n_layer=4", "--n_head=4", "--n_embd=128", "--block_size=64", "--batch_size=12"]
        steps = ["--max_iters=20", "--eval_interval=20", "--log_interval=5", "--warmup_iters=2"]
        numbers = ["--gradient_accumulation_steps=4", *sizes, *steps]
        return Part(name, limit_s, ranks, train(folder or name, "stdlib_char", *numbers, *arguments))

    def ordered(name: str, ranks: int, *arguments: str) -> Part:
        """The same by benchmarks/exact.py."""
        part = right(name, ranks, *arguments)
        return part._replace(command=["-m", "benchmarks.exact", *part.command])

    def parity(name: str, ranks: int, *arguments: str, tolerance: float = 0.0) -> list[Part]:
        """The same, then with the plain optimizer, and how far their checkpoints differ."""
        runs = ordered(name, ranks, *arguments), ordered(f"{name}-plain", ranks, *arguments, "--use_zero1=False")
        folders = [os.path.join("out-bench", part.name) for part in runs]
        compare = ["-m", "zero.checkpoint", "compare", *folders, f"--tolerance={tolerance}"]
        return [*runs, Part(f"{name}-compared", 20, 0, compare)]

    def bench(name: str, limit_s: int, model: str, *arguments: str, ranks: int = 0, folder: str = "", **of_part: Any) -> Part:
        """A measure of bench.py, with which the name begins."""
        sizes = [f"--model={model}", "--block_size=1024"] if on_gpu else [*tiny, "--vocab_size=512"]
        flags = [f"--what={name.partition('-')[0]}", f"--name={os.path.join(out, folder or name)}", *sizes]
        return Part(name, limit_s, ranks, ["bench.py", *flags, *arguments], **of_part)

    eager, compiled = "--compile=False", f"--compile={on_gpu}"
    of_gpt2 = ["--gradient_accumulation_steps=4"]
    of_gpt2 += ["--max_iters=60"] if on_gpu else ["--max_iters=12", "--batch_size=2", *tiny]
    of_xl = ["--gradient_accumulation_steps=2", "--batch_size=2", "--learning_rate=2e-4", compiled]
    of_xl += ["--n_layer=48", "--n_head=25", "--n_embd=1600", "--block_size=1024", "--max_iters=200"] if on_gpu else []
    of_xl += [] if on_gpu else [*tiny, "--max_iters=4"]
    codecs = ["--param_dtype=bfloat16_remainder", "--state_dtype=int8"]
    all_flags = [*codecs, "--activation_checkpointing=True", f"--loss_chunk={LOSS_CHUNK}"]
    unclipped = ["--grad_clip=0", eager]
    small_buckets = ["--dtype=float32", "--bucket_mb=0.3", *unclipped]
    times = ["--batch_size=8", f"--modes={','.join(of_a_run)},fsdp2"]
    several = []
    if gpus > 1:
        # a sum over four ranks has another order than the plain optimizer's
        for size in [size for size in (1, 2) if 2 * size <= gpus]:
            flags = f"--shard_size={size}", *small_buckets
            several += parity(f"train-hybrid-{size}", 2 * size, *flags, tolerance=0.0 if size == 1 else 1e-3)
        name = f"time-{gpus}-nccl-ranks"
        first_streams = {"TORCH_NCCL_HIGH_PRIORITY": "1"}
        several.append(bench(name, 150, "gpt2", *times, ranks=gpus))
        several.append(bench(f"{name}-high-priority", 150, "gpt2", *times, ranks=gpus, variables=first_streams))
    rank_0_of_8 = "--simulate_world_size=8"
    return [
        # the speed and the memory of runs, as README promises them
        fast("gpt2-compiled", 120, *of_gpt2, compiled),
        fast("xl-all-flags", 210, *of_xl, "--batch_size=1", *all_flags),
        fast("xl-bfloat16", 150, *of_xl, "--param_dtype=bfloat16"),
        # waits for collectives
        *parity("nccl-float32", 1, "--bias=True", *small_buckets),
        # Linear layers as autocast rounds them: bit-identical to float32 weights. Otherwise a kernel chooses its algorithm by
        # the address of a weight (then --bias=False differs as well), or does not round a bias as a cast does
        *parity("nccl-autocast", 1, "--bias=True", "--dtype=bfloat16", "--bucket_mb=0.3", *unclipped),
        ordered("nccl-bfloat16", 1, "--param_dtype=bfloat16", "--bucket_mb=0.3", *unclipped),
        ordered("nccl-muon", 1, "--optimizer=muon", *small_buckets),
        fast("gpt2-eager", 60, *of_gpt2, eager),
        *several,
        bench(f"time-1-{'nccl' if on_gpu else 'gloo'}-rank", 150, "gpt2", *times, ranks=1, folder="time"),
        # beside xl-bfloat16: weights as autocast rounds them, and float32 sums of gradients, with the losses of 200 iterations
        fast("xl-autocast", 150, *of_xl),
        fast("xl-shard-gradients", 150, *of_xl, "--param_dtype=bfloat16", "--shard_gradients=True"),
        # what rank 0 of 8 takes
        bench("memory-xl", 240, "gpt2-xl", "--batch_size=2", in_place, rank_0_of_8, compiled),
        bench("memory-gpt2", 150, "gpt2", "--batch_size=12", in_place, rank_0_of_8, compiled),
        bench("memory-fsdp2", 60, "gpt2-xl", "--batch_size=2", "--modes=sharded,fsdp2", rank_0_of_8),
        # two ranks: with NCCL if each has its own GPU, otherwise with gloo
        *parity("train-float32", 2, "--bias=True", *small_buckets),
        *parity("train-autocast", 2, "--dtype=bfloat16", "--bucket_mb=0.3", *unclipped),
        right("train-codecs", 2, *codecs, *unclipped),
        ordered("train-muon", 2, "--optimizer=muon", *small_buckets),
        right("train-float16", 2, "--dtype=float16", "--shard_gradients=True", "--loss_chunk=256", *unclipped),
        right("train-saved", 2, "--dtype=float32", "--always_save_checkpoint=True", eager),
        right("train-resumed", 1, "--dtype=float32", "--init_from=resume", "--max_iters=25", eager, folder="train-saved"),
        Part("published", 240, 0, ["-m", "benchmarks.published", "--measure"]),  # beside GPUs of others
        bench("memory-2-ranks", 120, "gpt2-medium", "--modes=adamw,sharded,codecs", ranks=2),
        fast("profile", 90, *of_gpt2, "--max_iters=12", "--profile=True", eager),
        right("train-compiled", 2, "--compile=True", limit_s=120),
    ]


def write_tokens() -> None:
    """Write a dataset of random tokens. Some are more frequent than others (Zipf's law), which a model learns."""
    os.makedirs(TOKENS, exist_ok=True)
    generator = np.random.default_rng(0)
    for split, count in (("train", 4_000_000), ("val", 100_000)):
        (generator.zipf(1.2, count) % 50257).astype(np.uint16).tofile(os.path.join(TOKENS, f"{split}.bin"))


def run(part: Part, limit_s: float, folder: str) -> tuple[str, float]:
    """Run a part, write its output to a file, and return its result and its seconds."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]  # its name may have no address
    words = [*torchrun, f"--nproc_per_node={part.ranks}", *part.command] if part.ranks else part.command
    command = [os.path.join(ROOT, word) if word in ("train.py", "bench.py") else word for word in words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT, **part.variables}
    begin = time.monotonic()
    path = os.path.join(folder, f"{part.name}.txt")
    with open(path, "w") as file:
        print(f"$ python {' '.join(words)}\n", file=file, flush=True)
        out: dict[str, Any] = {"stdout": file, "stderr": subprocess.STDOUT, "start_new_session": True}
        process = subprocess.Popen([sys.executable, *command], env=environment, **out)
        try:
            code = process.wait(limit_s)
            result = f"failed with exit code {code}, see {path}" if code else "ok"
        except subprocess.TimeoutExpired:
            result = f"did not end within {limit_s:.0f} s"
            process.terminate()  # torchrun ends its ranks, which have sessions of their own
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    with open(path) as file:
        lines = {start: line.strip() for line in file for start in SHOWN if line.startswith(start)}
    return "; ".join([result, *lines.values()]), time.monotonic() - begin


def machine(card: str) -> str:
    """Return what the figures depend on, in a line."""
    facts = [card, f"{os.cpu_count()} cores", platform.system(), f"torch {torch.__version__}"]
    if torch.cuda.is_available():
        facts += [f"CUDA {torch.version.cuda}", f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}", *asked(DRIVER)]
    return ", ".join(facts)


def asked(keys: str) -> list[str]:
    """Return what nvidia-smi says of the first GPU; nothing without it."""
    with suppress(OSError):
        command = ["nvidia-smi", f"--query-gpu={keys}", "--format=csv,noheader"]
        for line in subprocess.run(command, capture_output=True, text=True).stdout.splitlines()[:1]:
            return [f"{key}: {value}" for key, value in zip(keys.split(","), line.split(", "), strict=False)]
    return []


class Record:
    """The results of the parts so far, in results/<card>/, and everything in one archive."""

    def __init__(self, card: str) -> None:
        self.folder, self.archive = os.path.join("results", card), os.path.join("out-bench", f"{card}.tar.gz")
        self.machine = machine(card)
        self._path = os.path.join(self.folder, "parts.json")
        self.parts: dict[str, dict[str, Any]] = {}
        os.makedirs(self.folder, exist_ok=True)
        if os.path.exists(self.archive) and not os.path.exists(self._path):
            with tarfile.open(self.archive) as archive:
                archive.extractall(filter="data")
        if os.path.exists(self._path):
            with open(self._path) as file:
                self.parts = json.load(file)

    def is_ok(self, part: Part) -> bool:
        """Return whether it has succeeded, in this call or an earlier one."""
        return self.parts.get(part.name, {"result": ""})["result"].startswith("ok")

    def add(self, part: Part, result: str, seconds: float) -> str:
        """Write the result of a part, and return its line."""
        fields = {"date": date.today().isoformat(), "machine": self.machine, "after it": asked(CLOCKS), "command": part.command}
        self.parts[part.name] = {**fields, "seconds": round(seconds, 1), "result": result}
        with atomic_write(self._path) as path, open(path, "w") as file:
            json.dump(self.parts, file, indent=1)
        lines = {name: f"{name:20} {known['seconds']:6.1f} s  {known['result']}" for name, known in self.parts.items()}
        of_machine = dict.fromkeys(f"{known['date']}: {known['machine']}" for known in self.parts.values())
        with open(os.path.join(self.folder, "summary.txt"), "w") as file:
            file.write("\n".join(["$ make bench-gpu", *of_machine, "", *lines.values()]) + "\n")
        self._pack()
        return lines[part.name]

    def _pack(self) -> None:
        """Pack the results, and of the runs the metrics, the report and the profile: the smallest files first."""
        kinds = "metrics.jsonl", "report.md", "profile/*"
        patterns = [f"{self.folder}/**", *(f"out-bench/{name}/{kind}" for name in self.parts for kind in kinds)]
        found = [path for pattern in patterns for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)]
        with atomic_write(self.archive) as path, tarfile.open(path, "w:gz") as archive:
            for each in sorted(found, key=os.path.getsize):
                if archive.offset + os.path.getsize(each) < ARCHIVE_BYTES:
                    archive.add(each)
                else:
                    print(f"note: {each} is too large for the archive: {os.path.getsize(each) / 1e6:.0f} MB")


def main(named: list[str]) -> None:
    on_gpu = torch.cuda.is_available()
    # in another process: a context of this one would count as memory that the parts take
    ask = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"]
    name = subprocess.run(ask, capture_output=True, text=True, check=True).stdout if on_gpu else "cpu"
    card = "-".join(name.lower().split())
    every, slower, begin = parts(torch.cuda.device_count(), card), 1 if on_gpu else SLOWER, time.monotonic()
    with exit_on_wrong_input():
        if unknown := {*named} - {part.name for part in every}:
            raise ValueError(f"PARTS={' '.join(unknown)} is not one of {', '.join(part.name for part in every)}")
    record = Record(card)
    print(record.machine)
    write_tokens()
    todo = [part for part in every if (part.name in named if named else not record.is_ok(part))]
    left = []
    for part in sorted(todo, key=lambda part: part.name in record.parts):  # those that have failed come last
        remaining, limit_s = slower * BUDGET_S - (time.monotonic() - begin), slower * part.limit_s
        if remaining < limit_s:
            left.append(part.name)
            continue
        print(f"{part.name:20} at most {limit_s} s of {remaining:.0f} s that are left", flush=True)
        print(record.add(part, *run(part, limit_s, record.folder)), flush=True)
    print(f"\nresults are in {record.folder}, and with metrics and profile in {record.archive}")
    if left:
        print(f"no time is left for {' '.join(left)}: call it again")
    sys.exit(0 if all(map(record.is_ok, todo)) else 1)


if __name__ == "__main__":
    main([name for argument in sys.argv[1:] for name in argument.replace(",", " ").split()])
