"""Optimizer state that no longer knows how it was sharded: gather the whole of it on rank 0, and restore it anywhere.

Whatever the implementation and the world size, `consolidate` gives on rank 0 exactly what the `state_dict()` of a
single, unsharded optimizer would hold, and `restore` loads that into any implementation at any world size. State tensors
travel flat, a few megabytes at a time, on CPUs straight from where they lie to where they belong, so that consolidating
takes no memory but the state's. `ZeroRedundancyOptimizer.consolidate_state_dict`, which pickles whole states to every rank, is
not used.

Where the whole is too much for rank 0, `local_chunks` gives what each rank has to write itself. This module does not know of
files: `restore` is given a function that reads chunks.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from zero.collectives import cpu_group
from zero.layout import Slice
from zero.optimizer import flattened, hyperparameters, shaped
from zero.partition import Partition, packed_groups, partition

_MESSAGE_BYTES = 25_000_000
_IN_FLIGHT = 2  # messages at a time
# how this machine runs the update, not what the update is: taken from the running optimizer, never from a file
_MACHINE_FLAGS = ("fused", "foreach", "capturable", "differentiable")
# tensors that torch.optim keeps once per parameter: the step counter of Adam and most others, NAdam's product, ASGD's two rates
_PER_PARAMETER = ("step", "mu_product", "eta", "mu")
_ADAMS, _ADAM_KEYS = (torch.optim.Adam, torch.optim.AdamW), ("step", "exp_avg", "exp_avg_sq")


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or does not belong to this model; the message names the file or the entry."""


class TensorChunk(NamedTuple):
    """Elements `start:start + len(elements)` of one flattened tensor of a checkpoint."""

    name: str
    numel: int  # of the whole tensor
    start: int
    elements: torch.Tensor  # (stop - start,)

    @classmethod
    def of_whole(cls, name: str, tensor: torch.Tensor) -> Self:
        """All of a tensor, as one chunk."""
        return cls(name, tensor.numel(), 0, tensor.detach().reshape(-1))


class _Message(NamedTuple):
    """What one message carries: elements `start:stop` of one state tensor of the rank's slice number `position`."""

    position: int
    key: str
    dtype: torch.dtype
    start: int
    stop: int


class _Transfer(NamedTuple):
    """A message in flight. Until `work` is done, `elements` may be neither read nor written."""

    work: Any  # dist.Work; torch declares that isend may return None, outside of the group
    elements: torch.Tensor  # (stop - start,) on the CPU: a GPU may have no room left, and NCCL a communicator per pair


# What a rank holds, without the tensors: for each of its slices {key: dtype of a per-element tensor, or the value}
_Metadata = list[dict[str, Any]]


def consolidate(optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """AllGatherWork the whole optimizer state on rank 0. Needs to be called on all ranks.

    Returns:
        On rank 0 of the optimizer's process group: `{"state": ..., "param_groups": ...}` as the unsharded optimizer's
        `state_dict()` would give it, all tensors copies on the CPU. Elsewhere: None.
    """
    return _gather_optimizer(partition(optimizer))


def model_state_dict(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor] | None:
    """The model's whole `state_dict()` on rank 0, in the precision of the updates. Needs to be called on all ranks.

    Returns:
        On rank 0 copies on the CPU, each with storage of its own, tied entries tied; float32 masters in place of weights
        that are kept in less. Elsewhere: None.
    """
    return _gather_model(model, partition(optimizer))


def full_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """What `model_state_dict` and `consolidate` give, as "model" and "optimizer". Needs to be called on all ranks."""
    part = partition(optimizer)
    state = {"model": _gather_model(model, part), "optimizer": _gather_optimizer(part)}
    return state if part.receives else None


def local_chunks(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[TensorChunk], dict[str, Any] | None]:
    """What `full_state` would gather, left where it is. Needs to be called on all ranks.

    Returns:
        This rank's chunks, as views: the state and the (master) weights of the slices it owns, on rank 0 also whatever of
        the model nobody owns. And on rank 0 what `full_state` gives, with tensors on the meta device in place of those in
        chunks; elsewhere None. A chunk has the name that its tensor has there, joined by dots.
    """
    part = partition(optimizer)
    if part.replicated and not part.receives:
        return [], None
    part.update_masters()
    held = model.state_dict(keep_vars=True)
    names = {id(tensor): f"model.{name}" for name, tensor in reversed(held.items())}  # of tied ones the first
    chunks = _chunks_of_slices(part, names)
    metadata = _gather_metadata(_local_metadata(part, part.states), part)
    if not part.receives:
        return chunks, None
    owned = {id(part.params[piece.param]) for slices in part.slices for piece in slices}
    for key, tensor in {id(tensor): tensor for tensor in held.values()}.items():
        if key not in owned and isinstance(tensor, torch.Tensor):  # the rest is of get_extra_state()
            chunks.append(TensorChunk.of_whole(names[key], tensor))
    optimizer_state = {"state": _allocate(part, metadata, device="meta"), "param_groups": packed_groups(optimizer)}
    return chunks, {"model": _on_meta_device(held, part), "optimizer": optimizer_state}


def restore(
    optimizer: torch.optim.Optimizer,
    state_dict: dict[str, Any],
    read_chunks: Callable[[list[TensorChunk]], None] | None = None,
) -> None:
    """Load an unsharded optimizer's state; each rank takes its slices. Needs to be called on all ranks.

    Hyperparameters come from `state_dict`, but for the choice of kernel (`fused`, `foreach`, ...), which stays as it is;
    `step` counters land where that choice wants them (https://github.com/pytorch/pytorch/issues/124133).
    `state_dict` is only read; nothing in the optimizer aliases it.

    Args:
        state_dict: what `consolidate` gave, or the `state_dict()` of an unsharded optimizer.
        read_chunks: fills the elements of chunks. Where tensors in `state_dict` are on the meta device, each rank has it
            read the elements of its slices.

    Raises:
        CheckpointError: if its groups or the shapes of its tensors are not those of this optimizer's parameters.
    """
    if state_dict is None:
        raise CheckpointError("the whole state is needed on every rank, and `consolidate` gives it to rank 0: save and load it")
    part = partition(optimizer)
    _check_groups(state_dict["param_groups"], optimizer)
    _check_state(state_dict["state"], part)
    states, chunks = _local_states(state_dict["state"], part)
    if chunks:
        if read_chunks is None:
            raise CheckpointError("the state lies in shards; give restore what zero.checkpoint.chunk_reader returns for them")
        read_chunks(chunks)
    inner_groups = packed_groups(part.inner)
    for saved, group, inner_group in zip(state_dict["param_groups"], optimizer.param_groups, inner_groups, strict=True):
        for key, value in hyperparameters(saved).items():
            if key not in _MACHINE_FLAGS:
                group[key] = inner_group[key] = value
    part.inner.load_state_dict({"state": states, "param_groups": inner_groups})


# -- gather ------------------------------------------------------------------------------------------------------------


def _gather_optimizer(part: Partition) -> dict[str, Any] | None:
    if part.replicated and not part.receives:
        return None
    whole = _gather(part, part.states)
    return None if whole is None else {"state": whole, "param_groups": packed_groups(part.optimizer)}


def _gather_model(model: torch.nn.Module, part: Partition) -> dict[str, torch.Tensor] | None:
    masters = {}
    if part.plan.has_masters:
        part.update_masters()
        whole = _gather(part, [{"master": local.data} for local in part.locals])
        if whole is not None:
            masters = {id(part.params[number]): state["master"] for number, state in whole.items()}
    held = model.state_dict(keep_vars=True)
    if not part.receives:
        return None
    copies = dict(masters)
    for tensor in held.values():
        if not isinstance(tensor, torch.Tensor):  # of get_extra_state()
            copies[id(tensor)] = copy.deepcopy(tensor)
        elif id(tensor) not in copies:
            copies[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return {name: copies[id(tensor)] for name, tensor in held.items()}


def _gather(part: Partition, states: list[dict[str, Any]]) -> dict[int, dict[str, Any]] | None:
    """What every rank has for each of its slices, put together on rank 0 by parameter. Needs to be called on all ranks.

    Args:
        states: for each slice of this rank tensors that hold a number per element, and any other values.
    """
    metadata = _gather_metadata(_local_metadata(part, states), part)
    group = cpu_group(part.process_group) if len(part.slices) > 1 else None
    in_flight: deque[_Transfer] = deque()
    if part.rank != 0:
        for message in _messages(part.slices[part.rank], metadata[0]):
            elements = _elements(part, states, message).cpu()
            _enqueue(in_flight, _Transfer(dist.isend(elements, group_dst=0, group=group), elements))
        _drain(in_flight)
        return None
    whole = _allocate(part, metadata, device="cpu")
    for rank, (slices, held) in enumerate(zip(part.slices, metadata, strict=True)):
        for message in _messages(slices, held):
            piece = slices[message.position]
            flat = flattened(whole[piece.param][message.key], part.params[piece.param])
            place = flat[piece.start + message.start : piece.start + message.stop]
            if rank == 0:
                place.copy_(_elements(part, states, message))
            else:
                _enqueue(in_flight, _Transfer(dist.irecv(place, group_src=rank, group=group), place))
    _drain(in_flight)
    return whole


def _local_metadata(part: Partition, states: list[dict[str, Any]]) -> _Metadata:
    return [
        {key: value.dtype if _is_per_element(key, value, local) else _to_cpu(value) for key, value in state.items()}
        for state, local in zip(states, part.locals, strict=True)
    ]


def _gather_metadata(metadata: _Metadata, part: Partition) -> list[_Metadata]:
    """Every rank's metadata on rank 0, this rank's own elsewhere. Needs to be called on all ranks."""
    if len(part.slices) == 1:
        return [metadata]
    gathered: list[Any] | None = [None] * len(part.slices) if part.rank == 0 else None
    dist.gather_object(metadata, gathered, group_dst=0, group=cpu_group(part.process_group))
    return gathered if gathered is not None else [metadata]


def _allocate(part: Partition, metadata: list[_Metadata], device: str) -> dict[int, dict[str, Any]]:
    """The whole state by parameter, with uninitialized tensors for what there is per element."""
    whole: dict[int, dict[str, Any]] = {}
    for slices, held in zip(part.slices, metadata, strict=True):
        for piece, entries in zip(slices, held, strict=True):
            for key, entry in entries.items():
                state = whole.setdefault(piece.param, {})
                if not isinstance(entry, torch.dtype):
                    state[key] = entry
                elif key not in state:
                    param = part.params[piece.param]
                    state[key] = shaped(torch.empty(param.numel(), dtype=entry, device=device), param)
    return dict(sorted(whole.items()))


def _messages(slices: list[Slice], metadata: _Metadata) -> Iterator[_Message]:
    """Everything a rank holds per element, cut into messages of at most `_MESSAGE_BYTES`.

    Sender and receiver both derive the messages from the metadata, so only elements have to be sent.
    """
    for position, (piece, entries) in enumerate(zip(slices, metadata, strict=True)):
        for key, dtype in entries.items():
            if isinstance(dtype, torch.dtype):
                step = max(1, _MESSAGE_BYTES // dtype.itemsize)
                for start in range(0, piece.numel, step):
                    yield _Message(position, key, dtype, start, min(piece.numel, start + step))


def _elements(part: Partition, states: list[dict[str, Any]], message: _Message) -> torch.Tensor:
    """The elements of a message, (stop - start,), from the states of this rank's slices."""
    value, local = states[message.position][message.key].detach(), part.locals[message.position]
    return flattened(value, local)[message.start : message.stop]


def _enqueue(in_flight: deque[_Transfer], transfer: _Transfer) -> None:
    in_flight.append(transfer)
    _drain(in_flight, leave=_IN_FLIGHT)


def _drain(in_flight: deque[_Transfer], leave: int = 0) -> None:
    """Finish the first transfers, until `leave` are left."""
    while len(in_flight) > leave:
        in_flight.popleft().work.wait()


# -- chunks ------------------------------------------------------------------------------------------------------------


def _chunks_of_slices(part: Partition, names: dict[int, str]) -> list[TensorChunk]:
    """The (master) weights and the state of this rank's slices.

    Args:
        names: of the model's tensors, by id.
    """
    chunks = []
    for piece, local, state in zip(part.slices[part.rank], part.locals, part.states, strict=True):
        param = part.params[piece.param]
        if local is not param:  # a whole parameter may have any strides
            _check_contiguous(piece.param, param)
        if id(param) in names:
            chunks.append(TensorChunk(names[id(param)], param.numel(), piece.start, local.detach().reshape(-1)))
        for key, value in state.items():
            if _is_per_element(key, value, local):
                name = _state_name(piece.param, key)
                chunks.append(TensorChunk(name, param.numel(), piece.start, value.detach().reshape(-1)))
    return chunks


def _on_meta_device(held: dict[str, Any], part: Partition) -> dict[str, Any]:
    """A model's state dict with tensors on the meta device, of the dtype of the updates; tied ones stay tied."""
    trainable = [number for number, spec in enumerate(part.plan.params) if spec.requires_grad]
    dtypes = {id(part.params[number]): part.plan.update_dtype(number) for number in trainable}
    meta = {
        id(tensor): torch.empty(tensor.shape, dtype=dtypes.get(id(tensor), tensor.dtype), device="meta")
        for tensor in held.values()
        if isinstance(tensor, torch.Tensor)
    }
    return {name: meta.get(id(value), value) for name, value in held.items()}


def _check_contiguous(number: int, param: torch.Tensor) -> None:
    """A stored chunk is a range of elements in the order of the indices, a slice one in the order of memory."""
    if not param.is_contiguous():
        raise CheckpointError(
            f"parameter {number} has strides {param.stride()}; shards hold contiguous parameters, the consolidated format any"
        )


def _state_name(number: int, key: str) -> str:
    """The name of the chunks of a state tensor; `number` counts through all of the optimizer's parameters."""
    return f"optimizer.state.{number}.{key}"


# -- restore -----------------------------------------------------------------------------------------------------------


def _check_groups(saved_groups: list[dict[str, Any]], optimizer: torch.optim.Optimizer) -> None:
    """Refuse groups that are not those of this optimizer."""
    lengths = [len(group["params"]) for group in optimizer.param_groups]
    saved_lengths = [len(group["params"]) for group in saved_groups]
    if lengths != saved_lengths:
        raise CheckpointError(f"the saved optimizer has {saved_lengths} parameters in its groups, this one {lengths}")
    for saved, group in zip(saved_groups, optimizer.param_groups, strict=True):
        for key, value in hyperparameters(saved).items():
            if key in group and key not in _MACHINE_FLAGS and not _is_same_kind(value, group[key]):
                raise CheckpointError(f"the saved optimizer has {key}={value!r}, this one {key}={group[key]!r}")


def _check_state(saved: dict[int, dict[str, Any]], part: Partition) -> None:
    """Refuse state that does not fit the parameters."""
    for number, entries in saved.items():
        if not 0 <= number < len(part.params):
            raise CheckpointError(f"there is saved state of parameter {number}, but there are {len(part.params)}")
        if isinstance(part.inner, _ADAMS) and not (keys := entries.keys()) >= set(_ADAM_KEYS):
            raise CheckpointError(f"saved state of parameter {number} is {', '.join(keys)} instead of {', '.join(_ADAM_KEYS)}")
        for key, value in entries.items():
            param = part.params[number]
            if not _fits(key, value, param, part.plan.has_whole_parameters):
                shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                raise CheckpointError(
                    f"saved state {key!r} of parameter {number} has shape {shape}, the parameter {tuple(param.shape)}"
                )


def _local_states(saved: dict[int, dict[str, Any]], part: Partition) -> tuple[dict[int, dict[str, Any]], list[TensorChunk]]:
    """This rank's part of saved state, by the inner optimizer's numbers, and the chunks of it that have yet to be read."""
    states: dict[int, dict[str, Any]] = {}
    chunks = []
    for position, (piece, local) in enumerate(zip(part.slices[part.rank], part.locals, strict=True)):
        param = part.params[piece.param]
        for key, value in saved.get(piece.param, {}).items():
            own = _own_part(key, value, param, piece, local)
            states.setdefault(position, {})[key] = own
            if isinstance(value, torch.Tensor) and value.is_meta:
                if local is not param:
                    _check_contiguous(piece.param, param)
                start = piece.start if _is_per_element(key, value, param) else 0
                chunks.append(TensorChunk(_state_name(piece.param, key), value.numel(), start, own.view(-1)))
    return states, chunks


def _own_part(key: str, value: Any, param: torch.Tensor, piece: Slice, local: torch.Tensor) -> Any:
    """This rank's part of one saved entry, shaped as the inner optimizer holds it; a copy, or uninitialized if on meta."""
    if isinstance(value, torch.Tensor) and value.is_meta:
        return torch.empty(local.shape if _is_per_element(key, value, param) else value.shape, dtype=value.dtype)
    if _is_per_element(key, value, param):
        return shaped(flattened(value, param)[piece.start : piece.stop].clone(), local)
    return value.clone() if isinstance(value, torch.Tensor) else value


def _fits(key: str, value: Any, param: torch.Tensor, whole: bool) -> bool:
    """Whether state may have this shape: the parameter's, or with whole parameters that of its rows or columns."""
    if key in _PER_PARAMETER:
        return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    if not isinstance(value, torch.Tensor):
        return key not in _ADAM_KEYS
    factored = value.dim() == param.dim() and all(n in (1, m) for n, m in zip(value.shape, param.shape, strict=True))
    return value.shape == param.shape or (whole and factored)


def _is_same_kind(value: Any, ours: Any) -> bool:
    """Whether a hyperparameter may take the place of ours."""
    if isinstance(ours, list | tuple):
        return isinstance(value, list | tuple) and len(value) == len(ours) and all(map(_is_same_kind, value, ours))
    if isinstance(ours, int | float | torch.Tensor):
        return isinstance(value, int | float | torch.Tensor)
    return True


def _is_per_element(key: str, value: Any, param: torch.Tensor) -> bool:
    return key not in _PER_PARAMETER and isinstance(value, torch.Tensor) and value.shape == param.shape


def _to_cpu(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
