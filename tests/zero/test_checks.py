"""What ShardedOptimizer and ShardedDataParallel refuse, and with which message."""

import copy
import inspect
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
from nets import backward, net, steps, wrap
from optimizers import Plain
from ranks import run_in_turn
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, SGD, Adafactor, AdamW, SparseAdam

from zero import Muon, ShardedDataParallel, ShardedOptimizer
from zero.codecs import STATE_CODECS


class WithOwnHook(SGD):
    def __init__(self, params, **kwargs):
        super().__init__(params, **kwargs)
        self.register_step_post_hook(lambda *_: None)


class OfTheNorm(Plain):
    def update(self, param, group):
        return group["lr"] * param.grad / param.grad.norm()


class OfAGroup(OfTheNorm):
    def update(self, param, group):
        return super().update(param, group) if group.get("adapts") else torch.zeros_like(param)


class OfTheShape(Plain):
    def update(self, param, group):
        return group["lr"] * (param.grad - (param.grad.mean(0) if param.dim() > 1 else 0))


def an_optimizer_of(make, cls=AdamW, **kwargs):
    """Of one parameter that `make` returns."""
    return lambda: ShardedOptimizer([nn.Parameter(make())], cls, **kwargs)


def cast_by_autocast(stored, dtype, rank=None):
    """On all ranks, or on one."""

    def steps():
        weight = nn.Parameter(torch.ones(3, dtype=stored))
        yield
        ShardedOptimizer([weight], SGD, autocast={weight: dtype} if rank in (None, dist.get_rank()) else {})

    return steps


def wrapped(change, rank=None):
    """A net that `change` has changed, on all ranks or on one."""

    def steps():
        module = net()
        if rank in (None, dist.get_rank()):
            change(module)
        yield
        wrap(module)

    return steps


def after_wrapping(use, prepare=lambda optimizer, model: None, **options):
    """`use(optimizer, a weight, the wrapper)`."""

    def steps():
        model, optimizer = wrap(net(), **options)
        prepare(optimizer, model)
        yield
        use(optimizer, model.module[0].weight, model)

    return steps


def before_a_step_alone(change):
    def steps():
        module = net()
        module[2].bias.requires_grad_(False)
        optimizer = ShardedOptimizer(module.parameters(), SGD, lr=0.1)
        change(module)
        yield
        optimizer.step()

    return steps


def a_frozen_alias(module):
    module.alias = nn.Parameter(module[0].weight.data, requires_grad=False)


def an_unfrozen_parameter():
    module = net()
    module[0].bias.requires_grad_(False)
    model, optimizer = wrap(module)
    module[0].requires_grad_(True)
    backward(model)
    yield
    optimizer.step()


def a_second_backward_after_the_step(is_wrapped):
    module = net()
    model, optimizer = wrap(module) if is_wrapped else (module, ShardedOptimizer(module.parameters(), AdamW))
    loss = model(torch.ones(4, 8)).square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    yield
    loss.backward()


def a_sparse_gradient(is_wrapped):
    module = nn.Embedding(5, 3, sparse=True)
    model, optimizer = wrap(module, SGD) if is_wrapped else (module, ShardedOptimizer(module.parameters(), SGD, lr=0.1))
    yield
    model(torch.tensor([1])).sum().backward()
    optimizer.step()


def a_learning_rate():
    """An optimizer that is refused has moved nothing."""
    weight = nn.Parameter(torch.ones(2, 3))
    address = weight.data_ptr()
    yield
    try:
        ShardedOptimizer([weight], AdamW, param_dtype="bfloat16", lr=-1.0)
    finally:
        assert (weight.dtype, weight.data_ptr()) == (torch.float32, address)


def a_gradient_on_one_rank(optimizer_cls, good_steps=0, **group):
    """Without the wrapper, gradients are averaged by hand."""
    module = nn.Linear(8, 8, bias=False)
    optimizer = ShardedOptimizer([{"params": module.parameters(), **group}], optimizer_cls)
    for step in range(good_steps + 1):
        module.weight.grad = torch.ones(8, 8) if step < good_steps or dist.get_rank() == 0 else None
        if step == good_steps:
            yield
        optimizer.step()


def gradients_that_nobody_averaged(good_steps):
    module = net()
    optimizer = ShardedOptimizer(module.parameters(), SGD, lr=0.01)
    for step in range(good_steps + 1):
        optimizer.zero_grad()
        module((1 + (step == good_steps) * dist.get_rank()) * torch.ones(4, 8)).square().sum().backward()
        if step < good_steps:
            optimizer.step()
    before = copy.deepcopy(module.state_dict())
    yield
    try:
        optimizer.step()
    finally:
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def a_gradient_that_is_not_finite_on_one_rank():
    weight = nn.Parameter(torch.ones(3))
    optimizer = ShardedOptimizer([weight], SGD, lr=0.01)
    weight.grad = torch.full((3,), torch.inf)  # on all ranks: as under DistributedDataParallel
    optimizer.step()
    weight.grad = torch.ones(3) if dist.get_rank() else torch.tensor([torch.nan, 1.0, 1.0])
    yield
    optimizer.step()


DIFFERS = [  # how a model is changed on rank 1
    lambda module: module.__setitem__(2, nn.Linear(8, 4)),  # a shape
    lambda module: module[2].bfloat16(),
    lambda module: setattr(module[0], "weight", nn.Parameter(module[0].weight.data.t())),  # strides
    lambda module: module[0].bias.requires_grad_(False),
    lambda module: module.insert(1, nn.Tanh()),  # a name
    lambda module: module.register_buffer("more", torch.zeros(3)),
]
# the message of an error: functions that must raise it, after `yield` if there is one
CONSTRUCTION = {  # ValueError
    # -- what an optimizer is made of
    "share memory": [
        an_optimizer_of(lambda: torch.ones(1, 3).expand(4, 3)),
        wrapped(a_frozen_alias),
        wrapped(lambda module: (a_frozen_alias(module), module.requires_grad_())),
    ],
    "torch.sparse_coo, which cannot be laid flat": [an_optimizer_of(lambda: torch.eye(8).to_sparse())],
    "imaginary parts of a complex parameter": [
        an_optimizer_of(lambda: torch.ones(4, dtype=torch.complex64), param_dtype="bfloat16")
    ],
    "make it contiguous": [lambda: ShardedOptimizer([{"params": [nn.Parameter(torch.ones(4, 8).t())], "matrices": 1}], Muon)],
    "Invalid learning rate": [a_learning_rate],
    f"state_dtype='int4' is not one of {', '.join(STATE_CODECS)}": [an_optimizer_of(lambda: torch.ones(4), state_dtype="int4")],
    "needs float32 masters, not torch.float64": [
        an_optimizer_of(lambda: torch.ones(4, dtype=torch.float64), param_dtype="bfloat16_remainder")
    ],
    "must be a class": [an_optimizer_of(lambda: torch.ones(4), "AdamW"), lambda: ShardedOptimizer(net().parameters())],
    "two names of one argument": [an_optimizer_of(lambda: torch.ones(4), optimizer_class=AdamW)],
    r"overlap_with_ddp=True .* zero\.ShardedDataParallel": [
        lambda: ShardedOptimizer(net().parameters(), AdamW, None, True, True)
    ],
    "by its entry matrices=1 only": [
        lambda entry=entry: ShardedOptimizer([{"params": net().parameters(), **entry}], Muon)
        for entry in ({"use_muon": True}, {"kind": "muon"}, {"algorithm": "Muon"})
    ],
    "LBFGS .*all parameters together": [an_optimizer_of(lambda: torch.ones(4, 4), LBFGS)],
    "SparseAdam .*laid flat": [an_optimizer_of(lambda: torch.ones(4, 4), SparseAdam)],
    "Muon .*use ZeroRedundancyOptimizer .*or zero.Muon": [an_optimizer_of(lambda: torch.ones(4, 4), torch.optim.Muon)],
    "Adafactor .*use ZeroRedundancyOptimizer": [an_optimizer_of(lambda: torch.ones(4, 4), Adafactor)],
    "registers step hooks on itself": [an_optimizer_of(lambda: torch.ones(4), WithOwnHook, elementwise=True, lr=0.1)],
    "updates a matrix otherwise than its slices": [
        *(an_optimizer_of(lambda: torch.ones(4), OfTheNorm, elementwise=True, lr=lr) for lr in (0, 1)),
        *(an_optimizer_of(lambda: torch.ones(4), OfTheShape, elementwise=True, lr=lr) for lr in (0, 1)),
        lambda: ShardedOptimizer(
            [{"params": [nn.Parameter(torch.ones(4))], "adapts": adapts} for adapts in (False, True)],
            OfAGroup,
            elementwise=True,
        ),
    ],
    "not torch.bfloat16 to torch.int32": [cast_by_autocast(torch.bfloat16, torch.int32)],
    "not torch.float64 to torch.bfloat16": [cast_by_autocast(torch.float64, torch.bfloat16)],
    r"parameter 0 is .*, torch.bfloat16\), but .* on rank 0; build the same model on all ranks": [
        cast_by_autocast(torch.float32, torch.bfloat16, rank=1)
    ],
    r"norm_type=.* must be positive": [
        lambda wrong=wrong: wrap(net())[1].clip_grad_norm_(1.0, wrong) for wrong in (0.0, -1.0, torch.nan)
    ],
    "name one rank on all ranks": [lambda: wrap(net())[1].consolidate_state_dict(dist.get_rank())],
    "this state dict has no state": [lambda: wrap(net())[1].load_state_dict(None)],
    # -- what is wrapped
    "but .* on rank 0; .*build the same model on all ranks": [wrapped(change, rank=1) for change in DIFFERS],
    "mask is on the meta device": [wrapped(lambda module: module.register_buffer("mask", torch.ones(2, device="meta")))],
    r"0\.weight": [wrapped(lambda module: setattr(module, "_ddp_params_and_buffers_to_ignore", ["0.weight"]))],
    "in shared memory": [wrapped(lambda module: module.share_memory())],
    "elements of windows may share memory": [
        wrapped(lambda module: module.register_buffer("windows", torch.arange(10.0).as_strided((4, 4), (2, 1))))
    ],
    "ScriptModule": [lambda: wrap(module := torch.jit.script(net()), overlap=list(module.children()))],
    "Tanh in overlap .* is no module": [lambda: wrap(net(), overlap=[nn.Tanh()])],
    "ModuleList in overlap has no forward": [
        lambda: wrap(module := nn.Sequential(nn.ModuleList([nn.Linear(8, 8)])), overlap=list(module))
    ],
    "overlap=True must be modules of the model": [lambda: wrap(net(), overlap=True)],
    "alias shares memory with a parameter, which ShardedOptimizer has moved": [
        wrapped(lambda module: module.register_buffer("alias", module[0].weight.data[2]))
    ],
    "needs a ShardedOptimizer, not SGD": [lambda: ShardedDataParallel(net(), SGD(net().parameters()))],
    r"not the optimizer's: 2\.weight, 2\.bias; .*or use DistributedDataParallel": [
        lambda: ShardedDataParallel(module := net(), ShardedOptimizer(module[0].parameters(), AdamW))
    ],
}
USE = {  # RuntimeError
    "ranks with fewer inputs cannot join": [lambda: wrap(net())[0].join(), lambda: Join([wrap(net())[1]])],
    "if the model was moved or cast, build ShardedOptimizer after that": [
        after_wrapping(lambda optimizer, _, model: model.double(), lambda optimizer, model: backward(model))
    ],
    # -- what happens before a step
    "gradients set by hand are not sent": [
        after_wrapping(lambda optimizer, weight, _: (setattr(weight, "grad", torch.ones(8, 8)), optimizer.step()))
    ],
    r"0\.bias was frozen when": [an_unfrozen_parameter],
    "was frozen when": [before_a_step_alone(lambda module: setattr(module[2].bias.requires_grad_(), "grad", torch.ones(3)))],
    "build the optimizer after": [before_a_step_alone(lambda module: module.double())],
    "modified by an inplace operation": [partial(a_second_backward_after_the_step, is_wrapped) for is_wrapped in (True, False)],
    "sparse=False": [partial(a_sparse_gradient, is_wrapped) for is_wrapped in (True, False)],
    "on some ranks only": [partial(a_gradient_on_one_rank, SGD, 2), partial(a_gradient_on_one_rank, Muon, matrices=1)],
    r"the gradient of a parameter of shape .* on one rank, .*average the gradients": [
        partial(gradients_that_nobody_averaged, 0),
        partial(gradients_that_nobody_averaged, 1),
        a_gradient_that_is_not_finite_on_one_rank,
    ],
    # -- what is read or written
    r"the optimizer state is divided among the ranks.*iterate over optimizer\.state": [
        after_wrapping(lambda optimizer, weight, _: optimizer.state[weight]),
        after_wrapping(lambda optimizer, weight, _: weight in optimizer.state),
        after_wrapping(lambda optimizer, weight, _: optimizer.state.get(weight)),
        after_wrapping(lambda optimizer, weight, _: optimizer.state.setdefault(weight, {})),
    ],
    "expand": [
        after_wrapping(lambda optimizer, weight, _: optimizer.set_parameter(weight, torch.ones(3, 2)), param_dtype=dtype)
        for dtype in ("float32", "bfloat16")
    ],
}
COPIES = {  # TypeError
    "takes max_norm and norm_type, not parameters": [
        after_wrapping(lambda optimizer, weight, _: optimizer.clip_grad_norm_([weight], 1.0))
    ],
    r"consolidate_state_dict\(\)": [lambda: pickle.dumps(wrap(net())[1]), lambda: copy.deepcopy(wrap(net())[1])],
}
KINDS = {ValueError: CONSTRUCTION, RuntimeError: USE, TypeError: COPIES}


def is_refused(error, message, number):
    case = KINDS[error][message][number]
    if inspect.isgeneratorfunction(case):
        steps = case()
        next(steps)  # the set-up, which must not raise
        case = partial(next, steps, None)
    with pytest.raises(error, match=message):
        case()


def what_is_admitted():
    model, optimizer = wrap(net())
    optimizer.state.setdefault("scale", {"mean": 1.0})  # entries that are not of parameters are the caller's
    optimizer.state["seen"]["steps"] = 3
    steps(model, optimizer)
    assert (optimizer.state["scale"], optimizer.state["seen"]) == ({"mean": 1.0}, {"steps": 3})
    ShardedOptimizer(net().requires_grad_(False).parameters(), SGD).step()  # which has nothing to do
    params = list(net().parameters())
    ShardedOptimizer([{"params": params[:1], "kind": "muon", "matrices": 1}, {"params": params[1:], "use_muon": False}], Muon)
    module = net()
    DistributedDataParallel(module)  # is dropped
    ShardedOptimizer(module.parameters(), SGD, param_dtype="bfloat16")
    module = net()
    module[2].requires_grad_(False)
    for name, table in (("table", torch.ones(3)), ("phases", torch.ones(3, dtype=torch.complex64))):
        module.register_buffer(name, table)
    wrap(module, SGD, lr=0.1, param_dtype="bfloat16")
    assert {param.dtype for param in module.parameters()} == {torch.bfloat16}
    assert (module.table.dtype, module.phases.dtype) == (torch.float32, torch.complex64), "such as rotary tables"
    steps(*wrap(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), SGD, lr=0.1, param_dtype="bfloat16"))


def test_refusals_and_what_is_admitted():
    each = [(error, message, n) for error, of in KINDS.items() for message, cases in of.items() for n in range(len(cases))]
    run_in_turn(2, what_is_admitted, *(partial(is_refused, *case) for case in each))
