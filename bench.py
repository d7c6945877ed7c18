"""Compare the optimizers in one process group: time, bytes sent and memory of each one and of plain AdamW.

Time of GPT-2 124M on two CPU ranks with one thread each. It takes about five minutes:
    $ torchrun --standalone --nproc_per_node=2 bench.py --modes=adamw,torch,sharded --block_size=64 --batch_size=1

Bytes sent by a 10.7M-parameter model on four CPU ranks:
    $ torchrun --standalone --nproc_per_node=4 bench.py --modes=adamw,torch,sharded,bfloat16 --n_layer=6 --n_head=6 \\
        --n_embd=384 --vocab_size=65 --block_size=64 --batch_size=1

Memory of GPT-2 XL at each point of a step, on two ranks. The ranks share a GPU, or each rank has its own GPU:
    $ torchrun --standalone --nproc_per_node=2 bench.py --what=memory --modes=adamw,torch,sharded,shard_gradients,bfloat16 \\
        --n_layer=48 --n_head=25 --n_embd=1600 --block_size=1024 --batch_size=1 --out=results/gpt2-xl-memory.json

Time and memory to save and restore GPT-2 124M:
    $ torchrun --standalone --nproc_per_node=2 bench.py --what=checkpoint --modes=sharded,torch --block_size=64 --batch_size=1

On a noisy machine, compare only measurements that were taken close together. For this reason the modes take turns when the
time is measured. The column to read is "ratio": the time of a mode is divided by the time of the first mode in the same
round, and the ratio is the median over all rounds. A turn ends when every all-gather has ended. So once per turn, the time
includes an all-gather that would normally overlap with the next forward.
"""

import gc
import json
import os
import statistics
import sys
import tempfile
import time
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hardware
from configurator import PositiveFloat, PositiveInt, configure
from distributed import broadcast_object, exit_on_wrong_input, finish, gather_objects, is_rank_0, launched, start
from model import GPT, GPTConfig
from zero import ShardedOptimizer, checkpoint
from zero.build import build, clip_grad_norm_
from zero.memory import held_bytes

# -----------------------------------------------------------------------------
what: Literal["time", "memory", "checkpoint"] = "time"
modes = "adamw,torch,sharded"  # names from MODES below; the others are compared to the first one
out = ""  # path of a JSON file that also receives the figures
rounds: PositiveInt = 10  # turns of each mode; one more turn comes first and is not counted
steps_per_turn: PositiveInt = 3
batch_size: PositiveInt = 1  # sequences per rank
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
seed = 1337
config = configure(globals())
# -----------------------------------------------------------------------------

ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95)}


def simple(model, groups):
    """The simple scheme: DistributedDataParallel's all-reduce, then ShardedOptimizer's all-gather, which overlaps nothing."""
    optimizer = ShardedOptimizer(groups, torch.optim.AdamW, bucket_mb=zero_bucket_mb, fused=True, **ADAMW)
    return DistributedDataParallel(model, gradient_as_bucket_view=True), optimizer


def fsdp2(model, groups):
    """FSDP2, applied block by block. Parameters stay unsharded between forward and backward."""
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
    """Returns a model and its optimizer. All modes start from the same weights."""
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
    """Run a few steps and return milliseconds per step and bytes sent per rank and step. Needs to be called on all ranks."""
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
    """Returns the bytes sent over the loopback interface of this machine, or 0 if the count cannot be read."""
    path = "/sys/class/net/lo/statistics/tx_bytes"
    if not os.path.exists(path):
        return 0
    with open(path) as file:
        return int(file.read())


def measure_time():
    """Returns one table row per mode: median time, ratio to the first mode, bytes sent. Needs to be called on all ranks."""
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
    """Returns one table row per mode: bytes at several points of the first two steps. Needs to be called on all ranks.

    Each figure is the maximum over the ranks. On a GPU it is what the allocator holds, and the peak of that. On a CPU it is
    the model and its optimizer without activations, and there is no peak.
    """
    rows = []
    for name in names:
        gc.collect()  # free the memory of the previous mode
        points = gather_objects(memory_points(name))
        rows.append({"mode": name, **{f"{point}, MB": max(each[point] for each in points) / 1e6 for point in points[0]}})
    return rows


def memory_points(name):
    """Returns this rank's bytes at each point of the first two steps of a mode. Needs to be called on all ranks."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model, optimizer = contender(name)
    points = {"after init": bytes_now(optimizer)}
    backward(model)
    step(optimizer)
    wait_for_all(optimizer)
    points["after step"] = bytes_now(optimizer)
    if hasattr(model, "require_backward_grad_sync"):  # first micro-step: full gradients accumulate
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
    return points


def measure_checkpoint():
    """Returns one table row per mode. Needs to be called on all ranks.

    A row holds the seconds of the first consolidation, the median seconds of the consolidations after it, the seconds and
    megabytes of each checkpoint format, and the memory that consolidation takes in addition to the state itself.

    If `torch` is one of the modes, the last row is PyTorch's own `consolidate_state_dict`. It takes a minute and runs once.
    """
    rows = []
    for name in names:
        model, optimizer = trained(name)
        tries = [consolidation(optimizer, checkpoint.consolidate) for _ in range(rounds + 1)]
        rows.append({"mode": name, **consolidation_figures(tries), **save_and_restore(model, optimizer)})
        del model, optimizer
    if "torch" in names:
        _, optimizer = trained("torch")
        tries = [consolidation(optimizer, consolidate_pytorch)]
        rows.append({"mode": "consolidate_state_dict", **consolidation_figures(tries)})
    return rows


def trained(name):
    """Returns a model and its optimizer after one step, so that there is optimizer state. Needs to be called on all ranks."""
    model, optimizer = contender(name)
    backward(model)
    step(optimizer)
    wait_for_all(optimizer)
    return model, optimizer


def consolidation_figures(tries):
    """Returns the columns for several calls of `consolidation`. Needs to be called on all ranks."""
    first, *rest = (seconds for seconds, _ in tries)
    extra = gather_objects(max(extra for _, extra in tries))  # by rank
    return {
        "first, s": first,
        "consolidate, s": statistics.median(rest or [first]),
        "rank 0 extra, MB": extra[0] / 1e6,
        "others extra, MB": max(extra[1:], default=0) / 1e6,
    }


def consolidation(optimizer, consolidate):
    """Returns the seconds of a consolidation and its peak memory in bytes, without the state that it returned."""
    gc.collect()
    dist.barrier()
    before, begin = reset_peak(), time.perf_counter()
    state = consolidate(optimizer)
    return time.perf_counter() - begin, peak_resident() - before - state_bytes(state)


def consolidate_pytorch(optimizer):
    optimizer.consolidate_state_dict(to=0)
    return optimizer.state_dict() if is_rank_0() else None


def save_and_restore(model, optimizer):
    """Returns the seconds and megabytes of a checkpoint on disk in each format. Needs to be called on all ranks."""
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
    """Reset the peak resident memory of this process and return the bytes that are resident now."""
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
        raise ValueError(f"modes={modes}: {', '.join(unknown) or repr(modes)} is not one of {', '.join(MODES)}")
    GPTConfig(block_size, vocab_size, n_layer, n_head, n_embd, 0.0, bias)
    if out:
        os.makedirs(os.path.dirname(out) or ".", exist_ok=True)
        open(out, "a").close()
    if what == "checkpoint" and not os.path.exists("/proc/self/clear_refs"):
        raise ValueError("what=checkpoint reads memory figures that only Linux has; run it on Linux")
    if what == "memory" and "fsdp2" in names:
        raise ValueError("what=memory cannot measure fsdp2, whose tensors are parts of other tensors; remove it from --modes")
    device, dtype = hardware.resolve(device, dtype)
    device = start(launch, device)
autocast = hardware.autocast(device, dtype)

rows = MEASURES[what]()
if is_rank_0():
    with torch.device("meta"):
        parameters = GPT(GPTConfig(block_size, vocab_size, n_layer, n_head, n_embd, 0.0, bias)).num_params()
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    title = f"{parameters / 1e6:.1f}M parameters, {dist.get_world_size()} ranks, {dist.get_backend()}, {where}, {dtype}"
    if what == "memory" and device.type == "cpu":
        title += "; model and optimizer, without activations"
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
