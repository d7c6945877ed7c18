"""Compare the optimizers: memory at each point of a step, time, bytes sent, losses.

Everything about GPT-2 124M on two CPU ranks with one thread each:
    $ torchrun --standalone --nproc_per_node=2 bench.py --what=all --model=gpt2 --batch_size=1 --block_size=64

Time of some modes, with several sequence lengths:
    $ torchrun --standalone --nproc_per_node=2 bench.py --what=time --modes=adamw,sharded,fsdp2 --model=gpt2 \\
        --batch_size=1 --block_size=128,256,512

Memory of GPT-2 XL on two ranks. The ranks share a GPU, or each rank has its own GPU:
    $ torchrun --standalone --nproc_per_node=2 bench.py --what=memory --model=gpt2-xl --batch_size=1

Memory of rank 0 of 8, 64 and 1024 ranks, measured in one process without the others:
    $ python bench.py --what=memory --model=gpt2 --batch_size=1 --block_size=64 --simulate_world_size=8,64,1024

The tables are printed. The folder out-bench/<model, ranks, device>/, or with --name results/<name>/, receives them as
text and results.json, and as pictures if altair and vl-convert-python are installed.

On a noisy machine, compare only measurements that were taken close together. For this reason the modes take turns when
the time is measured. The column to read is "ratio": the time of a mode is divided by the time of the first mode in the
same round, and the ratio is the median over all rounds. If its quartiles are far apart, take more --rounds.

Points of a step: after init: the model exists. wrapping: the most while data parallelism is set up; after wrapping:
then. accumulating: between micro-steps. before step, after step: around the update. saving: a checkpoint is written.
peak: the most within a step.
Parts: rest is everything but the columns before it, mostly temporary tensors of backward.

Modes:
"""

import datetime
import os
import platform
import sys
from typing import Literal

import torch
import torch.distributed as dist

from benchmarks import memory_profile, speed, training
from benchmarks.contenders import Setup
from benchmarks.results import Results, draw
from configurator import Dtype, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Seed, configure, integers
from data.dataset import WITHOUT_DOWNLOAD, Dataset, prepare_if_missing
from distributed import machine
from distributed.exits import exit_on_wrong_input, finish
from distributed.launch import launched
from distributed.ranks import on_rank_0, print0, start
from forecast.modes import MODES, explained
from forecast.run_memory import gpt_specs
from model import GPT2_SIZES, GPTConfig
from zero.host_comm import is_rank_0
from zero.options import Options

__doc__ += explained(MODES)

# -----------------------------------------------------------------------------
what: Literal["memory", "time", "training", "all"] = "all"
modes = ""  # separated by commas; empty: a choice for each measure; the others are compared to the first one
model = ""  # 'gpt2', 'gpt2-medium', 'gpt2-large' or 'gpt2-xl'; empty: the sizes below
name = "auto"  # results/<name>/ receives the results; auto: out-bench/<model, ranks, device>/; empty: write nothing
simulate_world_size = ""  # numbers of ranks, as 8,64,1024: measure the memory of rank 0 in one process
rounds: PositiveInt = 5  # turns of each mode; one more turn comes first and is not counted
steps_per_turn: PositiveInt = 5  # one micro-step and one update each
training_steps: PositiveInt = 50  # of each mode, on the source of Python's standard library, to compare the losses
batch_size: PositiveInt = 1  # sequences per rank and micro-step
block_size = "1024"  # tokens per sequence; --what=time also takes several, as 128,256,512
n_layer = 12
n_head = 12
n_embd = 768
vocab_size = 50304
bias = False  # use biases in LayerNorm and Linear layers
activation_checkpointing = False  # as in train.py
compile = False  # as in train.py
grad_clip: NonNegativeFloat = 1.0  # maximum gradient norm; 0.0 disables clipping
bucket_mb: Literal["auto"] | PositiveFloat = "auto"  # megabytes per bucket of sharded; auto: by the bytes of the model
shard_size: NonNegativeInt = 0  # of the mode hybrid: ranks that share the state; 0: those of one machine
device = "auto"  # 'cpu', 'cuda'; auto: cuda if available, otherwise cpu
dtype: Dtype = "auto"  # of the computation; auto: best on GPU, float32 on CPU
seed: Seed = 1337
config = configure(globals(), connects=True)
# -----------------------------------------------------------------------------
DEFAULT_MODES = {
    # on one machine, hybrid is the same as sharded; no_overlap takes as much memory
    "memory": [name for name, mode in MODES.items() if mode.overlap and not mode.hybrid],
    "time": ["adamw", "torch", "sharded"],
    "training": [mode for mode in MODES if MODES[mode].planned],
}


def modes_of(measure):
    """Return the names of the modes to compare."""
    names = modes.split(",") if modes else DEFAULT_MODES[measure]
    if unknown := [name for name in names if name not in MODES]:
        raise ValueError(f"modes={modes}: {', '.join(unknown)} is not one of {', '.join(MODES)}")
    return names


launch = launched()
with exit_on_wrong_input():
    measures = [*DEFAULT_MODES] if what == "all" else [what]
    worlds = integers("simulate_world_size", simulate_world_size) if simulate_world_size else []
    if worlds and (launch.distributed or what != "memory"):
        raise ValueError("simulate_world_size measures memory in one process; start it with python bench.py --what=memory")
    if model and model not in GPT2_SIZES:
        raise ValueError(f"model={model} is not one of {', '.join(GPT2_SIZES)}")
    if "," in block_size and what != "time":
        raise ValueError(f"block_size={block_size}: only what=time takes several values; give one")
    block_sizes = integers("block_size", block_size)
    gpt = GPTConfig.of(config | GPT2_SIZES.get(model, {}), block_size=block_sizes[0])
    names = {measure: modes_of(measure) for measure in measures}
    if not worlds and not launch.distributed:
        raise ValueError("bench.py compares several ranks; start it with torchrun --standalone --nproc_per_node=2 bench.py")
    options = Options(shard_size=shard_size or launch.local_world_size)
    for world in worlds or [launch.world_size]:
        options.sharing(world)
    chosen, precision = machine.resolve(device, dtype)
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True  # as in train.py
with exit_on_wrong_input():
    used = torch.device(chosen) if worlds else start(launch, chosen)
    how = bucket_mb, grad_clip, activation_checkpointing, seed, options.shard_size, compile
    setup = Setup(gpt, batch_size, used, precision, *how)
    where, title = machine.device_name(used), model or f"{n_layer}x{n_embd}"
    ranks = f"simulated ranks {simulate_world_size}" if worlds else f"{launch.world_size} ranks, {dist.get_backend()}"
    folder = os.path.join("results", name) if name else ""
    if name == "auto":
        count = "simulated" if worlds else f"{launch.world_size}-ranks"
        lengths, card = f"{batch_size}x{block_size.replace(',', '-')}", where if used.type == "cuda" else "cpu"
        folder = os.path.join("out-bench", "-".join([title, lengths, count, *card.lower().split()]))
    facts = [title, f"{sum(spec.numel for spec in gpt_specs(gpt)) / 1e6:.1f}M parameters", ranks, precision]
    facts += [f"{batch_size} x {block_size} tokens per rank and micro-step"]
    facts += [f"buckets of {bucket_mb} MB"] * (bucket_mb != "auto")
    facts += ["activation checkpointing"] * activation_checkpointing + ["compiled"] * compile
    description = {
        "command": " ".join(["bench.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "machine": f"{where}, {os.cpu_count()} cores, {platform.system()}, torch {torch.__version__}",
        "setup": ", ".join(facts),
    }
    results = on_rank_0(lambda: Results(folder, description))
    if "training" in measures:
        on_rank_0(lambda: prepare_if_missing(WITHOUT_DOWNLOAD))
        data = Dataset(WITHOUT_DOWNLOAD, block_sizes[0])


allocated = "allocated on the GPU" if used.type == "cuda" else "of live tensors"
TITLES = {
    "memory": f"Memory: MB {allocated}, on {'rank 0' if worlds else 'the fullest rank'}",
    "time": "Time of a step; the ratio is that to the first mode in the same round",
    "training": "Training: peak of the fullest rank, and the largest difference of a loss from that of the first mode",
}


def rows_of(measure):
    """Yield the rows of a measure as they are measured; those of a time come again after each round. Call it on all ranks."""
    if measure == "time":
        yield from speed.time_rows(setup, names[measure], block_sizes, rounds, steps_per_turn)
    elif measure == "training":
        yield from training.training_rows(setup, names[measure], data, training_steps)
    else:
        for world in worlds or [0]:
            yield from memory_profile.memory_rows(setup, names[measure], world)


print0(results.title)
for measure in measures:
    details = f"{memory_profile.MICRO_STEPS} micro-steps per rank" if measure in ("memory", "training") else ""
    rows, text = {}, ""
    for row in rows_of(measure):
        rows[tuple(row.get(key) for key in ("world_size", "block_size", "mode", "point"))] = row
        if is_rank_0():
            text = results.add(measure, TITLES[measure], list(rows.values()), details)
    print0(f"\n{text}")
    if used.type == "cuda":
        free, total = torch.cuda.mem_get_info(used)
        taken = total - free - torch.cuda.memory_reserved(used)
        print0(f"on this GPU, {taken / 1e6:.0f} MB are taken outside of the allocator of rank 0")
if is_rank_0() and folder:
    try:
        draw(folder)
    except ImportError as error:
        print(f"\nnote: {error}, then python -m benchmarks.results {folder}")
    print(f"\nresults are in {folder}")
finish()
