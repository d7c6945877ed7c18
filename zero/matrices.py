"""Which rank gets which matrix whole, and which elements each rank sends for that. Arithmetic only."""

import heapq
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from zero.layout import PlacedSlice


class Matrix(NamedTuple):
    """Elements of a flattened parameter that form a matrix."""

    param: int  # as `Bucket.members` numbers it
    start: int  # first element
    shape: tuple[int, int]

    @property
    def numel(self) -> int:
        return self.shape[0] * self.shape[1]


class Part(NamedTuple):
    """Elements `start:stop` of a flattened matrix, in the shard that a rank has of a bucket."""

    matrix: int  # number
    rank: int
    bucket: int  # number
    offset: int  # of the first of these elements, in the shard
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


def owners_of(costs: Sequence[int], world_size: int) -> list[int]:
    """Return a rank for each matrix: in order of falling cost, the one with the least so far (longest processing time)."""
    loads = [(0, rank) for rank in range(world_size)]
    owners = [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        load, owners[number] = loads[0]
        heapq.heapreplace(loads, (load + costs[number], owners[number]))
    return owners


def parts_of(matrices: Sequence[Matrix], buckets: Iterable[tuple[Sequence[PlacedSlice], Sequence[int]]]) -> list[list[Part]]:
    """Return the parts of each matrix.

    Args:
        buckets: of each bucket the slices in it, with offsets in the bucket, and the number of elements of each rank's shard.
    """
    of_param: dict[int, list[int]] = {}
    for number, matrix in enumerate(matrices):
        of_param.setdefault(matrix.param, []).append(number)
    found: list[list[Part]] = [[] for _ in matrices]
    for bucket, (members, sizes) in enumerate(buckets):
        shards = list(pairwise(accumulate(sizes, initial=0)))
        rank = 0
        for placed in members:  # in the order of the bucket
            for number in of_param.get(placed.param, []):
                first = matrices[number].start
                start, stop = max(placed.start, first), min(placed.stop, first + matrices[number].numel)
                while start < stop:
                    offset = placed.offset + start - placed.start
                    while offset >= shards[rank][1]:
                        rank += 1
                    end = min(stop, start + shards[rank][1] - offset)
                    found[number].append(Part(number, rank, bucket, offset - shards[rank][0], start - first, end - first))
                    start = end
    return found
