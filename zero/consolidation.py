"""Optimizer state that no longer knows how it was sharded: the whole of it to rank 0, and back.

Whatever the implementation and the world size, `consolidate` gives on rank 0 exactly what the `state_dict()` of a
single, unsharded optimizer would hold, and `restore` takes that on any implementation at any world size. State tensors
travel flat, a few megabytes at a time; `ZeroRedundancyOptimizer.consolidate_state_dict`, which pickles whole states to
every rank, is not used.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zero.layout import Slice
from zero.optimizer import ShardedOptimizer, hyperparameters
from zero.partition import Partition, packed_groups, parameters, partition

_STAGING_BYTES = 25_000_000  # one message
# how the machine at hand runs the update, not what the update is: kept from the running optimizer, never from a file
_MACHINE_FLAGS = ("fused", "foreach", "capturable", "differentiable")

# tensors that torch.optim keeps once per parameter: Adam's and most others' counter, NAdam's product, ASGD's two rates
_PER_PARAMETER = ("step", "mu_product", "eta", "mu")


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or does not belong to this model; the message names the file or the entry."""


class _Run(NamedTuple):
    """Elements `start:stop` of one state tensor of the rank's slice number `position`."""

    position: int
    key: str
    dtype: torch.dtype
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


# What one rank holds, without the tensors: for each of its slices {key: dtype of a per-element tensor, or the value}
_Inventory = list[dict[str, Any]]


def consolidate(optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Collect the whole optimizer state on rank 0. Needs to be called on all ranks.

    Returns:
        On rank 0 of the optimizer's process group: `{"state": ..., "param_groups": ...}` as the unsharded optimizer's
        `state_dict()` would give it, all tensors copies on the CPU. Elsewhere: None.
    """
    part = partition(optimizer)
    if part.replicated and not _receives(part):
        return None
    whole = _gather(part, parameters(optimizer), [part.inner.state.get(local, {}) for local in parameters(part.inner)])
    return None if whole is None else {"state": whole, "param_groups": packed_groups(optimizer)}


def model_state_dict(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor] | None:
    """The model's whole `state_dict()` on rank 0, in the precision of the updates. Needs to be called on all ranks.

    Returns:
        On rank 0 copies on the CPU, each with storage of its own, tied entries tied; float32 masters in place of weights
        that are kept in less. Elsewhere: None.
    """
    part, params = partition(optimizer), parameters(optimizer)
    masters = {}
    if isinstance(optimizer, ShardedOptimizer) and optimizer.param_dtype is not None:
        whole = _gather(part, params, [{"master": local.data} for local in parameters(part.inner)])
        if whole is not None:
            masters = {id(params[index]): state["master"] for index, state in whole.items()}
    held = model.state_dict(keep_vars=True)
    if not _receives(part):
        return None
    copies: dict[int, torch.Tensor] = masters
    for tensor in held.values():
        if id(tensor) not in copies:
            copies[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return {name: copies[id(tensor)] for name, tensor in held.items()}


def _gather(part: Partition, params: list[torch.Tensor], states: list[dict[str, Any]]) -> dict[int, dict[str, Any]] | None:
    """What every rank has for each of its slices, put together on rank 0 by parameter. Needs to be called on all ranks.

    Args:
        params: the whole parameters.
        states: for each slice of this rank tensors that hold a number per element, and any other values.
    """
    locals_ = parameters(part.inner)
    inventory = [
        {key: value.dtype if _per_element(key, value, local) else _to_cpu(value) for key, value in state.items()}
        for state, local in zip(states, locals_, strict=True)
    ]
    inventories = _gather_inventories(inventory, part)
    wire = _wire_device(params, part)

    if part.rank != 0:
        for message in _messages(part.slices[part.rank], inventory):
            flat = torch.cat([_elements(states, run) for run in message])  # (elements of the message,)
            dist.send(flat.to(wire), group_dst=0, group=part.process_group)
        return None

    whole: dict[int, dict[str, Any]] = {}
    for rank, (slices, held) in enumerate(zip(part.slices, inventories, strict=True)):
        for piece, entries in zip(slices, held, strict=True):
            for key, entry in entries.items():
                state = whole.setdefault(piece.param, {})
                if isinstance(entry, torch.dtype) and key not in state:
                    state[key] = torch.empty(params[piece.param].shape, dtype=entry)
                elif not isinstance(entry, torch.dtype):
                    state[key] = entry
        for message in _messages(slices, held):
            if rank == 0:
                parts = [_elements(states, run) for run in message]
            else:
                flat = torch.empty(sum(run.numel for run in message), dtype=message[0].dtype, device=wire)
                dist.recv(flat, group_src=rank, group=part.process_group)
                parts = flat.split([run.numel for run in message])
            for run, elements in zip(message, parts, strict=True):
                piece = slices[run.position]
                whole[piece.param][run.key].view(-1)[piece.start + run.start : piece.start + run.stop] = elements
    return dict(sorted(whole.items()))


def restore(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Load an unsharded optimizer's state; each rank takes its slices. Needs to be called on all ranks.

    Hyperparameters come from `state_dict`, but for the choice of kernel (`fused`, `foreach`, ...), which stays as it is;
    `step` counters land where that choice wants them (https://github.com/pytorch/pytorch/issues/124133).
    `state_dict` is only read; nothing in the optimizer aliases it.

    Raises:
        CheckpointError: if its groups or the shapes of its tensors are not those of this optimizer's parameters.
    """
    part = partition(optimizer)
    params = parameters(optimizer)
    lengths = [len(group["params"]) for group in optimizer.param_groups]
    saved_lengths = [len(group["params"]) for group in state_dict["param_groups"]]
    if lengths != saved_lengths:
        raise CheckpointError(f"the saved optimizer has {saved_lengths} parameters in its groups, this one {lengths}")
    for index, entries in state_dict["state"].items():
        for key, value in entries.items():
            if isinstance(value, torch.Tensor) and value.dim() and not _fits(value.shape, params[index].shape, part.whole):
                raise CheckpointError(
                    f"saved state {key!r} of parameter {index} has shape {tuple(value.shape)}, "
                    f"the parameter {tuple(params[index].shape)}"
                )
    inner_groups = packed_groups(part.inner)
    for saved, group, inner_group in zip(state_dict["param_groups"], optimizer.param_groups, inner_groups, strict=True):
        for key, value in hyperparameters(saved).items():
            if key not in _MACHINE_FLAGS:
                group[key] = inner_group[key] = value
    inner_state = {}
    for position, (piece, local) in enumerate(zip(part.slices[part.rank], parameters(part.inner), strict=True)):
        if piece.param in state_dict["state"]:
            inner_state[position] = {
                key: _own_part(key, value, params[piece.param], piece, local)
                for key, value in state_dict["state"][piece.param].items()
            }
    part.inner.load_state_dict({"state": inner_state, "param_groups": inner_groups})


def _receives(part: Partition) -> bool:
    """Whether this process is the one that puts everything together."""
    return part.rank == 0 and not (part.replicated and dist.is_initialized() and dist.get_rank() != 0)


def _fits(shape: torch.Size, param_shape: torch.Size, whole: bool) -> bool:
    """Whether state may have this shape: the parameter's, or with whole parameters that of its rows or columns."""
    factored = len(shape) == len(param_shape) and all(n in (1, m) for n, m in zip(shape, param_shape, strict=True))
    return shape == param_shape or (whole and factored)


def _per_element(key: str, value: Any, param: torch.Tensor) -> bool:
    return key not in _PER_PARAMETER and isinstance(value, torch.Tensor) and value.shape == param.shape


def _to_cpu(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def _elements(states: list[dict[str, Any]], run: _Run) -> torch.Tensor:
    """The elements of a run, (run.numel,), out of the states of this rank's slices."""
    return states[run.position][run.key].detach().view(-1)[run.start : run.stop]


def _messages(slices: list[Slice], inventory: _Inventory) -> Iterator[list[_Run]]:
    """Everything a rank holds, cut and packed into messages of one dtype and at most `_STAGING_BYTES`.

    Sender and receiver both derive the messages from the inventory, so nothing but elements has to travel.
    """
    message: list[_Run] = []
    free = 0  # bytes
    for position, (piece, entries) in enumerate(zip(slices, inventory, strict=True)):
        for key, dtype in entries.items():
            if not isinstance(dtype, torch.dtype):
                continue
            start = 0
            while start < piece.numel:
                if message and (free < dtype.itemsize or message[0].dtype != dtype):
                    yield message
                    message = []
                if not message:
                    free = _STAGING_BYTES
                stop = min(piece.numel, start + free // dtype.itemsize)
                message.append(_Run(position, key, dtype, start, stop))
                free -= (stop - start) * dtype.itemsize
                start = stop
    if message:
        yield message


def _gather_inventories(inventory: _Inventory, part: Partition) -> list[_Inventory]:
    """Every rank's inventory on rank 0, this rank's own elsewhere."""
    if len(part.slices) == 1:
        return [inventory]
    gathered = [None] * len(part.slices) if part.rank == 0 else None
    dist.gather_object(inventory, gathered, group_dst=0, group=part.process_group)
    return gathered if gathered is not None else [inventory]


def _wire_device(params: list[torch.Tensor], part: Partition) -> torch.device:
    """Where tensors must lie to be sent: NCCL sends from the GPU, gloo from the CPU."""
    if len(part.slices) > 1 and dist.get_backend(part.process_group) == "nccl":
        return params[0].device
    return torch.device("cpu")


def _own_part(key: str, value: Any, param: torch.Tensor, piece: Slice, local: torch.Tensor) -> Any:
    """This rank's part of one saved state entry, shaped as the inner optimizer holds it; a copy."""
    if _per_element(key, value, param):
        return value.reshape(-1)[piece.start : piece.stop].clone().view(local.shape)
    return value.clone() if isinstance(value, torch.Tensor) else value
