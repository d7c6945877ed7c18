"""The optimizer state that a class keeps: it makes a step on the meta device, where tensors have sizes but no memory."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from forecast.prediction import Optimizer
from zero.layout import ParameterSpec, Plan
from zero.sharded_state import first_state


def groups_on_meta(specs: Sequence[ParameterSpec]) -> tuple[list[dict[str, Any]], list[torch.nn.Parameter]]:
    """Return new parameters on the meta device, with their groups for torch.optim and in the order of the specs."""
    params = [torch.nn.Parameter(torch.empty(spec.shape, dtype=spec.dtype, device="meta")) for spec in specs]
    groups: dict[int, dict[str, Any]] = {spec.group: {"params": []} for spec in sorted(specs, key=lambda spec: spec.group)}
    for spec, param in zip(specs, params, strict=True):
        groups[spec.group]["params"].append(param)
        if spec.matrices:
            groups[spec.group] |= {"matrices": spec.matrices, "ns_dtype": str(spec.matrix_dtype).removeprefix("torch.")}
    return list(groups.values()), params


def state_bytes(specs: Sequence[ParameterSpec], optimizer: Optimizer) -> list[int]:
    """Return the bytes of state that an optimizer keeps of each parameter, group by group, without counters of steps."""
    cls, arguments = optimizer
    state = first_state(partial(cls, **arguments), groups_on_meta(specs)[0])
    entries = [[value for name, value in state.get(number, {}).items() if name != "step"] for number in range(len(specs))]
    return [sum(value.nbytes for value in of_param if isinstance(value, torch.Tensor)) for of_param in entries]


def state_of_ranks(plan: Plan, of_params: Sequence[int]) -> list[int]:
    """Return the bytes of state of each rank, given those of each parameter."""
    each = [count / max(1, spec.numel) for count, spec in zip(of_params, plan.params, strict=True)]  # per element
    return [round(sum(each[slice_.number] * slice_.numel for slice_ in plan.slices(rank))) for rank in range(plan.world_size)]
