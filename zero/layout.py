"""Pure arithmetic: how flattened parameters are cut into buckets, shards and slices. No tensors, no communication.

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

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple, Self


class Slice(NamedTuple):
    """Elements `start:stop` of flattened parameter number `param`."""

    param: int
    start: int
    stop: int

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


def _check(numels: Sequence[int], world_size: int, bucket_numel: int, align: int) -> None:
    if min(world_size, bucket_numel, align) < 1 or any(numel < 0 for numel in numels):
        raise ValueError(f"world_size, bucket_numel and align must be positive, numels not negative: {numels}")


def _sizes(numels: Sequence[int], align: int) -> list[int]:
    """The elements that each parameter takes in the flat buffer."""
    return [_round_up(max(numel, 1), align) for numel in numels]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
