"""The partition of the optimizer state over the ranks, for each of the three implementations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, singledispatch
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

from zero.buckets import OwnedSlice
from zero.host_comm import cpu_group, meet
from zero.layout import Plan, Slice, parameter_specs, replicated_plan


@dataclass(frozen=True)
class Partition:
    """The state of one optimizer, divided among the ranks."""

    optimizer: torch.optim.Optimizer
    inner: torch.optim.Optimizer  # holds this rank's part of the state; its parameters are slices[rank], in that order
    plan: Plan
    rank: int  # of this process, among the ranks that share the state
    process_group: dist.ProcessGroup | None  # the ranks that share the state
    replica: int = 0  # index of the replica of this process; without sharding, each process has one, as rank 0 of 1
    owned: Sequence[OwnedSlice] = ()  # of a ShardedOptimizer
    to: int = 0  # the rank that receives the whole state, counted over all replicas; `rank` is counted inside of one

    @cached_property
    def params(self) -> list[torch.nn.Parameter]:
        """The whole parameters, numbered as in the plan."""
        return parameters(self.optimizer)

    @cached_property
    def slices(self) -> list[list[Slice]]:
        """The slices of each rank; `param` counts through all of the optimizer's param_groups."""
        return [self.plan.slices(rank) for rank in range(self.plan.world_size)]

    @cached_property
    def locals(self) -> list[torch.nn.Parameter]:
        """The parameters of the inner optimizer: this rank's slices."""
        return parameters(self.inner)

    @property
    def states(self) -> list[dict[str, Any]]:
        """The state of each of this rank's slices, as it is held between updates."""
        return [self.inner.state.get(local, {}) for local in self.locals]

    @property
    def readers(self) -> list[Callable[[], torch.Tensor]]:
        """For each of this rank's slices, the function that returns its elements in the precision of the update."""
        readers = {owned.local: owned.read for owned in self.owned}
        return [readers.get(local, local.detach) for local in self.locals]

    @property
    def sends(self) -> bool:
        """Whether the whole state is gathered from the replica of this process."""
        return self.replica == self.to // self.plan.world_size

    @property
    def receives(self) -> bool:
        """Whether this process is the one that receives the whole state."""
        return self.sends and self.rank == self.to % self.plan.world_size

    @property
    def cpu_group(self) -> dist.ProcessGroup | None:
        """The process group of these ranks that sends from main memory; None if there is one rank."""
        return cpu_group(self.process_group) if self.plan.world_size > 1 else None


@singledispatch
def partition(optimizer: torch.optim.Optimizer) -> Partition:
    """Return the partition of a ShardedOptimizer or ZeroRedundancyOptimizer; any other optimizer holds the whole state."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        numbers = {param: number for number, param in enumerate(parameters(optimizer))}
        assigned = tuple(  # by this version of torch; `zero.layout.zero_redundancy_plan` predicts it
            tuple(Slice(numbers[param], 0, param.numel()) for group in groups for param in group["params"])
            for groups in optimizer._partition_parameters()  # type: ignore[attr-defined]  # not in torch's stubs
        )
        plan = Plan(tuple(parameter_specs(optimizer.param_groups)), len(assigned), assigned=assigned)
        return Partition(optimizer, optimizer.optim, plan, optimizer.rank, optimizer.process_group)
    replica = dist.get_rank() if dist.is_initialized() else 0
    plan = replicated_plan(parameter_specs(optimizer.param_groups))
    return Partition(optimizer, optimizer, plan, 0, None, replica)


@singledispatch
def synchronized_partition(optimizer: torch.optim.Optimizer) -> Partition:
    """Wait for all ranks and all-gathers if state is sharded. Return the partition. Needs to be called on all ranks."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        meet(optimizer.process_group)
    return partition(optimizer)


def parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return all parameters, in the order in which a torch.optim `state_dict()` numbers them."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
