"""Which rank gets which matrix whole, and which elements each rank sends for that. Arithmetic only."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from zero.layout import PlacedSlice, Plan, balanced


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


class RoundSizes(NamedTuple):
    """Numbers of elements of the matrices that a rank exchanges in one round."""

    held: int  # in its shards
    received: int  # of the matrices that it owns, also from itself
    kept: int  # in its shards, of the matrices that it owns
    largest: int  # of the largest matrix that it owns

    @property
    def sent(self) -> int:
        """Elements that it sends to other ranks, to the owners and back."""
        return self.held + self.received - 2 * self.kept


@dataclass(frozen=True)
class MatrixPlan:
    """The owner and the parts of each matrix. They are exchanged in rounds, one for each bucket.

    Attributes:
        matrices: all of them.
        owners: the rank that transforms each of them.
        parts: the elements of each of them on each rank.
        rounds: the number of the round of each of them: the bucket that is updated first of those that hold its parameter.
    """

    matrices: list[Matrix]
    owners: list[int]
    parts: list[list[Part]]
    rounds: list[int]

    def sizes(self, rank: int, rounds: int) -> list[RoundSizes]:
        """Return what a rank exchanges in each round."""
        found = [RoundSizes(0, 0, 0, 0)] * rounds
        for matrix, owner, parts, number in zip(self.matrices, self.owners, self.parts, self.rounds, strict=True):
            held = sum(part.numel for part in parts if part.rank == rank)
            held_before, received, kept, largest = found[number]
            if owner == rank:
                received, kept, largest = received + matrix.numel, kept + held, max(largest, matrix.numel)
            found[number] = RoundSizes(held_before + held, received, kept, largest)
        return found

    def flops(self, rank: int) -> int:
        """Return the FLOPs of one Newton-Schulz iteration of all matrices that a rank owns."""
        owned = [matrix for matrix, owner in zip(self.matrices, self.owners, strict=True) if owner == rank]
        return sum(iteration_flops(matrix.shape) for matrix in owned)


def matrix_plan(plan: Plan) -> MatrixPlan:
    """Return the plan of the matrices of a ShardedOptimizer's plan, with parameters numbered as in its buffers, one by one.

    Raises:
        ValueError: if a parameter does not consist of as many matrices as its group says.
    """
    matrices: list[Matrix] = []
    buckets = []
    first = 0
    for buffer in plan.buffers:
        for number, spec in enumerate((plan.params[number] for number in buffer.params), first):
            if spec.matrices:
                rows, columns = stacked(spec.shape, spec.matrices)
                matrices += [Matrix(number, row * columns, (rows, columns)) for row in range(0, spec.shape[0], rows)]
        for bucket, shards in zip(buffer.layout.buckets, buffer.layout.shards, strict=True):
            placed = [member._replace(param=first + member.param) for member in buffer.layout.placed_in(bucket)]
            buckets.append((placed, [shard.numel for shard in shards]))
        first += len(buffer.params)
    parts = parts_of(matrices, buckets)
    last: dict[int, int] = {}  # bucket of a parameter: the last one is updated first
    for matrix, its_parts in zip(matrices, parts, strict=True):
        last[matrix.param] = max(last.get(matrix.param, 0), *(part.bucket for part in its_parts))
    owners = balanced([iteration_flops(matrix.shape) for matrix in matrices], plan.world_size)
    return MatrixPlan(matrices, owners, parts, [last[matrix.param] for matrix in matrices])


def stacked(shape: Sequence[int], count: int) -> tuple[int, int]:
    """Return the rows and columns of each of the `count` matrices of a parameter.

    Raises:
        ValueError: if it does not consist of so many.
    """
    if len(shape) != 2 or 0 in shape or shape[0] % count:
        raise ValueError(f"a parameter of shape {tuple(shape)} does not consist of {count} matrices of equal size")
    return shape[0] // count, shape[1]


def iteration_flops(shape: tuple[int, int]) -> int:
    """Return the FLOPs of a Newton-Schulz iteration for a matrix."""
    short, long = sorted(shape)
    return 2 * short * short * (2 * long + short)


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
