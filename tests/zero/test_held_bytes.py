"""zero/held_bytes.py: bytes per parameter, as the paper counts them; tests/forecast/test_prediction.py compares all kinds."""

from functools import partial

import pytest
import torch
from ranks import run_in_turn

from zero.build import build
from zero.flags import Flags
from zero.held_bytes import held_bytes


def bytes_per_parameter(param_dtype, shard_gradients):
    """Between the micro-steps of the second step, when all kinds of state exist; without the buckets."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(8)))
    params, dtype = sum(param.numel() for param in model.parameters()), getattr(torch, param_dtype)
    # a layer per bucket, without padding
    flags = Flags(param_dtype=param_dtype, bucket_mb=64 * 64 * dtype.itemsize / 1e6, shard_gradients=shard_gradients)
    model, optimizer = build(model, [{"params": list(model.parameters())}], flags, lr=0.1)
    model(torch.ones(2, 64, dtype=dtype)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with model.no_sync():
        model(torch.ones(2, 64, dtype=dtype)).sum().backward()
    return {purpose: count / params for purpose, count in held_bytes(optimizer, model).items() if purpose != "buckets"}


@pytest.mark.parametrize("world_size", [2, 4])
def test_state_is_that_of_the_paper_and_divided_evenly(world_size):
    kinds = ("bfloat16", False), ("float32", False), ("float32", True)
    by_kind = run_in_turn(world_size, *(partial(bytes_per_parameter, *kind) for kind in kinds))
    state = 8 / world_size
    expected = (
        {"parameters": 2, "gradients": 2, "master": 4 / world_size, "state": state},
        {"parameters": 4, "gradients": 4, "master": 0, "state": state},
        # the last of eight buckets is on its way
        {"parameters": 4, "gradients": 7 / 8 * 4 / world_size, "master": 0, "state": state},
    )
    assert by_kind == [[each] * world_size for each in expected]
