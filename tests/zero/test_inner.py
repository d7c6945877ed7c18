"""The inner optimizer: its state, and its calls."""

import copy
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from nets import TINY_MB
from ranks import run_in_turn
from torch import nn

from zero import ShardedOptimizer, checkpoint
from zero.checkpoint.state import local_chunks


class MyAdamW(torch.optim.AdamW):
    pass


def strides_of(state_dict):
    return {index: [value.stride() for value in state.values()] for index, state in state_dict["state"].items()}


def consolidated(optimizer_cls):
    """Zero-size, frozen, channels_last and transposed parameters: as the unsharded optimizer has them."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last))
    module.empty = nn.Parameter(torch.zeros(0, 3))
    module.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    module.expanded = nn.Parameter(torch.ones(3, 1).expand(3, 2), requires_grad=False)
    module.sliced = nn.Parameter(torch.randn(6, 6)[::2, ::3].t(), requires_grad=False)
    module.transposed = nn.Parameter(torch.randn(5, 7).t())
    strides = [param.stride() for param in module.parameters()]
    plain = copy.deepcopy(module)
    optimizer = ShardedOptimizer(module.parameters(), optimizer_cls, bucket_mb=TINY_MB, lr=0.01)
    reference = optimizer_cls(plain.parameters(), lr=0.01)
    assert [param.stride() for param in module.parameters()] == strides
    for trained, its_optimizer in ((module, optimizer), (plain, reference)):
        for step in range(3):
            images = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(step))
            loss = trained[0](torch.ones(8)).square().sum() + trained[1](images).square().sum()
            (loss + trained.empty.sum() + (trained.transposed * torch.arange(5.0)).square().sum()).backward()
            its_optimizer.step()
            its_optimizer.zero_grad()
    whole, weights = checkpoint.consolidate(optimizer), checkpoint.model_state_dict(module, optimizer)
    if dist.get_rank() == 0:
        expected = reference.state_dict()
        assert strides_of(whole) == strides_of(expected)
        assert whole["param_groups"] == expected["param_groups"]
        assert whole["state"].keys() == expected["state"].keys()
        for index, state in expected["state"].items():
            assert whole["state"][index].keys() == state.keys()
            for key, value in state.items():
                assert torch.equal(whole["state"][index][key], value), (index, key)
        assert weights.keys() == plain.state_dict().keys()
        assert all(torch.equal(weights[name], plain.state_dict()[name]) for name in weights)
    states, expected = [whole], strides_of(reference.state_dict())
    dist.broadcast_object_list(states)
    partly_frozen = copy.deepcopy(module)
    partly_frozen[0].requires_grad_(False)  # whose state stays
    again = ShardedOptimizer(partly_frozen.parameters(), optimizer_cls, bucket_mb=0.0005, lr=0.01)
    checkpoint.restore(again, states[0])
    restored = checkpoint.consolidate(again)
    if dist.get_rank() == 0:
        for index, state in whole["state"].items():
            assert all(torch.equal(restored["state"][index][key], value) for key, value in state.items())
    checkpoint.restore(reference, states[0])
    assert strides_of(reference.state_dict()) == expected
    with pytest.raises(ValueError, match="shards hold contiguous parameters, consolidated files hold any"):
        local_chunks(module, optimizer)


def calls():
    """On a GPU, small shards share a call of the inner optimizer, unless the call needs memory for each of them."""
    for on_cpu, kwargs, expected in (
        (True, {}, [1, 1, 1, 1, 1]),
        (False, {"fused": True}, [2, 2, 1]),
        (False, {}, [1, 1, 1, 1, 1]),
        (False, {"fused": True, "param_dtype": "bfloat16", "bucket_mb": 0.000128}, [1, 1, 1, 1, 1]),
        (False, {"fused": True, "state_dtype": "int8"}, [1, 1, 1, 1, 1]),
        (False, {"optimizer_cls": MyAdamW, "elementwise": True}, [5]),
    ):
        options = {"optimizer_cls": torch.optim.AdamW, "bucket_mb": 0.000256, **kwargs}
        with mock.patch("zero.collectives.is_on_cpu", lambda _, on_cpu=on_cpu: on_cpu), mock.patch("zero.update.TOGETHER", 70):
            optimizer = ShardedOptimizer(nn.Linear(16, 20, bias=False).parameters(), **options)
            assert [bucket.shard.numel() for bucket in optimizer.buckets] == [32] * 5
            assert [len(buckets) for buckets in optimizer._update._calls()] == expected


def test_the_inner_optimizer():
    run_in_turn(
        2,
        calls,
        partial(consolidated, torch.optim.AdamW),
        partial(consolidated, torch.optim.Adagrad),  # which also has state of frozen ones
    )
