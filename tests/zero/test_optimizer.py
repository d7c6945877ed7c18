"""zero/optimizer.py: ShardedOptimizer alone gives the weights of AdamW."""

import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ranks import run_in_turn, run_ranks
from toy import batch, largest_difference, make_toy, weights

from zero import ShardedDataParallel, ShardedOptimizer
from zero.build import clip_grad_norm_


def step_by_hand(world_size):
    """No DDP: gradients averaged by hand; parameters without a gradient, a closure, a scheduler."""
    model, oracle = make_toy(), make_toy()
    sharded = ShardedOptimizer(model.parameters(), torch.optim.AdamW, bucket_mb=0.0002, lr=0.1, weight_decay=0.1)
    plain = torch.optim.AdamW(oracle.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(6):
        if step == 0:
            schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in (sharded, plain)]

        def loss_of(toy, step=step):
            return sum(toy(*batch(step, r)) for r in range(world_size)) / world_size

        def closure():
            sharded.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss

        loss = sharded.step(closure)
        plain.zero_grad()
        expected = loss_of(oracle)
        expected.backward()
        plain.step()
        assert torch.equal(loss, expected)
        for scheduler in schedulers:
            scheduler.step()
        assert sharded.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    held = {id(owned.param) for owned in sharded.owned if sharded.inner.state.get(owned.local)}
    assert id(model.unused.weight) not in held, "a parameter without a gradient must not get state"
    assert largest_difference(weights(model), weights(oracle)) == 0.0
    assert torch.equal(model.unused.weight, make_toy().unused.weight)


def test_without_a_process_group():
    assert not dist.is_initialized()
    step_by_hand(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module = torch.nn.Linear(4, 4)
        optimizer = ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
        model = ShardedDataParallel(module, optimizer, overlap=[module])
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def test_alone_as_a_drop_in():
    run_ranks(step_by_hand, 2, 2)


def clipped(value):
    """The norm and the clipped gradients of slices, against torch's of whole ones; one gradient is not contiguous."""
    torch.manual_seed(0)
    gradients = [torch.randn(6, 5), torch.randn(5, 4).t(), torch.randn(7), torch.randn(())]
    gradients[1][2, 3] = value
    params, oracle = ([torch.nn.Parameter(torch.zeros_like(g)) for g in gradients] for _ in range(2))
    sharded = ShardedOptimizer(params, torch.optim.SGD, bucket_mb=0.0001, lr=1.0)
    plain = torch.optim.SGD(oracle, lr=1.0)
    for param, other, gradient in zip(params, oracle, gradients, strict=True):
        param.grad, other.grad = gradient.clone(memory_format=torch.preserve_format), gradient.clone()
    for optimizer in (sharded, plain):
        clip_grad_norm_(optimizer, torch.inf)  # only measures
    torch.testing.assert_close([other.grad for other in oracle], gradients, rtol=0, atol=0, equal_nan=True)
    norm, expected = sharded.clip_grad_norm_(0.1), torch.nn.utils.clip_grad_norm_(oracle, 0.1)
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0, equal_nan=True)
    if norm.isfinite():
        assert sharded.clip_grad_norm_(torch.inf) == pytest.approx(0.1, rel=1e-3)
    for param, other in zip(params, oracle, strict=True):  # on every rank: a loop may add to them
        torch.testing.assert_close(param.grad, other.grad, rtol=1e-6, atol=1e-9, equal_nan=True)
    sharded.step()
    plain.step()
    for param, other in zip(params, oracle, strict=True):
        torch.testing.assert_close(param, other, rtol=1e-6, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("world_size", [1, 3])
def test_clipping_is_that_of_torch(world_size):
    run_in_turn(world_size, *(partial(clipped, value) for value in (1.0, float("inf"), float("nan"))))
