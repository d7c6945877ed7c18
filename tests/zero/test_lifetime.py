"""Copies, pickles and deletion of a wrapped model and its optimizer."""

import copy
import gc
import io
import pickle
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from nets import backward, inputs, late_on_the_last_rank, net, wrap
from ranks import run_in_turn
from torch import nn
from zero.overlap import WaitingDict, WeakHook

from zero import ShardedDataParallel, ShardedOptimizer
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


def a_constructor_that_fails(at_the_end):
    """It leaves no hook behind."""
    module = net()
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.AdamW, param_dtype="bfloat16")
    if at_the_end:
        optimizer.wrap_param_groups = None
    else:
        module[2].bias.requires_grad_(False)  # a hook on its gradient cannot be installed, after those of other parameters
    with pytest.raises((RuntimeError, TypeError)):
        ShardedDataParallel(module, optimizer)
    gc.collect()
    module.float()
    assert not hooks_that_run(module)
    assert not any(part._load_state_dict_pre_hooks for part in module.modules())


def freed():
    """A model that nobody uses any more."""
    for _ in range(3):
        model, optimizer = wrap(net(), overlap=True)
        backward(model)
        optimizer.step()
        references = [weakref.ref(each) for each in (model, optimizer.buckets[0].data, model.module[0].weight)]
        del model, optimizer
        gc.collect()
        assert not any(reference() is not None for reference in references)


def with_late_gathers(call):
    with late_on_the_last_rank():
        call()


def test_a_wrapper_and_its_copies_leave_nothing_behind():
    failing = (partial(a_constructor_that_fails, at_the_end) for at_the_end in (False, True))
    run_in_turn(2, partial(with_late_gathers, copies), partial(with_late_gathers, deletion), *failing, freed)
