"""The tensors of a plan: flat buffers that hold the parameters, buckets with this rank's slices of them, all in a Placement."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from zero.collectives import Communicator
from zero.layout import BufferPlan, Plan, Slice
from zero.masters import Masters, Remainders, store_rounded
from zero.tensors import cut, cut_sizes, flattened, has_memory, memory_span, shaped, with_own_storage


@dataclass
class FlatBuffer:
    """Parameters of one dtype and device, whose data are views into one flat tensor."""

    data: torch.Tensor  # (layout.padded_numel,)
    params: dict[int, torch.nn.Parameter]  # by number, in the order of the layout
    planned: BufferPlan
    places: dict[int, tuple[Any, ...]] = field(default_factory=dict)  # by number: address, shape and strides of the parameter
    former_memory: list[tuple[StorageWeakRef, int, int]] = field(default_factory=list)  # storage, start, end

    def move_in(self, number: int, like: torch.Tensor) -> None:
        """Make a parameter a view into `data` with the strides of `like`. Its values are not copied."""
        param, offset = self.params[number], self.planned.layout.offsets[number]
        if has_memory(param):
            self.former_memory.append((StorageWeakRef(param.untyped_storage()), *memory_span(param)))
        part = with_own_storage(self.data[offset : offset + param.numel()])
        param.data = part.as_strided(like.shape, like.stride())
        self.places[number] = (param.data_ptr(), param.shape, param.stride())

    def moved(self) -> Iterator[torch.nn.Parameter]:
        """Yield the parameters that are no longer in their place (`param.data = ...`, `model.to`)."""
        for number, place in self.places.items():
            param = self.params[number]
            if (param.data_ptr(), param.shape, param.stride()) != place and param.numel():
                yield param

    def uses_former_memory(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor uses former memory of a parameter."""
        if not has_memory(tensor):
            return False
        storage, (start, stop) = StorageWeakRef(tensor.untyped_storage()), memory_span(tensor)
        return any(former == storage and start < end and begin < stop for former, begin, end in self.former_memory)


class OwnedSlice(NamedTuple):
    """A slice of this rank, as the inner optimizer sees it."""

    number: int  # of the parameter
    param: torch.nn.Parameter
    start: int  # first element of the flattened parameter, see `flattened`
    stop: int
    offset: int  # first element in this rank's shard of the bucket
    # a view into the shard or into the values of its masters; (stop - start,), or the parameter's shape if it has one element
    local: torch.nn.Parameter
    masters: Masters | Remainders | None = None  # those of the shard

    def read(self) -> torch.Tensor:
        """Return the elements in the precision of the update, also between updates: a view of `local`'s shape, or a copy."""
        if self.masters is None:
            return self.local.detach()
        return shaped(self.masters.read(self.offset, self.offset + self.local.numel()), self.local)

    def set_masters(self, values: torch.Tensor, first: int = 0) -> None:
        """Overwrite the masters with flat values from the parameter's element `first` on. The weights have them already."""
        start, stop = max(first, self.start), min(first + values.numel(), self.stop)
        if self.masters is not None and start < stop:
            own = values[start - first : stop - first]
            self.masters.write(self.offset + start - self.start, own.to(self.masters.values.dtype))


@dataclass
class Bucket:
    """The tensors and slices of one bucket at run time."""

    number: int  # among all buckets of the optimizer
    data: torch.Tensor  # (number of ranks * shard.numel(),), a view into FlatBuffer.data
    shard: torch.Tensor  # this rank's part of `data`
    masters: Masters | Remainders | None  # of `shard`, if `data` has lower precision than the update
    owned: list[OwnedSlice]  # the slices that this rank updates
    local_by_group: dict[int, list[torch.nn.Parameter]]  # their local parameters, by group of the inner optimizer
    members: list[Slice]  # all slices in the bucket
    gradient_dtype: torch.dtype  # in which their gradients are sent
    gather: list[dist.Work] | None = None  # the all-gather in flight: until it ends, only the `shard` part may be read

    @cached_property
    def cuts(self) -> list[int]:
        """Where the members begin and end in `data`, see `zero.tensors.cut`."""
        return cut_sizes([(member.offset, member.numel) for member in self.members], self.data.numel())

    @cached_property
    def own_cuts(self) -> list[int]:
        """Where the owned slices begin and end in `shard`."""
        return cut_sizes([(owned.offset, owned.local.numel()) for owned in self.owned], self.shard.numel())

    def views(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Return the owned slices of a tensor in the shape of `shard`, in the shapes of `OwnedSlice.local`."""
        return [shaped(part, owned.local) for part, owned in zip(cut(shard, self.own_cuts), self.owned, strict=True)]

    @property
    def values(self) -> torch.Tensor:
        """The tensor that the inner optimizer updates through views, in the shape of `shard`."""
        return self.shard if self.masters is None else self.masters.values

    def load_masters(self) -> None:
        """Make the owned slices ready for an update."""
        if self.masters is not None:
            self.masters.load()
            self._follow_masters()

    def store_masters(self) -> None:
        """Round the updated slices to the weights."""
        if self.masters is not None:
            self.masters.store()
            self._follow_masters()

    def _follow_masters(self) -> None:
        if isinstance(self.masters, Remainders):
            for owned, values in zip(self.owned, self.views(self.values), strict=True):
                owned.local.data = values


@dataclass
class Placement:
    """The parameters of a ShardedOptimizer in their places. It owns this, and hands it to the parts that work on buckets."""

    comm: Communicator
    registration_order: Sequence[torch.nn.Parameter] = ()  # that of `model.parameters()`, if known
    device: torch.device | None = None  # where the parameters will be; None: where they are
    autocast: Mapping[torch.nn.Parameter, torch.dtype] = field(default_factory=dict)  # those that only autocast reads
    plan: Plan = field(default_factory=lambda: Plan((), 1))  # of the parameters that have a place
    groups: list[list[torch.nn.Parameter]] = field(default_factory=list)  # as they were laid out
    frozen: list[torch.nn.Parameter] = field(default_factory=list)  # the parameters that are in no buffer
    buffers: list[FlatBuffer] = field(default_factory=list)
    buckets: list[Bucket] = field(default_factory=list)
    number_of: dict[torch.nn.Parameter, int] = field(default_factory=dict)  # of those in the buffers, in their order there
    owned_of: dict[torch.nn.Parameter, list[OwnedSlice]] = field(default_factory=dict)  # this rank's slices, ascending
    names: dict[torch.nn.Parameter, str] = field(default_factory=dict)  # known names, for messages
    # of the parameters with masters: version counters at the last write that reached these
    versions: dict[torch.nn.Parameter, int] = field(default_factory=dict)

    @property
    def owned(self) -> list[OwnedSlice]:
        """The slices of this rank, bucket by bucket."""
        return [owned for bucket in self.buckets for owned in bucket.owned]

    def moved(self) -> dict[torch.nn.Parameter, torch.dtype]:
        """Return the parameters that are no longer in their place, with the dtypes of their places."""
        return {param: buffer.data.dtype for buffer in self.buffers for param in buffer.moved()}

    def expect_versions(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Note that the writes to parameters so far have reached their masters, if they have any."""
        self.versions.update((param, param._version) for param in params if param in self.versions)

    def written(self) -> list[torch.nn.Parameter]:
        """Return the parameters whose masters have missed a write, as far as autograd's version counters show it."""
        return [param for param, version in self.versions.items() if param._version != version]

    def write(self, param: torch.nn.Parameter, values: torch.Tensor, first: int = 0) -> None:
        """Overwrite the elements of a parameter with masters from `first` on, rounded to its dtype, and the masters."""
        number, place = self.number_of[param], flattened(param.data, param)[first : first + values.numel()]
        planned = next(buffer.planned for buffer in self.buffers if number in buffer.params)
        store_rounded(values, place, half_even=planned.is_of_autocast)
        for owned in self.owned_of.get(param, []):
            owned.set_masters(values, first)


def allocate(
    planned: BufferPlan, params: dict[int, torch.nn.Parameter], rank: int, first_bucket: int
) -> tuple[FlatBuffer, list[Bucket]]:
    """Return a flat buffer and its buckets. The padding is zero; the parameters are still to be written.

    `params`: by number, in the order of the layout. `first_bucket`: how many buckets earlier buffers have.
    """
    layout = planned.layout
    data = torch.empty(layout.padded_numel, dtype=planned.dtype, device=planned.device)  # on a CPU, this takes no memory yet
    buffer = FlatBuffer(data, params, planned)
    buckets = []
    for bucket_number, (span, shards) in enumerate(zip(layout.buckets, layout.shards, strict=True), first_bucket):
        own = shards[rank]
        whole_bucket, shard = data[span.start : span.stop], data[own.start : own.stop]
        masters: Masters | Remainders | None = None
        if planned.has_masters:
            how = planned.update_dtype, planned.is_of_autocast
            masters = Remainders(shard) if planned.has_remainders else Masters(shard, *how)
        bucket = Bucket(bucket_number, whole_bucket, shard, masters, [], {}, layout.placed_in(span), planned.gradient_dtype)
        for padding in torch.split_with_sizes(whole_bucket, bucket.cuts)[::2]:
            padding.zero_()
        for number, start, stop, offset in layout.placed_in(own):
            param, local = params[number], bucket.values[offset : offset + stop - start]
            if param.numel() == 1:  # then any state of it has one shape
                local = shaped(local, param)
            local = torch.nn.Parameter(local)
            local.grad_dtype = None  # a gradient may be in another dtype until the update
            bucket.owned.append(OwnedSlice(number, param, start, stop, offset, local, bucket.masters))
        buckets.append(bucket)
    return buffer, buckets
