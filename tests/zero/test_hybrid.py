"""Hybrid sharding: groups of ranks share the state, and every group holds a replica of it. Same weights, same checkpoints."""

import itertools
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import run_in_turn, run_ranks
from torch.nn.parallel import DistributedDataParallel
from toy import assert_equal, batch, build_toy, largest_difference, make_toy, refused, train, weights

from run.memory_meter import describe
from zero import ShardedDataParallel, ShardedOptimizer
from zero.build import clip_grad_norm_
from zero.flags import Flags
from zero.host_comm import gather_objects

STEPS = 5


def hybrid_toy(shard_size, **flags):
    return build_toy(Flags(bucket_mb=0.0002, shard_size=shard_size, **flags))


def trained_like_adamw(shard_size):
    rank, found = dist.get_rank(), {}
    for clip, shard_gradients in itertools.product((0.0, 0.1), (False, True)):
        reference, adamw = build_toy("adamw")
        model, optimizer = hybrid_toy(shard_size, shard_gradients=shard_gradients)
        train(reference, adamw, rank, STEPS, clip)
        train(model, optimizer, rank, STEPS, clip)
        state = {str(key): value for key, value in optimizer.inner.state_dict()["state"].items()}
        result = {"clip": clip, "hybrid": weights(model), "adamw": weights(reference), "state": state}
        found[f"clip {clip}, shard_gradients {shard_gradients}"] = result
    return found


@pytest.mark.parametrize(("world_size", "shard_size"), [(2, 1), (6, 3)])
def test_the_weights_are_those_of_adamw(world_size, shard_size):
    results = run_ranks(trained_like_adamw, world_size, shard_size)
    for rank, found in enumerate(results):
        for how, result in found.items():
            exact = world_size == 2 and not result["clip"]  # a sum of two is the same in any order
            assert largest_difference(result["hybrid"], result["adamw"]) <= (0.0 if exact else 1e-6), how
            assert_equal(result["hybrid"], results[0][how]["hybrid"], f"rank {rank}, {how}")  # same bits on every rank ...
            assert_equal(result["state"], results[rank % shard_size][how]["state"], f"rank {rank}, {how}")  # ... and replica


def without_a_backend(folder):
    """Training after init_process_group() chose the backends of each device, which then have no name."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group(init_method=f"file://{folder}/again", rank=rank, world_size=world_size)
    assert dist.get_backend() == "undefined"
    comm = hybrid_toy(1)[1].comm
    assert {dist.get_backend(group) for group in (comm.shard_group, comm.replica_group)} == {"undefined"}
    return trained_like_adamw(1)


def test_groups_have_the_backends_that_pytorch_chooses(tmp_path):
    for found in run_ranks(without_a_backend, 2, str(tmp_path)):
        for how, result in found.items():
            assert largest_difference(result["hybrid"], result["adamw"]) <= (1e-6 if result["clip"] else 0.0), how


ORDERS = "synchronized synchronized", "local local synchronized", "synchronized norm synchronized"
ORDERS += "synchronized norm local synchronized", "synchronized norm drop synchronized", "synchronized zero synchronized"


def all_reduce_late(comm, shard):
    """It begins when it is waited for."""
    return [SimpleNamespace(wait=partial(dist.all_reduce, shard, group=comm.replica_group))] if comm.replicas > 1 else []


def several_backwards(order):
    """Gradients that have been added up over the replicas already are counted once when more gradients follow."""
    rank, norms, after = dist.get_rank(), [], []
    for shard_size in (4, 2):
        model, optimizer = hybrid_toy(shard_size, shard_gradients=True)
        optimizer.comm.all_reduce_shard = partial(all_reduce_late, optimizer.comm)
        for step, what in enumerate(order.split()):
            if what in ("zero", "drop"):
                optimizer.zero_grad(set_to_none=what == "drop")
            elif what == "norm":
                clip_grad_norm_(optimizer, math.inf)
            else:
                model.require_backward_grad_sync = what == "synchronized"
                model(*batch(step, rank)).backward()
        norms.append(clip_grad_norm_(optimizer, math.inf).item())
        optimizer.step()
        after.append(weights(model))
    assert norms[0] > 0.01
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)
    # AdamW's first step is lr * sign(gradient), so a wrong sum shows in the norm, and a wrong sign in the weights
    assert largest_difference(after[1], after[0]) <= 1e-6


def groups_that_do_not_fit():
    for shard_size, message in ((3, "shard_size=3 does not divide 4 ranks; use one of 1, 2"), (-1, "use one of 1, 2, 4")):
        refused(ValueError, message, hybrid_toy, shard_size)
    one, other = (hybrid_toy(2)[1] for _ in range(2))
    assert one.comm.shard_group is other.comm.shard_group is not one.comm.replica_group is other.comm.replica_group
    lines = gather_objects(describe(one, []))
    assert "over 2 ranks in each of 2 groups" in lines[0]


def test_backward_passes_of_a_step_add_up_and_groups_fit():
    run_in_turn(4, groups_that_do_not_fit, *(partial(several_backwards, order) for order in ORDERS))


def with_ddp_and_part_of_the_ranks():
    """Gradients that DistributedDataParallel has averaged, and a group that is not all ranks."""
    ranks, rank = [0, 1, 3, 4], dist.get_rank()
    group = dist.new_group(ranks)
    if rank not in ranks:
        return None
    found, cls = {}, torch.optim.AdamW
    for name in ("adamw", "under ddp", "wrapped"):
        model = make_toy()
        model.unused.requires_grad_(False)
        make = partial(ShardedOptimizer, optimizer_cls=cls, process_group=group, shard_size=2, bucket_mb=0.0002)
        optimizer = (cls if name == "adamw" else make)(model.parameters(), lr=0.01, fused=True)
        ddp = DistributedDataParallel(model, process_group=group)
        train(ShardedDataParallel(model, optimizer) if name == "wrapped" else ddp, optimizer, rank, STEPS)
        found[name] = weights(model)
    return found


def with_a_device_of_the_world():
    """Shard groups of some ranks that would be split from all."""
    group, rank = dist.new_group([0, 1]), dist.get_rank()
    dist.group.WORLD.bound_device_id = torch.device("cuda", rank)
    if rank < 2:
        with pytest.raises(ValueError, match="shard_size in a process_group of 2 ranks would wait for all 5, because"):
            ShardedOptimizer(make_toy().parameters(), torch.optim.AdamW, group, shard_size=1)
    dist.group.WORLD.bound_device_id = None


def test_gradients_of_ddp_and_a_group_of_some_ranks():
    by_rank, _ = run_in_turn(5, with_ddp_and_part_of_the_ranks, with_a_device_of_the_world)
    results = [found for found in by_rank if found is not None]
    assert len(results) == 4
    for found in results:
        assert_equal(found["under ddp"], found["adamw"])
        assert largest_difference(found["wrapped"], found["adamw"]) <= 1e-6
        assert_equal(found["wrapped"], results[0]["wrapped"])
