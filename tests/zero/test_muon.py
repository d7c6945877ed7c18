"""zero/muon/: sharded Muon is torch.optim.Muon and AdamW; who transforms what, and what is sent."""

import inspect
from functools import cache, partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_in_turn, run_ranks
from torch import nn
from torch.optim import _muon
from toy import assert_equal, batch, largest_difference, refused, train, weights

from forecast.dry_run import state_bytes, state_of_ranks
from forecast.run_memory import gpt_specs, planned_optimizer, predicted
from model import GPT, GPT2_SIZES, GPTConfig
from zero import Muon, ShardedDataParallel, ShardedOptimizer
from zero import checkpoint as ckpt
from zero.flags import Flags
from zero.layout import plan as make_plan
from zero.muon.matrices import matrix_plan
from zero.muon.muon import COEFFICIENTS, orthogonalized

DECAY = 0.1


def make():
    """A small GPT: stacked, square, wide and tall matrices in several rounds, one without a gradient; a frozen embedding."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=6, vocab_size=11, n_layer=2, n_head=2, n_embd=24, bias=False))
    model.transformer.h[1].unused = nn.Linear(8, 8, bias=False)
    model.transformer.wpe.requires_grad_(False)
    return model


def make_sharded(shard_gradients=False, **kwargs):
    model = make()
    optimizer = ShardedOptimizer(model.param_groups(DECAY, {}), Muon, bucket_mb=0.004, lr=0.01, **kwargs)
    return ShardedDataParallel(model, optimizer, shard_gradients), optimizer


def loss_of(model, number, rank):
    return model(*batch(number, rank))[1]


def newton_schulz(dtype):
    """torch's iteration, which has its dtype hard-wired, in another one."""
    source, found = inspect.getsource(_muon._zeropower_via_newtonschulz), {}
    hard_wired = "grad.bfloat16()" if "grad.bfloat16()" in source else "grad.to(dtype=torch.bfloat16, copy=True)"  # torch 2.15
    assert source.count(hard_wired) == 1
    exec(source.replace(hard_wired, f"grad.to({dtype}, copy=True)"), vars(_muon).copy(), found)
    return found["_zeropower_via_newtonschulz"]


@cache
def oracle(world_size, steps, dtype, micro_steps, clip):
    """One process: torch.optim.Muon and torch.optim.AdamW on the mean gradient, with a parameter of its own for each matrix."""
    model = make()
    *of_adamw, single, stacked = model.param_groups(DECAY, {})
    adamw = torch.optim.AdamW(of_adamw, lr=0.01)
    thirds = [nn.Parameter(third) for param in stacked["params"] for third in param.detach().chunk(3)]  # views
    muon = torch.optim.Muon(single["params"] + thirds, lr=0.01, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    with mock.patch.object(_muon, "_zeropower_via_newtonschulz", newton_schulz(dtype)):
        for step in range(steps):
            for micro_step in range(micro_steps):
                for rank in range(world_size):
                    (loss_of(model, step * micro_steps + micro_step, rank) / micro_steps / world_size).backward()
            if clip:
                assert nn.utils.clip_grad_norm_(model.parameters(), clip) > clip
            gradients = [gradient for param in stacked["params"] for gradient in param.grad.chunk(3)]
            for third, gradient in zip(thirds, gradients, strict=True):
                third.grad = gradient.clone()
            adamw.step()
            muon.step()
            model.zero_grad()
    return weights(model)


def trained(steps, ns_dtype, micro_steps, clip, **kwargs):
    """The weights, and whether matrices were sent."""
    model, optimizer = make_sharded(ns_dtype=ns_dtype, **kwargs)
    train(model, optimizer, dist.get_rank(), steps, clip, micro_steps=micro_steps, decay_lr=False, loss_of=loss_of)
    return weights(model), optimizer.comm.sent_bytes["all-to-all"] > 0


WAYS = {  # number of ranks: how they train
    1: [{"steps": 12}, {"steps": 12, "ns_dtype": "bfloat16"}],
    2: [{"steps": 12}, {"steps": 12, "ns_dtype": "bfloat16"}, {"shard_gradients": True}, {"clip": 0.1}],
    3: [{"micro_steps": 4}, {"shard_gradients": True, "micro_steps": 4}],
    4: [{}, {"shard_size": 2}],
}


@pytest.mark.parametrize("world_size", WAYS)
def test_steps_are_those_of_torchs_optimizers(world_size):
    """In float32, up to rounding of the means; twelve steps on two ranks bit for bit, also with matrices in bfloat16."""
    ways = [{"steps": 10, "ns_dtype": "float32", "micro_steps": 1, "clip": 0.0, **way} for way in WAYS[world_size]]
    for way, results in zip(ways, run_in_turn(world_size, *(partial(trained, **way) for way in ways)), strict=True):
        how = way["steps"], f"torch.{way['ns_dtype']}", way["micro_steps"], way["clip"]
        [[expected]] = run_in_turn(1, partial(oracle, world_size, *how))
        for found, is_sent in results:
            assert is_sent == (world_size > 1)
            assert largest_difference(found, expected) <= (0 if way["steps"] == 12 and world_size < 3 else 1e-5)


@pytest.mark.parametrize("state_dtype", ["bfloat16", "int8"])
def test_the_momentum_does_not_stall(state_dtype):
    """After many equal gradients; rounded to the nearest bfloat16, it would end at 0.9 of the gradient."""
    torch.manual_seed(0)
    param = nn.Parameter(torch.zeros(16, 32))
    group = {"params": [param], "matrices": 1, "momentum": 0.97, "ns_steps": 1}
    optimizer = ShardedOptimizer([group], Muon, lr=0.0, state_dtype=state_dtype)
    gradient = torch.rand(16, 32) + 0.5
    for _ in range(200):
        param.grad = gradient
        optimizer.step()
    momentum = ckpt.consolidate(optimizer)["state"][0]["momentum_buffer"]
    assert (momentum / gradient).mean().item() == pytest.approx(1, abs=0.02)


# -- arithmetic --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "world_size", "balance"),
    [
        *(("gpt2", 2, 1.03), ("gpt2", 7, 1.05), ("gpt2", 8, 1.03), ("gpt2-xl", 7, 1.05), ("gpt2-xl", 8, 1.03)),
        *(("gpt2", 64, 1.8), ("gpt2-xl", 64, 1.1)),  # 72 matrices, 288
        *(("gpt2", 1024, 33), ("gpt2-xl", 1024, 14)),  # most ranks have none
    ],
)
def test_bytes_and_balance_of_gpt2(name, world_size, balance):
    """At most 4 P_m (N - 1) / N^2 bytes per rank and step: P_m/N elements, (N - 1)/N of them of other owners, there and back.

    Less, because among the ranks whose loads stay the same, the one that holds most of a matrix owns it.
    """
    plan = make_plan(gpt_specs(GPTConfig(**GPT2_SIZES[name], bias=False), {}), world_size)
    matrices = matrix_plan(plan)
    assert len(matrices) == 6 * GPT2_SIZES[name]["n_layer"]
    load, sent = [0] * world_size, [0] * world_size
    for matrix in matrices:
        load[matrix.owner] += matrix.cost
        for part in matrix.parts:
            if part.rank != matrix.owner:
                sent[part.rank] += 2 * part.numel
                sent[matrix.owner] += 2 * part.numel
    numel = sum(part.numel for matrix in matrices for part in matrix.parts)
    expected = 4 * numel * (world_size - 1) / world_size**2
    most = {2: 0.9, 64: 0.99, 1024: 1.001}.get(world_size, 0.97)
    assert 0.4 * expected <= sum(sent) / world_size <= most * expected
    assert max(load) * world_size / sum(load) <= balance
    state = 4 * numel + 8 * (sum(spec.numel for spec in plan.params) - numel)
    for rank in {0, world_size // 2, world_size - 1}:
        prediction = predicted(plan.params, Flags(), planned_optimizer({}), rank=rank, world_size=world_size)
        assert prediction.sent["all-to-all"] == sent[rank]
        assert prediction.newton_schulz == load[rank]
        held = prediction.at("after step")["state"]
        assert held == pytest.approx(state / world_size, rel=0.1 if world_size <= 8 else 1)
    assert sum(state_of_ranks(plan, state_bytes(plan.params, planned_optimizer({})))) == state


@pytest.mark.parametrize("world_size", [2, 4, 8, 16, 64])
@pytest.mark.parametrize("name", ["gpt2", "gpt2-xl"])
def test_hardly_any_rank_waits_for_another_one_in_the_schedule(name, world_size):
    """With communication that takes no time, against equal loads, or the largest matrix where there are too few."""
    matrices = matrix_plan(make_plan(gpt_specs(GPTConfig(**GPT2_SIZES[name], bias=False), {}), world_size))
    rounds = [[0] * world_size for _ in range(max(matrix.round for matrix in matrices) + 1)]
    for matrix in matrices:
        rounds[matrix.round][matrix.owner] += matrix.cost
    ends = [[0] * world_size] * 2  # when each rank has transformed each round
    for loads in rounds:  # all ranks send a round when they have transformed the second one before it
        ends.append([max(*ends[-2], own) + load for own, load in zip(ends[-1], loads, strict=True)])
    costs = [matrix.cost for matrix in matrices]
    assert max(ends[-1]) <= 1.15 * max(sum(costs) / world_size, *costs)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "group", "message"),
    [
        ({"momentum": 1.0}, {}, "momentum=1.0 must be at least 0 and less than 1"),
        ({"ns_steps": 0}, {}, "ns_steps=0 must be positive"),
        ({}, {"params": [nn.Parameter(torch.ones(0, 4))], "matrices": 1}, r"parameter of shape \(0, 4\) does not consist of 1"),
        ({"ns_dtype": "float16"}, {}, "ns_dtype='float16' is not one of bfloat16, float32"),
        ({}, {"matrices": 5}, r"a parameter of shape \(24, 4\) does not consist of 5 matrices of equal size"),
        ({}, {"params": [nn.Parameter(torch.ones(3))], "matrices": 1}, r"a parameter of shape \(3,\) does not consist of 1"),
    ],
)
def test_mistakes(kwargs, group, message):
    group = {"params": [nn.Parameter(torch.ones(24, 4))], **group}
    refused(ValueError, message, ShardedOptimizer, [dict(group)], Muon, **kwargs)
    for param in group["params"]:
        param.grad = torch.ones_like(param)
    refused(ValueError, message, lambda: Muon([dict(group)], **kwargs).step())


def test_maximize_is_followed_also_if_it_is_set_later():
    trained = []
    for sign in (1, -1):
        optimizer = Muon([{"params": [weight := nn.Parameter(torch.eye(4, 3))], "matrices": 1}], lr=0.01)
        optimizer.param_groups[0]["maximize"] = sign < 0
        for step in range(3):
            weight.grad = sign * (torch.arange(12.0).view(4, 3) + step)
            optimizer.step()
        trained.append(weight.detach())
    assert_equal(*trained)


def test_state_of_adamw_is_refused():
    _, optimizer = make_sharded()
    model = make()
    adamw = torch.optim.AdamW([{"params": group["params"]} for group in model.param_groups(DECAY, {})])
    loss_of(model, 0, 0).backward()
    adamw.step()
    with pytest.raises(ckpt.CheckpointError, match="not of Muon; build the optimizer that was saved"):
        ckpt.restore(optimizer, adamw.state_dict())


def fails_in_its_own_round():
    """Memory runs out on rank 0 in its first matrix, on rank 1 in its second, which is of another round."""
    model, optimizer = make_sharded()
    loss_of(model, 0, dist.get_rank()).backward()
    results = [mock.DEFAULT] * dist.get_rank() + [torch.OutOfMemoryError(f"on rank {dist.get_rank()}")]
    with mock.patch("zero.muon.exchange.orthogonalized", mock.Mock(wraps=orthogonalized, side_effect=results)):
        try:
            optimizer.step()
        except torch.OutOfMemoryError:
            refused(RuntimeError, "a step has failed while matrices were exchanged; restart the program", optimizer.step)
            raise


def test_ranks_that_fail_in_different_rounds_end_together():
    with mock.patch("ranks.TIMEOUT_S", 30), pytest.raises(RuntimeError) as raised:
        run_ranks(fails_in_its_own_round, 2)
    assert all(f"rank {rank} raised" in str(raised.value) for rank in (0, 1))
    assert "OutOfMemoryError: on rank" in str(raised.value)


@pytest.mark.parametrize("count", [1, 2])
def test_a_batch_has_the_bits_of_torchs_iterations_of_each_matrix(count):
    matrices = torch.randn(count, 768, 192, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = [_muon._zeropower_via_newtonschulz(matrix, COEFFICIENTS, 5, 1e-7) for matrix in matrices]
    assert torch.equal(orthogonalized(matrices, 5), torch.stack(expected))
