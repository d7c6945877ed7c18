"""Who holds which part of the optimizer state, asked of any of the three implementations."""

from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

from zero.layout import Slice
from zero.optimizer import ShardedOptimizer


class Partition(NamedTuple):
    """One optimizer's state as it is spread over the ranks."""

    inner: torch.optim.Optimizer  # holds this rank's part; its parameters are slices[rank], in that order
    slices: list[list[Slice]]  # by rank; `param` counts through all of the optimizer's param_groups
    rank: int  # of this process
    process_group: dist.ProcessGroup | None
    replicated: bool  # not spread at all: every process holds the same, as if it were rank 0 of one
    whole: bool  # by whole parameters: state may have the shape of a row or a column


def partition(optimizer: torch.optim.Optimizer) -> Partition:
    """The partition of a ShardedOptimizer, a ZeroRedundancyOptimizer, or any other optimizer (which holds all of it)."""
    if isinstance(optimizer, ShardedOptimizer):
        comm, whole = optimizer.comm, optimizer.partition == "parameter"
        slices = [optimizer.slices(rank) for rank in range(comm.world_size)]
        return Partition(optimizer.inner, slices, comm.rank, comm.group, replicated=False, whole=whole)
    index_of = {param: index for index, param in enumerate(parameters(optimizer))}

    def whole_parameters(groups: list[dict[str, Any]]) -> list[Slice]:
        return [Slice(index_of[param], 0, param.numel()) for group in groups for param in group["params"]]

    if isinstance(optimizer, ZeroRedundancyOptimizer):
        slices = [whole_parameters(groups) for groups in optimizer._partition_parameters()]
        return Partition(optimizer.optim, slices, optimizer.rank, optimizer.process_group, replicated=False, whole=True)
    return Partition(optimizer, [whole_parameters(optimizer.param_groups)], 0, None, replicated=True, whole=True)


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
