"""Which rank gets which matrix whole, and which elements each rank sends for that. Arithmetic only."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    parts: list[list[Part]] = []
    last: dict[int, int] = {}  # bucket of a parameter: the last one is updated first
    first_param, bucket = 0, -1
    for buffer in plan.buffers:
        of_param: dict[int, range] = {}  # numbers of its matrices
        for number, spec in enumerate(plan.params[number] for number in buffer.params):
            if spec.matrices:
                rows, columns = stacked(spec.shape, spec.matrices)
                of_param[number] = range(len(matrices), len(matrices) + spec.matrices)
                matrices += [
                    Matrix(first_param + number, index * rows * columns, (rows, columns)) for index in range(spec.matrices)
                ]
        parts += [[] for _ in matrices[len(parts) :]]
        for span, shards in zip(buffer.layout.buckets, buffer.layout.shards, strict=True):
            bucket += 1
            for placed in buffer.layout.placed_in(span):
                for number in of_param.get(placed.param, ()):
                    last[matrices[number].param] = bucket
                    parts[number] += _parts(number, matrices[number], placed, bucket, shards[0].numel)
        first_param += len(buffer.params)
    owners = balanced([iteration_flops(matrix.shape) for matrix in matrices], plan.world_size)
    return MatrixPlan(matrices, owners, parts, [last[matrix.param] for matrix in matrices])


def _parts(number: int, matrix: Matrix, placed: PlacedSlice, bucket: int, shard_numel: int) -> Iterator[Part]:
    """Yield the parts of a matrix in a slice of its parameter, placed in a bucket with shards of `shard_numel` elements."""
    start, stop = max(placed.start, matrix.start), min(placed.stop, matrix.start + matrix.numel)
    while start < stop:
        rank, offset = divmod(placed.offset + start - placed.start, shard_numel)
        end = min(stop, start + shard_numel - offset)
        yield Part(number, rank, bucket, offset, start - matrix.start, end - matrix.start)
        start = end


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
