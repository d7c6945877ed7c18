"""Pure arithmetic: how flattened parameters are cut into buckets, shards and slices. No tensors, no communication.

Words used everywhere in this package:

flat buffer   all parameters of one dtype laid end to end in the order given (the optimizer reverses its own: later
              parameters get their gradients earlier), then padding
bucket        `bucket_numel` consecutive elements of the flat buffer, the unit of communication; the last one is shorter
shard         the r-th 1/N of a bucket, owned by rank r
slice         the part of one parameter that falls into one shard: a contiguous range of the flattened parameter

Parameters and shards begin at multiples of `align` elements. A vectorized kernel rounds the elements of its body and
those of its tail, what is left of the last vector, differently (torch's fused CPU AdamW does); cut between vectors, a
slice's tail is its parameter's, and the update of slices is that of whole parameters bit for bit.

Padding is less than `align` elements per parameter and `align * world_size` in all, so every rank owns the same number
of elements but for that (ZeRO, https://arxiv.org/abs/1910.02054, section 5.1).
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple


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
    """Where each parameter, bucket, shard and slice lies in one flat buffer.

    Args:
        numels: elements of each parameter, in the order in which they are laid down.
        world_size: ranks that share the buffer.
        bucket_numel: elements per bucket, rounded up to a multiple of `align * world_size`.
        align: elements per vector of the kernels that will run over slices.

    Raises:
        ValueError: if a size is impossible.
    """

    numels: tuple[int, ...]
    world_size: int
    bucket_numel: int
    align: int = 1
    offsets: tuple[int, ...] = field(init=False)  # first element of each parameter in the flat buffer
    padded_numel: int = field(init=False)  # elements of the flat buffer

    def __post_init__(self) -> None:
        if min(self.world_size, self.bucket_numel, self.align) < 1 or any(numel < 0 for numel in self.numels):
            raise ValueError(f"world_size, bucket_numel and align must be positive, numels not negative: {self.numels}")
        *offsets, end = accumulate((_round_up(numel, self.align) for numel in self.numels), initial=0)
        shards = self.align * self.world_size
        object.__setattr__(self, "bucket_numel", _round_up(self.bucket_numel, shards))
        object.__setattr__(self, "offsets", tuple(offsets))
        object.__setattr__(self, "padded_numel", _round_up(end, shards))

    @property
    def buckets(self) -> list[Span]:
        """The buckets, each a multiple of `align * world_size` long."""
        starts = range(0, self.padded_numel, self.bucket_numel)
        return [Span(start, min(start + self.bucket_numel, self.padded_numel)) for start in starts]

    def shard(self, bucket: Span, rank: int) -> Span:
        """The part of `bucket` that `rank` owns."""
        numel = bucket.numel // self.world_size
        return Span(bucket.start + rank * numel, bucket.start + (rank + 1) * numel)

    def slices(self, rank: int) -> list[Slice]:
        """The slices that `rank` owns, from the front of the flat buffer to its end; `param` counts through `numels`."""
        return [piece for bucket in self.buckets for piece in self.slices_in(self.shard(bucket, rank))]

    def slices_in(self, span: Span) -> list[Slice]:
        """The parts of parameters that lie in `span`, from its front to its end."""
        found = []
        first = max(0, bisect_right(self.offsets, span.start) - 1)
        for param in range(first, len(self.numels)):
            offset = self.offsets[param]
            if offset >= span.stop:
                break
            start, stop = max(span.start - offset, 0), min(span.stop - offset, self.numels[param])
            if start < stop:
                found.append(Slice(param, start, stop))
        return found


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
