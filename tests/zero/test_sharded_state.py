"""zero/sharded_state.py: who holds which slices, asked of each implementation."""

from functools import partial

import pytest
import torch
from ranks import run_in_turn
from toy import MODES, build_toy

from zero.sharded_state import packed_groups, parameters, partition


def held(mode):
    """This rank's view of all slices, as plain lists, and what stands beside them."""
    _, optimizer = build_toy(mode)
    part = partition(optimizer)
    params = parameters(optimizer)
    assert [id(param) for group in optimizer.param_groups for param in group["params"]] == list(map(id, params))
    for piece, local in zip(part.slices[part.rank], parameters(part.inner), strict=True):
        whole = params[piece.param].detach()
        assert torch.equal(local.detach().reshape(-1), whole.reshape(-1)[piece.start : piece.stop])
    groups = [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in optimizer.param_groups]
    plain = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), fused=True)
    assert packed_groups(part.optimizer) == plain.state_dict()["param_groups"]
    return {
        "slices": [[list(piece[:3]) for piece in of_rank] for of_rank in part.slices],
        "numels": [param.numel() for param in params],
        "rank": part.rank,
        "replica": part.replica,
    }


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_element_has_one_holder(world_size):
    for mode, results in zip(MODES, run_in_turn(world_size, *(partial(held, mode) for mode in MODES)), strict=True):
        alone = mode == "adamw" or world_size == 1
        for rank, result in enumerate(results):
            assert result["slices"] == results[0]["slices"], "all ranks agree"
            assert len(result["slices"]) == (1 if alone else world_size)
            assert result["rank"] == (0 if alone else rank)
            assert result["replica"] == (rank if alone else 0)
        pieces = sorted(tuple(piece) for of_rank in results[0]["slices"] for piece in of_rank)
        for number, numel in enumerate(results[0]["numels"]):
            ends = [(start, stop) for param, start, stop in pieces if param == number]
            assert [0] + [stop for _, stop in ends] == [start for start, _ in ends] + [numel]
