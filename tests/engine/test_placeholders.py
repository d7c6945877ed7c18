"""zero/placeholders.py: what stands in for parameters that arrive and for gradients that have been sent."""

import copy
import pickle

import pytest
import torch
from torch import nn

from zero.placeholders import SentGradient, WaitingDict, find_hidden_tensors, local_gradient

READS = {
    "[]": lambda waiting: waiting["a"],
    "get": lambda waiting: waiting.get("a"),
    "values": lambda waiting: list(waiting.values()),
    "items": lambda waiting: list(waiting.items()),
    "pop": lambda waiting: waiting.pop("a"),
    "popitem": lambda waiting: waiting.popitem(),
    "setdefault": lambda waiting: waiting.setdefault("a"),
    "copy": lambda waiting: waiting.copy(),
    "dict": lambda waiting: dict(waiting),
    "unpacking": lambda waiting: {**waiting},
    "copy.copy": copy.copy,
    "pickle": lambda waiting: pickle.loads(pickle.dumps(waiting)),
}


@pytest.mark.parametrize("read", READS)
def test_whoever_reads_a_value_waits_for_it(read):
    waited = []
    waiting = WaitingDict({"a": 1}, waited.append)
    found = READS[read](waiting)
    assert waited == [1]
    assert type(found) is not WaitingDict


def test_whoever_reads_no_value_does_not_wait():
    waited = []
    waiting = WaitingDict({"a": 1}, waited.append)
    assert (list(waiting), len(waiting), "a" in waiting, waiting.plain()) == (["a"], 1, True, {"a": 1})
    assert not waited
    assert type(waiting.plain()) is dict
    assert waiting.get("b", 2) == 2
    assert waiting.pop("b", 3) == 3


def test_a_sent_gradient_has_a_shape_and_no_elements():
    param = nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
    sent = SentGradient(param)
    param.grad = sent
    assert (param.grad.shape, param.grad.dtype) == (param.shape, param.dtype)
    assert local_gradient(param) is None
    assert "shape=(3, 2)" in repr(sent)
    for read in (
        lambda: param.grad + 1,
        lambda: param.grad.norm(),
        lambda: param.grad.data.mul_(2),
        lambda: setattr(param.grad, "data", torch.ones(3, 2)),
        lambda: param.grad.share_memory_(),
        lambda: pickle.dumps(param.grad),
    ):
        with pytest.raises(RuntimeError, match="cannot be read or written"):
            read()


def test_a_sent_gradient_keeps_what_backward_adds():
    param = nn.Parameter(torch.ones(3))
    sent = param.grad = SentGradient(param)
    for factor in (1.0, 2.0):
        (factor * param).sum().backward()
    assert param.grad is sent
    assert torch.equal(local_gradient(param), torch.full((3,), 3.0))
    assert torch.equal(sent.take_added(), torch.full((3,), 3.0))
    assert sent.take_added() is None
    assert local_gradient(param) is None


@pytest.mark.parametrize("foreach", [False, True])
def test_a_sent_gradient_can_be_zeroed(foreach):
    param = nn.Parameter(torch.ones(3))
    sent = param.grad = SentGradient(param)
    param.sum().backward()
    torch.optim.SGD([param], foreach=foreach).zero_grad(set_to_none=False)
    assert sent.take_added() is None
    assert sent.take_zeroed()
    assert not sent.take_zeroed()


def test_tensors_that_a_module_holds_past_its_dictionaries_are_found():
    module, other, part = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    module.part = part
    assert find_hidden_tensors(module, {module, part}) == []
    weight = part.weight
    module.held = [{"inside": (other.weight,)}, lambda: weight, part]
    found = find_hidden_tensors(module, {module, part})
    assert {id(tensor) for tensor in found} == {id(other.weight), id(part.weight)}
    module.held = [other]
    assert {id(tensor) for tensor in find_hidden_tensors(module, {module, part})} == {id(other.weight), id(other.bias)}
    lstm = nn.LSTM(2, 2)
    assert {id(tensor) for tensor in find_hidden_tensors(lstm, {lstm})} == {id(param) for param in lstm.parameters()}
