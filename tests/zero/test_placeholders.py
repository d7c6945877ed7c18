"""zero/reducer.py: what stands in for gradients that have been sent."""

import pickle

import pytest
import torch
from torch import nn

from zero.reducer import SentGradient, local_gradient


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
    assert torch.equal(sent.added, torch.full((3,), 3.0))


@pytest.mark.parametrize("foreach", [False, True])
def test_a_sent_gradient_can_be_zeroed(foreach):
    param = nn.Parameter(torch.ones(3))
    sent = param.grad = SentGradient(param)
    param.sum().backward()
    torch.optim.SGD([param], foreach=foreach).zero_grad(set_to_none=False)
    assert sent.added is None
    assert sent.zeroed
