"""Optimizer state that does not depend on its sharding: gather the whole state on rank 0, and restore it at any world size.

On each rank, a save makes an outline of the whole state (tensors on the meta device) and chunks (the elements of these tensors
that the rank owns). `local_chunks` returns both. `full_state` fills the outline on rank 0. `restore` loads a state into any
implementation and takes a function that reads chunks: this module accesses no files.
"""

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple, Self

import torch

from zero.checks import ENTRIES
from zero.codecs import Encoded
from zero.host_comm import gather_objects, gather_tensors
from zero.layout import Slice
from zero.muon import Muon
from zero.sharded_state import Partition, hyperparameters, synchronized_partition
from zero.tensors import flattened, is_dense, shaped

# these say how this machine computes the update: taken from the running optimizer, never from a file
_MACHINE_FLAGS = ("fused", "foreach", "capturable", "differentiable", "ns_dtype")
_RULE = "state must have one number per element, or be one number, the same on all ranks; ZeroRedundancyOptimizer takes any"
_NUMBERS = {"step", "eta", "mu", "mu_product"}  # which of `ENTRIES` are one number; the others have the parameter's shape


class CheckpointError(ValueError):
    """A checkpoint cannot be made or read, or does not belong to this model. The message names the file or the entry."""


class TensorChunk(NamedTuple):
    """A range of the elements of one tensor of a checkpoint."""

    name: str  # its keys in the checkpoint, joined by dots
    numel: int  # of the whole tensor
    start: int  # of the range in the flattened tensor
    elements: torch.Tensor  # (number of elements in the range,), or the whole tensor in its shape; meta if `decode` makes them
    decode: Callable[[], torch.Tensor] | None = None

    @property
    def stop(self) -> int:
        return self.start + self.elements.numel()

    @classmethod
    def of_whole(cls, name: str, tensor: torch.Tensor) -> Self:
        """Return a whole tensor as one chunk."""
        return cls(name, tensor.numel(), 0, tensor.detach())

    def read(self) -> torch.Tensor:
        """Return the elements. Each call decodes them, so that few chunks are decoded at a time."""
        return self.elements if self.decode is None else self.decode()

    def read_flat(self) -> torch.Tensor:
        return flattened(elements := self.read(), elements)


def map_leaves(function: Callable[[str, Any], Any], tree: Any, name: str = "") -> Any:
    """Return nested dicts, lists and tuples with `function(name, leaf)` in place of each leaf, named by its keys with dots."""
    if not isinstance(tree, dict | list | tuple):
        return function(name, tree)
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    mapped = {key: map_leaves(function, inner, f"{name}.{key}" if name else str(key)) for key, inner in pairs}
    return mapped if isinstance(tree, dict) else list(mapped.values()) if isinstance(tree, list) else tuple(mapped.values())


def leaves(tree: Any) -> dict[str, Any]:
    """Return the leaves of nested dicts, lists and tuples by their names, see `map_leaves`."""
    found: dict[str, Any] = {}

    def add(name: str, leaf: Any) -> None:
        if found.setdefault(name, leaf) is not leaf:  # as in {"a": {"b": 1}, "a.b": 2}
            raise CheckpointError(f"two entries of the state are named {name!r}; rename one of them")

    map_leaves(add, tree)
    return found


def consolidate(optimizer: torch.optim.Optimizer, to: int = 0) -> dict[str, Any] | None:
    """Gather the whole optimizer state on rank `to` of the process group. Needs to be called on all its ranks.

    Return on this rank the `state_dict()` of the unsharded optimizer, in copies on the CPU; on others None.

    Raises CheckpointError on all ranks if an entry of state has neither one number per element nor the same value on all ranks.
    If parameters are whole, an entry may have any shape.
    """
    part = replace(synchronized_partition(optimizer), to=to)
    whole = _gathered(part, *_of_optimizer(part))
    return whole and whole["optimizer"]


def model_state_dict(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor] | None:
    """Gather the model's whole `state_dict()` on rank 0, in the precision of the updates. Needs to be called on all ranks.

    Return on rank 0 copies on the CPU, tied where the entries are, with masters for weights of lower precision; on others None.
    """
    part = synchronized_partition(optimizer)
    whole = _gathered(part, *_of_model(part, model, divided=part.plan.has_masters))
    return whole and whole["model"]


def full_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Gather `model_state_dict` and `consolidate` on rank 0, as "model" and "optimizer". Needs to be called on all ranks."""
    part = synchronized_partition(optimizer)
    return _gathered(part, *_of_both(part, model, divided=part.plan.has_masters))


def local_chunks(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any] | None, list[TensorChunk]]:
    """Return the state that `full_state` would gather, but leave it on its ranks. Needs to be called on all ranks.

    Returns:
        On rank 0 the outline: the result of `full_state`, with tensors on the meta device in place of those in chunks. On other
        ranks None. And this rank's chunks, as views or to be decoded: the state and the (master) weights of the slices that it
        owns, and on rank 0 the tensors of the model that no rank owns.
    Raises CheckpointError also for a parameter that is not contiguous.
    """
    part = synchronized_partition(optimizer)
    _check_contiguous(part)
    outline, chunks = _of_both(part, model, divided=True)
    if part.sends:
        _gathered_ranges(part, outline, chunks)
    return outline if part.receives else None, chunks


def restore(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], read_chunks: Callable[[list[TensorChunk]], None] | None = None
) -> None:
    """Load the state of an unsharded optimizer. Each rank takes its slices. Needs to be called on all ranks.

    Hyperparameters come from `state_dict`, except for the choice of kernel (`fused`, `foreach`, ...). `step` counters go to the
    device that the kernel requires (https://github.com/pytorch/pytorch/issues/124133).

    `state_dict`: that of `consolidate` or of an unsharded optimizer. It is only read and copied. `read_chunks`: fills the
    elements of chunks, for tensors on the meta device. Raises CheckpointError if groups, shapes or entries do not match.
    """
    if state_dict is None:
        raise CheckpointError("state_dict is None; save what `consolidate` returns on one rank, and load that on all ranks")
    part = synchronized_partition(optimizer)
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
                ours = group.get(key)
                group[key] = inner_group[key] = _copied(value, ours.device if isinstance(ours, torch.Tensor) else "cpu")
    part.inner.load_state_dict({"state": states, "param_groups": inner_groups})
    if "has_state" in vars(optimizer):  # a ShardedOptimizer
        vars(optimizer).update(has_state=bool(state_dict["state"]), gathered=None)


def _of_optimizer(part: Partition) -> tuple[dict[str, Any], list[TensorChunk]]:
    """Return the outline of the whole optimizer state, and this rank's chunks of it. Needs to be called on all ranks."""
    own: list[dict[str, Any]] = []  # outlines of the state of this rank's slices
    chunks: list[TensorChunk] = []
    error = None
    try:
        for slice_, local, state in zip(part.slices[part.rank], part.locals, part.states, strict=True):
            take = partial(_take_leaf, part, slice_, local, chunks)
            own.append(map_leaves(take, state, f"optimizer.state.{slice_.param}"))
    except CheckpointError as raised:
        error = raised
    gathered = _gathered_objects(part, (own, error))
    if error := next(filter(None, (error for _, error in gathered)), None):
        raise error
    first: dict[int, tuple[int, dict[str, Any]]] = {}  # by parameter: the rank and the outline of its first slice
    for rank, slices in enumerate(part.slices):
        for slice_, outline in zip(slices, gathered[rank][0], strict=True):
            first_rank, its_outline = first.setdefault(slice_.param, (rank, outline))
            there, here = ({name: _text(leaf) for name, leaf in leaves(held).items()} for held in (its_outline, outline))
            for name in there | here:
                a, b = (texts.get(name, "nothing") for texts in (there, here))
                if a != b:
                    entry = _entry(part, slice_.param, name)
                    raise CheckpointError(f"{entry} as {a} on rank {first_rank} and {b} on rank {rank}: {_RULE}")
    whole = {number: outline for number, (_, outline) in sorted(first.items()) if outline}
    state = {"state": whole, "param_groups": _copied(packed_groups(part.optimizer))}
    return {"optimizer": state}, chunks if part.sends else []


def _take_leaf(part: Partition, slice_: Slice, local: torch.Tensor, chunks: list[TensorChunk], name: str, value: Any) -> Any:
    """Return the outline of one leaf of a slice's state, and add the leaf's elements to `chunks`."""
    if isinstance(value, int | float | complex | None):
        return value
    entry = _entry(part, slice_.param, name.removeprefix(f"optimizer.state.{slice_.param}."))
    param = part.params[slice_.param]
    if isinstance(value, Encoded):
        elements = _meta_like(local, torch.float32)
        chunks.append(TensorChunk(name, param.numel(), slice_.start, elements, partial(value.decode, local)))
        return _meta_like(param, torch.float32)
    if not isinstance(value, torch.Tensor):
        raise CheckpointError(f"{entry} as {type(value).__name__}, which cannot be restored; use tensors and numbers")
    if value.dim() and value.shape == local.shape:
        chunks.append(TensorChunk(name, param.numel(), slice_.start, value.detach()))
        return _meta_like(value if value.shape == param.shape else param, value.dtype)
    if value.numel() == 1:
        return _copied(value)
    if not _is_whole(part, slice_.param):
        raise CheckpointError(f"{entry} in shape {tuple(value.shape)} for {local.numel()} elements: {_RULE}")
    chunks.append(TensorChunk.of_whole(name, value))
    return _meta_like(value, value.dtype)


def _entry(part: Partition, number: int, name: str) -> str:
    return f"{type(part.inner).__name__} keeps {name!r} of parameter {number}"


def _text(leaf: Any) -> str:
    """Return a text that differs for different leaves of outlines."""
    if _is_meta(leaf):
        return f"a number per element, {leaf.dtype}"
    return f"{leaf.dtype} {leaf.tolist()}" if isinstance(leaf, torch.Tensor) else repr(leaf)


def _of_model(part: Partition, model: torch.nn.Module, divided: bool) -> tuple[dict[str, Any], list[TensorChunk]]:
    """Return the outline of a model's state dict, in the dtype of the updates, and this rank's chunks of it.

    `divided`: each rank has the (master) weights of its slices. Otherwise rank 0 has all weights. Tied tensors stay tied.
    """
    held = model.state_dict(keep_vars=True)
    names = {id(tensor): f"model.{name}" for name, tensor in reversed(held.items())}  # first name of tied tensors
    numbers = {id(part.params[slice_.param]): slice_.param for slices in part.slices for slice_ in slices} if divided else {}
    for name, param in model.named_parameters(remove_duplicate=False):
        number = numbers.get(id(param))
        if number is not None and held.get(name, param) is not param and part.plan.update_dtypes[number] != param.dtype:
            copied = f"state_dict() of the model has a copy of {name}"
            raise CheckpointError(f"{copied}, which lacks its master; return the parameter")
    chunks = []
    for slice_, local, read in zip(part.slices[part.rank], part.locals, part.readers, strict=True) if divided else ():
        param = part.params[slice_.param]
        if id(param) in names:
            chunks.append(TensorChunk(names[id(param)], param.numel(), slice_.start, _meta_like(local, local.dtype), read))
    outlines: dict[int, Any] = {}
    for key, tensor in {id(tensor): tensor for tensor in held.values()}.items():
        if not isinstance(tensor, torch.Tensor):  # from get_extra_state()
            outlines[key] = copy.deepcopy(tensor) if part.receives else None
            continue
        number, dtype = numbers.get(key), tensor.dtype
        if number is not None and part.plan.params[number].requires_grad:
            dtype = part.plan.update_dtypes[number]
        outlines[key] = _meta_like(tensor, dtype)
        if number is None and part.receives:
            chunks.append(TensorChunk.of_whole(names[key], tensor))
    return {"model": {name: outlines[id(tensor)] for name, tensor in held.items()}}, chunks if part.sends else []


def _of_both(part: Partition, model: torch.nn.Module, divided: bool) -> tuple[dict[str, Any], list[TensorChunk]]:
    """Return the outline of a checkpoint's "model" and "optimizer", and this rank's chunks of both. See `_of_model`."""
    state, of_state = _of_optimizer(part)
    weights, of_weights = _of_model(part, model, divided)
    return {**weights, **state}, of_weights + of_state


def _gathered(part: Partition, outline: dict[str, Any], chunks: list[TensorChunk]) -> dict[str, Any] | None:
    """Return on rank 0 the whole state, an outline filled with the chunks of all ranks. Needs to be called on all ranks."""
    if not part.sends:
        return None
    ranges_of_ranks = _gathered_ranges(part, outline, chunks)
    whole, places = None, None
    if part.receives:
        whole, tensors = materialized(outline, torch.preserve_format)
        flat = {name: flattened(tensor, tensor) for name, tensor in tensors.items()}
        places = [[flat[name][start:stop] for name, start, stop in ranges] for ranges in ranges_of_ranks]
    gather_tensors([chunk.read_flat for chunk in chunks], places, part.cpu_group, part.to % part.plan.world_size)
    if whole and "model" in outline:  # what get_extra_state() has returned stays as it is
        whole["model"] |= {name: held for name, held in outline["model"].items() if not isinstance(held, torch.Tensor)}
    return whole


def _gathered_objects(part: Partition, value: Any) -> list[Any]:
    return gather_objects(value, part.cpu_group) if part.plan.world_size > 1 else [value]


def _gathered_ranges(part: Partition, outline: dict[str, Any], chunks: list[TensorChunk]) -> list[list[tuple[str, int, int]]]:
    """Return (name, start, stop) of the chunks of each rank. Needs to be called on all ranks that share the state.

    Raises CheckpointError on all of them if the chunks are not exactly the elements of rank 0's outline.
    """
    tensors = {id(leaf): (name, leaf.numel()) for name, leaf in reversed(leaves(outline).items()) if _is_meta(leaf)}
    own = [(chunk.name, chunk.start, chunk.stop) for chunk in chunks]
    (_, expected), *_ = gathered = _gathered_objects(part, (own, dict(tensors.values())))
    held: Counter[str] = Counter()
    for ranges, _ in gathered:
        for name, start, stop in ranges:
            held[name] += stop - start
    for name in expected | held:
        if held[name] != expected.get(name, 0):
            sizes = f"{expected.get(name, 0)} elements on rank 0, but the ranks hold {held[name]}"
            raise CheckpointError(f"{name} has {sizes}; save the same model on all ranks")
    return [ranges for ranges, _ in gathered]


def materialized(tree: Any, memory_format: torch.memory_format) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a tree with new CPU tensors in place of meta tensors, and the new tensors by name. Tied tensors stay tied."""
    new: dict[int, torch.Tensor] = {}
    named: dict[str, torch.Tensor] = {}

    def allocate(name: str, leaf: Any) -> Any:
        if not _is_meta(leaf):
            return leaf
        if id(leaf) not in new:
            new[id(leaf)] = named[name] = torch.empty_like(leaf, device="cpu", memory_format=memory_format)
        return new[id(leaf)]

    return map_leaves(allocate, tree), named


def _check_contiguous(part: Partition) -> None:
    """Refuse a parameter that is not contiguous: a file has index order, slices and fused updates have memory order."""
    for number, (param, spec) in enumerate(zip(part.params, part.plan.params, strict=True)):
        if spec.requires_grad and not param.is_contiguous():
            remedy = "shards hold contiguous parameters, consolidated files hold any"
            raise CheckpointError(f"parameter {number} has strides {param.stride()}; {remedy}")


def _check_groups(saved_groups: list[dict[str, Any]], optimizer: torch.optim.Optimizer) -> None:
    """Refuse groups that do not match the groups of this optimizer."""
    lengths, saved_lengths = ([len(group["params"]) for group in groups] for groups in (optimizer.param_groups, saved_groups))
    if lengths != saved_lengths:
        raise CheckpointError(f"the saved optimizer has {saved_lengths} parameters in its groups, this one {lengths}")
    for saved, group in zip(saved_groups, optimizer.param_groups, strict=True):
        for key, value in hyperparameters(saved).items():
            fits = value == group.get(key) if key == "matrices" else _is_same_kind(value, group.get(key))
            if key in group and key not in _MACHINE_FLAGS and not fits:
                raise CheckpointError(f"the saved optimizer has {key}={value!r}, this one {key}={group[key]!r}")


def _check_state(saved: dict[int, dict[str, Any]], part: Partition, in_chunks: bool) -> None:
    """Refuse state that does not fit the parameters or the class, with the same result on all ranks."""
    if in_chunks:
        _check_contiguous(part)
    inner = type(part.inner)
    for number, entries in saved.items():
        if not 0 <= number < len(part.params):
            raise CheckpointError(f"there is saved state of parameter {number}, but there are {len(part.params)}")
        is_matrix = issubclass(inner, Muon) and part.plan.params[number].matrices  # the others have the state of AdamW
        known = torch.optim.Muon if is_matrix else next((cls for cls in inner.__mro__ if cls in ENTRIES), None)
        of = [cls for cls, (always, sometimes) in ENTRIES.items() if always <= entries.keys() <= always | sometimes]
        if entries and known and known not in of and (of or not ENTRIES[known][0] <= entries.keys()):
            kept = f"{', '.join(entries)}{' of ' if of else ''}{' or '.join(cls.__name__ for cls in of)}"
            raise CheckpointError(f"the saved state is {kept}, not of {inner.__name__}; build the optimizer that was saved")
        whole, shape = _is_whole(part, number), part.params[number].shape
        for name, value in leaves(entries).items():
            is_tensor = isinstance(value, torch.Tensor)
            is_number = isinstance(value, int | float) or (is_tensor and value.numel() == 1)
            has_shape = is_tensor and value.shape == shape
            if known is None or name not in set.union(*ENTRIES[known]):
                fits = not is_tensor or is_number or has_shape or whole
            else:
                fits = is_number if name in _NUMBERS else has_shape or (value is None and known is torch.optim.SGD)
            if not fits:
                found = f"has shape {tuple(value.shape)}" if is_tensor else f"has type {type(value).__name__}"
                raise CheckpointError(f"saved state {name!r} of parameter {number} {found}, the parameter shape {tuple(shape)}")


def _local_states(saved: dict[int, dict[str, Any]], part: Partition) -> tuple[dict[int, dict[str, Any]], list[TensorChunk]]:
    """Return this rank's part of saved state, by the inner optimizer's numbers, and its chunks that are not read yet."""
    states: dict[int, dict[str, Any]] = {}
    chunks: list[TensorChunk] = []

    def own_part(slice_: Slice, local: torch.Tensor, name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        param = part.params[slice_.param]
        is_per_element = value.shape == param.shape
        if value.is_meta:
            own = torch.empty(local.shape if is_per_element else value.shape, dtype=value.dtype, device="cpu")
            chunks.append(TensorChunk(name, value.numel(), slice_.start if is_per_element else 0, own.view(-1)))
            return own
        return shaped(flattened(value, param)[slice_.start : slice_.stop].clone(), local) if is_per_element else value.clone()

    for position, (slice_, local) in enumerate(zip(part.slices[part.rank], part.locals, strict=True)):
        if slice_.param in saved:
            take = partial(own_part, slice_, local)
            states[position] = map_leaves(take, saved[slice_.param], f"optimizer.state.{slice_.param}")
    return states, chunks


def _is_same_kind(value: Any, ours: Any) -> bool:
    """Return whether a hyperparameter may replace ours."""
    if isinstance(ours, list | tuple):
        return isinstance(value, list | tuple) and len(value) == len(ours) and all(map(_is_same_kind, value, ours))
    if isinstance(ours, int | float | torch.Tensor):
        return isinstance(value, int | float | torch.Tensor)
    return True


def _is_whole(part: Partition, number: int) -> bool:
    """Return whether a parameter is never cut: then its state may have any shape."""
    return part.plan.assigned is not None or not part.plan.params[number].requires_grad


def _meta_like(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor on the meta device, in the shape of `param`, and in its strides if dense."""
    memory_format = torch.preserve_format if is_dense(param) else torch.contiguous_format
    return torch.empty_like(param, dtype=dtype, device="meta", memory_format=memory_format)


def _is_meta(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_meta


def packed_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the `param_groups` of a torch.optim `state_dict()`: hyperparameters, and numbers in place of parameters."""
    numbers = count()
    return [{**group, "params": [next(numbers) for _ in group["params"]]} for group in optimizer.param_groups]


def _copied(tree: Any, device: torch.device | str = "cpu") -> Any:
    """Return nested dicts, lists and tuples with copies of their tensors on a device."""
    return map_leaves(lambda _, leaf: leaf.detach().to(device, copy=True) if isinstance(leaf, torch.Tensor) else leaf, tree)
