"""Moves the parameters of a ShardedOptimizer into flat buffers."""

import itertools
from typing import Any

import torch

from zero.buckets import FlatBuffer, OwnedSlice, allocate
from zero.checks import check_groups, check_parameters, check_rounding
from zero.codecs import codec_of
from zero.collectives import Communicator
from zero.host_comm import check_same_on_all_ranks, on_all_ranks, on_any_rank
from zero.layout import Plan, parameter_specs, plan
from zero.masters import store_rounded
from zero.muon import Muon
from zero.muon.exchange import check_matrices
from zero.sharded_state import hyperparameters
from zero.tensors import flattened, is_dense, properties


def lay_out(optimizer: Any, earlier: Plan | None = None) -> None:
    """Move a ShardedOptimizer's parameters into flat buffers, except those of the `earlier` plan. Call it on all ranks."""
    optimizer.plan = planned = _checked_plan(optimizer, earlier)
    optimizer.params_of_groups = [list(group["params"]) for group in optimizer.param_groups]
    params = list(itertools.chain(*optimizer.params_of_groups))
    optimizer.frozen = [param for param, spec in zip(params, planned.params, strict=True) if not spec.requires_grad]
    group_of = {param: index for index, group in enumerate(optimizer.param_groups) for param in group["params"]}
    for number, start, stop, offset in planned.slices(optimizer.comm.shard_rank):
        if not planned.params[number].requires_grad:  # a frozen parameter stays in its own memory
            optimizer.owned_of[params[number]] = [OwnedSlice(params[number], start, stop, offset, params[number])]
    for planned_buffer in planned.buffers[len(optimizer.buffers) :]:
        own = [params[number] for number in planned_buffer.params]
        for param in own:
            optimizer.owned_of.pop(param, None)  # of a parameter that was frozen
        first_param, first_bucket = len(optimizer.number_of), len(optimizer.buckets)
        buffer, buckets = allocate(planned_buffer, own, optimizer.comm.shard_rank, first_param, first_bucket)
        optimizer.buffers.append(buffer)
        optimizer.number_of.update(zip(own, itertools.count(first_param), strict=False))
        optimizer.buckets += buckets
        for bucket in buckets:
            for owned in bucket.owned:
                optimizer.owned_of.setdefault(owned.param, []).append(owned)
                bucket.local_by_group.setdefault(group_of[owned.param], []).append(owned.local)
        for number, param in enumerate(own):
            _move_in(buffer, number, optimizer.comm, optimizer.owned_of.get(param, []))
        optimizer.expect_versions(own)


def groups_of_slices(optimizer: Any) -> list[dict[str, Any]]:
    """Return the groups with this rank's slices in place of the parameters."""
    groups = []
    for group in optimizer.param_groups:
        slices = itertools.chain(*(optimizer.owned_of.get(param, []) for param in group["params"]))
        groups.append({**hyperparameters(group), "params": [owned.local for owned in slices]})
    return groups


def have_moved(optimizer: Any) -> bool:
    """Return whether parameters have left their places on any rank, before the first step. Needs to be called on all ranks."""
    if optimizer.has_state or not optimizer.source.is_whole or optimizer.plan.has_masters:
        return False
    check_groups(optimizer)
    dtypes = {param: buffer.data.dtype for buffer in optimizer.buffers for param in buffer.moved()}
    is_cast = on_any_rank(any(param.dtype != dtype for param, dtype in dtypes.items()), optimizer.comm.group)
    return on_any_rank(bool(dtypes), optimizer.comm.group) and not is_cast


def _move_in(buffer: FlatBuffer, number: int, comm: Communicator, slices: list[OwnedSlice]) -> None:
    """Move a parameter, and its `slices` of this rank, to its place with the values of rank 0. Call it on all ranks."""
    param = buffer.params[number]
    source = param.data if is_dense(param) else param.data.contiguous()
    buffer.move_in(number, source)
    place = flattened(param.data, param)
    for first, part in comm.broadcast_parts(flattened(source, source), place):
        if part.dtype != place.dtype:
            store_rounded(part, place[first : first + part.numel()])
        for owned in slices:
            owned.set_masters(part, first)


def _checked_plan(optimizer: Any, earlier: Plan | None) -> Plan:
    """Return the plan of all groups, with the earlier buffers. If a check fails, raise on all ranks before anything moves."""
    groups, comm, options = optimizer.param_groups, optimizer.comm, optimizer.options
    params = list(itertools.chain(*(group["params"] for group in groups)))

    def check() -> None:
        check_parameters(params, options.stored_dtype)
        if codec_of(options.state_dtype) is not None:
            check_rounding(optimizer.optimizer_cls, groups)
        if issubclass(optimizer.optimizer_cls, Muon):
            check_matrices(groups)
        optimizer.optimizer_cls([_of_one_element(group, optimizer.device) for group in groups], **optimizer.arguments)

    on_all_ranks(check, comm.group)
    check_same_on_all_ranks({f"parameter {number}": properties(param) for number, param in enumerate(params)}, comm.group)
    specs = parameter_specs(groups, optimizer.registration_order, device=optimizer.device)
    for number, spec in enumerate(earlier.params if earlier else ()):
        if spec.requires_grad:  # a parameter in a buffer stays there, also if frozen now
            specs[number] = spec
    return plan(specs, comm.shard_size, options, earlier.buffers if earlier else ())


def _of_one_element(group: dict[str, Any], device: torch.device | None) -> dict[str, Any]:
    """Return a parameter group with parameters of one element, for a trial of its hyperparameters."""
    tried = [torch.nn.Parameter(param.new_zeros((), device=device), param.requires_grad) for param in group["params"]]
    return {**hyperparameters(group), "params": tried}
