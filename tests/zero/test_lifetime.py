"""Copies, pickles and deletion of a wrapped model and its optimizer."""

import copy
import gc
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from nets import backward, inputs, make_gathers_late, net, wrap
from ranks import run_ranks
from torch import nn

from zero import ShardedDataParallel, ShardedOptimizer
from zero.overlap import WaitingDict, WeakHook
from zero.reducer import SentGradient


class First(nn.Module):
    """The first of two results."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


def copies():
    """A copy or a pickle that is made right after step is plain and whole, and trains on its own."""
    make_gathers_late()
    module = nn.Sequential(*net(), First(nn.LSTM(3, 3)))
    model, optimizer = wrap(module, overlap=True)
    backward(model)
    optimizer.step()
    assert isinstance(vars(module[0])["_parameters"], WaitingDict)
    copied = copy.deepcopy(module)
    from_wrapper = copy.deepcopy(model)
    pickled = pickle.loads(pickle.dumps(module))
    torch.save(module, io.BytesIO())
    with pytest.raises(TypeError, match=r"pickle its \.module"):
        pickle.dumps(model)
    for other in (copied, from_wrapper, pickled):
        assert type(other) is nn.Sequential
        for part, original in zip(other.modules(), module.modules(), strict=True):
            assert type(vars(part)["_parameters"]) is dict
            assert all(hook._method() is None for hook in part._forward_pre_hooks.values()), "it does nothing any more"
            assert not part._load_state_dict_pre_hooks
            for param, weight in zip(part.parameters(), original.parameters(), strict=True):
                assert torch.equal(param, weight)
                assert param.grad is None
        other(inputs()).sum().backward()
        torch.optim.SGD(other.parameters(), 0.1).step()
    return True


def test_copies_and_pickles_are_plain():
    run_ranks(copies, 2)


def hooks_that_run(module):
    """The calls of this package's hooks in a forward and a backward of the module."""
    calls = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(WeakHook, "__call__", lambda *call: calls.append(call))
        module(inputs()).sum().backward()
    module.zero_grad()
    return calls


def deletion():
    """A deleted wrapper leaves the module as it was and nothing in flight, after a forward, a backward or a step."""
    make_gathers_late()
    for last in ("forward", "backward", "step"):
        module = net()
        before = [dict(vars(part)) for part in module.modules()]
        model, optimizer = wrap(module, overlap=True)
        result = model(inputs()).square().sum()
        if last != "forward":
            result.backward()
        if last == "step":
            optimizer.step()
        del model, result
        gc.collect()
        for part, attributes in zip(module.modules(), before, strict=True):
            assert type(vars(part)["_parameters"]) is dict
            assert vars(part).keys() == attributes.keys()
            assert all(len(vars(part)[name]) == len(attributes[name]) for name in attributes if "hooks" in name)
        assert all(param.grad is None for param in module.parameters())
        assert not hooks_that_run(module)
        assert all(param.isfinite().all() for param in module.parameters())
        together = torch.full((3,), float(dist.get_rank()))
        dist.all_reduce(together)
        assert together.tolist() == [1.0, 1.0, 1.0]
        module(inputs()).sum().backward()
        assert not isinstance(module[0].weight.grad, SentGradient)
        module.zero_grad()
        if last == "backward":
            with pytest.raises(RuntimeError, match="had sent the gradients of this step is gone"):
                optimizer.step()
        model, again = wrap(module)  # over the parameters in the old optimizer's buffers
        backward(model)
        again.step()
    return True


def test_a_deleted_wrapper_leaves_nothing_behind():
    run_ranks(deletion, 2)


def a_constructor_that_fails(at_the_end):
    module = net()
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.AdamW, param_dtype=torch.bfloat16)
    if at_the_end:
        optimizer.wrap_param_groups = None
    else:
        module[2].bias.requires_grad_(False)  # a hook on its gradient cannot be installed, after those of other parameters
    with pytest.raises((RuntimeError, TypeError)):
        ShardedDataParallel(module, optimizer)
    gc.collect()
    module.float()
    return [*hooks_that_run(module), *(hook for part in module.modules() for hook in part._load_state_dict_pre_hooks)]


@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_failed_wrapper_leaves_no_hook_behind(at_the_end):
    assert run_ranks(a_constructor_that_fails, 1, at_the_end) == [[]]


def shard_gradients_set_later():
    module = net()
    model, _ = wrap(module)
    found = []
    for model.shard_gradients in (False, True):
        with model.no_sync():
            backward(model)
        found.append(isinstance(module[0].weight.grad, SentGradient))
        model.zero_grad()
    return found


def test_shard_gradients_may_be_set_later():
    assert run_ranks(shard_gradients_set_later, 1) == [[False, True]]
