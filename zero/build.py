"""The only module that selects the implementation: (model, parameter groups, flags) -> (model, optimizer)."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from zero.checks import STAYS, WITH_VALUES
from zero.data_parallel import ShardedDataParallel
from zero.flags import Flags
from zero.gradients import GradientNorms, float32_norms
from zero.host_comm import gather_objects, is_rank_0, on_all_ranks
from zero.muon import Muon
from zero.optimizer import ShardedOptimizer
from zero.sharded_state import parameters
from zero.tensors import flattened, is_held, memory_span, set_data, values_on


def optimizer_of(matrices: bool, device_type: str, **adamw: Any) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class of the optimizer and its arguments: those of torch.optim.AdamW, and its fused kernel if there is one.

    Args:
        matrices: whether there are groups with an entry "matrices", for `zero.Muon`.
    """
    return Muon if matrices else torch.optim.AdamW, {**adamw, "fused": device_type in ("cuda", "cpu")}


def build(
    model: torch.nn.Module,
    groups: list[dict[str, Any]],
    flags: Flags = Flags(),
    *,
    device: torch.device | None = None,
    overlap: bool = False,
    **adamw: Any,
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Wrap `model` for data parallelism and create its optimizer. Needs to be called on all ranks.

    Args:
        groups: parameter groups, as for torch.optim.AdamW. If a group has an entry "matrices", the optimizer is `zero.Muon`.
        flags: see `zero.flags.Flags`.
        device: where `model` will train. Default: where it is. Its tensors move there one after the other. The values are those
            of rank 0; on other ranks, the model may be on the meta device, if its tensors are parameters and buffers, and if
            its construction draws no random numbers for anything else.
        overlap: with `zero1_impl='sharded'`, the all-gathers run during the next forward. For models that read parameters
            through their modules, see `zero.ShardedDataParallel`.
        **adamw: arguments of torch.optim.AdamW, see `optimizer_of`.

    Returns:
        The model to call in the training loop, and the optimizer.

    Raises:
        ValueError: if flags cannot be combined, or if `bucket_mb`, `shard_size` or an argument of AdamW is invalid.
    """
    implementation = flags.implementation(dist.get_world_size() if dist.is_initialized() else 1)
    device = device or next(model.parameters()).device
    optimizer_cls, arguments = optimizer_of(any("matrices" in group for group in groups), device.type, **adamw)
    move(model, device, trainable=implementation != "sharded")
    if not dist.is_initialized():
        return model, optimizer_cls(groups, **arguments)
    if implementation == "sharded":
        sharded = ShardedOptimizer(
            groups,
            optimizer_cls,
            shard_size=flags.shard_size,
            registration_order=model.parameters(),
            device=device,
            **flags.options,
            **arguments,
        )
        wrapped = ShardedDataParallel(model, sharded, flags.shard_gradients, overlap=overlap)
        return wrapped, sharded
    optimizer: torch.optim.Optimizer
    if implementation == "torch":
        optimizer = ZeroRedundancyOptimizer(groups, optimizer_class=optimizer_cls, **arguments)
    else:
        optimizer = optimizer_cls(groups, **arguments)
    # gradients are views into DDP's buckets: the all-reduce is the same, but there is no second copy of every gradient
    device_ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True), optimizer


def move(model: torch.nn.Module, device: torch.device, trainable: bool) -> None:
    """Move a model to a device, tensor by tensor. Needs to be called on all ranks.

    If it is on the meta device on some ranks, buffers and frozen parameters get the values of rank 0.

    Args:
        trainable: move also the trainable parameters, from the meta device without values. ShardedOptimizer moves them itself.

    Raises:
        ValueError: if the model is on the meta device and has tensors that would not get the values of rank 0.
    """

    def check() -> bool:
        if device.type == "meta":
            raise ValueError("the model is on the meta device; device=... says where it will train")
        is_meta = _check_meta(model)
        if is_meta and is_rank_0():
            raise ValueError("the model is on the meta device; rank 0 needs its values")
        return is_meta

    some_are_meta = any(gather_objects(on_all_ranks(check)))
    for tensor in (*model.parameters(), *model.buffers()):
        is_trained = isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad
        if trainable or not is_trained:
            set_data(tensor, values_on(device, tensor))
        if some_are_meta and not is_trained and tensor.numel():
            dist.broadcast(flattened(tensor.data, tensor), 0)


def _check_meta(module: torch.nn.Module) -> bool:
    """Return whether a module has tensors on the meta device.

    Raises ValueError for those that would not get the values of rank 0, or not keep them.
    """
    names = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    spans: dict[int, dict[str, tuple[int, int]]] = {}  # by storage and name
    for prefix, part in module.named_modules():
        for key, value in vars(part).items():
            for tensor in tree_leaves(value):
                if not isinstance(tensor, torch.Tensor) or not tensor.is_meta:
                    continue
                if (name := names.get(id(tensor))) is None:
                    where = f"{prefix}.{key}".lstrip(".")
                    raise ValueError(f"{where} is neither a parameter nor a buffer and gets no values; {WITH_VALUES}")
                if is_held(tensor) or tensor.grad is not None:
                    raise ValueError(f"there are views, results or a gradient of {name}, {STAYS}")
                start, stop = memory_span(tensor)
                in_storage = spans.setdefault(tensor.untyped_storage()._cdata, {})
                for other, (begin, end) in in_storage.items():
                    if other != name and start < end and begin < stop:
                        raise ValueError(f"{other} and {name} share memory, {STAYS}")
                in_storage[name] = start, stop
    return bool(spans)


def clip_grad_norm_(optimizer: torch.optim.Optimizer, max_norm: float) -> GradientNorms:
    """Clip the gradients of all parameters together, with any implementation. Needs to be called on all ranks.

    The result is that of `torch.nn.utils.clip_grad_norm_` on full gradients. With `max_norm=math.inf`, the function only
    measures. Return the norms before clipping.
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
