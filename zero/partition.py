"""Who holds which part of the optimizer state, asked of any of the three implementations."""

from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

from zero.layout import Plan, Slice, parameter_specs, replicated_plan
from zero.optimizer import ShardedOptimizer


@dataclass(frozen=True)
class Partition:
    """One optimizer's state as it is spread over the ranks."""

    optimizer: torch.optim.Optimizer
    inner: torch.optim.Optimizer  # holds this rank's part; its parameters are slices[rank], in that order
    plan: Plan
    rank: int  # of this process
    process_group: dist.ProcessGroup | None
    replicated: bool = False  # not spread at all: every process holds the same, as if it were rank 0 of one

    @cached_property
    def params(self) -> list[torch.nn.Parameter]:
        """The whole parameters, numbered as in the plan."""
        return parameters(self.optimizer)

    @cached_property
    def slices(self) -> list[list[Slice]]:
        """By rank; `param` counts through all of the optimizer's param_groups."""
        return [self.plan.slices(rank) for rank in range(self.plan.world_size)]

    @cached_property
    def locals(self) -> list[torch.nn.Parameter]:
        """The parameters of the inner optimizer: this rank's slices."""
        return parameters(self.inner)

    @property
    def states(self) -> list[dict[str, Any]]:
        """The state of each of this rank's slices."""
        return [self.inner.state.get(local, {}) for local in self.locals]

    @property
    def receives(self) -> bool:
        """Whether this process is the one on which the whole is put together."""
        return self.rank == 0 and not (self.replicated and dist.is_initialized() and dist.get_rank() != 0)

    def update_masters(self) -> None:
        """Have float32 masters, if there are any, follow weights that have been written to since the last step."""
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.update_masters()


def partition(optimizer: torch.optim.Optimizer) -> Partition:
    """The partition of a ShardedOptimizer, a ZeroRedundancyOptimizer, or any other optimizer (which holds all of it)."""
    if isinstance(optimizer, ShardedOptimizer):
        comm = optimizer.comm
        return Partition(optimizer, optimizer.inner, optimizer.plan, comm.rank, comm.group)
    specs = parameter_specs(optimizer.param_groups)
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        # as this version of torch has dealt them; `zero.layout.zero_redundancy_plan` says so beforehand
        numbers = {param: number for number, param in enumerate(parameters(optimizer))}
        dealt = tuple(
            tuple(Slice(numbers[param], 0, param.numel()) for group in groups for param in group["params"])
            for groups in optimizer._partition_parameters()  # type: ignore[attr-defined]  # not in torch's stubs
        )
        plan = Plan(tuple(specs), len(dealt), dealt=dealt)
        return Partition(optimizer, optimizer.optim, plan, optimizer.rank, optimizer.process_group)
    return Partition(optimizer, optimizer, replicated_plan(specs), 0, None, replicated=True)


def parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """All parameters, in the order in which a torch.optim `state_dict()` numbers them."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def packed_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The `param_groups` of a torch.optim `state_dict()`: hyperparameters, and numbers in place of parameters."""
    numbers = count()
    return [
        {**{key: value for key, value in group.items() if key != "params"}, "params": [next(numbers) for _ in group["params"]]}
        for group in optimizer.param_groups
    ]
