"""The optimizers side by side in one process group: time and bytes per step of each, and the ratio to plain AdamW.

GPT-2 124M on two CPU ranks, a thread each, about five minutes:
    $ torchrun --standalone --nproc_per_node=2 bench.py --modes=adamw,torch,sharded --block_size=64 --batch_size=1

The bytes of a 10.7M-parameter model on four:
    $ torchrun --standalone --nproc_per_node=4 bench.py --modes=adamw,torch,sharded --n_layer=6 --n_head=6 --n_embd=384 \\
        --vocab_size=65 --block_size=64 --batch_size=1

On a noisy machine only what was measured next to each other can be compared, so the modes take turns, and the figure to look
at is the median over the rounds of each mode's time divided by adamw's in the same round. A turn ends when every parameter is
whole, so the all-gather that the next forward would hide shows once per turn.
"""

import os
import statistics
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hardware
from configurator import configure, fail
from model import GPT, GPTConfig
from zero import ShardedOptimizer
from zero.build import build, clip_grad_norm_

# -----------------------------------------------------------------------------
modes = "adamw,torch,sharded"  # of those in MODES below; adamw is what the others are compared to
rounds = 10  # turns of each mode; one more, the first, is not counted
steps_per_turn = 3
batch_size = 1  # of each rank
block_size = 1024
n_layer = 12
n_head = 12
n_embd = 768
vocab_size = 50304
bias = False
grad_clip = 1.0
zero_bucket_mb = 75.0
device = "auto"
dtype = "auto"
seed = 1337
configure(globals())
# -----------------------------------------------------------------------------

ADAMW = {"lr": 1e-4, "betas": (0.9, 0.95)}


def simple(model, groups):
    """The simple scheme: DistributedDataParallel's all-reduce, then ShardedOptimizer's all-gather, nothing overlapped."""
    optimizer = ShardedOptimizer(groups, torch.optim.AdamW, bucket_mb=zero_bucket_mb, fused=True, **ADAMW)
    return DistributedDataParallel(model, gradient_as_bucket_view=True), optimizer


def fsdp2(model, groups):
    """FSDP2 with parameters kept whole between forward and backward, block by block."""
    mesh = init_device_mesh(torch_device.type, (dist.get_world_size(),))
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
    "simple": simple,
    "fsdp2": fsdp2,
}


def turn(model, optimizer):
    """Milliseconds per step, and bytes that each rank sent per step, of a few steps. Needs to be called on all ranks."""
    dist.barrier()
    bytes_before, start = loopback_bytes(), time.perf_counter()
    for _ in range(steps_per_turn):
        tokens = torch.randint(vocab_size, (2, batch_size, block_size), device=torch_device)
        with autocast:
            _, loss = model(*tokens)
        loss.backward()
        if grad_clip:
            clip_grad_norm_(optimizer, grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.synchronize()
    if torch_device.type == "cuda":
        torch.cuda.synchronize()
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


if "RANK" not in os.environ:
    fail("bench.py compares several ranks; start it with torchrun --standalone --nproc_per_node=2 bench.py")
names = modes.split(",")
if unknown := [name for name in names if name not in MODES]:
    fail(f"modes={modes}: {', '.join(unknown)} is not one of {', '.join(MODES)}")
device, dtype = hardware.resolve(device, dtype)
local_rank = int(os.environ["LOCAL_RANK"])
if device == "cuda":
    device = f"cuda:{local_rank % torch.cuda.device_count()}"
    torch.cuda.set_device(device)
torch_device = torch.device(device)
shares_a_gpu = device != "cpu" and int(os.environ["LOCAL_WORLD_SIZE"]) > torch.cuda.device_count()
dist.init_process_group("gloo" if device == "cpu" or shares_a_gpu else "nccl")
if device == "cpu":
    hardware.divide_threads(int(os.environ["LOCAL_WORLD_SIZE"]))
autocast = nullcontext() if dtype == "float32" else torch.amp.autocast(torch_device.type, hardware.DTYPES[dtype])

contenders = {}
for name in names:
    torch.manual_seed(seed)
    model = GPT(GPTConfig(block_size, vocab_size, n_layer, n_head, n_embd, 0.0, bias)).to(torch_device)
    contenders[name] = MODES[name](model, model.param_groups(0.1))
torch.manual_seed(seed + dist.get_rank())  # different tokens on each rank

times = {name: [] for name in names}
sent = {name: [] for name in names}
for _ in range(rounds + 1):
    for name, contender in contenders.items():
        milliseconds, bytes_per_step = turn(*contender)
        times[name].append(milliseconds)
        sent[name].append(bytes_per_step)

if dist.get_rank() == 0:
    print(f"{model.num_params() / 1e6:.1f}M parameters, {dist.get_world_size()} ranks, {dtype}, {rounds} rounds")
    print(f"{'mode':16}{'ms per step':>12}{'ratio':>8}{'MB sent per rank and step':>28}")
    for name in names:
        ratios = [time / reference for time, reference in zip(times[name][1:], times[names[0]][1:], strict=True)]
        print(
            f"{name:16}{statistics.median(times[name][1:]):12.1f}{statistics.median(ratios):8.3f}"
            f"{statistics.median(sent[name][1:]) / 1e6:28.1f}"
        )
del contenders, contender, model  # before the group that they hold
dist.destroy_process_group()
