"""Pure arithmetic: how flattened parameters are cut into buckets, shards and slices. No tensors, no communication.

`plan` says for any world size which rank owns which slice of which parameter; `ShardedOptimizer` allocates what it says.

Words used everywhere in this package:

flat buffer   all parameters of one dtype laid end to end in the order given (the optimizer reverses its own: later
              parameters get their gradients earlier), then padding
bucket        consecutive elements of the flat buffer, the unit of communication
shard         the part of a bucket that one rank owns; the shards of a bucket lie side by side, by rank
slice         the part of one parameter that falls into one shard: a contiguous range of the flattened parameter

`Layout.by_element` makes all shards of a bucket equal (ZeRO, https://arxiv.org/abs/1910.02054, section 5.1), so that
parameters are cut wherever a shard ends. `Layout.by_parameter` deals whole parameters, for optimizers that look at a
parameter's shape; its shards are as equal as that allows.

Parameters and shards begin at multiples of `align` elements. A vectorized kernel rounds the elements of its body and
those of its tail, what is left of the last vector, differently (torch's fused CPU AdamW does); cut between vectors, a
slice's tail is its parameter's, and the update of slices is that of whole parameters bit for bit. Padding is less than
`align` elements per parameter and `align * world_size` in all; a parameter without elements takes `align`, so that it
has a place, and one owner, like any other.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Self

import torch

_VECTOR_BYTES = 64  # the widest vector registers, AVX-512, and a cache line
PARTITIONS = ("element", "parameter")


class ParameterSpec(NamedTuple):
    """What a plan needs to know of a parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = True
    group: int = 0  # number of its parameter group
    position: int = -1  # in the order in which the model registers its parameters, if it is known
    name: str = ""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Slice(NamedTuple):
    """Elements `start:stop` of flattened parameter number `param`."""

    param: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


def parameter_specs(
    groups: list[dict[str, Any]],
    registration_order: Iterable[torch.nn.Parameter] = (),
    names: Mapping[torch.nn.Parameter, str] | None = None,
) -> list[ParameterSpec]:
    """The specs of the parameters of torch.optim groups, which may be on the meta device.

    Args:
        registration_order: `model.parameters()`, where the groups have another order.
        names: of the parameters, as far as they are known.
    """
    positions, names = {param: position for position, param in enumerate(registration_order)}, names or {}
    return [
        ParameterSpec(
            tuple(param.shape),
            param.dtype,
            param.device,
            param.requires_grad,
            group=index,
            position=positions.get(param, -1),
            name=names.get(param, ""),
        )
        for index, group in enumerate(groups)
        for param in group["params"]
    ]


class PlacedSlice(NamedTuple):
    """Elements `start:stop` of flattened parameter number `param`, from `offset` on in a bucket or shard."""

    param: int
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


class Span(NamedTuple):
    """Elements `start:stop` of the flat buffer."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """Where each parameter, bucket, shard and slice lies in one flat buffer."""

    numels: tuple[int, ...]  # elements of each parameter
    offsets: tuple[int, ...]  # first element of each parameter in the flat buffer
    shards: tuple[tuple[Span, ...], ...]  # of each bucket, by rank; without gaps from 0 to padded_numel

    @classmethod
    def by_element(cls, numels: Sequence[int], world_size: int, bucket_numel: int, align: int = 1) -> Self:
        """Buckets of `bucket_numel` elements, rounded up to a multiple of `align * world_size`, in equal shards.

        Args:
            numels: elements of each parameter, in the order in which they are laid down.
            world_size: ranks that share the buffer.
            bucket_numel: elements per bucket; the last one is shorter.
            align: elements per vector of the kernels that will run over slices.

        Raises:
            ValueError: if a size is impossible.
        """
        _check(numels, world_size, bucket_numel, align)
        *offsets, end = accumulate(_sizes(numels, align), initial=0)
        unit = align * world_size
        padded_numel, bucket_numel = _round_up(end, unit), _round_up(bucket_numel, unit)
        shards = []
        for start in range(0, padded_numel, bucket_numel):
            numel = min(bucket_numel, padded_numel - start) // world_size
            shards.append(tuple(Span(start + r * numel, start + (r + 1) * numel) for r in range(world_size)))
        return cls(tuple(numels), tuple(offsets), tuple(shards))

    @classmethod
    def by_parameter(cls, numels: Sequence[int], world_size: int, bucket_numel: int, align: int = 1) -> Self:
        """Whole parameters dealt by size, the largest first, each to the rank that has least so far.

        A bucket holds consecutive parameters, no more than `bucket_numel` elements if they are not larger each, and in
        it every owner's parameters lie side by side. Arguments and errors are those of `by_element`.
        """
        _check(numels, world_size, bucket_numel, align)
        sizes = _sizes(numels, align)
        owner, load = [0] * len(sizes), [0] * world_size
        for param in sorted(range(len(sizes)), key=lambda param: -sizes[param]):
            owner[param] = load.index(min(load))
            load[owner[param]] += sizes[param]
        members: list[list[int]] = []  # of each bucket
        room = 0
        for param, size in enumerate(sizes):
            if not members or size > room:
                members.append([])
                room = bucket_numel
            members[-1].append(param)
            room -= size
        offsets, shards, end = [0] * len(sizes), [], 0
        for bucket in members:
            bounds = [end]
            for rank in range(world_size):
                for param in bucket:
                    if owner[param] == rank:
                        offsets[param] = end
                        end += sizes[param]
                bounds.append(end)
            shards.append(tuple(Span(start, stop) for start, stop in pairwise(bounds)))
        return cls(tuple(numels), tuple(offsets), tuple(shards))

    @cached_property
    def buckets(self) -> list[Span]:
        """The buckets, from the front of the flat buffer to its end."""
        return [Span(shards[0].start, shards[-1].stop) for shards in self.shards]

    @property
    def padded_numel(self) -> int:
        """Elements of the flat buffer."""
        return self.buckets[-1].stop if self.buckets else 0

    def slices(self, rank: int) -> list[Slice]:
        """The slices that `rank` owns, from the front of the flat buffer to its end; `param` counts through `numels`."""
        return [piece for shards in self.shards for piece in self.slices_in(shards[rank])]

    def placed_in(self, span: Span) -> list[PlacedSlice]:
        """The parts of parameters that lie in `span`, with their places in it, from its front to its end."""
        return [
            PlacedSlice(param, start, stop, self.offsets[param] + start - span.start)
            for param, start, stop in self.slices_in(span)
        ]

    def slices_in(self, span: Span) -> list[Slice]:
        """The parts of parameters that lie in `span`, from its front to its end."""
        found = []
        first = max(0, bisect_right(self._laid, span.start, key=lambda param: self.offsets[param]) - 1)
        for param in self._laid[first:]:
            offset = self.offsets[param]
            if offset >= span.stop:
                break
            start, stop = max(span.start - offset, 0), min(span.stop - offset, self.numels[param])
            if start < stop or (self.numels[param] == 0 and span.start <= offset):
                found.append(Slice(param, start, stop))
        return found

    @cached_property
    def _laid(self) -> list[int]:
        """The parameters from the front of the flat buffer to its end."""
        return sorted(range(len(self.numels)), key=lambda param: self.offsets[param])


@dataclass(frozen=True)
class BufferPlan:
    """One flat buffer: trainable parameters of one dtype and device."""

    params: tuple[int, ...]  # numbers of the plan's parameters, in the order of the layout
    layout: Layout
    dtype: torch.dtype  # that the parameters are kept in
    update_dtype: torch.dtype  # that they are updated in
    device: torch.device

    @property
    def has_masters(self) -> bool:
        """Whether each rank keeps its slices in `update_dtype` as well."""
        return self.dtype != self.update_dtype


@dataclass(frozen=True)
class Plan:
    """Which rank owns which slice of which parameter."""

    params: tuple[ParameterSpec, ...]
    world_size: int
    buffers: tuple[BufferPlan, ...] = ()  # the trainable parameters of a ShardedOptimizer
    dealt: tuple[tuple[Slice, ...], ...] | None = None  # without buffers: the whole parameters of each rank
    partition: str = "element"  # or 'parameter'
    param_dtype: torch.dtype | None = None  # under ShardedDataParallel also that of frozen parameters

    def slices(self, rank: int) -> list[Slice]:
        """The slices that `rank` owns, in the order of its inner optimizer's parameters."""
        if self.dealt is not None:
            return list(self.dealt[rank])
        slices = [
            piece._replace(param=buffer.params[piece.param]) for buffer in self.buffers for piece in buffer.layout.slices(rank)
        ]
        if rank == 0:  # it has the optimizer state of frozen parameters, if there is any
            slices += [Slice(number, 0, spec.numel) for number, spec in enumerate(self.params) if not spec.requires_grad]
        return sorted(slices)

    def update_dtype(self, number: int) -> torch.dtype:
        """What a parameter is updated in."""
        return self._update_dtypes.get(number, self.params[number].dtype)

    @property
    def has_masters(self) -> bool:
        """Whether owners keep their slices in more precision than the parameters have."""
        return any(buffer.has_masters for buffer in self.buffers)

    @property
    def has_whole_parameters(self) -> bool:
        """Whether every slice is a whole parameter, so that state may have the shape of a row or a column."""
        return self.dealt is not None or self.partition == "parameter"

    def followed_by(self, other: Self) -> Self:
        """This plan and one of more parameters, which are numbered after this one's."""
        first = len(self.params)
        buffers = [replace(buffer, params=tuple(first + number for number in buffer.params)) for buffer in other.buffers]
        return replace(self, params=self.params + other.params, buffers=(*self.buffers, *buffers))

    @cached_property
    def _update_dtypes(self) -> dict[int, torch.dtype]:
        return {number: buffer.update_dtype for buffer in self.buffers for number in buffer.params}


def plan(
    params: Sequence[ParameterSpec],
    world_size: int,
    *,
    bucket_mb: float = 75,
    partition: str = "element",
    param_dtype: torch.dtype | None = None,
) -> Plan:
    """The plan of a ShardedOptimizer: flat buffers, one per dtype and device, in reverse registration order.

    Args:
        params: all parameters, numbered as a torch.optim `state_dict()` numbers them.
        world_size: ranks that share the optimizer state.
        bucket_mb: megabytes (10**6 bytes) per bucket.
        partition: 'element', equal shards, or 'parameter', whole parameters.
        param_dtype: what the parameters are to be kept in; they are updated in their own dtype, float32 at least.

    Raises:
        ValueError: if `bucket_mb` is not positive, `partition` unknown, or `world_size` less than 1.
    """
    if bucket_mb <= 0:
        raise ValueError(f"bucket_mb={bucket_mb} must be positive")
    if partition not in PARTITIONS:
        raise ValueError(f"partition={partition!r} is neither 'element' nor 'parameter'")
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for number in sorted(range(len(params)), key=lambda number: params[number].position)[::-1]:
        if params[number].requires_grad:
            kinds.setdefault((params[number].dtype, params[number].device), []).append(number)
    lay_out = Layout.by_element if partition == "element" else Layout.by_parameter
    buffers = []
    for (own_dtype, device), numbers in kinds.items():
        dtype = param_dtype or own_dtype
        layout = lay_out(
            [params[number].numel for number in numbers],
            world_size,
            bucket_numel=max(1, int(bucket_mb * 1e6) // dtype.itemsize),
            align=_VECTOR_BYTES // dtype.itemsize,
        )
        update_dtype = own_dtype if param_dtype is None else torch.promote_types(own_dtype, torch.float32)
        buffers.append(BufferPlan(tuple(numbers), layout, dtype, update_dtype, device))
    return Plan(tuple(params), world_size, tuple(buffers), partition=partition, param_dtype=param_dtype)


def zero_redundancy_plan(params: Sequence[ParameterSpec], world_size: int) -> Plan:
    """The plan of `torch.distributed.optim.ZeroRedundancyOptimizer`, which deals whole parameters to the ranks.

    Group by group, the largest parameter first, each goes to the rank that has the fewest elements so far (its
    `_partition_parameters`).
    """
    dealt: list[list[Slice]] = [[] for _ in range(world_size)]
    load = [0] * world_size  # elements
    for number in sorted(range(len(params)), key=lambda number: (params[number].group, -params[number].numel)):
        rank = load.index(min(load))
        dealt[rank].append(Slice(number, 0, params[number].numel))
        load[rank] += params[number].numel
    return Plan(tuple(params), world_size, dealt=tuple(map(tuple, dealt)))


def replicated_plan(params: Sequence[ParameterSpec]) -> Plan:
    """The plan of an optimizer that is not sharded: every rank is as rank 0 of one."""
    return Plan(tuple(params), 1, dealt=(tuple(Slice(number, 0, spec.numel) for number, spec in enumerate(params)),))


def _check(numels: Sequence[int], world_size: int, bucket_numel: int, align: int) -> None:
    if min(world_size, bucket_numel, align) < 1 or any(numel < 0 for numel in numels):
        raise ValueError(f"world_size, bucket_numel and align must be positive, numels not negative: {numels}")


def _sizes(numels: Sequence[int], align: int) -> list[int]:
    """The elements that each parameter takes in the flat buffer."""
    return [_round_up(max(numel, 1), align) for numel in numels]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
