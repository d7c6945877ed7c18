"""Optimizer state that does not depend on its sharding: gather the whole state on rank 0, and restore it at any world size.

For any implementation and any world size, `consolidate` returns on rank 0 exactly what the `state_dict()` of a single,
unsharded optimizer would hold. `restore` loads this into any implementation at any world size. State tensors are sent flat,
in messages of a few megabytes. On CPUs they are sent from their own memory directly into the destination, so consolidation
takes no memory except for the state itself. `ZeroRedundancyOptimizer.consolidate_state_dict`, which sends whole pickled
states to every rank, is not used.

If the whole state is too large for rank 0, `local_chunks` returns the part that each rank has to write itself. This module
does not access files: `restore` takes a function that reads chunks.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from zero.collectives import TAG, cpu_group
from zero.layout import Slice
from zero.optimizer import flattened, hyperparameters, shaped
from zero.partition import Partition, packed_groups, partition

MESSAGE_BYTES = 25_000_000
_IN_FLIGHT = 2  # messages in flight
# these flags select how this machine runs the update, not its result: taken from the running optimizer, never from a file
_MACHINE_FLAGS = ("fused", "foreach", "capturable", "differentiable")
# tensors that torch.optim keeps once per parameter: step counter of Adam and most others, product of NAdam, two rates of ASGD
_PER_PARAMETER = ("step", "mu_product", "eta", "mu")
_ADAMS, _ADAM_KEYS = (torch.optim.Adam, torch.optim.AdamW), ("step", "exp_avg", "exp_avg_sq")


class CheckpointError(ValueError):
    """A checkpoint cannot be read or does not belong to this model. The message names the file or the entry."""


class TensorChunk(NamedTuple):
    """Elements `start:start + len(elements)` of one flattened tensor of a checkpoint."""

    name: str
    numel: int  # of the whole tensor
    start: int
    elements: torch.Tensor  # (number of elements in the chunk,)

    @classmethod
    def of_whole(cls, name: str, tensor: torch.Tensor) -> Self:
        """Return a whole tensor as one chunk."""
        return cls(name, tensor.numel(), 0, tensor.detach().reshape(-1))


class _Message(NamedTuple):
    """The content of one message: elements `start:stop` of one state tensor of the rank's slice number `position`."""

    position: int
    key: str
    dtype: torch.dtype
    start: int
    stop: int


class Transfer(NamedTuple):
    """A message in flight. Until `work` is done, `elements` may be neither read nor written."""

    work: Any  # dist.Work; torch declares that isend may return None, outside of the group
    # (stop - start,) on the CPU: a GPU may have no memory left, and NCCL needs a communicator per pair of ranks
    elements: torch.Tensor


# Metadata of a rank's state, for each of its slices: {key: dtype of a per-element tensor, or the value itself}
_Metadata = list[dict[str, Any]]


def consolidate(optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Gather the whole optimizer state on rank 0. Needs to be called on all ranks.

    Returns:
        On rank 0 of the optimizer's process group: `{"state": ..., "param_groups": ...}`, as in the `state_dict()` of the
        unsharded optimizer. All tensors are copies on the CPU. On other ranks: None.
    """
    return _gather_optimizer(partition(optimizer))


def model_state_dict(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor] | None:
    """Gather the model's whole `state_dict()` on rank 0, in the precision of the updates. Needs to be called on all ranks.

    Returns:
        On rank 0: copies on the CPU, each with its own storage. Tied entries stay tied. Float32 masters replace weights that
        are stored in lower precision. On other ranks: None.
    """
    return _gather_model(model, partition(optimizer))


def full_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Gather the results of `model_state_dict` and `consolidate` on rank 0, as "model" and "optimizer".

    Needs to be called on all ranks.

    Returns:
        On rank 0: the two results. On other ranks: None.
    """
    part = partition(optimizer)
    state = {"model": _gather_model(model, part), "optimizer": _gather_optimizer(part)}
    return state if part.receives else None


def local_chunks(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[TensorChunk], dict[str, Any] | None]:
    """Return the state that `full_state` would gather, but leave it on its ranks. Needs to be called on all ranks.

    Returns:
        First, this rank's chunks, as views: the state and the (master) weights of the slices that it owns. Rank 0 also has
        the tensors of the model that no rank owns. Second, on rank 0 the result of `full_state`, with tensors on the meta
        device in place of the tensors in chunks. On other ranks, the second value is None. The name of a chunk is the path
        of its tensor in this result: its keys, joined by dots.
    """
    part = partition(optimizer)
    if part.replica:
        return [], None
    part.synchronize()
    held = model.state_dict(keep_vars=True)
    names = {id(tensor): f"model.{name}" for name, tensor in reversed(held.items())}  # first name of tied tensors
    chunks = _chunks_of_slices(part, names)
    metadata = _gather_metadata(_local_metadata(part, part.states), part)
    if not part.receives:
        return chunks, None
    owned = {id(part.params[slice_.param]) for slices in part.slices for slice_ in slices}
    for key, tensor in {id(tensor): tensor for tensor in held.values()}.items():
        if key not in owned and isinstance(tensor, torch.Tensor):  # others are from get_extra_state()
            chunks.append(TensorChunk.of_whole(names[key], tensor))
    optimizer_state = {"state": _allocate(part, metadata, device="meta"), "param_groups": packed_groups(optimizer)}
    return chunks, {"model": _on_meta_device(held, part), "optimizer": optimizer_state}


def restore(
    optimizer: torch.optim.Optimizer,
    state_dict: dict[str, Any],
    read_chunks: Callable[[list[TensorChunk]], None] | None = None,
) -> None:
    """Load the state of an unsharded optimizer. Each rank takes its slices. Needs to be called on all ranks.

    Hyperparameters come from `state_dict`, except for the choice of kernel (`fused`, `foreach`, ...), which stays unchanged.
    `step` counters go to the device that this kernel requires (https://github.com/pytorch/pytorch/issues/124133).
    `state_dict` is only read. Nothing in the optimizer aliases it.

    Args:
        state_dict: the result of `consolidate`, or the `state_dict()` of an unsharded optimizer.
        read_chunks: fills the elements of chunks. If tensors in `state_dict` are on the meta device, each rank uses this
            function to read the elements of its slices. It is called on all ranks, also with an empty list.

    Raises:
        CheckpointError: if its groups or the shapes of its tensors do not match this optimizer's parameters.
    """
    if state_dict is None:
        raise CheckpointError("every rank needs the whole state, but `consolidate` returns it on rank 0: save it and load it")
    part = partition(optimizer)
    _check_groups(state_dict["param_groups"], optimizer)
    _check_state(state_dict["state"], part, in_chunks=read_chunks is not None)
    states, chunks = _local_states(state_dict["state"], part)
    if read_chunks is not None:
        read_chunks(chunks)
    elif chunks:
        raise CheckpointError("the state is in shards; restore needs the function from zero.checkpoint.chunk_reader")
    inner_groups = packed_groups(part.inner)
    for saved, group, inner_group in zip(state_dict["param_groups"], optimizer.param_groups, inner_groups, strict=True):
        for key, value in hyperparameters(saved).items():
            if key not in _MACHINE_FLAGS:
                group[key] = inner_group[key] = value
    part.inner.load_state_dict({"state": states, "param_groups": inner_groups})


# -- gather ------------------------------------------------------------------------------------------------------------


def _gather_optimizer(part: Partition) -> dict[str, Any] | None:
    if part.replica:
        return None
    whole = _gather(part, part.states)
    return None if whole is None else {"state": whole, "param_groups": packed_groups(part.optimizer)}


def _gather_model(model: torch.nn.Module, part: Partition) -> dict[str, torch.Tensor] | None:
    part.synchronize()
    if part.replica:
        return None
    masters = {}
    if part.plan.has_masters:
        whole = _gather(part, [{"master": local.data} for local in part.locals])
        if whole is not None:
            masters = {id(part.params[number]): state["master"] for number, state in whole.items()}
    held = model.state_dict(keep_vars=True)
    if not part.receives:
        return None
    copies = dict(masters)
    for tensor in held.values():
        if not isinstance(tensor, torch.Tensor):  # from get_extra_state()
            copies[id(tensor)] = copy.deepcopy(tensor)
        elif id(tensor) not in copies:
            copies[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return {name: copies[id(tensor)] for name, tensor in held.items()}


def _gather(part: Partition, states: list[dict[str, Any]]) -> dict[int, dict[str, Any]] | None:
    """Gather the states of all slices of all ranks on rank 0, by parameter. Needs to be called on all ranks.

    Args:
        states: for each slice of this rank, tensors with one number per element, and any other values.
    """
    metadata = _gather_metadata(_local_metadata(part, states), part)
    group = cpu_group(part.process_group) if len(part.slices) > 1 else None
    in_flight: deque[Transfer] = deque()
    if part.rank != 0:
        for message in _messages(part.slices[part.rank], metadata[0]):
            elements = _elements(part, states, message).cpu()
            enqueue(in_flight, Transfer(dist.isend(elements, group_dst=0, group=group, tag=TAG), elements))
        drain(in_flight)
        return None
    whole = _allocate(part, metadata, device="cpu")
    for rank, (slices, held) in enumerate(zip(part.slices, metadata, strict=True)):
        for message in _messages(slices, held):
            slice_ = slices[message.position]
            flat = flattened(whole[slice_.param][message.key], part.params[slice_.param])
            place = flat[slice_.start + message.start : slice_.start + message.stop]
            if rank == 0:
                place.copy_(_elements(part, states, message))
            else:
                enqueue(in_flight, Transfer(dist.irecv(place, group_src=rank, group=group, tag=TAG), place))
    drain(in_flight)
    return whole


def _local_metadata(part: Partition, states: list[dict[str, Any]]) -> _Metadata:
    return [
        {key: value.dtype if _is_per_element(key, value, local) else _to_cpu(value) for key, value in state.items()}
        for state, local in zip(states, part.locals, strict=True)
    ]


def _gather_metadata(metadata: _Metadata, part: Partition) -> list[_Metadata]:
    """Gather the metadata of all ranks on rank 0. Other ranks get only their own. Needs to be called on all ranks."""
    if len(part.slices) == 1:
        return [metadata]
    gathered: list[Any] | None = [None] * len(part.slices) if part.rank == 0 else None
    dist.gather_object(metadata, gathered, group_dst=0, group=cpu_group(part.process_group))
    return gathered if gathered is not None else [metadata]


def _allocate(part: Partition, metadata: list[_Metadata], device: str) -> dict[int, dict[str, Any]]:
    """Return the whole state by parameter, with uninitialized tensors for per-element entries."""
    whole: dict[int, dict[str, Any]] = {}
    for slices, held in zip(part.slices, metadata, strict=True):
        for slice_, entries in zip(slices, held, strict=True):
            for key, entry in entries.items():
                state = whole.setdefault(slice_.param, {})
                if not isinstance(entry, torch.dtype):
                    state[key] = entry
                elif key not in state:
                    param = part.params[slice_.param]
                    state[key] = shaped(torch.empty(param.numel(), dtype=entry, device=device), param)
    return dict(sorted(whole.items()))


def _messages(slices: list[Slice], metadata: _Metadata) -> Iterator[_Message]:
    """Divide the per-element state of a rank into messages of at most `MESSAGE_BYTES`.

    Sender and receiver both derive the messages from the metadata, so only elements are sent.
    """
    for position, (slice_, entries) in enumerate(zip(slices, metadata, strict=True)):
        for key, dtype in entries.items():
            if isinstance(dtype, torch.dtype):
                step = max(1, MESSAGE_BYTES // dtype.itemsize)
                for start in range(0, slice_.numel, step):
                    yield _Message(position, key, dtype, start, min(slice_.numel, start + step))


def _elements(part: Partition, states: list[dict[str, Any]], message: _Message) -> torch.Tensor:
    """Return the elements of a message, (stop - start,), from the states of this rank's slices."""
    value, local = states[message.position][message.key].detach(), part.locals[message.position]
    return flattened(value, local)[message.start : message.stop]


def enqueue(in_flight: deque[Transfer], transfer: Transfer) -> None:
    in_flight.append(transfer)
    drain(in_flight, leave=_IN_FLIGHT)


def drain(in_flight: deque[Transfer], leave: int = 0) -> None:
    """Wait for the oldest transfers, until only `leave` are in flight."""
    while len(in_flight) > leave:
        in_flight.popleft().work.wait()


# -- chunks ------------------------------------------------------------------------------------------------------------


def _chunks_of_slices(part: Partition, names: dict[int, str]) -> list[TensorChunk]:
    """Return the (master) weights and the state of this rank's slices as chunks.

    Args:
        names: names of the model's tensors, by id.
    """
    chunks = []
    for slice_, local, state in zip(part.slices[part.rank], part.locals, part.states, strict=True):
        param = part.params[slice_.param]
        if local is not param:  # a whole parameter may have any strides
            _check_contiguous(slice_.param, param)
        if id(param) in names:
            chunks.append(TensorChunk(names[id(param)], param.numel(), slice_.start, local.detach().reshape(-1)))
        for key, value in state.items():
            if _is_per_element(key, value, local):
                name = _state_name(slice_.param, key)
                chunks.append(TensorChunk(name, param.numel(), slice_.start, value.detach().reshape(-1)))
    return chunks


def _on_meta_device(held: dict[str, Any], part: Partition) -> dict[str, Any]:
    """Return a model's state dict with tensors on the meta device, in the dtype of the updates. Tied tensors stay tied."""
    trainable = [number for number, spec in enumerate(part.plan.params) if spec.requires_grad]
    dtypes = {id(part.params[number]): part.plan.update_dtype(number) for number in trainable}
    meta = {
        id(tensor): torch.empty(tensor.shape, dtype=dtypes.get(id(tensor), tensor.dtype), device="meta")
        for tensor in held.values()
        if isinstance(tensor, torch.Tensor)
    }
    return {name: meta.get(id(value), value) for name, value in held.items()}


def _check_contiguous(number: int, param: torch.Tensor) -> None:
    """Refuse a parameter that is not contiguous: a chunk is a range in index order, but a slice in memory order."""
    if not param.is_contiguous():
        raise CheckpointError(
            f"parameter {number} has strides {param.stride()}; shards hold contiguous parameters, consolidated files hold any"
        )


def _state_name(number: int, key: str) -> str:
    """Return the name of the chunks of a state tensor; `number` counts through all of the optimizer's parameters."""
    return f"optimizer.state.{number}.{key}"


# -- restore -----------------------------------------------------------------------------------------------------------


def _check_groups(saved_groups: list[dict[str, Any]], optimizer: torch.optim.Optimizer) -> None:
    """Refuse groups that do not match the groups of this optimizer."""
    lengths = [len(group["params"]) for group in optimizer.param_groups]
    saved_lengths = [len(group["params"]) for group in saved_groups]
    if lengths != saved_lengths:
        raise CheckpointError(f"the saved optimizer has {saved_lengths} parameters in its groups, this one {lengths}")
    for saved, group in zip(saved_groups, optimizer.param_groups, strict=True):
        for key, value in hyperparameters(saved).items():
            if key in group and key not in _MACHINE_FLAGS and not _is_same_kind(value, group[key]):
                raise CheckpointError(f"the saved optimizer has {key}={value!r}, this one {key}={group[key]!r}")


def _check_state(saved: dict[int, dict[str, Any]], part: Partition, in_chunks: bool) -> None:
    """Refuse state that does not fit the parameters, with the same result on all ranks."""
    for number, entries in saved.items():
        if not 0 <= number < len(part.params):
            raise CheckpointError(f"there is saved state of parameter {number}, but there are {len(part.params)}")
        if isinstance(part.inner, _ADAMS) and not (keys := entries.keys()) >= set(_ADAM_KEYS):
            raise CheckpointError(f"saved state of parameter {number} is {', '.join(keys)} instead of {', '.join(_ADAM_KEYS)}")
        if in_chunks and part.plan.assigned is None and part.plan.params[number].requires_grad:
            _check_contiguous(number, part.params[number])
        for key, value in entries.items():
            param = part.params[number]
            if not _fits(key, value, param, part.plan.has_whole_parameters):
                shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                raise CheckpointError(
                    f"saved state {key!r} of parameter {number} has shape {shape}, the parameter {tuple(param.shape)}"
                )


def _local_states(saved: dict[int, dict[str, Any]], part: Partition) -> tuple[dict[int, dict[str, Any]], list[TensorChunk]]:
    """Return this rank's part of saved state, by the inner optimizer's numbers, and its chunks that are not read yet."""
    states: dict[int, dict[str, Any]] = {}
    chunks = []
    for position, (slice_, local) in enumerate(zip(part.slices[part.rank], part.locals, strict=True)):
        param = part.params[slice_.param]
        for key, value in saved.get(slice_.param, {}).items():
            own = _own_part(key, value, param, slice_, local)
            states.setdefault(position, {})[key] = own
            if isinstance(value, torch.Tensor) and value.is_meta:
                start = slice_.start if _is_per_element(key, value, param) else 0
                chunks.append(TensorChunk(_state_name(slice_.param, key), value.numel(), start, own.view(-1)))
    return states, chunks


def _own_part(key: str, value: Any, param: torch.Tensor, slice_: Slice, local: torch.Tensor) -> Any:
    """Return this rank's part of one saved entry, in the shape of the inner optimizer's entry.

    It is a copy. If the saved entry is on the meta device, it is an uninitialized tensor.
    """
    if isinstance(value, torch.Tensor) and value.is_meta:
        return torch.empty(local.shape if _is_per_element(key, value, param) else value.shape, dtype=value.dtype)
    if _is_per_element(key, value, param):
        return shaped(flattened(value, param)[slice_.start : slice_.stop].clone(), local)
    return value.clone() if isinstance(value, torch.Tensor) else value


def _fits(key: str, value: Any, param: torch.Tensor, whole: bool) -> bool:
    """Return whether state may have this shape: that of the parameter, or with whole parameters that of rows or columns."""
    if key in _PER_PARAMETER:
        return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    if not isinstance(value, torch.Tensor):
        return key not in _ADAM_KEYS
    factored = value.dim() == param.dim() and all(n in (1, m) for n, m in zip(value.shape, param.shape, strict=True))
    return value.shape == param.shape or (whole and factored)


def _is_same_kind(value: Any, ours: Any) -> bool:
    """Return whether a hyperparameter may replace ours."""
    if isinstance(ours, list | tuple):
        return isinstance(value, list | tuple) and len(value) == len(ours) and all(map(_is_same_kind, value, ours))
    if isinstance(ours, int | float | torch.Tensor):
        return isinstance(value, int | float | torch.Tensor)
    return True


def _is_per_element(key: str, value: Any, param: torch.Tensor) -> bool:
    return key not in _PER_PARAMETER and isinstance(value, torch.Tensor) and value.shape == param.shape


def _to_cpu(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
