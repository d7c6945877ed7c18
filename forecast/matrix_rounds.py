"""What Muon costs a rank: the elements that it exchanges in each round, and the FLOPs of its matrices. Arithmetic only."""

from collections import Counter
from typing import NamedTuple

from zero.muon.matrices import MatrixPlan, iteration_flops


class RoundSizes(NamedTuple):
    """Numbers of elements of the matrices that a rank exchanges in one round."""

    held: int = 0  # in its shards
    received: int = 0  # of the matrices that it owns, also from itself
    kept: int = 0  # in its shards, of the matrices that it owns
    temporary: int = 0  # at most in tensors of the iterations
    until: int = 0  # the number of rounds that have arrived when its directions have all been applied

    @property
    def sent(self) -> int:
        """Elements that it sends to other ranks, to the owners and back."""
        return self.held + self.received - 2 * self.kept


def round_sizes(plan: MatrixPlan, rank: int) -> list[RoundSizes]:
    """Return what a rank exchanges in each round."""
    needed: dict[int, int] = {}  # how many rounds must have arrived before a bucket is updated, by its number
    for parts, number in zip(plan.parts, plan.rounds, strict=True):
        for part in parts:
            needed[part.bucket] = max(number + 1, needed.get(part.bucket, 0))
    found = [RoundSizes()] * (max(plan.rounds, default=-1) + 1)
    batches: Counter[tuple[int, tuple[int, int]]] = Counter()  # by round and shape
    for matrix, owner, parts, number in zip(plan.matrices, plan.owners, plan.parts, plan.rounds, strict=True):
        own = [part for part in parts if part.rank == rank]
        held, round_ = sum(part.numel for part in own), found[number]
        until = max((needed[part.bucket] for part in own), default=0)
        round_ = round_._replace(held=round_.held + held, until=max(round_.until, until))
        if owner == rank:
            batches[number, matrix.shape] += 1
            # two of the shape of the batch, two of its products
            temporary = batches[number, matrix.shape] * 2 * (matrix.numel + min(matrix.shape) ** 2)
            received, kept, temporary = round_.received + matrix.numel, round_.kept + held, max(round_.temporary, temporary)
            round_ = round_._replace(received=received, kept=kept, temporary=temporary)
        found[number] = round_
    return found


def owned_flops(plan: MatrixPlan, rank: int) -> int:
    """Return the FLOPs of one Newton-Schulz iteration of all matrices that a rank owns."""
    owned = [matrix for matrix, owner in zip(plan.matrices, plan.owners, strict=True) if owner == rank]
    return sum(iteration_flops(matrix.shape) for matrix in owned)
