"""Check on this device that every mode computes the weights of DistributedDataParallel and the plain optimizer.

It needs only torch.

Two ranks, which share a GPU or run on the CPU:
    $ torchrun --standalone --nproc_per_node=2 -m benchmarks.parity --backend=gloo

One rank with NCCL goes through the sharded path, which has no other rank to send to, and calls NCCL's collectives on their own:
    $ torchrun --standalone --nproc_per_node=1 -m benchmarks.parity --backend=nccl
"""

from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.contenders import Contender, Setup
from configurator import configure
from distributed import machine
from distributed.exits import exit_on_wrong_input, finish
from distributed.launch import launched
from distributed.ranks import on_rank_0, print0, start
from forecast.modes import MODES, Mode
from model import GPTConfig
from zero import checkpoint

device = "auto"
backend: Literal["auto", "nccl", "gloo"] = "auto"

STEPS, MICRO_STEPS = 5, 2
# On one or two ranks, sums have one order, so the weights are equal bit for bit. Clipping adds up squares in another order.
CLIPPED_TOLERANCE = 1e-2
MUON_CLIPPED_TOLERANCE = 5e-2  # Newton-Schulz in bfloat16 amplifies the difference


def trained_weights(setup: Setup, mode: Mode, steps: int = STEPS) -> torch.Tensor:
    """Return all (master) weights, (number of weights,) float32, on rank 0. Needs to be called on all ranks."""
    contender = Contender(setup, mode).wrap()
    for _ in range(steps):
        contender.step([None] * MICRO_STEPS)
    weights = checkpoint.model_state_dict(contender.module, contender.optimizer) or {}
    return torch.cat([torch.empty(0), *(weight.flatten() for weight in weights.values())])


def check(setup: Setup) -> bool:
    """Print a line per mode and return whether all modes agree with the plain optimizer. Needs to be called on all ranks."""
    before = trained_weights(setup, MODES["adamw"], steps=0)
    plain = {mode.muon: trained_weights(setup, mode) for mode in (MODES["adamw"], MODES["plain_muon"])}
    verdicts = []

    def judge(what: str, weights: torch.Tensor, expected: torch.Tensor, limit: float, of_mean: bool = False) -> None:
        reduce = torch.mean if of_mean else torch.max
        found = on_rank_0(lambda: (reduce((weights - expected).abs()) / reduce((expected - before).abs())).item())
        verdicts.append(found <= limit)  # nan is not
        measured = f"difference {found:.1e}, allowed {limit:.1e}"
        print0(f"{'ok' if verdicts[-1] else 'WRONG':5}  {what:26}  grad_clip={setup.grad_clip:<4}  {measured}")

    for name, mode in MODES.items():
        if mode.tolerance is not None:
            of_clipping = MUON_CLIPPED_TOLERANCE if mode.muon else CLIPPED_TOLERANCE
            limit = max(mode.tolerance, of_clipping if setup.grad_clip else 0.0)
            of_mean = mode.lowers_weights or mode.flags.state_dtype != "float32"
            judge(name, trained_weights(setup, mode), plain[mode.muon], limit, of_mean)
    recomputed = trained_weights(replace(setup, activation_checkpointing=True), MODES["adamw"])
    judge("activation checkpointing", recomputed, plain[False], 0.0)
    return all(verdicts)


def call_collectives(device: torch.device) -> None:
    """Call the collectives of NCCL that buckets use. Needs to be called on all ranks."""
    for dtype in (torch.float32, torch.bfloat16):
        bucket = torch.arange(64 * dist.get_world_size(), device=device).to(dtype)
        shard, gathered = bucket.new_empty(64), torch.empty_like(bucket)
        dist.reduce_scatter_tensor(shard, bucket)
        dist.all_to_all_single(gathered, bucket)
        dist.all_gather_into_tensor(gathered, shard)
        print0(
            f"ok     reduce-scatter, all-to-all, all-gather of {dtype} with {dist.get_backend()}: {gathered.sum().item():.0f}"
        )


def main() -> None:
    config = configure(globals())
    launch = launched()
    with exit_on_wrong_input():
        if not launch.distributed:
            raise ValueError("start it with torchrun --standalone --nproc_per_node=2 -m benchmarks.parity")
        chosen, _ = machine.resolve(config["device"], "float32")
        used = start(launch, chosen, config["backend"])
    print0(f"{launch.world_size} ranks, {dist.get_backend()}, {used.type}, torch {torch.__version__}")
    if dist.get_backend() == "nccl":
        call_collectives(used)
    gpt = GPTConfig(block_size=64, vocab_size=65, n_layer=4, n_head=4, n_embd=128, bias=True)
    setup = Setup(gpt, 4, used, "float32", bucket_mb=0.3, grad_clip=0.0, activation_checkpointing=False, seed=1)
    with sdpa_kernel(SDPBackend.MATH):  # the backward pass of other kernels adds up in a different order each time
        agree = [check(replace(setup, grad_clip=grad_clip)) for grad_clip in (0.0, 0.1)]
    finish(0 if all(agree) else 1)


if __name__ == "__main__":
    main()
