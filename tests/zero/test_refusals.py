"""What ShardedOptimizer and ShardedDataParallel refuse, and with which message."""

import copy
import pickle

import pytest
import torch
from nets import backward, inputs, net, wrap
from ranks import run_ranks
from torch import nn

from zero import ShardedDataParallel, ShardedOptimizer


class Counting(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


class CountsItself(torch.optim.SGD):
    """Its rate falls with its calls, which it counts in an attribute."""

    calls = 0

    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            for param in group["params"]:
                param.data.sub_(param.grad, alpha=0.1 / self.calls)


class ByNorm(torch.optim.SGD):
    """The length of a step depends on the norm of the parameter, as in LAMB."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data.sub_(param.grad * (0.1 * param.data.norm() / param.grad.norm()))


def refusals_of_what_is_cut_off():
    """Memory, gradients, groups and classes that would mean something else than in torch."""
    weight = nn.Parameter(torch.ones(8, 8))
    alias = nn.Parameter(weight.data, requires_grad=False)
    with pytest.raises(ValueError, match="share memory"):
        ShardedOptimizer([weight, alias], torch.optim.AdamW)
    module = net()
    module._ddp_params_and_buffers_to_ignore = ["0.weight"]
    with pytest.raises(ValueError, match=r"0\.weight"):
        wrap(module)

    for change in (lambda params: params.pop(), lambda params: params.reverse()):
        module = net()
        model, optimizer = wrap(module)
        backward(model)
        change(optimizer.param_groups[0]["params"])
        with pytest.raises(RuntimeError, match="the parameters in param_groups have been changed"):
            optimizer.step()

    module = net()
    model, optimizer = wrap(module)
    backward(model)
    saved = module[0].weight.grad
    optimizer.zero_grad()
    backward(model, 1)
    module[0].weight.grad = saved
    with pytest.raises(RuntimeError, match=r"the gradient of 0\.weight was put there again"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="cannot be read or written"):
        pickle.dumps(saved)
    with pytest.raises(RuntimeError, match="cannot be read or written"):
        module.share_memory()

    for optimizer_cls in (CountsItself, ByNorm, Counting):
        with pytest.raises(ValueError, match=f"{optimizer_cls.__name__} is not one of torch.optim's classes"):
            ShardedOptimizer(net().parameters(), optimizer_cls)
    module = nn.Linear(8, 8)
    module.bias.requires_grad_(False)
    with pytest.raises(ValueError, match="Muon only supports 2D"):  # on both ranks, although only one of them owns it
        ShardedOptimizer(module.parameters(), torch.optim.Muon, partition="parameter")
    return True


def test_what_would_be_cut_off_is_refused():
    run_ranks(refusals_of_what_is_cut_off, 2)


def refusals():
    module = net()
    model, optimizer = wrap(module)
    with pytest.raises(ValueError, match="the optimizer has a ShardedDataParallel already"):
        ShardedDataParallel(module, optimizer)
    with pytest.raises(ValueError, match="the optimizer has a ShardedDataParallel already"):
        ShardedDataParallel(net(), optimizer)

    backward(model)
    for read in (
        lambda: nn.utils.clip_grad_norm_(module.parameters(), 1.0),
        lambda: nn.utils.clip_grad_norm_(module.parameters(), 1.0, foreach=False),
        lambda: nn.utils.clip_grad_value_(module.parameters(), 1.0),
        lambda: module[0].weight.grad.norm(),
        lambda: module[0].weight.grad.mul_(2),
        lambda: module[0].weight.grad.add_(module[0].weight.detach(), alpha=0.1),
        lambda: module[0].weight.grad + 1,
        lambda: module[0].weight.grad.data.clamp_(-1, 1),
        lambda: setattr(module[0].weight.grad, "data", torch.zeros(8, 8)),
        lambda: torch.optim.SGD(module.parameters(), 0.1).step(),
    ):
        with pytest.raises(RuntimeError, match=r"this gradient cannot be read or written: .*optimizer\.clip_grad_norm_"):
            read()
    assert optimizer.clip_grad_norm_(1e-3) > 1e-3

    with pytest.raises(RuntimeError, match=r"optimizer\.inner\.state has that of this rank's slices"):
        optimizer.state.clear()
    for copies in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match=r"zero\.checkpoint\.consolidate\(optimizer\)"):
            copies(optimizer)
    optimizer.zero_grad()
    module[0].weight.grad = torch.ones(8, 8)
    with pytest.raises(RuntimeError, match="one set by hand is never sent"):
        optimizer.step()
    optimizer.zero_grad()

    module = net()
    groups = [{"params": module.parameters(), "lr": 0.1}]
    grouped = ShardedOptimizer(groups, torch.optim.SGD)
    groups[0]["lr"] = 0.2  # the optimizer's own group, as in torch.optim; with overlap, a copy takes its place
    grouped.step()
    assert grouped.inner.param_groups[0]["lr"] == 0.2
    wrapped = ShardedDataParallel(module, grouped, overlap=True)
    groups[0]["lr"] = 0.3
    with pytest.raises(RuntimeError, match="take it from param_groups now"):
        grouped.step()
    del wrapped
    module = net()
    model, optimizer = wrap(module)

    loss = model(inputs()).square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    optimizer.zero_grad()

    module[0].weight = nn.Parameter(torch.ones(8, 8))
    backward(model)
    with pytest.raises(RuntimeError, match=r"^0\.weight require gradients, but are not the optimizer's: replaced"):
        optimizer.step()

    module = net()
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.AdamW)
    loss = module(inputs()).square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()

    module = net()
    module.alias = nn.Parameter(module[0].weight.data)
    with pytest.raises(ValueError, match="share memory"):
        ShardedOptimizer(module.parameters(), torch.optim.AdamW)
    with pytest.raises(ValueError, match="share memory"):
        ShardedOptimizer([nn.Parameter(torch.ones(1, 3).expand(4, 3))], torch.optim.AdamW)
    module = net()
    module.register_buffer("windows", torch.arange(10.0).as_strided((4, 4), (2, 1)))
    with pytest.raises(ValueError, match="elements of windows may share memory"):
        wrap(module)
    with pytest.raises(ValueError, match="ScriptModule"):
        wrap(torch.jit.script(net()), overlap=True)
    return True


def test_what_cannot_be_right_is_refused():
    run_ranks(refusals, 2)
