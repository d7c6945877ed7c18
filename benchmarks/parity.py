"""Check on this device that every mode computes the weights of DistributedDataParallel and the plain optimizer.

It needs only torch.

Two ranks, which share a GPU or run on the CPU:
    $ torchrun --standalone --nproc_per_node=2 -m benchmarks.parity --backend=gloo

One rank with NCCL goes through the sharded path, which has no other rank to send to, and calls NCCL's collectives on their own:
    $ torchrun --standalone --nproc_per_node=1 -m benchmarks.parity --backend=nccl
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
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
from model import GPTConfig
from zero import checkpoint

device = "auto"
backend: Literal["auto", "nccl", "gloo"] = "auto"

STEPS, MICRO_STEPS = 5, 2
# Largest difference of a weight, relative to the largest change of a weight. On one or two ranks, sums have one order, so the
# weights are equal bit for bit. Clipping adds up squares in another order, and shard_gradients adds up the micro-steps in
# another order: where a gradient is close to zero, AdamW can make this visible.
LIMITS = {"adamw_in_place": 0.0, "torch": 0.0, "sharded": 0.0, "shard_gradients": 1e-2}
CLIPPED_LIMIT = 1e-2
MUON_CLIPPED_LIMIT = 5e-2  # Newton-Schulz in bfloat16 amplifies the difference
ROUNDED_LIMITS = {"bfloat16": 0.1, "remainder": 0.1, "int8": 0.1}  # of the mean difference, relative to the mean change


def trained_weights(setup: Setup, mode: str, steps: int = STEPS) -> torch.Tensor:
    """Return all (master) weights, (number of weights,) float32, on rank 0. Needs to be called on all ranks."""
    contender = Contender(setup, mode).wrap()
    for _ in range(steps):
        with contender.accumulating():
            for _ in range(MICRO_STEPS - 1):
                contender.forward().backward()
        contender.step()
    weights = checkpoint.model_state_dict(contender.module, contender.optimizer) or {}
    return torch.cat([torch.empty(0), *(weight.flatten() for weight in weights.values())])


def check(setup: Setup) -> bool:
    """Print a line per mode and return whether all modes agree with the plain optimizer. Needs to be called on all ranks."""
    before, after = trained_weights(setup, "adamw", steps=0), trained_weights(setup, "adamw")
    verdicts = []

    def judge(what: str, found: float, limit: float) -> None:
        agrees = found <= limit  # nan does not
        verdicts.append(agrees)
        measured = f"difference {found:.1e}, allowed {limit:.1e}"
        print0(f"{'ok' if agrees else 'WRONG':5}  {what:26}  grad_clip={setup.grad_clip:<4}  {measured}")

    for mode, limit in LIMITS.items():
        differences = (trained_weights(setup, mode) - after).abs()
        found = on_rank_0(partial(_ratio, differences, (after - before).abs(), torch.max))
        judge(mode, found, max(limit, CLIPPED_LIMIT) if setup.grad_clip else limit)
    for mode, limit in ROUNDED_LIMITS.items():
        differences = (trained_weights(setup, mode) - after).abs()
        judge(mode, on_rank_0(partial(_ratio, differences, (after - before).abs(), torch.mean)), limit)
    plain = trained_weights(setup, "plain_muon")
    differences = (trained_weights(setup, "muon") - plain).abs()
    found = on_rank_0(partial(_ratio, differences, (plain - before).abs(), torch.max))
    judge("muon", found, MUON_CLIPPED_LIMIT if setup.grad_clip else 0.0)
    recomputed = trained_weights(replace(setup, activation_checkpointing=True), "adamw")
    differences = (recomputed - after).abs()
    judge("activation checkpointing", on_rank_0(partial(_ratio, differences, (after - before).abs(), torch.max)), 0.0)
    return all(verdicts)


def _ratio(differences: torch.Tensor, changes: torch.Tensor, reduce: Callable[[torch.Tensor], torch.Tensor]) -> float:
    return (reduce(differences) / reduce(changes)).item()


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
