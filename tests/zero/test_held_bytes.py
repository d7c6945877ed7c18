"""zero/held_bytes.py: bytes as they are predicted, as they are accounted for, and as they are really held."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from ranks import run_in_turn, run_ranks
from toy import MODES

from forecast.activations import LiveBytes
from model import GPT, GPTConfig
from zero.build import build
from zero.flags import Flags
from zero.held_bytes import held_bytes


def model_state(mode):
    """Live bytes, and those accounted for, between the micro-steps of the second step, when all kinds of state exist."""
    with LiveBytes() as live:
        torch.manual_seed(0)
        model = GPT(GPTConfig(block_size=16, vocab_size=65, n_layer=12, n_head=2, n_embd=128, bias=False))
        model, optimizer = build(model, model.param_groups(0.1), replace(MODES[mode], bucket_mb=0.2), lr=1e-2)
        tokens = torch.randint(65, (2, 1, 16))
        model(*tokens)[1].backward()
        optimizer.step()
        optimizer.zero_grad()
        model.require_backward_grad_sync = False
        model(*tokens)[1].backward()
        held = held_bytes(optimizer, model)
    params = sum(param.numel() for param in model.parameters())
    return {"live": live.now, "held": sum(held.values()), "buckets": held["buckets"], "params": params}


def test_model_state_bytes():
    by_mode = run_in_turn(2, *(partial(model_state, mode) for mode in ("adamw", "sharded", "gradients")))
    for ranks in zip(*by_mode, strict=True):
        adamw, sharded, gradients = ranks
        # DistributedDataParallel has its buckets, and the gradients that accumulate
        assert adamw["live"] == pytest.approx(20 * adamw["params"], rel=0.01)
        assert (sharded["live"] - sharded["buckets"]) / adamw["params"] == pytest.approx(12, abs=0.1)
        assert (gradients["live"] - gradients["buckets"]) / adamw["params"] == pytest.approx(10, abs=0.1)
        for result in ranks:
            assert result["buckets"] <= 0.05 * adamw["live"]
            assert result["held"] == pytest.approx(result["live"], rel=0.01), "what is held is accounted for"


def model_state_in_bfloat16():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(8)))
    params = sum(param.numel() for param in model.parameters())
    flags = Flags(param_dtype="bfloat16", bucket_mb=0.008192)  # a layer per bucket, without padding
    model, optimizer = build(model, [{"params": list(model.parameters())}], flags, lr=0.1)
    model(torch.ones(2, 64, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with model.no_sync():
        model(torch.ones(2, 64, dtype=torch.bfloat16)).sum().backward()
    held = held_bytes(optimizer)
    del held["buckets"]
    return {purpose: count / params for purpose, count in held.items()}


@pytest.mark.parametrize("world_size", [2, 4])
def test_state_is_that_of_the_paper_and_divided_evenly(world_size):
    for held in run_ranks(model_state_in_bfloat16, world_size):
        assert held == {"parameters": 2, "gradients": 2, "master": 4 / world_size, "state": 8 / world_size}
