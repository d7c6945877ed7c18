"""zero/grad_scaler.py: where a float16 gradient of any rank is not finite, all ranks skip the step together."""

from functools import partial

import torch
import torch.distributed as dist
from ranks import run_in_turn
from toy import batch, build_toy, largest_difference, refused, weights

from zero import ShardedDataParallel, ShardedGradScaler, ShardedOptimizer
from zero.build import clip_grad_norm_
from zero.flags import Flags
from zero.sharded_state import partition


def overflow(now, gradient):
    gradient = gradient.clone()
    gradient.view(-1)[0] += float("inf") if now else 0.0
    return gradient


def train_with_an_overflow(mode, clip, muon):
    """A planted inf on one rank: both skip that step and halve the scale; then both train on.

    It is in one element of a gradient. Each rank holds a part of the elements, so only one of them has it in its shards.
    """
    flags = Flags(bucket_mb=0.0002, shard_size=2) if mode == "hybrid" else mode
    under_ddp = mode in ("adamw", "torch")  # which wants a gradient of every parameter
    model, optimizer = build_toy(flags, seed=dist.get_rank(), muon=muon, freeze=under_ddp)
    scaler = ShardedGradScaler("cpu", init_scale=2.0**10)
    for step in range(4):
        before = weights(model)
        loss = model(*batch(step, dist.get_rank()))
        if step == 1 and not under_ddp and dist.get_rank() == 0:  # a gradient that one rank alone has
            loss = loss + model.module.unused(torch.ones(3)).square().sum()
        weight = model.get_parameter("module.hidden.weight")
        handle = weight.register_hook(partial(overflow, step == 1 and dist.get_rank() == 1))
        scaler.scale(loss).backward()
        handle.remove()
        scaler.unscale_(optimizer)
        if clip:
            norm = clip_grad_norm_(optimizer, 1.0)
            assert norm.isfinite() == (step != 1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert all(tensor.isfinite().all() for tensor in weights(model).values())
        assert (largest_difference(weights(model), before) == 0.0) == (step == 1)
    states = partition(optimizer).inner.state.values()
    taken = {int(state["step"]) for state in states if "step" in state}
    assert taken in ({3}, {0, 3}), "one layer has a gradient in the step that was skipped only"
    return weights(model), scaler.get_scale()


def whole_gradients():
    """Without ShardedDataParallel, every rank has all of them, also after unscaling."""
    params = [torch.nn.Parameter(torch.zeros(size)) for size in (40, 3)]
    optimizer, scaler = ShardedOptimizer(params, torch.optim.SGD, lr=1.0), ShardedGradScaler("cpu", init_scale=4.0)
    for param, gradient in zip(params, scaler.scale([torch.ones(40), torch.ones(3)]), strict=True):
        param.grad = gradient
    scaler.unscale_(optimizer)
    assert optimizer.comm.waits.read_ms().keys() == {"all-reduce"}, "its wait is a part of the exposed communication"
    assert all((param.grad == 1.0).all() for param in params)
    scaler.step(optimizer)
    assert all((param == -1.0).all() for param in params)


def test_all_ranks_skip_or_none():
    run_in_turn(2, whole_gradients)
    cases = [("adamw", False, False), ("torch", True, False), ("sharded", False, False), ("sharded", True, True)]
    cases += [("gradients", True, False), ("gradients", False, True)]  # mode, clip, Muon
    results = run_in_turn(2, *(partial(train_with_an_overflow, *case) for case in cases))
    for by_rank in results + run_in_turn(4, partial(train_with_an_overflow, "hybrid", False, False)):
        for after, scale in by_rank:
            assert largest_difference(after, by_rank[0][0]) == 0.0
            assert scale == 2.0**9


def test_float16_gradients_are_unscaled_in_float32():
    """Whole ones are refused, as torch.amp.GradScaler does."""
    module = torch.nn.Linear(3, 2, bias=False)
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=1.0, param_dtype="float16")

    def backward(model):
        scaler = ShardedGradScaler("cpu", init_scale=4.0)
        scaler.scale(model(torch.ones(1, 3).half()).float().sum()).backward()
        return scaler

    refused(ValueError, "wrap the model", backward(module).unscale_, optimizer)
    optimizer.zero_grad()
    before, scaler = module.weight.tolist(), backward(ShardedDataParallel(module, optimizer))
    scaler.unscale_(optimizer)
    [gradient] = [owned.local.grad for owned in optimizer.placed.owned]
    assert (gradient.dtype, gradient.tolist()) == (torch.float32, [1.0] * 6)
    scaler.step(optimizer)
    assert module.weight.tolist() != before
