"""Pure arithmetic: how flattened parameters are cut into buckets, shards and slices. No tensors, no communication.

Words used everywhere in this package:

flat buffer   all parameters of one dtype laid end to end in the order given (the optimizer gives them in reverse
              registration order, the order in which backward produces gradients), then padding
bucket        `bucket_numel` consecutive elements of the flat buffer, the unit of communication; the last one is shorter
shard         the r-th 1/N of a bucket, owned by rank r
slice         the part of one parameter that falls into one shard: a contiguous range of the flattened parameter

Only the tail of the flat buffer is padded, by fewer than N elements, so every rank owns the same number of elements to
within one element per rank, whatever the shapes (ZeRO, https://arxiv.org/abs/1910.02054, section 5.1).
"""

from bisect import bisect_right
from dataclasses import dataclass
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
        bucket_numel: elements per bucket, rounded up to a multiple of `world_size`.
    """

    numels: tuple[int, ...]
    world_size: int
    bucket_numel: int

    def __post_init__(self) -> None:
        if self.world_size < 1 or self.bucket_numel < 1 or any(n < 0 for n in self.numels):
            raise ValueError(f"world_size and bucket_numel must be positive, numels not negative: {self}")
        object.__setattr__(self, "bucket_numel", _round_up(self.bucket_numel, self.world_size))
        object.__setattr__(self, "offsets", tuple(accumulate(self.numels, initial=0)))

    offsets: tuple[int, ...] = ()  # first element of each parameter in the flat buffer, then the total; derived

    @property
    def numel(self) -> int:
        """Elements of all parameters, without padding."""
        return self.offsets[-1]

    @property
    def padded_numel(self) -> int:
        """Elements of the flat buffer: `numel` and the padding of its tail."""
        return _round_up(self.numel, self.world_size)

    @property
    def buckets(self) -> list[Span]:
        """The buckets, each a multiple of `world_size` long."""
        starts = range(0, self.padded_numel, self.bucket_numel)
        return [Span(start, min(start + self.bucket_numel, self.padded_numel)) for start in starts]

    def shard(self, bucket: Span, rank: int) -> Span:
        """The part of `bucket` that `rank` owns."""
        numel = bucket.numel // self.world_size
        return Span(bucket.start + rank * numel, bucket.start + (rank + 1) * numel)

    def slices(self, rank: int) -> list[Slice]:
        """The slices that `rank` owns, from the front of the flat buffer to its end; `param` counts through `numels`."""
        found = []
        for bucket in self.buckets:
            shard = self.shard(bucket, rank)
            param = bisect_right(self.offsets, shard.start) - 1
            while param < len(self.numels) and self.offsets[param] < shard.stop:
                first = self.offsets[param]
                start, stop = max(shard.start, first), min(shard.stop, self.offsets[param + 1])
                if start < stop:
                    found.append(Slice(param, start - first, stop - first))
                param += 1
        return found


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
