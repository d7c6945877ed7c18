"""zero/data_parallel.py: the weights are those of plain AdamW on the mean gradient, or of its masters, with any overlap."""

import functools
import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from blocks import Part
from nets import wrap
from ranks import run_in_turn
from torch import nn
from toy import batch, largest_difference, make_toy, sharded_toy, train, weights

from zero import ShardedOptimizer
from zero import checkpoint as ckpt
from zero.collectives import Communicator
from zero.reducer import BucketGradients

STEPS = 7


def loss_of(model, number, rank):
    """One layer has a gradient in a few micro-steps only, and with several ranks on rank 0 only."""
    loss = model(*batch(number, rank))
    if number % 7 == 4 and rank == 0:
        toy = getattr(model, "module", model)
        loss = loss + toy.unused(torch.ones(3, dtype=toy.scale.dtype)).square().sum()
    return loss


def oracle_run(world_size, micro_steps, clip, shard_gradients, dtype):
    """All batches in one process: gradients are averaged as DistributedDataParallel does, before they are added in float32.

    The model in `dtype` and its float32 masters, which AdamW updates.
    """
    model, masters = make_toy(0).to(dtype), make_toy(0)
    optimizer = torch.optim.AdamW(masters.param_groups(), lr=0.01, fused=True)
    pairs = list(zip(model.parameters(), masters.parameters(), strict=True))
    for step in range(STEPS):
        for rank, micro_step in itertools.product(range(world_size), range(micro_steps)):
            (loss_of(model, step * micro_steps + micro_step, rank) / micro_steps).backward()
            if shard_gradients or micro_step == micro_steps - 1:
                for param, master in pairs:
                    if param.grad is not None:
                        share = (param.grad * (1 / world_size)).float()
                        master.grad = share if master.grad is None else master.grad + share
                model.zero_grad()
        if clip:
            torch.nn.utils.clip_grad_norm_(masters.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        model.load_state_dict(masters.state_dict())
    return weights(model), weights(masters)


def trained(micro_steps, clip, param_dtype, shard_gradients):
    """The weights, on rank 0 the masters as they are saved, and the bytes that were sent, in units of what a rank gathers.

    The ranks start from different weights; the wrapper must make them those of rank 0.
    """
    how = {"shard_gradients": shard_gradients, "param_dtype": param_dtype, "overlap": ("hidden", "head")}
    model, optimizer = sharded_toy(dist.get_rank(), fused=True, **how)
    train(model, optimizer, dist.get_rank(), STEPS, clip, micro_steps=micro_steps, decay_lr=False, loss_of=loss_of)
    gathered = STEPS * sum(bucket.shard.nbytes for bucket in optimizer.placed.buckets) * (dist.get_world_size() - 1)
    sent = [optimizer.comm.sent_bytes[kind] / max(1, gathered) for kind in ("reduce-scatter", "all-gather")]
    return weights(model), ckpt.model_state_dict(model.module, optimizer) or {}, sent


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_parity(world_size):
    cases = [(1, 0.0, "float32"), (4, 0.0, "float32"), (2, 0.05, "float32")]
    cases += [(1, 0.0, "bfloat16"), (3, 0.0, "bfloat16_remainder")] if world_size < 4 else []
    cases = [(*case, shard_gradients) for case in cases for shard_gradients in (False, True)]
    by_case = run_in_turn(world_size, *(functools.partial(trained, *case) for case in cases))
    for (micro_steps, clip, param_dtype, shard_gradients), results in zip(cases, by_case, strict=True):
        dtype = getattr(torch, param_dtype.removesuffix("_remainder"))
        [[oracle]] = run_in_turn(1, functools.partial(oracle_run, world_size, micro_steps, clip, shard_gradients, dtype))
        expected, masters = oracle
        assert largest_difference(masters, weights(make_toy(0))) > 0.01, "training must have changed something"
        # a sum of two is the same in any order; with shard_gradients micro-steps are added after ranks, not before
        exact = world_size == 1 or (world_size == 2 and not (shard_gradients and micro_steps > 1))
        exact, rounding = exact and not clip, 2**-8 if dtype == torch.bfloat16 else 1e-6
        for found, _, sent in results:
            assert {tensor.dtype for tensor in found.values()} == {dtype}, "also the frozen ones"
            assert largest_difference(found, expected) <= (0.0 if exact else rounding), shard_gradients
            assert sent == ([micro_steps if shard_gradients else 1, 1] if world_size > 1 else [0, 0])
        whole = results[0][1]
        own = {name for name in whole if not name.startswith("frozen")}  # what is frozen has no master
        assert {whole[name].dtype for name in own} == {torch.float32}
        difference = largest_difference(*({name: each[name] for name in own} for each in (whole, masters)))
        assert difference <= (0.0 if exact else 1e-5)


def alone_under_averaging_by_hand():
    """Without ShardedDataParallel: clipped gradients stay clipped, new gradients and weights that were set are used."""
    model, masters = make_toy(), make_toy()
    optimizer = ShardedOptimizer(model.param_groups(), torch.optim.SGD, param_dtype="bfloat16", lr=1.0)
    model.to(torch.bfloat16)  # the frozen ones, too
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
    from_bfloat16 = ShardedOptimizer(make_toy().to(torch.bfloat16).parameters(), torch.optim.SGD, param_dtype="bfloat16")
    for each in (optimizer, from_bfloat16):
        assert all(bucket.masters.values.dtype == torch.float32 for bucket in each.placed.buckets)


def a_gradient_that_somebody_keeps():
    """It is added to one that has been sent, and overwritten before the sum is sent."""
    module, kept = nn.Linear(2, 1, bias=False), []
    module.weight.register_hook(kept.append)
    nn.init.ones_(module.weight)
    model, optimizer = wrap(module, torch.optim.SGD, lr=0.1)
    for model.require_backward_grad_sync in (True, False, True):
        model(torch.ones(1, 2)).sum().backward()
        kept[-1].zero_()
    optimizer.step()
    assert module.weight.tolist() == [pytest.approx([1 - 3 * 0.1] * 2)]


def a_backward_without_gradients(shard_gradients):
    """Two synchronized backwards per step. On rank 0, the first one reaches no parameter; a step is dropped in between.

    DistributedDataParallel hangs.
    """
    x = torch.ones(1, requires_grad=True)

    def forward(part, used):
        return (x * part.weight.sum() if used else 2 * x).sum()

    module = Part(forward, weight=nn.Parameter(torch.ones(4)))
    model, optimizer = wrap(module, torch.optim.SGD, lr=0.1, shard_gradients=shard_gradients)
    for step in range(6):
        for used in (dist.get_rank() > 0, step % 3 < 2):
            model(used).backward()
        if step % 3 < 2:
            optimizer.step()
        optimizer.zero_grad()
    # each step: rank 0 has one gradient of 1, rank 1 two
    assert module.weight.tolist() == pytest.approx([1 - 4 * 0.1 * 1.5] * 4)


def half_precision_norms():
    """Gradients in float16, with float16 as the default dtype: their norm is larger than float16 can hold."""
    torch.set_default_dtype(torch.float16)
    try:
        model, optimizer = wrap(nn.Linear(512, 512, bias=False), bucket_mb=75)
        (model(torch.full((1, 512), 16.0)) * 16).sum().backward()
        assert optimizer.clip_grad_norm_(1e9).item() == pytest.approx(512 * 256)
    finally:
        torch.set_default_dtype(torch.float32)


def calls():
    """On a GPU, small shards share a call of the inner optimizer, unless the call needs memory for each of them."""
    for on_cpu, kwargs, expected in (
        (True, {}, [1, 1, 1, 1, 1]),
        (False, {"fused": True}, [2, 2, 1]),
        (False, {}, [1, 1, 1, 1, 1]),
        (False, {"fused": True, "param_dtype": "bfloat16", "bucket_mb": 0.000128}, [1, 1, 1, 1, 1]),
        (False, {"fused": True, "state_dtype": "int8"}, [1, 1, 1, 1, 1]),
        (False, {"optimizer_cls": type("Own", (torch.optim.AdamW,), {}), "elementwise": True}, [5]),
    ):
        options = {"optimizer_cls": torch.optim.AdamW, "bucket_mb": 0.000256, **kwargs}
        travels = mock.patch.object(Communicator, "is_on_cpu", return_value=on_cpu)
        with travels, mock.patch("zero.update.TOGETHER", 70):
            optimizer = ShardedOptimizer(nn.Linear(16, 20, bias=False).parameters(), **options)
            assert [bucket.shard.numel() for bucket in optimizer.placed.buckets] == [32] * 5
            assert [len(buckets) for buckets in optimizer._updater.bucket_groups()] == expected


def buckets_that_nobody_has_filled():
    """The zeros of parameters without a gradient are sent bucket by bucket: not all of them exist at once."""
    layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(9))
    model, optimizer = wrap(layers, bucket_mb=64 * 4 / 1e6)
    alive, places = [], BucketGradients.places

    def counting(gradients):
        result = places(gradients)
        alive.append(sum(gradients.buffer is not None for gradients in model.reducer._gradients))
        return result

    with mock.patch.object(BucketGradients, "places", counting):
        layers[0](torch.ones(2, 8)).sum().backward()
    assert len(alive) == len(optimizer.placed.buckets) == 9
    assert max(alive) == 2


def test_steps_of_two_ranks():
    without_gradients = (functools.partial(a_backward_without_gradients, is_sharded) for is_sharded in (False, True))
    own = alone_under_averaging_by_hand, a_gradient_that_somebody_keeps, buckets_that_nobody_has_filled
    run_in_turn(2, *own, calls, half_precision_norms, *without_gradients)
