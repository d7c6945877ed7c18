"""Makes the implementation that the flags choose: (model, parameter groups, flags) -> (model, optimizer)."""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from zero.autocast import autocast_parameters
from zero.checks import check_values
from zero.data_parallel import ShardedDataParallel
from zero.flags import Flags
from zero.gradients import float32_norms
from zero.host_comm import on_all_ranks
from zero.muon import Muon
from zero.optimizer import ShardedOptimizer
from zero.sharded_state import parameters


def optimizer_of(matrices: bool, device_type: str, **adamw: Any) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class of the optimizer and its arguments: those of torch.optim.AdamW, and its fused kernel if there is one.

    `matrices`: whether there are groups with an entry "matrices", for `zero.Muon`.
    """
    return Muon if matrices else torch.optim.AdamW, {**adamw, "fused": device_type in ("cuda", "cpu")}


def build(
    model: torch.nn.Module,
    groups: list[dict[str, Any]],
    flags: Flags = Flags(),
    *,
    device: torch.device | None = None,
    overlap: Iterable[torch.nn.Module] = (),
    autocast: torch.dtype = torch.float32,
    **adamw: Any,
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Wrap `model` for data parallelism and create its optimizer. Needs to be called on all ranks.

    Args:
        groups: parameter groups, as for torch.optim.AdamW. If a group has an entry "matrices", the optimizer is `zero.Muon`.
        flags: see `zero.flags.Flags`.
        device: where `model` will train, with the values of rank 0. Default: where it is. Tensors move one after the other.
        overlap: with `zero1_impl='sharded'`, see `zero.ShardedDataParallel`.
        autocast: the dtype of autocast, for `param_dtype='auto'` on several ranks; float32: forward runs without it.
        **adamw: arguments of torch.optim.AdamW, see `optimizer_of`.

    Return the model to call in the training loop, and the optimizer. Raises ValueError if the model is on the meta device, or
    flags, arguments and device do not fit together.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    implementation = flags.implementation(world_size)
    device = device or next(model.parameters()).device
    optimizer_cls, arguments = optimizer_of(any("matrices" in group for group in groups), device.type, **adamw)
    on_all_ranks(partial(check_values, model))
    if implementation == "sharded":
        if device.type == "mps":  # which has no float64, and was never tried
            raise ValueError("param_dtype and state_dtype do not support device=mps; leave them out, or use --device=cpu")
        for tensor in (*model.parameters(), *model.buffers()):  # ShardedOptimizer moves the trainable parameters
            if not (isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad):
                tensor.data = tensor.data.to(device)
        arguments |= {"registration_order": model.parameters(), "device": device, "options": flags}
        if autocast != torch.float32 and flags.stores_as_autocast(world_size):
            arguments["autocast"] = autocast_parameters(model, autocast)
        sharded = ShardedOptimizer(groups, optimizer_cls, **arguments)
        wrapped = ShardedDataParallel(model, sharded, flags.shard_gradients, overlap=overlap)
        return wrapped, sharded
    model.to(device)
    if implementation == "torch":
        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(groups, optimizer_class=optimizer_cls, **arguments)
    else:
        optimizer = optimizer_cls(groups, **arguments)
    if not dist.is_initialized():
        return model, optimizer
    # gradients are views into DDP's buckets: the all-reduce is the same, but there is no second copy of every gradient
    device_ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True), optimizer


def clip_grad_norm_(optimizer: torch.optim.Optimizer, max_norm: float) -> torch.Tensor:
    """Clip the gradients of all parameters together, with any implementation. Needs to be called on all ranks.

    As `torch.nn.utils.clip_grad_norm_` on full gradients. With `max_norm=math.inf`, it only measures. Return the norm before
    clipping, a scalar.
    """
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.clip_grad_norm_(max_norm)
    params = parameters(optimizer)
    gradients = [param.grad for param in params if param.grad is not None]
    norms = float32_norms(gradients) if gradients else [torch.zeros((), dtype=torch.float32)]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    if max_norm < math.inf:
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    return norm
