"""The partition of the optimizer state over the ranks, for each of the three implementations."""

import inspect
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

from zero.buckets import OwnedSlice
from zero.host_comm import ALONE, meet
from zero.layout import ParameterSpec, Plan, Slice, parameter_specs
from zero.stopwatch import without_hooks


@dataclass(frozen=True)
class Partition:
    """The state of one optimizer, divided among the ranks."""

    optimizer: torch.optim.Optimizer
    inner: torch.optim.Optimizer  # holds this rank's part of the state
    plan: Plan
    rank: int  # of this process, among the ranks that share the state
    process_group: dist.ProcessGroup | None  # the ranks that share the state; ALONE without sharding
    everyone: dist.ProcessGroup | None  # all ranks, also those of other replicas; ALONE without sharding
    owned: Sequence[OwnedSlice]  # the parameters of `inner`: this rank's slices, in the order of `plan.slices`
    replica: int = 0  # index of the replica of this process; without sharding, each process has one, as rank 0 of 1

    @property
    def ranks(self) -> list[int]:
        """The ranks that share the state, numbered as those of all processes."""
        if self.plan.world_size > 1:
            return dist.get_process_group_ranks(self.process_group or dist.group.WORLD)
        return [dist.get_rank() if dist.is_initialized() else 0]


class DividedOptimizer(torch.optim.Optimizer):
    """An optimizer whose state is divided among the ranks: ShardedOptimizer, as this module and checkpoints see it."""

    has_state: bool  # whether any rank may have state; the same on all ranks
    consolidated: dict[Any, Any] | None  # the whole state, or {ELSEWHERE: the rank that has it}; None: not consolidated

    @abstractmethod
    def partition(self) -> Partition:
        """Return the partition of the state."""

    @abstractmethod
    def settle(self) -> None:
        """Make the state ready to be saved or restored. Needs to be called on all ranks."""


def partition(optimizer: torch.optim.Optimizer, settle: bool = False) -> Partition:
    """Return the partition of a ShardedOptimizer or ZeroRedundancyOptimizer; any other optimizer holds the whole state.

    `settle`: make the state ready to be saved or restored before that. Then it needs to be called on all ranks.
    """
    if isinstance(optimizer, DividedOptimizer):
        if settle:
            optimizer.settle()
        return optimizer.partition()
    params, specs = parameters(optimizer), parameter_specs(optimizer.param_groups)
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        if settle:
            meet(optimizer.process_group)
        groups_of_ranks = optimizer._partition_parameters()  # type: ignore[attr-defined]  # not in torch's stubs
        plan, rank, replica = _whole_parameters(groups_of_ranks, params, specs), optimizer.rank, 0
        inner, group, everyone = optimizer.optim, optimizer.process_group, optimizer.process_group
    else:
        plan, rank, replica = Plan(tuple(specs), 1), 0, dist.get_rank() if dist.is_initialized() else 0
        inner, group, everyone = optimizer, ALONE, ALONE
    owned = [OwnedSlice(number, params[number], 0, stop, 0, params[number]) for number, _, stop, _ in plan.slices(rank)]
    return Partition(optimizer, inner, plan, rank, group, everyone, owned, replica)


def zero_redundancy_plan(specs: Sequence[ParameterSpec], world_size: int) -> Plan:
    """Return the plan of a ZeroRedundancyOptimizer of this version of torch, without its other ranks."""
    params, groups = [torch.empty(spec.shape, device="meta") for spec in specs], dict[int, list[torch.Tensor]]()
    for param, spec in sorted(zip(params, specs, strict=True), key=lambda pair: pair[1].group):
        groups.setdefault(spec.group, []).append(param)
    optimizer = object.__new__(ZeroRedundancyOptimizer)  # without its constructor, which needs all ranks
    needed = {"param_groups": [{"params": of_group} for of_group in groups.values()], "_partition_parameters_cache": []}
    vars(optimizer).update(world_size=world_size, **needed)
    return _whole_parameters(optimizer._partition_parameters(), params, specs)  # type: ignore[attr-defined]


def _whole_parameters(
    groups_of_ranks: list[list[dict[str, Any]]], params: Sequence[torch.Tensor], specs: Sequence[ParameterSpec]
) -> Plan:
    """Return the plan in which each rank has the parameters of its groups."""
    numbers = {param: number for number, param in enumerate(params)}
    assigned = tuple(
        tuple(Slice(numbers[param], 0, param.numel()) for group in groups for param in group["params"])
        for groups in groups_of_ranks
    )
    return Plan(tuple(specs), len(assigned), assigned=assigned)


def taken_over(optimizer: torch.optim.Optimizer, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the groups of an optimizer, and the arguments that make another one of its class, with `kwargs` in their place.

    Raises ValueError for arguments that are not among the defaults, and if a scheduler or hooks belong to the optimizer.
    """
    name, arguments = type(optimizer).__name__, {**optimizer.defaults, **kwargs}
    accepted = inspect.signature(type(optimizer)).parameters
    if unknown := [str(argument) for key, argument in accepted.items() if key not in ("params", *arguments)]:
        raise ValueError(f"{name} does not keep {', '.join(unknown)} in its defaults; give ShardedOptimizer class and groups")
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if hooks or hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise ValueError(f"{name} has a scheduler or hooks, which would stay with it; make these after ShardedOptimizer")
    return [{**group} for group in optimizer.param_groups], {key: arguments[key] for key in arguments if key in accepted}


def first_state(
    make: partial[torch.optim.Optimizer], groups: list[dict[str, Any]], dtypes: Iterable[torch.dtype] = ()
) -> dict[int, dict[str, Any]]:
    """Return the state of an optimizer after a step on the meta device, where tensors have sizes but no memory, by number.

    `make`: from groups of parameters, which are copied. `dtypes`: of the parameters; by default their own.
    """
    of_params, copies = iter(dtypes), list[dict[str, Any]]()
    for group in groups:
        params = [torch.empty_like(param, dtype=next(of_params, param.dtype), device="meta") for param in group["params"]]
        slow = dict.fromkeys({"fused", "capturable"} & {*group, *make.keywords}, False)  # which need a GPU
        copies.append({**group, **slow, "params": list(map(torch.nn.Parameter, params))})
        for param, like in zip(copies[-1]["params"], group["params"], strict=True):
            param.grad = torch.empty_like(param) if like.requires_grad else None
    optimizer = make(copies)
    without_hooks(type(optimizer).step)(optimizer)
    return {number: optimizer.state[param] for number, param in enumerate(parameters(optimizer)) if param in optimizer.state}


def parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return all parameters, in the order in which a torch.optim `state_dict()` numbers them."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
