"""Moves the parameters of a ShardedOptimizer into flat buffers."""

import itertools
from functools import partial
from typing import Any

import torch

from zero.autocast import check_autocast
from zero.buckets import FlatBuffer, OwnedSlice, Placement, allocate
from zero.checks import KNOWN, check_elementwise, check_groups, check_parameters, check_rounding
from zero.codecs import codec_of
from zero.host_comm import check_same_on_all_ranks, gather_objects, on_all_ranks
from zero.layout import Plan, parameter_specs, plan
from zero.muon import Muon
from zero.muon.exchange import check_matrices
from zero.sharded_state import hyperparameters
from zero.tensors import flattened, is_dense, properties

Groups = list[dict[str, Any]]  # of torch.optim


def lay_out(placed: Placement, groups: Groups, make_inner: partial[torch.optim.Optimizer]) -> None:
    """Plan flat buffers for the parameters of the groups that are in none, and move them there. Call it on all ranks.

    `make_inner`: a class with its arguments, which makes the optimizer of the slices from their groups.

    Raises ValueError on all ranks, before anything moves, if these do not fit.
    """
    placed.plan = planned = _checked_plan(placed, groups, make_inner)
    rank = placed.comm.shard_rank
    placed.groups = [list(group["params"]) for group in groups]
    params = list(itertools.chain(*placed.groups))
    placed.frozen = [param for param, spec in zip(params, planned.params, strict=True) if not spec.requires_grad]
    group_of = {param: index for index, group in enumerate(placed.groups) for param in group}
    for number, start, stop, offset in planned.slices(rank):
        if not planned.params[number].requires_grad:  # a frozen parameter stays in its own memory
            placed.owned_of[params[number]] = [OwnedSlice(number, params[number], start, stop, offset, params[number])]
    for planned_buffer in planned.buffers[len(placed.buffers) :]:
        own = {number: params[number] for number in planned_buffer.layout.numels}
        for param in own.values():
            placed.owned_of.pop(param, None)  # of a parameter that was frozen
        buffer, buckets = allocate(planned_buffer, own, rank, len(placed.buckets))
        placed.buffers.append(buffer)
        placed.buckets += buckets
        placed.number_of.update({param: number for number, param in own.items()})
        placed.versions.update(dict.fromkeys(own.values() if planned_buffer.has_masters else (), 0))
        for bucket in buckets:
            for owned in bucket.owned:
                placed.owned_of.setdefault(owned.param, []).append(owned)
                bucket.local_by_group.setdefault(group_of[owned.param], []).append(owned.local)
        for number, param in own.items():
            _move_in(placed, buffer, number, param)
        placed.expect_versions(own.values())


def groups_of_slices(placed: Placement, groups: Groups) -> Groups:
    """Return the groups with this rank's slices in place of the parameters."""
    found = []
    for group in groups:
        slices = itertools.chain(*(placed.owned_of.get(param, []) for param in group["params"]))
        found.append({**hyperparameters(group), "params": [owned.local for owned in slices]})
    return found


def have_moved(placed: Placement, groups: Groups) -> bool:
    """Return whether parameters have left their places on any rank, and kept their dtype. Needs to be called on all ranks."""
    check_groups(placed, groups)
    dtypes = placed.moved()
    is_cast = any(param.dtype != dtype for param, dtype in dtypes.items())
    of_ranks = gather_objects((bool(dtypes), is_cast), placed.comm.group)
    return (True, False) in of_ranks and not any(is_cast for _, is_cast in of_ranks)


def _move_in(placed: Placement, buffer: FlatBuffer, number: int, param: torch.nn.Parameter) -> None:
    """Move a parameter, and this rank's masters, to its place with the values of rank 0. Needs to be called on all ranks."""
    source = param.data if is_dense(param) else param.data.contiguous()
    buffer.move_in(number, source)
    for first, part in placed.comm.broadcast_parts(flattened(source, source), flattened(param.data, param)):
        if buffer.planned.has_masters:  # otherwise it has arrived in its place
            placed.write(param, part, first)


def _checked_plan(placed: Placement, groups: Groups, make_inner: partial[torch.optim.Optimizer]) -> Plan:
    """Return the plan of all groups, with the buffers that exist. If a check fails, raise on all ranks."""
    comm, options = placed.comm, placed.comm.options
    params = list(itertools.chain(*(group["params"] for group in groups)))
    cls: Any = make_inner.func

    def check() -> None:
        if comm.checks_values:
            check_parameters(params, options.stored_dtype)
            check_autocast({param: dtype for param, dtype in placed.autocast.items() if param not in placed.number_of})
        if codec_of(options.state_dtype) is not None:
            check_rounding(cls, groups)
        if issubclass(cls, Muon):
            check_matrices(groups)
        make_inner([_of_one_element(group, placed.device) for group in groups])
        if cls not in KNOWN and comm.checks_values:
            for group in {repr(hyperparameters(group)): group for group in groups if group["params"]}.values():
                check_elementwise(make_inner, group, placed.device or group["params"][0].device)

    on_all_ranks(check, comm.group)
    facts = {f"parameter {number}": (*properties(param), placed.autocast.get(param)) for number, param in enumerate(params)}
    check_same_on_all_ranks(facts, comm.group)
    specs = parameter_specs(groups, placed.registration_order, placed.device, placed.autocast)
    for number, spec in enumerate(placed.plan.params):
        if spec.requires_grad:  # a parameter in a buffer stays there, also if frozen now
            specs[number] = spec
    return plan(specs, comm.shard_size, options, placed.plan.buffers)


def _of_one_element(group: dict[str, Any], device: torch.device | None) -> dict[str, Any]:
    """Return a parameter group with parameters of one element, for a trial of its hyperparameters."""
    tried = [torch.nn.Parameter(param.new_zeros((), device=device), param.requires_grad) for param in group["params"]]
    return {**hyperparameters(group), "params": tried}
