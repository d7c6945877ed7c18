"""Optimizer state that no longer knows how it was sharded: the whole of it to rank 0, and back.

Whatever the implementation and the world size, `consolidate` gives on rank 0 exactly what the `state_dict()` of a
single, unsharded optimizer would hold, and `restore` takes that on any implementation at any world size. State tensors
travel flat, a few megabytes at a time, on CPUs straight from where they lie to where they belong, so that consolidating
takes no memory but the state's. `ZeroRedundancyOptimizer.consolidate_state_dict`, which pickles whole states to every rank, is
not used.

Where the whole is too much for rank 0, `own_pieces` names what each rank would have contributed, for somebody to write.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from zero.collectives import cpu_group
from zero.layout import Slice
from zero.optimizer import ShardedOptimizer, flattened, hyperparameters, shaped
from zero.partition import Partition, packed_groups, parameters, partition

_MESSAGE_BYTES = 25_000_000
_IN_FLIGHT = 2  # messages at a time
# how the machine at hand runs the update, not what the update is: kept from the running optimizer, never from a file
_MACHINE_FLAGS = ("fused", "foreach", "capturable", "differentiable")

# tensors that torch.optim keeps once per parameter: Adam's and most others' counter, NAdam's product, ASGD's two rates
_PER_PARAMETER = ("step", "mu_product", "eta", "mu")


_ADAMS, _ADAM_KEYS = (torch.optim.Adam, torch.optim.AdamW), ("step", "exp_avg", "exp_avg_sq")


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or does not belong to this model; the message names the file or the entry."""


class Piece(NamedTuple):
    """Elements `start:start + len(elements)` of one flattened tensor of the checkpoint."""

    name: str
    numel: int  # of the whole tensor
    start: int
    elements: torch.Tensor  # (stop - start,)

    @classmethod
    def of_whole(cls, name: str, tensor: torch.Tensor) -> Self:
        """All of a tensor, as one piece."""
        return cls(name, tensor.numel(), 0, tensor.detach().reshape(-1))


class _Run(NamedTuple):
    """Elements `start:stop` of one state tensor of the rank's slice number `position`."""

    position: int
    key: str
    dtype: torch.dtype
    start: int
    stop: int


class _Transfer(NamedTuple):
    """A message in flight. Until `work` is done, `elements` may be neither read nor written."""

    work: dist.Work
    elements: torch.Tensor  # (run.stop - run.start,) on the CPU: a GPU may have no room left, and NCCL a communicator per pair


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
        optimizer.take_over_written_weights()
        whole = _gather(part, params, [{"master": local.data} for local in parameters(part.inner)])
        if whole is not None:
            masters = {id(params[index]): state["master"] for index, state in whole.items()}
    held = model.state_dict(keep_vars=True)
    if not _receives(part):
        return None
    copies = dict(masters)
    for tensor in held.values():
        if not isinstance(tensor, torch.Tensor):  # of get_extra_state()
            copies[id(tensor)] = copy.deepcopy(tensor)
        elif id(tensor) not in copies:
            copies[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return {name: copies[id(tensor)] for name, tensor in held.items()}


def own_pieces(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[Piece], dict[str, Any] | None]:
    """What `model_state_dict` and `consolidate` would collect, left where it is. Needs to be called on all ranks.

    Returns:
        This rank's pieces, as views: the state and the (master) weights of the slices it owns, on rank 0 also whatever of
        the model nobody owns. And on rank 0 `{"model": ..., "optimizer": ...}` with tensors on the meta device in place of
        what is in pieces, elsewhere None. A piece has the name that its tensor has there, joined by dots.
    """
    part, params = partition(optimizer), parameters(optimizer)
    if part.replicated and not _receives(part):
        return [], None
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.take_over_written_weights()
    held = model.state_dict(keep_vars=True)
    names = {id(tensor): f"model.{name}" for name, tensor in reversed(held.items())}  # of tied ones the first
    locals_ = parameters(part.inner)
    states = [part.inner.state.get(local, {}) for local in locals_]
    pieces = []
    for piece, local, state in zip(part.slices[part.rank], locals_, states, strict=True):
        whole = params[piece.param]
        if local is not whole:  # frozen ones stay whole
            _check_contiguous(piece.param, whole)
        if id(whole) in names:
            pieces.append(Piece(names[id(whole)], whole.numel(), piece.start, local.detach().reshape(-1)))
        for key, value in state.items():
            if _per_element(key, value, local):
                pieces.append(Piece(_state_name(piece.param, key), whole.numel(), piece.start, value.detach().reshape(-1)))
    inventories = _gather_inventories(_inventory(states, locals_), part)
    contents = None
    if _receives(part):
        owned = {id(params[piece.param]) for slices in part.slices for piece in slices}
        tensors = [tensor for tensor in held.values() if isinstance(tensor, torch.Tensor)]  # the rest is get_extra_state()'s
        others = {id(tensor): tensor for tensor in tensors if id(tensor) not in owned}
        pieces += [Piece.of_whole(names[key], tensor) for key, tensor in others.items()]
        with_masters = set()
        if isinstance(optimizer, ShardedOptimizer) and optimizer.param_dtype is not None:
            with_masters = {id(param) for buffer in optimizer.buffers for param in buffer.params}

        def stand_in(tensor: torch.Tensor) -> torch.Tensor:
            in_full = id(tensor) in with_masters
            dtype = torch.promote_types(tensor.dtype, torch.float32) if in_full else tensor.dtype
            return torch.empty(tensor.shape, dtype=dtype, device="meta")

        stand_ins = {id(tensor): stand_in(tensor) for tensor in tensors}
        contents = {
            "model": {name: stand_ins.get(id(value), value) for name, value in held.items()},
            "optimizer": {
                "state": _room(part, params, inventories, device="meta"),
                "param_groups": packed_groups(optimizer),
            },
        }
    return pieces, contents


def _check_contiguous(index: int, param: torch.Tensor) -> None:
    """A stored piece is a range of elements in the order of the indices, a slice one in the order of memory."""
    if not param.is_contiguous():
        raise CheckpointError(
            f"parameter {index} has strides {param.stride()}; shards hold contiguous parameters, the consolidated format any"
        )


def _state_name(param: int, key: str) -> str:
    """The name of a state tensor's pieces; `param` counts through all of the optimizer's parameters."""
    return f"optimizer.state.{param}.{key}"


def _gather(part: Partition, params: list[torch.Tensor], states: list[dict[str, Any]]) -> dict[int, dict[str, Any]] | None:
    """What every rank has for each of its slices, put together on rank 0 by parameter. Needs to be called on all ranks.

    Args:
        params: the whole parameters.
        states: for each slice of this rank tensors that hold a number per element, and any other values.
    """
    locals_ = parameters(part.inner)
    inventory = _inventory(states, locals_)
    inventories = _gather_inventories(inventory, part)
    group = cpu_group(part.process_group) if len(part.slices) > 1 else None

    in_flight: deque[_Transfer] = deque()
    if part.rank != 0:
        for run in _runs(part.slices[part.rank], inventory):
            elements = _elements(states, run, locals_).cpu()
            _enqueue(in_flight, _Transfer(dist.isend(elements, group_dst=0, group=group), elements))
        _drain(in_flight)
        return None

    whole = _room(part, params, inventories, device="cpu")
    for rank, (slices, held) in enumerate(zip(part.slices, inventories, strict=True)):
        for run in _runs(slices, held):
            piece = slices[run.position]
            flat = flattened(whole[piece.param][run.key], params[piece.param])
            place = flat[piece.start + run.start : piece.start + run.stop]
            if rank == 0:
                place.copy_(_elements(states, run, locals_))
                continue
            _enqueue(in_flight, _Transfer(dist.irecv(place, group_src=rank, group=group), place))
    _drain(in_flight)
    return whole


def _inventory(states: list[dict[str, Any]], locals_: list[torch.Tensor]) -> _Inventory:
    return [
        {key: value.dtype if _per_element(key, value, local) else _to_cpu(value) for key, value in state.items()}
        for state, local in zip(states, locals_, strict=True)
    ]


def _room(part: Partition, params: list[torch.Tensor], inventories: list[_Inventory], device: str) -> dict[int, dict[str, Any]]:
    """The whole state by parameter, with room for what there is per element."""
    whole: dict[int, dict[str, Any]] = {}
    for slices, held in zip(part.slices, inventories, strict=True):
        for piece, entries in zip(slices, held, strict=True):
            for key, entry in entries.items():
                state = whole.setdefault(piece.param, {})
                if not isinstance(entry, torch.dtype):
                    state[key] = entry
                elif key not in state:
                    param = params[piece.param]
                    state[key] = shaped(torch.empty(param.numel(), dtype=entry, device=device), param)
    return dict(sorted(whole.items()))


def _enqueue(in_flight: deque[_Transfer], transfer: _Transfer) -> None:
    in_flight.append(transfer)
    if len(in_flight) > _IN_FLIGHT:
        _drain(in_flight, leave=_IN_FLIGHT)


def _drain(in_flight: deque[_Transfer], leave: int = 0) -> None:
    """Finish the first transfers, until `leave` are left."""
    while len(in_flight) > leave:
        in_flight.popleft().work.wait()


def restore(
    optimizer: torch.optim.Optimizer,
    state_dict: dict[str, Any],
    read_pieces: Callable[[list[Piece]], None] | None = None,
) -> None:
    """Load an unsharded optimizer's state; each rank takes its slices. Needs to be called on all ranks.

    State tensors on the meta device stand for elements that `read_pieces` reads, each rank those of its slices.

    Hyperparameters come from `state_dict`, but for the choice of kernel (`fused`, `foreach`, ...), which stays as it is;
    `step` counters land where that choice wants them (https://github.com/pytorch/pytorch/issues/124133).
    `state_dict` is only read; nothing in the optimizer aliases it.

    Raises:
        CheckpointError: if its groups or the shapes of its tensors are not those of this optimizer's parameters.
    """
    if state_dict is None:
        raise CheckpointError("the whole state is needed on every rank, and `consolidate` gives it to rank 0: save and load it")
    part = partition(optimizer)
    params = parameters(optimizer)
    lengths = [len(group["params"]) for group in optimizer.param_groups]
    saved_lengths = [len(group["params"]) for group in state_dict["param_groups"]]
    if lengths != saved_lengths:
        raise CheckpointError(f"the saved optimizer has {saved_lengths} parameters in its groups, this one {lengths}")
    for saved, group in zip(state_dict["param_groups"], optimizer.param_groups, strict=True):
        for key, value in hyperparameters(saved).items():
            if key in group and key not in _MACHINE_FLAGS and not _alike(value, group[key]):
                raise CheckpointError(f"the saved optimizer has {key}={value!r}, this one {key}={group[key]!r}")
    for index, entries in state_dict["state"].items():
        if not 0 <= index < len(params):
            raise CheckpointError(f"there is saved state of parameter {index}, but there are {len(params)}")
        if isinstance(part.inner, _ADAMS) and not (keys := entries.keys()) >= set(_ADAM_KEYS):
            raise CheckpointError(f"saved state of parameter {index} is {', '.join(keys)} instead of {', '.join(_ADAM_KEYS)}")
        for key, value in entries.items():
            if not _fits(key, value, params[index], part.whole):
                shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                raise CheckpointError(
                    f"saved state {key!r} of parameter {index} has shape {shape}, the parameter {tuple(params[index].shape)}"
                )
    inner_groups = packed_groups(part.inner)
    for saved, group, inner_group in zip(state_dict["param_groups"], optimizer.param_groups, inner_groups, strict=True):
        for key, value in hyperparameters(saved).items():
            if key not in _MACHINE_FLAGS:
                group[key] = inner_group[key] = value
    inner_state, in_pieces = {}, []
    for position, (piece, local) in enumerate(zip(part.slices[part.rank], parameters(part.inner), strict=True)):
        whole = params[piece.param]
        for key, value in state_dict["state"].get(piece.param, {}).items():
            own = _own_part(key, value, whole, piece, local)
            inner_state.setdefault(position, {})[key] = own
            if isinstance(value, torch.Tensor) and value.is_meta:
                if local is not whole:
                    _check_contiguous(piece.param, whole)
                start = piece.start if _per_element(key, value, whole) else 0
                in_pieces.append(Piece(_state_name(piece.param, key), value.numel(), start, own.view(-1)))
    if in_pieces:
        if read_pieces is None:
            raise CheckpointError(
                "the saved state lies in shards; give restore what reads them, zero.checkpoint.chunk_reader(path, checkpoint)"
            )
        read_pieces(in_pieces)
    part.inner.load_state_dict({"state": inner_state, "param_groups": inner_groups})


def _receives(part: Partition) -> bool:
    """Whether this process is the one that puts everything together."""
    return part.rank == 0 and not (part.replicated and dist.is_initialized() and dist.get_rank() != 0)


def _fits(key: str, value: Any, param: torch.Tensor, whole: bool) -> bool:
    """Whether state may look so: like the parameter, or with whole parameters like its rows or columns."""
    if key in _PER_PARAMETER:
        return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    if not isinstance(value, torch.Tensor):
        return key not in _ADAM_KEYS
    factored = value.dim() == param.dim() and all(n in (1, m) for n, m in zip(value.shape, param.shape, strict=True))
    return value.shape == param.shape or (whole and factored)


def _alike(value: Any, ours: Any) -> bool:
    """Whether a hyperparameter may take the place of ours."""
    if isinstance(ours, list | tuple):
        return isinstance(value, list | tuple) and len(value) == len(ours) and all(map(_alike, value, ours))
    if isinstance(ours, int | float | torch.Tensor):
        return isinstance(value, int | float | torch.Tensor)
    return True


def _per_element(key: str, value: Any, param: torch.Tensor) -> bool:
    return key not in _PER_PARAMETER and isinstance(value, torch.Tensor) and value.shape == param.shape


def _to_cpu(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def _elements(states: list[dict[str, Any]], run: _Run, locals_: list[torch.Tensor]) -> torch.Tensor:
    """The elements of a run, (run.stop - run.start,), out of the states of this rank's slices."""
    return flattened(states[run.position][run.key].detach(), locals_[run.position])[run.start : run.stop]


def _runs(slices: list[Slice], inventory: _Inventory) -> Iterator[_Run]:
    """Everything a rank holds per element, cut into messages of at most `_MESSAGE_BYTES`.

    Sender and receiver both derive the messages from the inventory, so nothing but elements has to travel.
    """
    for position, (piece, entries) in enumerate(zip(slices, inventory, strict=True)):
        for key, dtype in entries.items():
            if isinstance(dtype, torch.dtype):
                step = max(1, _MESSAGE_BYTES // dtype.itemsize)
                for start in range(0, piece.numel, step):
                    yield _Run(position, key, dtype, start, min(piece.numel, start + step))


def _gather_inventories(inventory: _Inventory, part: Partition) -> list[_Inventory]:
    """Every rank's inventory on rank 0, this rank's own elsewhere."""
    if len(part.slices) == 1:
        return [inventory]
    gathered = [None] * len(part.slices) if part.rank == 0 else None
    dist.gather_object(inventory, gathered, group_dst=0, group=cpu_group(part.process_group))
    return gathered if gathered is not None else [inventory]


def _own_part(key: str, value: Any, param: torch.Tensor, piece: Slice, local: torch.Tensor) -> Any:
    """This rank's part of one saved state entry, shaped as the inner optimizer holds it; a copy, or room for one."""
    if isinstance(value, torch.Tensor) and value.is_meta:
        return torch.empty(local.shape if _per_element(key, value, param) else value.shape, dtype=value.dtype)
    if _per_element(key, value, param):
        return shaped(flattened(value, param)[piece.start : piece.stop].clone(), local)
    return value.clone() if isinstance(value, torch.Tensor) else value
