"""What Muon costs a rank: the elements that it exchanges in each round, and the FLOPs of its matrices. Arithmetic only."""

from collections import Counter
from typing import NamedTuple

from zero.muon.matrices import MatrixPlan, iteration_flops


class RoundSizes(NamedTuple):
    """Numbers of elements of the matrices that a rank exchanges in one round, and what it computes."""

    held: int = 0  # in its shards
    received: int = 0  # of the matrices that it owns, also from itself
    kept: int = 0  # in its shards, of the matrices that it owns
    temporary: int = 0  # at most in tensors of the iterations
    iteration_flops: int = 0  # of a Newton-Schulz iteration of the matrices that it owns
    until: int = 0  # the number of rounds that have arrived when its directions have all been applied

    @property
    def sent(self) -> int:
        """Elements that it sends to other ranks, to the owners and back."""
        return self.held + self.received - 2 * self.kept


def round_sizes(plan: MatrixPlan, rank: int) -> list[RoundSizes]:
    """Return what a rank exchanges in each round; none: the plan has no matrices."""
    arrived: Counter[int] = Counter()  # how many rounds must have arrived before a bucket is updated, by its number
    for parts, number in zip(plan.parts, plan.rounds, strict=True):
        for part in parts:
            arrived[part.bucket] = max(number + 1, arrived[part.bucket])
    own = [[part for part in parts if part.rank == rank] for parts in plan.parts]  # of each matrix
    held = [sum(part.numel for part in parts) for parts in own]
    found = []
    for round_ in range(max(plan.rounds, default=-1) + 1):
        numbers = [number for number, of_matrix in enumerate(plan.rounds) if of_matrix == round_]
        owned = [number for number in numbers if plan.owners[number] == rank]
        shapes = Counter(plan.matrices[number].shape for number in owned)  # matrices of a shape are transformed together
        found.append(
            RoundSizes(
                held=sum(held[number] for number in numbers),
                received=sum(plan.matrices[number].numel for number in owned),
                kept=sum(held[number] for number in owned),
                # two tensors of the shape of the batch, two of its products
                temporary=max((2 * count * (m * n + min(m, n) ** 2) for (m, n), count in shapes.items()), default=0),
                iteration_flops=sum(iteration_flops(plan.matrices[number].shape) for number in owned),
                until=max((arrived[part.bucket] for number in numbers for part in own[number]), default=0),
            )
        )
    return found
