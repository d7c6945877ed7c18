"""forecast/run_memory.py: the state of an optimizer is known before its first step."""

import copy

import pytest
import torch

from forecast.run_memory import with_own_state
from model import GPT, GPTConfig
from zero import Muon
from zero.held_bytes import held_bytes
from zero.layout import parameter_specs


@pytest.mark.parametrize(
    ("optimizer_cls", "arguments", "tensors"),
    [
        (torch.optim.AdamW, {"fused": True}, [2, 2]),
        (torch.optim.AdamW, {"amsgrad": True}, [3, 3]),
        (torch.optim.SGD, {}, [0, 0]),
        (torch.optim.SGD, {"momentum": 0.9}, [1, 1]),
        (torch.optim.RMSprop, {"centered": True}, [2, 2]),
        (Muon, {}, [2, 2, 1, 1]),
    ],
)
def test_the_state_of_a_class_is_counted_before_its_first_step(optimizer_cls, arguments, tensors):
    model = GPT(GPTConfig(block_size=4, vocab_size=5, n_layer=1, n_head=1, n_embd=8))
    optimizer = optimizer_cls(model.param_groups(0.1, {} if optimizer_cls is Muon else None), lr=0.1, **arguments)
    before = copy.deepcopy((list(model.parameters()), optimizer.state_dict()))
    specs = with_own_state(parameter_specs(optimizer.param_groups), optimizer)
    if optimizer_cls in (torch.optim.AdamW, Muon) and "amsgrad" not in arguments:
        assert list(specs) == parameter_specs(optimizer.param_groups), "plan.py does not measure these"
    assert [tensors[spec.group] for spec in specs] == [spec.state_tensors for spec in specs]
    assert str(before) == str((list(model.parameters()), optimizer.state_dict())), "nothing has changed"
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert held_bytes(optimizer)["state"] == sum(spec.state_tensors * spec.numel * spec.dtype.itemsize for spec in specs)
