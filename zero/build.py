"""The only module that selects the implementation: (model, parameter groups, flags) -> (model, optimizer)."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from zero.data_parallel import ShardedDataParallel
from zero.flags import PARAM_DTYPES, Flags
from zero.layout import BucketMB
from zero.optimizer import GradientNorms, ShardedOptimizer, float32_norms
from zero.partition import parameters, partition


def build(
    model: torch.nn.Module,
    groups: list[dict[str, Any]],
    *,
    use_zero1: bool = True,
    zero1_impl: str = "sharded",
    bucket_mb: BucketMB = "auto",
    shard_gradients: bool = False,
    param_dtype: str = "float32",
    check_reads: bool = False,
    shard_size: int = 0,
    overlap: bool = False,
    **adamw: Any,
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Wrap `model` for data parallelism and create its AdamW. Needs to be called on all ranks, with `model` on its device.

    Args:
        groups: parameter groups, as for torch.optim.AdamW.
        use_zero1: divide the optimizer state among the ranks. A single process does not divide it.
        zero1_impl: 'sharded' selects `zero.ShardedOptimizer`, 'torch' selects
            `torch.distributed.optim.ZeroRedundancyOptimizer`.
        bucket_mb: megabytes per bucket of ShardedOptimizer. 'auto': chosen by `zero.layout.auto_bucket_mb`.
        shard_gradients: only with 'sharded': no full gradient outlives its bucket. This takes one reduce-scatter per
            micro-step.
        param_dtype: 'float32', or with 'sharded' also 'bfloat16': weights and gradients are bfloat16, and each rank holds
            1/N of the float32 masters.
        check_reads: only with 'sharded' and `overlap`: in each forward, an operation that reads a parameter before it has
            arrived raises an error.
        shard_size: only with 'sharded': number of consecutive ranks that share the state. Each such group of ranks holds a
            replica of the whole state. 0: all ranks share it.
        overlap: with 'sharded', the all-gathers run during the next forward. For models that read parameters through their
            modules, see `zero.ShardedDataParallel`.
        **adamw: arguments of torch.optim.AdamW. Its fused kernel is used if the device has one.

    Returns:
        The model to call in the training loop, and the optimizer.

    Raises:
        ValueError: if `zero1_impl` or `param_dtype` is unknown, flags cannot be combined, `bucket_mb` is neither 'auto' nor
            positive, or `shard_size` or an argument of AdamW is invalid.
    """
    flags = Flags(use_zero1, zero1_impl, bucket_mb, shard_gradients, param_dtype, check_reads, shard_size)
    implementation = flags.implementation(dist.get_world_size() if dist.is_initialized() else 1)
    device = next(model.parameters()).device
    adamw["fused"] = device.type in ("cuda", "cpu")
    if not dist.is_initialized():
        return model, torch.optim.AdamW(groups, **adamw)
    if implementation == "sharded":
        sharded = ShardedOptimizer(
            groups,
            torch.optim.AdamW,
            bucket_mb=bucket_mb,
            shard_size=shard_size,
            registration_order=model.parameters(),
            param_dtype=PARAM_DTYPES[param_dtype],
            **adamw,
        )
        return ShardedDataParallel(model, sharded, shard_gradients, overlap=overlap, check_reads=check_reads), sharded
    optimizer: torch.optim.Optimizer
    if implementation == "torch":
        optimizer = ZeroRedundancyOptimizer(groups, optimizer_class=torch.optim.AdamW, **adamw)
    else:
        optimizer = torch.optim.AdamW(groups, **adamw)
    # gradients are views into DDP's buckets: the all-reduce is the same, but there is no second copy of every gradient
    device_ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True), optimizer


def clip_grad_norm_(optimizer: torch.optim.Optimizer, max_norm: float) -> GradientNorms:
    """Clip the gradients of all parameters together, with any implementation. Needs to be called on all ranks.

    The result is that of `torch.nn.utils.clip_grad_norm_` on full gradients. With `max_norm=math.inf`, the function only
    measures.

    Returns:
        The norms before clipping.
    """
    if isinstance(optimizer, ShardedOptimizer):
        params, norms = parameters(optimizer.inner), optimizer.gradient_norms()
    else:
        params = [param for param in parameters(optimizer) if param.grad is not None]
        each = float32_norms([param.grad for param in params if param.grad is not None]) if params else []
        total = torch.linalg.vector_norm(torch.stack(each)) if params else torch.zeros((), dtype=torch.float32)
        norms = GradientNorms(total, dict(zip(params, each, strict=True)))
    # gradients whose norm is not finite stay unchanged
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, norms.total.nan_to_num(0.0, 0.0, 0.0))
    return norms


def describe(optimizer: torch.optim.Optimizer, use_zero1: bool) -> str:
    """Return one line for the console: the implementation, its state bytes per rank, and the state bytes of plain AdamW."""
    plan = partition(optimizer).plan
    by_rank = [2 * owned for owned in plan.updated_bytes]  # exp_avg and exp_avg_sq
    whole = f"{sum(by_rank) / 1e6:.1f} MB"
    if isinstance(optimizer, ShardedOptimizer | ZeroRedundancyOptimizer):
        name = "sharded" if isinstance(optimizer, ShardedOptimizer) else "torch"
        fullest = f"{max(by_rank) / 1e6:.1f} MB of AdamW state on the fullest rank"
        count = optimizer.comm.replicas if isinstance(optimizer, ShardedOptimizer) else 1
        ranks = f"{len(by_rank)} rank{'s' if len(by_rank) > 1 else ''}"
        replicas = f" in each of {count} groups" if count > 1 else ""
        if plan.has_masters:
            fullest += f", plus half of that in float32 master weights of the {plan.param_dtype} weights"
        return (
            f"Using ZeRO-1 optimizer state sharding: zero1_impl='{name}' ({type(optimizer).__name__}) over "
            f"{ranks}{replicas}, {fullest}; plain AdamW would hold {whole} on each"
        )
    why = " (use_zero1 needs more than one process; start with torchrun)" if use_zero1 else ""
    return f"Using plain AdamW{why}: {whole} of optimizer state on each rank"
