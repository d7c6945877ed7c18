"""What ShardedOptimizer and ShardedDataParallel refuse, and with which message."""

import copy
import pickle
import re
from functools import partial

import torch
import torch.distributed as dist
from nets import backward, inputs, net, wrap
from ranks import run_ranks
from torch import nn

from zero import Muon, ShardedDataParallel, ShardedOptimizer


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


def shared_with_a_frozen_one():
    weight = nn.Parameter(torch.ones(8, 8))
    alias = nn.Parameter(weight.data, requires_grad=False)
    yield
    ShardedOptimizer([weight, alias], torch.optim.AdamW)


def an_alias():
    module = net()
    module.alias = nn.Parameter(module[0].weight.data)
    yield
    ShardedOptimizer(module.parameters(), torch.optim.AdamW)


def an_expanded_parameter():
    yield
    ShardedOptimizer([nn.Parameter(torch.ones(1, 3).expand(4, 3))], torch.optim.AdamW)


def a_buffer_that_overlaps_itself():
    module = net()
    module.register_buffer("windows", torch.arange(10.0).as_strided((4, 4), (2, 1)))
    yield
    wrap(module)


def parameters_that_ddp_ignores():
    module = net()
    module._ddp_params_and_buffers_to_ignore = ["0.weight"]
    yield
    wrap(module)


def a_script_module():
    yield
    wrap(torch.jit.script(net()), overlap=True)


def an_optimizer_with_a_wrapper(of_another_module):
    module = net()
    model, optimizer = wrap(module)
    yield model
    ShardedDataParallel(net() if of_another_module else module, optimizer)


def a_class_that_is_not_declared(optimizer_cls):
    yield
    ShardedOptimizer(net().parameters(), optimizer_cls)


def muon_for_a_vector():
    """On both ranks, although only one of them owns it."""
    module = nn.Linear(8, 8)
    module.bias.requires_grad_(False)
    yield
    ShardedOptimizer(module.parameters(), torch.optim.Muon, partition="parameter")


def a_list_of_parameters_changed(change):
    model, optimizer = wrap(net())
    backward(model)
    change(optimizer.param_groups[0]["params"])
    yield
    optimizer.step()


def a_group_of_before_the_wrapper_changed():
    module = net()
    groups = [{"params": module.parameters(), "lr": 0.1}]
    optimizer = ShardedOptimizer(groups, torch.optim.SGD)
    groups[0]["lr"] = 0.2  # the optimizer's own group, as in torch.optim; with overlap, a copy takes its place
    optimizer.step()
    assert optimizer.inner.param_groups[0]["lr"] == 0.2
    model = ShardedDataParallel(module, optimizer, overlap=True)
    groups[0]["lr"] = 0.3
    yield model
    optimizer.step()


def a_gradient_put_back():
    module = net()
    model, optimizer = wrap(module)
    backward(model)
    saved = module[0].weight.grad
    optimizer.zero_grad()
    backward(model, 1)
    module[0].weight.grad = saved
    yield
    optimizer.step()


def a_gradient_set_by_hand():
    module = net()
    model, optimizer = wrap(module)
    module[0].weight.grad = torch.ones(8, 8)
    yield model
    optimizer.step()


def a_replaced_parameter():
    module = net()
    model, optimizer = wrap(module)
    module[0].weight = nn.Parameter(torch.ones(8, 8))
    backward(model)
    yield
    optimizer.step()


def a_second_backward_after_the_step(wrapped):
    module = net()
    model, optimizer = wrap(module) if wrapped else (module, ShardedOptimizer(module.parameters(), torch.optim.AdamW))
    loss = model(inputs()).square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    yield
    loss.backward()


def a_sparse_parameter():
    yield
    ShardedOptimizer([nn.Parameter(torch.eye(8).to_sparse())], torch.optim.AdamW)


def another_shape(**kwargs):
    weight = nn.Parameter(torch.ones(2, 3))
    optimizer = ShardedOptimizer([weight], torch.optim.AdamW, **kwargs)
    yield
    optimizer.set_parameter(weight, torch.ones(3, 2))


def a_learning_rate():
    """An optimizer that is refused has moved nothing."""
    weight = nn.Parameter(torch.ones(2, 3))
    address = weight.data_ptr()
    yield
    try:
        ShardedOptimizer([weight], torch.optim.AdamW, param_dtype=torch.bfloat16, lr=-1.0)
    finally:
        assert (weight.dtype, weight.data_ptr()) == (torch.float32, address)


def a_gradient_on_one_rank(optimizer_cls, **group):
    """Without the wrapper, gradients are averaged by hand."""
    module = nn.Linear(8, 8, bias=False)
    optimizer = ShardedOptimizer([{"params": module.parameters(), **group}], optimizer_cls)
    if dist.get_rank() == 0:
        module.weight.grad = torch.ones(8, 8)
    yield
    optimizer.step()


def a_group(change):
    """A group that is refused changes nothing: the optimizer goes on, also with a group that is not refused."""
    model, same, late = net(), net(), nn.Parameter(torch.ones(8, 8))
    optimizer, oracle = (ShardedOptimizer(each.parameters(), Muon, lr=0.01) for each in (model, same))
    group, address = {"params": [late], "matrices": 1}, late.data_ptr()
    yield
    try:
        optimizer.add_param_group(change(group, model))
    finally:
        assert (late.data_ptr(), len(optimizer.param_groups), len(optimizer.inner.param_groups)) == (address, 1, 1)
        for each, its in ((model, optimizer), (same, oracle)):
            its.add_param_group({"params": [other := nn.Parameter(torch.ones(4, 4))], "matrices": 2})
            for param in (*each.parameters(), other):
                param.grad = torch.ones_like(param)
            its.step()
        assert all(map(torch.equal, model.parameters(), same.parameters()))


def use_of_a_sent_gradient(use):
    module = net()
    model, _ = wrap(module)
    backward(model)
    yield model
    use(module)


def use_of_the_optimizer(use):
    _, optimizer = wrap(net())
    yield
    use(optimizer)


SHARED, SENT = "share memory", r"this gradient cannot be read or written: .*optimizer\.clip_grad_norm_"
HAS_ONE, INPLACE = "the optimizer has a ShardedDataParallel already", "modified by an inplace operation"
CHANGED, CONSOLIDATE = "the parameters in param_groups have been changed", r"zero\.checkpoint\.consolidate\(optimizer\)"
USES = {
    "clip_grad_norm_": lambda module: nn.utils.clip_grad_norm_(module.parameters(), 1.0),
    "clip_grad_norm_ one by one": lambda module: nn.utils.clip_grad_norm_(module.parameters(), 1.0, foreach=False),
    "clip_grad_value_": lambda module: nn.utils.clip_grad_value_(module.parameters(), 1.0),
    "norm": lambda module: module[0].weight.grad.norm(),
    "mul_": lambda module: module[0].weight.grad.mul_(2),
    "add_ with alpha": lambda module: module[0].weight.grad.add_(module[0].weight.detach(), alpha=0.1),
    "add": lambda module: module[0].weight.grad + 1,
    "data.clamp_": lambda module: module[0].weight.grad.data.clamp_(-1, 1),
    "data =": lambda module: setattr(module[0].weight.grad, "data", torch.zeros(8, 8)),
    "another optimizer": lambda module: torch.optim.SGD(module.parameters(), 0.1).step(),
    "pickle": lambda module: pickle.dumps(module[0].weight.grad),
    "share_memory": lambda module: module.share_memory(),
}
GROUPS = {  # what makes a group be refused
    "on one rank": (lambda group, _: group | {"params": [nn.Parameter(torch.ones(8, 8 + dist.get_rank()))]}, "model differs"),
    "twice": (lambda group, model: group | {"params": [model[0].weight]}, "more than one parameter group"),
    "shared": (
        lambda group, _: group | {"params": [*group["params"], nn.Parameter(group["params"][0].data[:4])]},
        "share memory",
    ),
    "of the class": (lambda group, _: group | {"momentum": 2.0}, "momentum=2.0 must be"),
    "of another dtype": (lambda group, _: group | {"ns_dtype": "float16"}, "ns_dtype='float16' is not one of"),
    "no matrices": (lambda group, _: group | {"matrices": 3}, "does not consist of 3 matrices"),
    "strides": (lambda group, _: group | {"params": [nn.Parameter(torch.ones(4, 8).t())]}, "make it contiguous"),
    "sparse": (lambda group, _: group | {"params": [nn.Parameter(torch.eye(8).to_sparse())]}, "torch.sparse_coo"),
}
# case: what is done, where what comes after `yield` must raise; the error; its message
CASES = {
    "shared with a frozen one": (shared_with_a_frozen_one, ValueError, SHARED),
    "an alias": (an_alias, ValueError, SHARED),
    "an expanded parameter": (an_expanded_parameter, ValueError, SHARED),
    "a buffer that overlaps itself": (a_buffer_that_overlaps_itself, ValueError, "elements of windows may share memory"),
    "parameters that DDP ignores": (parameters_that_ddp_ignores, ValueError, r"0\.weight"),
    "a ScriptModule": (a_script_module, ValueError, "ScriptModule"),
    "a second wrapper": (partial(an_optimizer_with_a_wrapper, False), ValueError, HAS_ONE),
    "a second module": (partial(an_optimizer_with_a_wrapper, True), ValueError, HAS_ONE),
    **{
        cls.__name__: (partial(a_class_that_is_not_declared, cls), ValueError, f"{cls.__name__} is not one of torch.optim's")
        for cls in (CountsItself, ByNorm, Counting)
    },
    "Muon for a vector": (muon_for_a_vector, ValueError, "Muon only supports 2D"),
    "a parameter less": (partial(a_list_of_parameters_changed, list.pop), RuntimeError, CHANGED),
    "another order": (partial(a_list_of_parameters_changed, list.reverse), RuntimeError, CHANGED),
    "an old group": (a_group_of_before_the_wrapper_changed, RuntimeError, "take it from param_groups now"),
    "a gradient put back": (a_gradient_put_back, RuntimeError, r"the gradient of 0\.weight was put there again"),
    "a gradient by hand": (a_gradient_set_by_hand, RuntimeError, "one set by hand is never sent"),
    "a replaced parameter": (
        *(a_replaced_parameter, RuntimeError),
        r"^0\.weight require gradients, but are not the optimizer's: replaced",
    ),
    "backward after step": (partial(a_second_backward_after_the_step, True), RuntimeError, INPLACE),
    "backward after step, alone": (partial(a_second_backward_after_the_step, False), RuntimeError, INPLACE),
    **{f"sent: {name}": (partial(use_of_a_sent_gradient, use), RuntimeError, SENT) for name, use in USES.items()},
    "state.clear": (
        *(partial(use_of_the_optimizer, lambda optimizer: optimizer.state.clear()), RuntimeError),
        r"optimizer\.inner\.state has that of this rank's slices",
    ),
    "a sparse parameter": (a_sparse_parameter, ValueError, "torch.sparse_coo, which cannot be laid flat"),
    "another shape": (another_shape, RuntimeError, "expand"),
    "another shape in bfloat16": (partial(another_shape, param_dtype=torch.bfloat16), RuntimeError, "expand"),
    "a learning rate": (a_learning_rate, ValueError, "Invalid learning rate"),
    "a gradient on one rank": (partial(a_gradient_on_one_rank, torch.optim.SGD), RuntimeError, "on some ranks only"),
    "Muon, a gradient on one rank": (partial(a_gradient_on_one_rank, Muon, matrices=1), RuntimeError, "on some ranks only"),
    **{f"a group, {name}": (partial(a_group, change), ValueError, text) for name, (change, text) in GROUPS.items()},
    "pickle of the optimizer": (partial(use_of_the_optimizer, pickle.dumps), TypeError, CONSOLIDATE),
    "deepcopy of the optimizer": (partial(use_of_the_optimizer, copy.deepcopy), TypeError, CONSOLIDATE),
}


def refusals():
    """Run each case on this rank: what is not refused, by name."""
    wrong = {}
    for name, (do, error, message) in CASES.items():
        steps = do()
        next(steps)  # the set-up, which must not raise
        try:
            next(steps, None)
            wrong[name] = "not refused"
        except error as raised:
            if not re.search(message, str(raised)):
                wrong[name] = str(raised)
    module = net()
    model, optimizer = wrap(module)
    backward(model)
    assert optimizer.clip_grad_norm_(1e-3) > 1e-3
    ShardedOptimizer(net().requires_grad_(False).parameters(), torch.optim.SGD).step()  # which has nothing to do
    return wrong


def test_refusals():
    assert run_ranks(refusals, 2) == [{}, {}]
