"""Optimizer state that does not depend on its sharding: bring the whole state to one rank, and restore it at any world size.

`snapshot` makes an outline of the state (tensors on the meta device) where it will be received, and on each rank a list of the
parts of these tensors that the rank holds. `Snapshot.arriving` brings the parts to the outline, to fill tensors or a file.
`restore` loads a state into any implementation. This module accesses no files.
"""

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten_with_path, tree_map, tree_structure, tree_unflatten

from zero.buckets import OwnedSlice
from zero.checks import ENTRIES
from zero.codecs import Encoded
from zero.host_comm import cpu_group, gather_objects, on_all_ranks, received, send
from zero.muon import Muon
from zero.sharded_state import DividedOptimizer, Partition, hyperparameters, parameters, partition
from zero.tensors import flattened, is_dense, shaped

# these say how this machine computes the update: taken from the running optimizer, never from a file
_MACHINE_FLAGS = ("fused", "foreach", "capturable", "differentiable", "ns_dtype")
_RULE = "state must have one number per element, or be one number, the same on all ranks; ZeroRedundancyOptimizer takes any"
_NUMBERS = {"step", "eta", "mu", "mu_product"}  # which of `ENTRIES` are one number; the others have the parameter's shape


class CheckpointError(ValueError):
    """A checkpoint cannot be made or read, or does not belong to this model. The message names the file or the entry."""


class Part(NamedTuple):
    """Elements of one tensor of a state, on the rank that holds them."""

    name: str  # of the tensor: its keys in the state, joined by dots
    start: int  # first element in the flattened tensor
    numel: int
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]  # returns them in any shape. Each call decodes them, so that few are decoded at a time

    def flat(self) -> torch.Tensor:
        """Return the elements, (numel,), on the CPU."""
        elements = flattened(read := self.read(), read).contiguous().cpu()
        if (elements.numel(), elements.dtype) != (self.numel, self.dtype):
            held = f"{elements.numel()} elements of {elements.dtype}, not {self.numel} of {self.dtype}"
            raise CheckpointError(f"{self.name} has {held}; change no parameter while it is saved")
        return elements


@dataclass
class Snapshot:
    """A state that ranks hold in parts, on its way to one of them. Until `hold`, parts read the live tensors."""

    outline: dict[str, Any] | None  # on the rank that receives: the state, with tensors on the meta device for the parts
    own: list[Part]  # of this rank, by name and start
    sources: list[tuple[torch.Tensor, int, int]]  # on the rank that receives: tensor, numel and rank of each part, in order
    to: int  # the rank that receives. Ranks are numbered as those of all processes
    group: dist.ProcessGroup | None  # of these ranks, sends from main memory
    everyone: dist.ProcessGroup | None  # all ranks, also those of other replicas, which send nothing

    @contextmanager
    def arriving(self) -> Iterator[Iterator[tuple[torch.Tensor, torch.Tensor]]]:
        """Return pairs, in a context: a tensor of the outline, its next elements, flat, on the CPU. Call it on all ranks.

        If a rank cannot read one of its parts, there is an error on all ranks, after the last pair.
        """
        pieces = self._pieces()
        try:
            yield pieces
        finally:
            for _ in pieces:  # here the other ranks send, and after an error the rest is received
                pass

    def _pieces(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        own, errors = iter(self.own), list[Exception]()

        def flat(part: Part) -> torch.Tensor:
            try:
                return part.flat()
            except Exception as error:  # such as a full GPU: the rank that receives waits for this part, and for the others
                errors.append(error)
                return torch.zeros(part.numel, dtype=part.dtype)

        def check() -> None:
            for error in errors:
                raise error

        if self.outline is None:
            for part in own:
                send(flat(part), self.to, self.group)
        for tensor, numel, rank in self.sources:
            of_rank = [flat(next(own))] if rank == self.to else received(tensor.reshape(-1)[:numel], rank, self.group)
            for elements in of_rank:
                yield tensor, elements
        on_all_ranks(check, self.everyone, CheckpointError)

    def in_memory(self) -> dict[str, Any] | None:
        """Return the state in new tensors on the CPU, where the outline is. Needs to be called on all ranks."""
        tensors = {id(tensor): tensor for tensor, _, _ in self.sources}
        new = {key: torch.empty_like(tensor, device="cpu") for key, tensor in tensors.items()}
        filled: Counter[int] = Counter()
        with self.arriving() as pieces:
            for tensor, elements in pieces:
                first = filled[id(tensor)]
                filled[id(tensor)] += len(elements)
                flattened(new[id(tensor)], tensor)[first : first + len(elements)] = elements
        return tree_map(lambda leaf: new.get(id(leaf), leaf), self.outline)

    def hold(self) -> None:
        """Copy the parts to the CPU: training overwrites what they read."""
        self.own = [part._replace(read=part.read().to("cpu", copy=True).detach) for part in self.own]


def named(tree: Any) -> dict[str, Any]:
    """Return the leaves of nested dicts, lists and tuples by their names: the keys that lead to them, joined by dots."""
    found: dict[str, Any] = {}
    for path, leaf in tree_flatten_with_path(tree)[0]:
        name = ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
        if found.setdefault(name, leaf) is not leaf:  # as in {"a": {"b": 1}, "a.b": 2}
            raise CheckpointError(f"two entries of the state are named {name!r}; rename one of them")
    return found


def outlined(tree: Any) -> dict[str, torch.Tensor]:
    """Return the tensors on the meta device by their names; tied ones by the first."""
    leaves = named(tree)
    names = {id(leaf): name for name, leaf in reversed(leaves.items()) if _is_meta(leaf)}
    return {name: leaf for name, leaf in leaves.items() if names.get(id(leaf)) == name}


def consolidate(optimizer: torch.optim.Optimizer, to: int = 0) -> dict[str, Any] | None:
    """Gather the whole optimizer state on rank `to` of the process group. Needs to be called on all its ranks.

    Return on this rank the `state_dict()` of the unsharded optimizer, in copies on the CPU; on others None.

    Raises CheckpointError on all ranks if an entry of state has neither one number per element nor the same value on all ranks.
    If parameters are whole, an entry may have any shape.
    """
    whole = snapshot(optimizer, to=to).in_memory()
    return whole and whole["optimizer"]


def model_state_dict(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor] | None:
    """Gather the model's whole `state_dict()` on rank 0, in the precision of the updates. Needs to be called on all ranks.

    Return on rank 0 copies on the CPU, tied where the entries are, with masters for weights of lower precision; on others None.
    """
    whole = snapshot(optimizer, model, with_state=False).in_memory()
    return whole and whole["model"]


def snapshot(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module | None = None,
    with_state: bool = True,
    to: int = 0,
    group: dist.ProcessGroup | None = None,
) -> Snapshot:
    """Return the state of an optimizer and the weights of a model, for rank `to`. Needs to be called on all ranks.

    `group`: of all ranks, will send from main memory. Default: that of the optimizer.

    Raises the errors of `consolidate`, and CheckpointError if the ranks have different models.
    """
    divided = partition(optimizer, settle=True)
    replica, receiver = divmod(to, divided.plan.world_size)
    receives = (divided.replica, divided.rank) == (replica, receiver)
    take = partial(parts_of_rank, divided, model, with_state, receives)
    weights, outlines, own = on_all_ranks(take, divided.everyone, CheckpointError)
    gathered = gather_objects((outlines, [(part.name, part.start, part.numel) for part in own]), divided.process_group)
    of_slices, ranges_of_ranks = zip(*gathered, strict=True)

    def make() -> Snapshot:
        state = {"state": _merged(divided, of_slices), "param_groups": _copied(packed_groups(optimizer))}
        if divided.replica != replica:
            return Snapshot(None, [], [], to, None, group or divided.everyone)
        whole = {**weights, "optimizer": state} if with_state else weights
        tensors, ranked = outlined(whole), zip(divided.ranks, ranges_of_ranks, strict=True)
        sources = sorted((*range_, rank) for rank, ranges in ranked for range_ in ranges)
        expected, held = Counter({name: tensor.numel() for name, tensor in tensors.items()}), Counter[str]()
        for name, _, numel, _ in sources:
            held[name] += numel
        for name in expected | held if receives else ():  # a copy of the model, for example, has no masters
            if expected[name] != held[name]:
                sizes = f"{expected[name]} elements on rank {to}, but the ranks hold {held[name]}"
                raise CheckpointError(f"{name} has {sizes}; save the same model on all ranks")
        in_order = [(tensors[name], numel, rank) for name, _, numel, rank in sources if receives]
        groups = (group, group) if group is not None else (cpu_group(divided.process_group), divided.everyone)
        return Snapshot(whole if receives else None, own, in_order, divided.ranks[receiver], *groups)

    return on_all_ranks(make, divided.everyone, CheckpointError)


def parts_of_rank(
    partition: Partition, model: torch.nn.Module | None, with_state: bool, receives: bool
) -> tuple[dict[str, Any], list[Any], list[Part]]:
    """Return the outlines of a model's weights and of the state of each slice, and the parts that this rank holds, in order."""
    own: list[Part] = []
    outlines = [_outline(partition, owned, own) for owned in partition.owned] if with_state else []
    weights = {} if model is None else {"model": _weights(partition, model, receives, own)}
    return weights, outlines, sorted(own, key=lambda held: (held.name, held.start))


def restore(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Load the state of an unsharded optimizer. Each rank takes its slices. Needs to be called on all ranks.

    Hyperparameters come from `state_dict`, except for the choice of kernel (`fused`, `foreach`, ...). `step` counters go to the
    device that the kernel requires (https://github.com/pytorch/pytorch/issues/124133).

    `state_dict`: that of `consolidate` or of an unsharded optimizer. It is only read and copied. Raises CheckpointError if
    groups, shapes or entries do not match.
    """
    if state_dict is None:
        raise CheckpointError("state_dict is None; save what `consolidate` returns on one rank, and load that on all ranks")
    divided = partition(optimizer, settle=True)
    saved = state_dict["state"]
    _check_groups(state_dict["param_groups"], optimizer)
    _check_state(saved, divided)

    def own(owned: OwnedSlice, value: Any) -> Any:
        """Return the part of a leaf that belongs to a slice."""
        if not isinstance(value, torch.Tensor) or value.shape != owned.param.shape:
            return _copied(value)
        return shaped(flattened(value, owned.param)[owned.start : owned.stop].clone(), owned.local)

    in_saved = [(position, owned) for position, owned in enumerate(divided.owned) if owned.number in saved]
    states = {position: tree_map(partial(own, owned), saved[owned.number]) for position, owned in in_saved}
    inner_groups = packed_groups(divided.inner)
    for its_group, group, inner_group in zip(state_dict["param_groups"], optimizer.param_groups, inner_groups, strict=True):
        for key, value in hyperparameters(its_group).items():
            if key not in _MACHINE_FLAGS:
                ours = group.get(key)
                group[key] = inner_group[key] = _copied(value, ours.device if isinstance(ours, torch.Tensor) else "cpu")
    divided.inner.load_state_dict({"state": states, "param_groups": inner_groups})
    if isinstance(optimizer, DividedOptimizer):
        optimizer.has_state, optimizer.consolidated = bool(saved), None


def _outline(partition: Partition, owned: OwnedSlice, own: list[Part]) -> Any:
    """Return the outline of the state of a slice, and add the parts of tensors that it has to `own`."""

    def take(name: str, value: Any) -> Any:
        if isinstance(value, int | float | complex | None):
            return value
        entry, numel = _entry(partition, owned.number, name), owned.local.numel()
        like: torch.Tensor = owned.param
        read: Callable[[], torch.Tensor]
        if isinstance(value, Encoded):
            dtype, read = torch.float32, partial(value.decode, owned.local)
        elif not isinstance(value, torch.Tensor):
            raise CheckpointError(f"{entry} as {type(value).__name__}, which cannot be restored; use tensors and numbers")
        elif value.numel() == 1 and not (value.dim() and value.shape == owned.local.shape):
            return _copied(value)
        elif value.shape == owned.local.shape or partition.plan.is_whole(owned.number):
            dtype, read, numel = value.dtype, value.detach, value.numel()
            like = value if partition.plan.is_whole(owned.number) or value.shape == like.shape else like
        else:
            raise CheckpointError(f"{entry} in shape {tuple(value.shape)} for {numel} elements: {_RULE}")
        own.append(Part(f"optimizer.state.{owned.number}.{name}", owned.start, numel, dtype, read))
        return _meta_like(like, dtype)

    state = partition.inner.state.get(owned.local, {})
    return tree_unflatten(list(itertools.starmap(take, named(state).items())), tree_structure(state))


def _merged(partition: Partition, of_slices: Sequence[list[Any]]) -> dict[int, Any]:
    """Return the outline of the whole state, from those of the slices of each rank. They differ in nothing but elements."""
    first: dict[int, tuple[int, Any]] = {}  # by parameter: the rank and the outline of its first slice
    for rank, outlines in enumerate(of_slices):
        for slice_, outline in zip(partition.plan.slices(rank), outlines, strict=bool(outlines)):
            first_rank, its_outline = first.setdefault(slice_.number, (rank, outline))
            there, here = ({name: _text(leaf) for name, leaf in named(held).items()} for held in (its_outline, outline))
            for name in there | here:
                a, b = (texts.get(name, "nothing") for texts in (there, here))
                if a != b:
                    entry = _entry(partition, slice_.number, name)
                    raise CheckpointError(f"{entry} as {a} on rank {first_rank} and {b} on rank {rank}: {_RULE}")
    return {number: outline for number, (_, outline) in sorted(first.items()) if outline}


def _entry(partition: Partition, number: int, name: str) -> str:
    return f"{type(partition.inner).__name__} keeps {name!r} of parameter {number}"


def _text(leaf: Any) -> str:
    """Return a text that differs for different leaves of outlines."""
    if _is_meta(leaf):
        return f"a number per element, {leaf.dtype}"
    return f"{leaf.dtype} {leaf.tolist()}" if isinstance(leaf, torch.Tensor) else repr(leaf)


def _weights(partition: Partition, model: torch.nn.Module, receives: bool, own: list[Part]) -> dict[str, Any]:
    """Return the outline of a model's state dict, in the dtype of the updates, and add the parts of this rank to `own`.

    These are its masters and, on the rank that receives, all that has no masters. Tied tensors stay tied.
    """
    divided = partition.plan.has_masters
    held = model.state_dict(keep_vars=True)
    names = {id(tensor): f"model.{name}" for name, tensor in reversed(held.items())}  # first name of tied tensors
    laid_out = zip(parameters(partition.optimizer), partition.plan.params, partition.plan.update_dtypes, strict=True)
    # as it was laid out, whether or not it has been frozen since
    dtypes = {id(param): dtype if spec.requires_grad else param.dtype for param, spec, dtype in laid_out}
    for name, param in model.named_parameters(remove_duplicate=False):
        if divided and held.get(name, param) is not param and dtypes.get(id(param), param.dtype) != param.dtype:
            copied = f"state_dict() of the model has a copy of {name}"
            raise CheckpointError(f"{copied}, which lacks its master; return the parameter")
    outlines: dict[int, Any] = {}
    for key, tensor in {id(tensor): tensor for tensor in held.values()}.items():
        if not isinstance(tensor, torch.Tensor):  # from get_extra_state()
            outlines[key] = copy.deepcopy(tensor) if receives else None
            continue
        is_divided = divided and key in dtypes
        outlines[key] = _meta_like(tensor, dtypes[key] if is_divided else tensor.dtype)
        if receives and not is_divided:
            own.append(Part(names[key], 0, tensor.numel(), tensor.dtype, tensor.detach))
    for owned in partition.owned if divided else ():
        if (key := id(owned.param)) in names:
            own.append(Part(names[key], owned.start, owned.local.numel(), dtypes[key], owned.read))
    return {name: outlines[id(tensor)] for name, tensor in held.items()}


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


def _check_state(saved: dict[int, dict[str, Any]], partition: Partition) -> None:
    """Refuse state that does not fit the parameters or the class, with the same result on all ranks."""
    inner, params = type(partition.inner), parameters(partition.optimizer)
    for number, entries in saved.items():
        if not 0 <= number < len(params):
            raise CheckpointError(f"there is saved state of parameter {number}, but there are {len(params)}")
        is_matrix = issubclass(inner, Muon) and partition.plan.params[number].matrices  # the others have the state of AdamW
        known = torch.optim.Muon if is_matrix else next((cls for cls in inner.__mro__ if cls in ENTRIES), None)
        of = [cls for cls, (always, sometimes) in ENTRIES.items() if always <= entries.keys() <= always | sometimes]
        if entries and known and known not in of and (of or not ENTRIES[known][0] <= entries.keys()):
            kept = f"{', '.join(entries)}{' of ' if of else ''}{' or '.join(cls.__name__ for cls in of)}"
            raise CheckpointError(f"the saved state is {kept}, not of {inner.__name__}; build the optimizer that was saved")
        whole, shape = partition.plan.is_whole(number), params[number].shape
        for name, value in named(entries).items():
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


def _is_same_kind(value: Any, ours: Any) -> bool:
    """Return whether a hyperparameter may replace ours."""
    if isinstance(ours, list | tuple):
        return isinstance(value, list | tuple) and len(value) == len(ours) and all(map(_is_same_kind, value, ours))
    if isinstance(ours, int | float | torch.Tensor):
        return isinstance(value, int | float | torch.Tensor)
    return True


def _meta_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor on the meta device, in the shape of `tensor`, and in its strides if dense."""
    memory_format = torch.preserve_format if is_dense(tensor) else torch.contiguous_format
    return torch.empty_like(tensor, dtype=dtype, device="meta", memory_format=memory_format)


def _is_meta(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_meta


def packed_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the `param_groups` of a torch.optim `state_dict()`: hyperparameters, and numbers in place of parameters."""
    numbers = itertools.count()
    return [{**group, "params": [next(numbers) for _ in group["params"]]} for group in optimizer.param_groups]


def _copied(tree: Any, device: torch.device | str = "cpu") -> Any:
    """Return a tree with copies of its tensors on a device."""
    return tree_map(lambda leaf: leaf.detach().to(device, copy=True) if isinstance(leaf, torch.Tensor) else leaf, tree)
