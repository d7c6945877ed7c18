"""Which rank gets which matrix whole and when, and which elements each rank sends for that. Arithmetic only."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zero.layout import Plan, Slice, balanced

IMBALANCE = 1.05  # of the loads of the ranks, the largest to the mean


class Matrix(NamedTuple):
    """Elements of a flattened parameter that form a matrix."""

    param: int  # number of the parameter
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


@dataclass(frozen=True)
class MatrixPlan:
    """The owner and the parts of each matrix, and the round in which it is exchanged.

    A round has the matrices of consecutive parameters in the order in which the update needs them: at least one per rank, and
    as many elements as a bucket. It ends where the ranks have had equal loads since the first round, up to `IMBALANCE`, so that
    they hardly wait for each other. Once the mean load is 20 times the largest cost of a matrix, it may end anywhere.
    """

    matrices: list[Matrix]
    owners: list[int]  # of each matrix: the rank that transforms it
    parts: list[list[Part]]  # of each: its elements on each rank
    rounds: list[int]  # of each: the number of its round


def matrix_plan(plan: Plan) -> MatrixPlan:
    """Return the plan of the matrices in a ShardedOptimizer's plan. Raises ValueError if a parameter has not so many."""
    matrices: list[Matrix] = []
    parts: list[list[Part]] = []
    in_order: list[tuple[int, list[range]]] = []  # of each buffer: elements of a bucket, numbers of each parameter's matrices
    bucket = -1
    for buffer in plan.buffers:
        of_param: dict[int, range] = {}
        for param in buffer.layout.numels:
            if (spec := plan.params[param]).matrices:
                rows, columns = stacked(spec.shape, spec.matrices)
                of_param[param] = range(len(matrices), len(matrices) + spec.matrices)
                matrices += [Matrix(param, index * rows * columns, (rows, columns)) for index in range(spec.matrices)]
        parts += [[] for _ in matrices[len(parts) :]]
        for span, shards in zip(buffer.layout.buckets, buffer.layout.shards, strict=True):
            bucket += 1
            for placed in buffer.layout.placed_in(span):
                for number in of_param.get(placed.number, ()):
                    parts[number] += _parts(number, matrices[number], placed, bucket, len(shards[0]))
        in_order.append((len(buffer.layout.buckets[0]), list(of_param.values())[::-1]))  # the last bucket is updated first
    costs = [iteration_flops(matrix.shape) for matrix in matrices]
    owners, rounds = [0] * len(matrices), [0] * len(matrices)
    for index, round_ in enumerate(_rounds(matrices, costs, in_order[::-1], plan.world_size)):
        for number, owner in _owners(round_, costs, parts):
            owners[number], rounds[number] = owner, index
    return MatrixPlan(matrices, owners, parts, rounds)


class _Round(NamedTuple):
    numbers: list[int]  # of matrices
    owners: list[int]  # of matrices that cost as much as these
    before: list[int]  # loads of the ranks
    after: list[int]


def _rounds(matrices: list[Matrix], costs: list[int], buffers: list[tuple[int, list[range]]], world_size: int) -> list[_Round]:
    """Return the rounds, see `MatrixPlan`. None reaches into another buffer.

    `buffers`: for each, elements of a bucket and numbers of the matrices of each parameter, in the order of the update.
    """
    found: list[_Round] = []
    largest, loads = 0, [0] * world_size

    def divided(numbers: list[int], before: list[int]) -> _Round:
        after = before.copy()
        return _Round(numbers, balanced([costs[number] for number in numbers], after), before, after)

    for bucket_numel, params in buffers:
        first, numbers, numel = len(found), list[int](), 0
        for of_param in params:
            numbers += of_param
            numel += sum(matrices[number].numel for number in of_param)
            largest = max(largest, costs[of_param[0]])
            if len(numbers) >= world_size and numel >= bucket_numel:
                round_ = divided(numbers, loads)
                if max(round_.after) <= IMBALANCE * max(largest, sum(round_.after) / world_size):
                    found.append(round_)
                    numbers, numel, loads = [], 0, round_.after
        if numbers:  # what is left is a round of its own, or joins the previous one if loads are then more equal
            rest = divided(numbers, loads)
            if len(found) > first:
                joined = divided(found[-1].numbers + numbers, found[-1].before)
                if max(joined.after) < max(rest.after):
                    rest = joined
                    found.pop()
            found.append(rest)
            loads = rest.after
    return found


def _owners(round_: _Round, costs: list[int], parts: list[list[Part]]) -> Iterator[tuple[int, int]]:
    """Yield (matrix, owner) for a round. Of the ranks that get a matrix of this cost, the owner holds most of its elements."""
    free: dict[int, list[int]] = {}  # by cost: ranks that own a matrix of this cost
    for number, owner in zip(round_.numbers, round_.owners, strict=True):
        free.setdefault(costs[number], []).append(owner)
    for number in round_.numbers:
        held: Counter[int] = Counter()
        for part in parts[number]:
            held[part.rank] += part.numel
        owner = max(free[costs[number]], key=held.__getitem__)
        free[costs[number]].remove(owner)
        yield number, owner


def _parts(number: int, matrix: Matrix, placed: Slice, bucket: int, shard_numel: int) -> Iterator[Part]:
    """Yield the parts of a matrix in a slice of its parameter, placed in a bucket with shards of `shard_numel` elements."""
    start, stop = max(placed.start, matrix.start), min(placed.stop, matrix.start + matrix.numel)
    while start < stop:
        rank, offset = divmod(placed.offset + start - placed.start, shard_numel)
        end = min(stop, start + shard_numel - offset)
        yield Part(number, rank, bucket, offset, start - matrix.start, end - matrix.start)
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
