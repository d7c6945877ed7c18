"""The one place that chooses how the optimizer state is held: (model, parameter groups, flags) -> (model, optimizer)."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from zero.data_parallel import ShardedDataParallel
from zero.memory import predicted_bytes
from zero.optimizer import GradientNorms, ShardedOptimizer
from zero.partition import parameters, partition

IMPLEMENTATIONS = ("sharded", "torch")
PARAM_DTYPES = {"float32": None, "bfloat16": torch.bfloat16}  # None: as the model comes


def build(
    model: torch.nn.Module,
    groups: list[dict[str, Any]],
    *,
    use_zero1: bool = True,
    zero1_impl: str = "sharded",
    bucket_mb: float = 75,
    shard_gradients: bool = False,
    param_dtype: str = "float32",
    check_reads: bool = False,
    **adamw: Any,
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Wrap `model` for data parallelism and make its AdamW. Needs to be called on all ranks, `model` on its device.

    Args:
        groups: parameter groups, as for torch.optim.AdamW.
        use_zero1: divide the optimizer state among the ranks; a single process has nobody to divide with.
        zero1_impl: 'sharded' is `zero.ShardedOptimizer`, 'torch' is `torch.distributed.optim.ZeroRedundancyOptimizer`.
        bucket_mb: megabytes per bucket of ShardedOptimizer.
        shard_gradients: with 'sharded', let no full gradient outlive its bucket: one reduce-scatter per micro-step.
        param_dtype: 'float32', or with 'sharded' 'bfloat16': weights and gradients in that, float32 masters 1/N per rank.
        check_reads: with 'sharded', a debugging mode: a parameter that is read before it has arrived is nan.
        **adamw: for torch.optim.AdamW; its fused kernel is used where the device has one.

    Returns:
        The model to call in the training loop, and the optimizer.

    Raises:
        ValueError: if `zero1_impl` or `param_dtype` is unknown, flags do not go together, `bucket_mb` is not positive, or
            an argument of AdamW's impossible.
    """
    if zero1_impl not in IMPLEMENTATIONS:
        raise ValueError(f"zero1_impl={zero1_impl!r} is not one of {', '.join(IMPLEMENTATIONS)}")
    if param_dtype not in PARAM_DTYPES:
        raise ValueError(f"param_dtype={param_dtype!r} is not one of {', '.join(PARAM_DTYPES)}")
    device = next(model.parameters()).device
    adamw["fused"] = device.type in ("cuda", "cpu")
    if not dist.is_initialized():
        return model, torch.optim.AdamW(groups, **adamw)
    if dist.get_world_size() > 1 and not (use_zero1 and zero1_impl == "sharded"):
        if param_dtype != "float32":
            raise ValueError(f"param_dtype={param_dtype!r} needs the master weights of use_zero1=True, zero1_impl='sharded'")
        if shard_gradients:
            raise ValueError("shard_gradients=True needs use_zero1=True, zero1_impl='sharded'")
        if check_reads:
            raise ValueError("zero_check_reads=True needs use_zero1=True, zero1_impl='sharded'")
    if use_zero1 and zero1_impl == "sharded" and dist.get_world_size() > 1:
        sharded = ShardedOptimizer(
            groups,
            torch.optim.AdamW,
            bucket_mb=bucket_mb,
            registration_order=model.parameters(),
            param_dtype=PARAM_DTYPES[param_dtype],
            **adamw,
        )
        return ShardedDataParallel(model, sharded, shard_gradients=shard_gradients, check_reads=check_reads), sharded
    optimizer: torch.optim.Optimizer
    if use_zero1 and dist.get_world_size() > 1:
        optimizer = ZeroRedundancyOptimizer(groups, optimizer_class=torch.optim.AdamW, **adamw)
    else:
        optimizer = torch.optim.AdamW(groups, **adamw)
    # gradients as views into DDP's buckets: the same all-reduce, without a second copy of every gradient
    device_ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True), optimizer


def clip_grad_norm_(optimizer: torch.optim.Optimizer, max_norm: float) -> GradientNorms:
    """Clip the gradients of all parameters together, wherever they are; returns norms. Needs to be called on all ranks.

    As `torch.nn.utils.clip_grad_norm_` over full gradients. With `max_norm=math.inf` it only measures.
    """
    if isinstance(optimizer, ShardedOptimizer):
        params, norms = parameters(optimizer.inner), optimizer.gradient_norms()
    else:
        params = [param for param in parameters(optimizer) if param.grad is not None]
        each = torch._foreach_norm([param.grad for param in params if param.grad is not None]) if params else ()
        total = torch.linalg.vector_norm(torch.stack(each)) if params else torch.zeros(())
        norms = GradientNorms(total, dict(zip(params, each, strict=True)))
    # gradients whose norm is not finite stay as they are
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, norms.total.nan_to_num(0.0, 0.0, 0.0))
    return norms


def describe(optimizer: torch.optim.Optimizer, use_zero1: bool) -> str:
    """One line for the console: which implementation, its state bytes per rank, and what plain AdamW would hold."""
    plan = partition(optimizer).plan
    by_rank = [predicted_bytes(plan, rank)["state"] for rank in range(plan.world_size)]
    whole = f"{sum(by_rank) / 1e6:.1f} MB"
    if isinstance(optimizer, ShardedOptimizer | ZeroRedundancyOptimizer):
        name = "sharded" if isinstance(optimizer, ShardedOptimizer) else "torch"
        fullest = f"{max(by_rank) / 1e6:.1f} MB of AdamW state on the fullest rank"
        if plan.has_masters:
            fullest += f", half as much again in float32 master weights of {plan.param_dtype} ones"
        return (
            f"Using ZeRO-1 optimizer state sharding: zero1_impl='{name}' ({type(optimizer).__name__}) over "
            f"{len(by_rank)} ranks, {fullest}; plain AdamW would hold {whole} on each"
        )
    why = " (use_zero1 needs more than one process; start with torchrun)" if use_zero1 else ""
    return f"Using plain AdamW{why}: {whole} of optimizer state on each rank"
