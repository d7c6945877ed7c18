"""Division of flattened parameters into buckets, shards and slices. Arithmetic only: no tensors, no communication.

`plan` computes for any world size which rank owns which slice of which parameter. Terms used in this package:

number        of a parameter, as a torch.optim `state_dict()` counts them; everywhere in this package
flat buffer   all parameters of one dtype laid end to end in the given order, with padding. The optimizer reverses the order
              of its parameters, because later parameters get their gradients earlier.
bucket        consecutive elements of the flat buffer; the unit of communication
shard         the part of a bucket that one rank owns; all are equal, and lie side by side, in rank order
slice         the part of one parameter that lies in one shard: a contiguous range of the flattened parameter

Parameters and shards begin at multiples of `align` elements. A vectorized kernel may round the elements of full vectors and
those of the tail differently (torch's fused CPU AdamW does). The cuts lie between vectors, so an update of slices equals an
update of whole parameters bit for bit. A parameter without elements takes `align` elements, so that it has one owner too.
Source: ZeRO, https://arxiv.org/abs/1910.02054, section 5.1.
"""

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import itemgetter
from typing import Any, NamedTuple, Self

import torch

from zero.options import Options

_VECTOR_BYTES = 64  # size of the widest vector registers (AVX-512) and of a cache line


class ParameterSpec(NamedTuple):
    """The properties of a parameter that a plan needs."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = True
    group: int = 0  # number of its parameter group
    position: int = -1  # in the order in which the model registers its parameters; -1 if unknown
    matrices: int = 0  # how many it consists of, for an optimizer that updates matrices, see `zero.muon`
    matrix_dtype: torch.dtype = torch.bfloat16  # in which these are sent
    autocast: torch.dtype | None = None  # the dtype to which autocast always casts it; None: some read it as it is

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Slice(NamedTuple):
    """Elements `start:stop` of a flattened parameter."""

    number: int  # of the parameter
    start: int
    stop: int
    offset: int = 0  # where they begin in a bucket or shard

    @property
    def numel(self) -> int:
        return self.stop - self.start


def parameter_specs(
    groups: list[dict[str, Any]],
    registration_order: Iterable[torch.nn.Parameter] = (),
    device: torch.device | None = None,
    autocast: Mapping[torch.nn.Parameter, torch.dtype] | None = None,
) -> list[ParameterSpec]:
    """Return the specs of the parameters in torch.optim groups.

    `registration_order`: that of `model.parameters()`. `device`: where the parameters will be; None: where they are.
    `autocast`: see `zero.autocast.autocast_parameters`.
    """
    positions = {param: position for position, param in enumerate(registration_order)}
    return [
        ParameterSpec(
            tuple(param.shape),
            param.dtype,
            device or param.device,
            param.requires_grad,
            group=index,
            position=positions.get(param, -1),
            matrices=group.get("matrices", 0),
            matrix_dtype=getattr(torch, group.get("ns_dtype", "bfloat16")),
            autocast=(autocast or {}).get(param),
        )
        for index, group in enumerate(groups)
        for param in group["params"]
    ]


@dataclass(frozen=True)
class Layout:
    """The positions of the parameters, buckets, shards and slices in one flat buffer."""

    numels: dict[int, int]  # by number of a parameter, in the order of the flat buffer: how many elements it has
    offsets: dict[int, int]  # and its first element in the flat buffer
    shards: tuple[tuple[range, ...], ...]  # of each bucket, by rank: elements of the flat buffer, which they cover without gaps

    @classmethod
    def by_element(cls, numels: Mapping[int, int], world_size: int, bucket_numel: int, align: int = 1) -> Self:
        """Make equal buckets of at most `bucket_numel` elements, with equal shards for `world_size` ranks.

        Args:
            numels: number of elements of each parameter, by its number, in the order of the flat buffer.
            bucket_numel: largest number of elements per bucket, rounded up to a multiple of `align * world_size`.
            align: number of elements per vector of the kernels that will run over slices.
        """
        *offsets, end = accumulate((_ceil(max(numel, 1), align) * align for numel in numels.values()), initial=0)
        unit = align * world_size
        buckets = max(1, _ceil(end, _ceil(bucket_numel, unit) * unit))
        numel = _ceil(end, buckets * unit) * align  # per shard
        firsts = range(0, buckets * world_size * numel, max(1, world_size * numel))
        shards = [tuple(range(first + r * numel, first + (r + 1) * numel) for r in range(world_size)) for first in firsts]
        return cls(dict(numels), dict(zip(numels, offsets, strict=True)), tuple(shards))

    @cached_property
    def buckets(self) -> list[range]:
        """The buckets, in the order of the flat buffer."""
        return [range(shards[0].start, shards[-1].stop) for shards in self.shards]

    @property
    def padded_numel(self) -> int:
        """Number of elements of the flat buffer."""
        return self.buckets[-1].stop if self.buckets else 0

    def slices(self, rank: int) -> list[Slice]:
        """Return the slices that `rank` owns, in the order of the flat buffer."""
        return [slice_ for shards in self.shards for slice_ in self.placed_in(shards[rank])]

    def placed_in(self, span: range) -> list[Slice]:
        """Return the parts of parameters that lie in `span`, with their offsets in it, in the order of the flat buffer."""
        found = []
        first = max(0, bisect_right(self._in_order, span.start, key=itemgetter(1)) - 1)
        for number, offset in self._in_order[first:]:
            if offset >= span.stop:
                break
            start, stop = max(span.start - offset, 0), min(span.stop - offset, self.numels[number])
            if start < stop or (self.numels[number] == 0 and span.start <= offset):
                found.append(Slice(number, start, stop, offset + start - span.start))
        return found

    @cached_property
    def _in_order(self) -> list[tuple[int, int]]:
        return list(self.offsets.items())


@dataclass(frozen=True)
class BufferPlan:
    """One flat buffer: trainable parameters of one dtype and device."""

    layout: Layout
    dtype: torch.dtype  # in which the parameters are stored and gathered
    gradient_dtype: torch.dtype  # in which their gradients arrive and are sent
    update_dtype: torch.dtype  # in which the parameters are updated
    device: torch.device
    has_remainders: bool = False  # whether the masters are held as weight and remainder

    @property
    def has_masters(self) -> bool:
        """Whether each rank also keeps its slices in `update_dtype`."""
        return self.dtype != self.update_dtype

    @property
    def is_of_autocast(self) -> bool:
        """Whether the parameters are stored as autocast rounds them."""
        return self.dtype != self.gradient_dtype


@dataclass(frozen=True)
class Plan:
    """Which rank owns which slice of which parameter."""

    params: tuple[ParameterSpec, ...]
    world_size: int  # number of ranks that share the optimizer state
    buffers: tuple[BufferPlan, ...] = ()  # flat buffers of a ShardedOptimizer, for trainable parameters; none: not sharded
    assigned: tuple[tuple[Slice, ...], ...] | None = None  # of ZeroRedundancyOptimizer: the whole parameters of each rank
    param_dtype: torch.dtype | None = None  # under ShardedDataParallel also the dtype of frozen parameters
    state_dtype: str = "float32"  # in which float32 state is held between updates

    def slices(self, rank: int) -> list[Slice]:
        """Return the slices that `rank` owns, in the order of its inner optimizer's parameters."""
        if self.assigned is not None:
            return list(self.assigned[rank])
        slices: list[Slice] = []
        for buffer in self.buffers:
            slices += buffer.layout.slices(rank)
        if rank == 0:  # it has the state of frozen parameters, if there is any
            slices += [Slice(number, 0, spec.numel) for number, spec in enumerate(self.params) if self.is_whole(number)]
        return sorted(slices)

    def is_whole(self, number: int) -> bool:
        """Return whether a parameter is never cut: then its state may have any shape."""
        return not any(number in buffer.layout.numels for buffer in self.buffers)

    @cached_property
    def update_dtypes(self) -> list[torch.dtype]:
        """The dtype in which each parameter is updated."""
        of_buffers = {number: buffer.update_dtype for buffer in self.buffers for number in buffer.layout.numels}
        return [of_buffers.get(number, spec.dtype) for number, spec in enumerate(self.params)]

    @property
    def has_masters(self) -> bool:
        """Whether owners keep their slices in higher precision than the parameters."""
        return any(buffer.has_masters for buffer in self.buffers)

    @property
    def weights(self) -> str:
        """What the weights are: 'float32' for their own dtype, 'autocast' if it rounds some, otherwise the dtype of all."""
        if any(buffer.is_of_autocast for buffer in self.buffers):
            return "autocast"
        return str(self.param_dtype or torch.float32).removeprefix("torch.")


def auto_bucket_mb(nbytes: int, world_size: int) -> float:
    """Return the megabytes per bucket for `nbytes` of parameters whose optimizer state `world_size` ranks share.

    A third of the parameters: two buckets exist at a time, and each takes 2 % of a short step of a small model on a CPU. At
    least 4 MB, because messages have a latency. At most 25 MB, as in DistributedDataParallel: larger buckets take memory and
    overlap less. This limit rises to 1 MB per rank, as in Megatron-LM, because a ring sends one message per rank, and to a
    40th of the parameters: two buckets are then 5 %, and the host needs time for each. Figures: docs/sharding.md.
    """
    return max(4.0, min(nbytes / 3e6, max(25.0, world_size, nbytes / 40e6)))


def plan(
    params: Sequence[ParameterSpec], world_size: int, options: Options = Options(), earlier: Sequence[BufferPlan] = ()
) -> Plan:
    """Return the plan of a ShardedOptimizer: flat buffers, one per dtype and device, in reverse registration order.

    Parameters that autocast casts come first. Those beside them, such as LayerNorms, have a buffer of their own, with a small
    bucket: their gradients arrive all through backward. The others come last: the next forward needs these first.

    `world_size` ranks share the state of `params`. Those that `options` store in another dtype are updated in their own, at
    least float32. `earlier`: existing buffers. Raises ValueError.
    """
    param_dtype, has_remainders = options.stored_dtype, options.param_dtype == "bfloat16_remainder"
    kinds: dict[tuple[int, torch.dtype, torch.dtype, torch.device], list[int]] = {}
    nbytes, laid_out = 0, {number for buffer in earlier for number in buffer.layout.numels}
    in_order = sorted((spec.position, number) for number, spec in enumerate(params) if spec.requires_grad)[::-1]
    casts = {number for _, number in in_order if options.param_dtype == "auto" and params[number].autocast}
    last_cast = max((index for index, (_, number) in enumerate(in_order) if number in casts), default=-1)
    for index, (_, number) in enumerate(in_order):
        if number not in laid_out:
            spec, place = params[number], 0 if number in casts else 1 if index < last_cast else 2
            stored = spec.autocast if number in casts else param_dtype
            kinds.setdefault((place, spec.dtype, stored or spec.dtype, spec.device), []).append(number)
            nbytes += spec.numel * (param_dtype or spec.dtype).itemsize
    megabytes = auto_bucket_mb(nbytes, world_size) if isinstance(options.bucket_mb, str) else options.bucket_mb
    buffers = list(earlier)
    for (_, own_dtype, stored, device), numbers in sorted(kinds.items(), key=lambda kind: kind[0][0]):
        dtype = param_dtype or own_dtype  # of gradients
        numels, bucket_numel = {number: params[number].numel for number in numbers}, int(megabytes * 1e6) // dtype.itemsize
        layout = Layout.by_element(numels, world_size, max(1, bucket_numel), align=_VECTOR_BYTES // dtype.itemsize)
        update_dtype = own_dtype if param_dtype is None else torch.promote_types(own_dtype, torch.float32)
        if has_remainders and update_dtype != torch.float32:
            remedy = "use param_dtype='bfloat16'"
            raise ValueError(f"param_dtype='bfloat16_remainder' needs float32 masters, not {update_dtype}; {remedy}")
        buffers.append(BufferPlan(layout, stored, dtype, update_dtype, device, has_remainders))
    return Plan(tuple(params), world_size, tuple(buffers), None, param_dtype, options.state_dtype)


def balanced(costs: Sequence[int], loads: list[int]) -> list[int]:
    """Return a rank for each cost, the largest first ("longest processing time"): that with the smallest load so far.

    Adds the costs to `loads`.
    """
    smallest = sorted((load, rank) for rank, load in enumerate(loads))  # a heap
    ranks = [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        _, rank = smallest[0]
        loads[rank] += costs[number]
        ranks[number] = rank
        heapq.heapreplace(smallest, (loads[rank], rank))
    return ranks


def _ceil(value: int, divisor: int) -> int:
    return -(-value // divisor)
