"""Which rank gets which matrix whole and when, and which elements each rank sends for that. Arithmetic only."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from zero.layout import Plan, Slice, balanced

IMBALANCE = 1.05  # of the loads of the ranks, the largest to the mean


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


@dataclass
class Matrix:
    """Elements of a flattened parameter that form a matrix, and which rank transforms it when."""

    number: int  # in the plan
    param: int  # number of the parameter
    start: int  # first element
    shape: tuple[int, int]
    parts: list[Part] = field(default_factory=list)  # its elements on each rank
    owner: int = 0  # the rank that transforms it
    round: int = 0  # number of the round in which it is exchanged

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)

    @property
    def cost(self) -> int:
        """FLOPs of an iteration of Newton-Schulz."""
        return iteration_flops(self.shape)


class _Round(NamedTuple):
    matrices: list[Matrix]
    owners: list[int]  # of matrices that cost as much as these
    before: list[int]  # loads of the ranks
    after: list[int]


def matrix_plan(plan: Plan) -> list[Matrix]:
    """Return the matrices in a ShardedOptimizer's plan. Raises ValueError if a parameter has not so many.

    A round has the matrices of consecutive parameters in the order in which the update needs them: at least one per rank, and
    as many elements as a bucket. It ends where the ranks have had equal loads since the first round, up to `IMBALANCE`, so that
    they hardly wait for each other. Once the mean load is 20 times the largest cost of a matrix, it may end anywhere.
    """
    matrices, buckets = list[Matrix](), itertools.count()
    in_order: list[tuple[int, list[list[Matrix]]]] = []  # of each buffer: elements of a bucket, the matrices of each parameter
    for buffer in plan.buffers:
        of_param: dict[int, list[Matrix]] = {}
        for param in buffer.layout.numels:
            if (spec := plan.params[param]).matrices:
                shape, first = stacked(spec.shape, spec.matrices), len(matrices)
                matrices += [Matrix(first + k, param, k * math.prod(shape), shape) for k in range(spec.matrices)]
                of_param[param] = matrices[first:]
        for span, shards, bucket in zip(buffer.layout.buckets, buffer.layout.shards, buckets, strict=False):
            for placed in buffer.layout.placed_in(span):
                for matrix in of_param.get(placed.number, ()):
                    matrix.parts += _parts(matrix, placed, bucket, len(shards[0]))
        in_order.append((len(buffer.layout.buckets[0]), list(of_param.values())[::-1]))  # the last bucket is updated first
    for number, round_ in enumerate(_rounds(in_order[::-1], plan.world_size)):
        _choose_owners(round_, number)
    return matrices


def _rounds(buffers: list[tuple[int, list[list[Matrix]]]], world_size: int) -> list[_Round]:
    """Return the rounds, see `matrix_plan`. None reaches into another buffer.

    `buffers`: for each, elements of a bucket and the matrices of each parameter, in the order of the update.
    """
    found: list[_Round] = []
    largest, loads = 0, [0] * world_size

    def divided(matrices: list[Matrix], before: list[int]) -> _Round:
        after = before.copy()
        return _Round(matrices, balanced([matrix.cost for matrix in matrices], after), before, after)

    for bucket_numel, params in buffers:
        first, matrices, numel = len(found), list[Matrix](), 0
        for of_param in params:
            matrices += of_param
            numel += of_param[-1].stop
            largest = max(largest, of_param[0].cost)
            if len(matrices) >= world_size and numel >= bucket_numel:
                round_ = divided(matrices, loads)
                if max(round_.after) <= IMBALANCE * max(largest, sum(round_.after) / world_size):
                    found.append(round_)
                    matrices, numel, loads = [], 0, round_.after
        if matrices:  # what is left is a round of its own, or joins the previous one if loads are then more equal
            rest = divided(matrices, loads)
            if len(found) > first:
                joined = divided(found[-1].matrices + matrices, found[-1].before)
                if max(joined.after) < max(rest.after):
                    rest = joined
                    found.pop()
            found.append(rest)
            loads = rest.after
    return found


def _choose_owners(round_: _Round, number: int) -> None:
    """Give the matrices of a round their owners: of the ranks that get one of this cost, that with most of its elements."""
    free: dict[int, list[int]] = {}  # by cost: ranks that own a matrix of this cost
    for matrix, owner in zip(round_.matrices, round_.owners, strict=True):
        free.setdefault(matrix.cost, []).append(owner)
    for matrix in round_.matrices:
        held: Counter[int] = Counter()
        for part in matrix.parts:
            held[part.rank] += part.numel
        matrix.owner, matrix.round = max(free[matrix.cost], key=held.__getitem__), number
        free[matrix.cost].remove(matrix.owner)


def _parts(matrix: Matrix, placed: Slice, bucket: int, shard_numel: int) -> Iterator[Part]:
    """Yield the parts of a matrix in a slice of its parameter, placed in a bucket with shards of `shard_numel` elements."""
    start, stop = max(placed.start, matrix.start), min(placed.stop, matrix.stop)
    while start < stop:
        rank, offset = divmod(placed.offset + start - placed.start, shard_numel)
        end = min(stop, start + shard_numel - offset)
        yield Part(matrix.number, rank, bucket, offset, start - matrix.start, end - matrix.start)
        start = end


def stacked(shape: Sequence[int], count: int) -> tuple[int, int]:
    """Return the rows and columns of each of the `count` matrices of a parameter. Raise ValueError if it has not so many."""
    if len(shape) != 2 or 0 in shape or shape[0] % count:
        raise ValueError(f"a parameter of shape {tuple(shape)} does not consist of {count} matrices of equal size")
    return shape[0] // count, shape[1]


def iteration_flops(shape: tuple[int, int]) -> int:
    """Return the FLOPs of a Newton-Schulz iteration for a matrix."""
    short, long = sorted(shape)
    return 2 * short * short * (2 * long + short)
