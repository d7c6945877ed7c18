"""forecast/dry_run.py: the state of an optimizer is known before its first step."""

import pytest
import torch

from forecast.dry_run import state_bytes
from model import GPT, GPTConfig
from zero import Muon
from zero.held_bytes import held_bytes
from zero.layout import parameter_specs


@pytest.mark.parametrize(
    ("optimizer_cls", "arguments"),
    [
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.RMSprop, {"centered": True}),
        (Muon, {"fused": True}),
    ],
)
def test_the_state_of_a_class_is_counted_before_its_first_step(optimizer_cls, arguments):
    model = GPT(GPTConfig(block_size=4, vocab_size=5, n_layer=1, n_head=1, n_embd=8))
    optimizer = optimizer_cls(model.param_groups(0.1, {} if optimizer_cls is Muon else None), lr=0.1, **arguments)
    expected = sum(state_bytes(parameter_specs(optimizer.param_groups), (optimizer_cls, {"lr": 0.1, **arguments})))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert held_bytes(optimizer)["state"] == expected
    assert (expected > 0) == (arguments != {} or optimizer_cls is not torch.optim.SGD)
