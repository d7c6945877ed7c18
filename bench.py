"""The optimizers side by side in one process group: time, bytes sent and memory of each, next to plain AdamW.

GPT-2 124M on two CPU ranks, a thread each, about five minutes:
    $ torchrun --standalone --nproc_per_node=2 bench.py --modes=adamw,torch,sharded --block_size=64 --batch_size=1

The bytes of a 10.7M-parameter model on four:
    $ torchrun --standalone --nproc_per_node=4 bench.py --modes=adamw,torch,sharded,bfloat16 --n_layer=6 --n_head=6 \\
        --n_embd=384 --vocab_size=65 --block_size=64 --batch_size=1

The memory of GPT-2 XL at each point of a step, on two ranks that share a GPU or have one each:
    $ torchrun --standalone --nproc_per_node=2 bench.py --what=memory --modes=adamw,torch,sharded,shard_gradients,bfloat16 \\
        --n_layer=48 --n_head=25 --n_embd=1600 --block_size=1024 --batch_size=1 --out=results/gpt2-xl-memory.json

Seconds and memory to save and restore GPT-2 124M:
    $ torchrun --standalone --nproc_per_node=2 bench.py --what=checkpoint --modes=sharded,torch --block_size=64 --batch_size=1

On a noisy machine only what was measured next to each other can be compared, so for their times the modes take turns, and
the figure to look at is the median over the rounds of each mode's time divided by the first one's in the same round. A turn
ends when every parameter is whole, so the all-gather that the next forward would hide shows once per turn.
"""

import gc
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hardware
from configurator import NonNegativeInt, PositiveFloat, PositiveInt, configure
from distributed import exit_on_wrong_input, finish, launched, start
from model import GPT, GPTConfig
from zero import ShardedOptimizer, checkpoint
from zero.build import build, clip_grad_norm_
from zero.collectives import broadcast_object, gather_objects
from zero.memory import held_bytes

# -----------------------------------------------------------------------------
what: Literal["time", "memory", "checkpoint"] = "time"
modes = "adamw,torch,sharded"  # of those in MODES below; the first is what the others are compared to
out = ""  # a JSON file for the figures, besides the table
rounds: PositiveInt = 10  # turns of each mode; one more, the first, is not counted
steps_per_turn: PositiveInt = 3
batch_size: PositiveInt = 1  # of each rank
block_size = 1024
n_layer = 12
n_head = 12
n_embd = 768
vocab_size = 50304
bias = False
grad_clip = 1.0
zero_bucket_mb: PositiveFloat = 75.0
device = "auto"
dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
seed: NonNegativeInt = 1337
config = configure(globals())
# -----------------------------------------------------------------------------

ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95)}


def simple(model, groups):
    """The simple scheme: DistributedDataParallel's all-reduce, then ShardedOptimizer's all-gather, nothing overlapped."""
    optimizer = ShardedOptimizer(groups, torch.optim.AdamW, bucket_mb=zero_bucket_mb, fused=True, **ADAMW)
    return DistributedDataParallel(model, gradient_as_bucket_view=True), optimizer


def fsdp2(model, groups):
    """FSDP2 with parameters kept whole between forward and backward, block by block."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return model, torch.optim.AdamW(model.param_groups(0.1), fused=True, **ADAMW)


def built(**flags):
    return lambda model, groups: build(model, groups, bucket_mb=zero_bucket_mb, **flags, **ADAMW)


MODES = {
    "adamw": built(use_zero1=False),
    "torch": built(zero1_impl="torch"),
    "sharded": built(),
    "shard_gradients": built(shard_gradients=True),
    "bfloat16": built(param_dtype="bfloat16"),  # weights in bfloat16, sharded float32 masters
    "simple": simple,
    "fsdp2": fsdp2,
}


def contender(name):
    """A model and its optimizer, of the same weights for every mode."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(block_size, vocab_size, n_layer, n_head, n_embd, 0.0, bias)).to(device)
    contender = MODES[name](model, model.param_groups(0.1))
    torch.manual_seed(seed + dist.get_rank())  # different tokens on each rank
    return contender


def backward(model):
    tokens = torch.randint(vocab_size, (2, batch_size, block_size), device=device)
    with autocast:
        _, loss = model(*tokens)
    loss.backward()


def step(optimizer):
    if grad_clip:
        clip_grad_norm_(optimizer, grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def wait_for_all(optimizer):
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.synchronize()
    if device.type == "cuda":
        torch.cuda.synchronize()


def turn(model, optimizer):
    """Milliseconds per step, and bytes that each rank sent per step, of a few steps. Needs to be called on all ranks."""
    dist.barrier()
    bytes_before, start = loopback_bytes(), time.perf_counter()
    for _ in range(steps_per_turn):
        backward(model)
        step(optimizer)
    wait_for_all(optimizer)
    milliseconds = (time.perf_counter() - start) * 1000 / steps_per_turn
    dist.barrier()
    return milliseconds, (loopback_bytes() - bytes_before) / steps_per_turn / dist.get_world_size()


def loopback_bytes():
    """Bytes that have gone over this machine's loopback interface, or 0 where that cannot be read."""
    path = "/sys/class/net/lo/statistics/tx_bytes"
    if not os.path.exists(path):
        return 0
    with open(path) as file:
        return int(file.read())


def measure_time():
    """Rows of the table: by mode the median time, ratio to the first mode, and bytes. Needs to be called on all ranks."""
    contenders = {name: contender(name) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    sent: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds + 1):
        for name in names:
            milliseconds, bytes_per_step = turn(*contenders[name])
            times[name].append(milliseconds)
            sent[name].append(bytes_per_step)
    rows = []
    for name in names:
        ratios = [time / reference for time, reference in zip(times[name][1:], times[names[0]][1:], strict=True)]
        rows.append(
            {
                "mode": name,
                "ms per step": statistics.median(times[name][1:]),
                "ratio": statistics.median(ratios),
                "MB sent per rank and step": statistics.median(sent[name][1:]) / 1e6,
            }
        )
    return rows


def measure_memory():
    """Rows of the table: by mode the bytes of the fullest rank at points of the second step. Needs to be called on all ranks.

    On a GPU the bytes that its allocator holds, and their peak; on a CPU those of the model and its optimizer, without
    activations, and no peak.
    """
    rows = []
    for name in names:
        gc.collect()  # the mode before
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        model, optimizer = contender(name)
        points = {"after init": bytes_now(optimizer)}
        backward(model)
        step(optimizer)
        wait_for_all(optimizer)
        points["after step"] = bytes_now(optimizer)
        if hasattr(model, "require_backward_grad_sync"):  # a first micro-step, when full gradients are there
            model.require_backward_grad_sync = False
            backward(model)
            model.require_backward_grad_sync = True
        points["between micro-steps"] = bytes_now(optimizer)
        backward(model)
        points["before step"] = bytes_now(optimizer)
        step(optimizer)
        wait_for_all(optimizer)
        if device.type == "cuda":
            points["peak"] = torch.cuda.max_memory_allocated()
        gathered = gather_objects(points)
        rows.append({"mode": name, **{f"{point}, MB": max(each[point] for each in gathered) / 1e6 for point in points}})
        del model, optimizer
    return rows


def measure_checkpoint():
    """Rows of the table: by mode the seconds to consolidate for the first time and in the median of the rounds after it, each
    format's figures, and memory beyond the state itself.

    PyTorch's own way, which takes a minute and is tried once, is the last row where `torch` is among the modes. Needs to
    be called on all ranks.
    """
    rows = []
    for name in [*names, *(["consolidate_state_dict"] if "torch" in names else [])]:
        model, optimizer = contender("torch" if name == "consolidate_state_dict" else name)
        backward(model)
        step(optimizer)
        wait_for_all(optimizer)
        if name == "consolidate_state_dict":
            tries, saved = [consolidation(optimizer, consolidate_pytorch)], {}
        else:
            tries = [consolidation(optimizer, checkpoint.consolidate) for _ in range(rounds + 1)]
            saved = save_and_restore(model, optimizer)
        gathered = gather_objects(max(extra for _, extra in tries))
        times = [seconds for seconds, _ in tries]
        row = {"mode": name, "first, s": times[0], "consolidate, s": statistics.median(times[-rounds:])} | saved
        row |= {"rank 0 extra, MB": gathered[0] / 1e6, "others extra, MB": max(gathered[1:], default=0) / 1e6}
        rows.append(row)
        del model, optimizer
    return rows


def consolidation(optimizer, consolidate):
    """Seconds of a consolidation, and the bytes of memory it took at its peak beyond the state it gave."""
    gc.collect()
    dist.barrier()
    before, begin = reset_peak(), time.perf_counter()
    state = consolidate(optimizer)
    return time.perf_counter() - begin, peak_resident() - before - state_bytes(state)


def consolidate_pytorch(optimizer):
    optimizer.consolidate_state_dict(to=0)
    return optimizer.state_dict() if dist.get_rank() == 0 else None


def save_and_restore(model, optimizer):
    """Each format's seconds and megabytes of a checkpoint on the disk. Needs to be called on all ranks."""
    figures = {}
    for format in checkpoint.FORMATS:
        with tempfile.TemporaryDirectory() as folder:
            folder = broadcast_object(folder)
            writer = checkpoint.CheckpointWriter(folder, format=format)
            values = {"model_args": {}, "config": {}, "iter_num": 1, "best_val_loss": 0.0}
            writer.save(getattr(model, "module", model), optimizer, values)
            dist.barrier()
            begin = time.perf_counter()
            path = f"{folder}/ckpt.pt"
            loaded = checkpoint.load(path)
            checkpoint.restore(optimizer, loaded["optimizer"], checkpoint.chunk_reader(path, loaded))
            figures[f"{format}: load, s"] = time.perf_counter() - begin
            for report in writer.outcomes():
                figures |= {f"{format}: write, s": report.write_s, f"{format}: MB": report.nbytes / 1e6}
            dist.barrier()
    return figures


def state_bytes(state):
    if state is None:
        return 0
    return sum(value.nbytes for entry in state["state"].values() for value in entry.values() if isinstance(value, torch.Tensor))


def reset_peak():
    """Have the kernel forget this process's peak of resident memory; the bytes that are resident now."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return peak_resident()


def peak_resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))


def decimals(column):
    return 1 if column.startswith("ms") or "MB" in column else 3


def bytes_now(optimizer):
    if device.type == "cuda":
        return torch.cuda.memory_allocated()
    return sum(held_bytes(optimizer).values())


MEASURES = {"time": measure_time, "memory": measure_memory, "checkpoint": measure_checkpoint}
launch = launched()
names = modes.split(",")
with exit_on_wrong_input():
    if not launch.distributed:
        raise ValueError("bench.py compares several ranks; start it with torchrun --standalone --nproc_per_node=2 bench.py")
    if unknown := [name for name in names if name not in MODES]:
        raise ValueError(f"modes={modes}: {', '.join(unknown)} is not one of {', '.join(MODES)}")
    GPTConfig(block_size, vocab_size, n_layer, n_head, n_embd, 0.0, bias)
    if out:
        os.makedirs(os.path.dirname(out) or ".", exist_ok=True)
        open(out, "a").close()
    if what == "checkpoint" and not os.path.exists("/proc/self/clear_refs"):
        raise ValueError("what=checkpoint measures memory as Linux does; run it there")
    if what == "memory" and "fsdp2" in names:
        raise ValueError("what=memory cannot see into fsdp2, whose tensors are parts of others; leave it out of --modes")
    device, dtype = hardware.resolve(device, dtype)
    device = start(launch, device)
autocast = nullcontext() if dtype == "float32" else torch.amp.autocast(device.type, hardware.DTYPES[dtype])

rows = MEASURES[what]()
if dist.get_rank() == 0:
    with torch.device("meta"):
        parameters = GPT(GPTConfig(block_size, vocab_size, n_layer, n_head, n_embd, 0.0, bias)).num_params()
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    title = f"{parameters / 1e6:.1f}M parameters, {dist.get_world_size()} ranks, {dist.get_backend()}, {where}, {dtype}"
    if what == "memory" and device.type == "cpu":
        title += "; of the model and its optimizer, without activations"
    print(title)
    widths = {column: max(10, len(column) + 2) for column in rows[0]}
    widths["mode"] = 2 + max(len(row["mode"]) for row in rows)
    print("".join(f"{column:>{width}}" for column, width in widths.items()))
    for row in rows:
        cells = {column: row.get(column, "") for column in widths}
        cells = {column: cell if isinstance(cell, str) else f"{cell:.{decimals(column)}f}" for column, cell in cells.items()}
        print("".join(f"{cells[column]:>{width}}" for column, width in widths.items()))
    if out:
        with open(out, "w") as file:
            figures = {"what": title, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "command": sys.argv}
            json.dump({**figures, "config": config, "rows": rows}, file, indent=1)
finish()
