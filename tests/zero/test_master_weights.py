"""Weights in bfloat16 and float32 masters of the owned slices: AdamW updates the masters."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from ranks import run_in_turn
from toy import batch, largest_difference, make_toy, train, weights

from zero import ShardedDataParallel, ShardedOptimizer
from zero import checkpoint as ckpt
from zero.held_bytes import held_bytes

STEPS = 8


def oracle_run(micro_steps, shard_gradients):
    """One process: a bfloat16 model whose gradients update a float32 copy, which is then rounded into the model."""
    model, masters, world_size = make_toy(0), make_toy(0), dist.get_world_size()
    model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(masters.param_groups(), lr=0.01, fused=True)
    for step in range(STEPS):
        for param in masters.parameters():
            param.grad = None
        for rank in range(world_size):
            for micro_step in range(micro_steps):
                (model(*batch(step * micro_steps + micro_step, rank)) / micro_steps).backward()
                if shard_gradients or micro_step == micro_steps - 1:
                    for param, master in zip(model.parameters(), masters.parameters(), strict=True):
                        if param.grad is not None:
                            share = (param.grad * (1 / world_size)).float()
                            master.grad = share if master.grad is None else master.grad + share
                            param.grad = None
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(model.parameters(), masters.parameters(), strict=True):
                param.copy_(master)
    return weights(model), weights(masters)


def like_the_oracle(micro_steps, shard_gradients):
    toy = make_toy(seed=dist.get_rank())
    optimizer = ShardedOptimizer(
        toy.param_groups(), torch.optim.AdamW, bucket_mb=0.0002, param_dtype="bfloat16", lr=0.01, fused=True
    )
    model, world_size = ShardedDataParallel(toy, optimizer, shard_gradients), dist.get_world_size()
    train(model, optimizer, dist.get_rank(), STEPS, micro_steps=micro_steps, decay_lr=False)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}, "also the frozen ones"
    low, masters = oracle_run(micro_steps, shard_gradients)
    exact = world_size <= 2 and not (shard_gradients and world_size > 1)
    assert largest_difference(weights(model), low) <= (0.0 if exact else 2**-8)
    if world_size == 2:
        sent = STEPS * sum(bucket.data.numel() for bucket in optimizer.buckets)  # half of 2 bytes each
        scatters = micro_steps if shard_gradients else 1
        assert optimizer.comm.sent_bytes == {"reduce-scatter": scatters * sent, "all-gather": sent}
    master = ckpt.model_state_dict(model.module, optimizer)
    if master is not None:
        assert {tensor.dtype for tensor in master.values()} == {torch.float32, torch.bfloat16}  # what is frozen has no master
        trained = {name for name in master if not name.startswith("frozen")}
        difference = largest_difference(*({name: each[name].float() for name in trained} for each in (master, masters)))
        assert difference <= (0.0 if exact else 1e-5)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parity(world_size):
    run_in_turn(world_size, *(partial(like_the_oracle, *kind) for kind in ((1, False), (3, False), (3, True))))


def alone_under_averaging_by_hand():
    """Without ShardedDataParallel: clipped gradients stay clipped, new gradients and weights that were set are used."""
    model, masters = make_toy(), make_toy()
    optimizer = ShardedOptimizer(model.param_groups(), torch.optim.SGD, param_dtype="bfloat16", lr=1.0)
    model.to(torch.bfloat16)
    plain = torch.optim.SGD(masters.param_groups(), lr=1.0)
    for step in range(4):
        model(*batch(step, 0)).backward()
        for param, master in zip(model.parameters(), masters.parameters(), strict=True):
            master.grad = None if param.grad is None else param.grad.float()
        assert optimizer.clip_grad_norm_(0.05) > 0.05
        torch.nn.utils.clip_grad_norm_(masters.parameters(), 0.05)
        optimizer.step()
        plain.step()
        model.zero_grad()  # not the optimizer's
        low = {name: tensor.to(torch.bfloat16) for name, tensor in weights(masters).items()}
        assert largest_difference(weights(model), low) <= 2**-8
        for param, master in zip(model.parameters(), masters.parameters(), strict=True):
            optimizer.set_parameter(param, master.data.mul_(0.9))
    return held_bytes(optimizer)["master"]


def from_bfloat16():
    optimizer = ShardedOptimizer(make_toy().to(torch.bfloat16).parameters(), torch.optim.SGD, param_dtype="bfloat16")
    return [bucket.masters.values.dtype == torch.float32 for bucket in optimizer.buckets]


def test_alone_and_in_bfloat16():
    masters, are_float32 = run_in_turn(2, alone_under_averaging_by_hand, from_bfloat16)
    assert all(masters)
    assert all(all(each) for each in are_float32)
