"""What a caller declares, and what is refused when it is built: right, or an error with the reason."""

import warnings

import pytest
import torch
import torch.distributed as dist
from nets import TINY_MB, backward, inputs, net, same_under_both, wrap, wrap_plain
from ranks import run_ranks
from test_checks import ByNorm, Counting, CountsItself
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zero import ShardedDataParallel, ShardedOptimizer


class Lookahead(torch.optim.SGD):
    """Every second call of `step` goes halfway back to where it was two calls before."""

    calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        self.calls += 1
        for group in self.param_groups:
            for param in group["params"]:
                slow = self.state[param].setdefault("slow", param.clone())
                if self.calls % 2 == 0:
                    slow.lerp_(param, 0.5)
                    param.copy_(slow)


class Schedule(torch.optim.SGD):
    """Counts its calls in its param_groups, and steps with a rate that falls with them."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] / group["k"])


class DecaysMatrices(torch.optim.SGD):
    """A rule on the number of dimensions."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.dim() > 1:
                    param.mul_(0.9)
        super().step()


def four_steps(wrapped, module):
    model, optimizer = wrapped
    for step in range(4):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in module.parameters()]


def difference_from_ddp(optimizer_cls, **declared):
    module, plain = net(), net()
    optimizer = ShardedOptimizer(module.parameters(), optimizer_cls, bucket_mb=TINY_MB, lr=0.1, **declared)
    ours = four_steps((ShardedDataParallel(module, optimizer), optimizer), module)
    theirs = four_steps((DistributedDataParallel(plain), optimizer_cls(plain.parameters(), lr=0.1)), plain)
    return max((left - right).abs().max().item() for left, right in zip(ours, theirs, strict=True))


def declared_optimizers():
    found = {}
    for optimizer_cls in (Lookahead, Schedule, CountsItself, Counting):
        found[optimizer_cls.__name__] = difference_from_ddp(optimizer_cls, elementwise=True)
    for optimizer_cls in (DecaysMatrices, ByNorm, Lookahead):
        with pytest.raises(ValueError, match=r"elementwise=True .* otherwise partition='parameter'"):
            ShardedOptimizer(net().parameters(), optimizer_cls, lr=0.1)
        found[f"whole {optimizer_cls.__name__}"] = difference_from_ddp(optimizer_cls, partition="parameter")
    for optimizer_cls in (torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop, torch.optim.NAdam, torch.optim.ASGD):
        found[optimizer_cls.__name__] = difference_from_ddp(optimizer_cls)
    return found


def test_a_declared_optimizer_does_the_same_as_under_ddp():
    for found in run_ranks(declared_optimizers, 2):
        assert found == {name: pytest.approx(0, abs=1e-6) for name in found}


def a_saliency_map_on_one_rank(wrap):
    """torch.autograd.grad between forward and backward, on one rank, and a penalty that is only logged."""
    module = net()
    model, optimizer = wrap(module)
    for step in range(4):
        x = inputs(step).requires_grad_()
        if dist.get_rank() == 1:
            torch.autograd.grad(model(x).sum(), x)
            torch.autograd.grad(model(x).square().sum(), list(module.parameters()))
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in module.parameters()]


def autograd_grad(overlap):
    return same_under_both(a_saliency_map_on_one_rank, TINY_MB, overlap)


@pytest.mark.parametrize("overlap", [False, True])
def test_autograd_grad_is_no_backward(overlap):
    assert run_ranks(autograd_grad, 2, overlap) == [pytest.approx(0, abs=1e-6)] * 2


def a_rank_without_gradients():
    """Its outputs do not depend on the parameters; DistributedDataParallel hangs."""
    weight = nn.Parameter(torch.ones(4))
    module = nn.Module()
    module.weight = weight
    module.forward = lambda x: x * weight.sum() if dist.get_rank() == 0 else x * 2
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=1.0)
    model = ShardedDataParallel(module, optimizer)
    for _ in range(3):
        model(torch.ones(1, requires_grad=True)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weight.detach().tolist()


def test_a_rank_may_have_no_gradient_at_all():
    assert run_ranks(a_rank_without_gradients, 2) == [[-0.5] * 4] * 2


def a_backward_without_gradients(shard_gradients):
    """Two synchronized backwards per step. On rank 0, the first one reaches no parameter; a step is dropped in between."""
    weight = nn.Parameter(torch.ones(4))
    module = nn.Module()
    module.weight = weight
    module.forward = lambda x, used: x * weight.sum() if used else x * 2
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=0.1, bucket_mb=TINY_MB)
    model = ShardedDataParallel(module, optimizer, shard_gradients)
    for step in range(6):
        for used in (dist.get_rank() > 0, step % 3 < 2):
            model(torch.ones(1, requires_grad=True), used).sum().backward()
        if step % 3 < 2:
            optimizer.step()
        optimizer.zero_grad()
    return weight.detach().tolist()


@pytest.mark.parametrize("shard_gradients", [False, True])
def test_a_backward_without_gradients_on_one_rank_is_counted(shard_gradients):
    # each step: rank 0 has one gradient of 1, rank 1 two
    assert run_ranks(a_backward_without_gradients, 2, shard_gradients) == [pytest.approx([1 - 4 * 0.1 * 1.5] * 4)] * 2


def model_that_differs(how):
    module = net()
    if dist.get_rank() == 1:
        if how == "a shape":
            module[2] = nn.Linear(8, 4)
        elif how == "a dtype":
            module[2].bfloat16()
        elif how == "strides":
            module[0].weight = nn.Parameter(module[0].weight.data.t())
        elif how == "a frozen parameter":
            module[0].bias.requires_grad_(False)
        elif how == "a name":
            module = nn.Sequential(module[0], nn.Tanh(), nn.Tanh(), module[2])
        elif how == "a buffer":
            module.register_buffer("more", torch.zeros(3))
    return module


@pytest.mark.parametrize("how", ["a shape", "a dtype", "strides", "a frozen parameter", "a name", "a buffer"])
def test_ranks_must_build_the_same_model(how):
    run_ranks(refuses_what_differs, 2, how)


def refuses_what_differs(how):
    with pytest.raises(ValueError, match=r"the model differs between the ranks: .* on rank 0"):
        wrap(model_that_differs(how))
    return True


class Registers(nn.Module):
    """Registers a buffer in forward: on one rank, of other sizes on each rank, or the same on all ranks."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.how, self.calls = nn.Linear(8, 3), how, 0
        if how != "first buffer on one rank":
            self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        if self.how == "grows on all ranks":
            self.seen = torch.full((self.calls,), float(dist.get_rank()))
        elif dist.get_rank() == 1:
            self.register_buffer("own", torch.full((5,), 7.0))
        return self.inner(x)


def registered_buffers():
    for how in ("first buffer on one rank", "grows on all ranks"):
        trained = {}
        for wrapping in (wrap, wrap_plain):
            module = Registers(how)
            four_steps(wrapping(module), module)
            trained[wrapping] = {name: buffer.tolist() for name, buffer in module.named_buffers()}
        assert trained[wrap] == trained[wrap_plain]
    module = Registers("on one rank")
    model, optimizer = wrap(module)
    backward(model)
    optimizer.step()
    with pytest.raises(RuntimeError, match="buffers differ between the ranks"):
        model(inputs())
    return True


def test_buffers_of_forward_do_as_under_ddp_or_are_refused():
    run_ranks(registered_buffers, 2)


class WithOwnHook(torch.optim.SGD):
    def __init__(self, params, **kwargs):
        super().__init__(params, **kwargs)
        self.register_step_post_hook(lambda *_: None)


def refused_when_built():
    module = net()
    module.share_memory()
    with pytest.raises(ValueError, match="in shared memory"):
        wrap(module)
    complex_ = nn.Linear(4, 4, dtype=torch.complex64)
    with pytest.raises(ValueError, match="imaginary parts"):
        ShardedOptimizer(complex_.parameters(), torch.optim.SGD, param_dtype=torch.bfloat16)
    module = net()
    module.register_buffer("phases", torch.ones(3, dtype=torch.complex64))
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.SGD, param_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="imaginary parts of phases"):
        ShardedDataParallel(module, optimizer)
    module = net()
    model = DistributedDataParallel(module)
    with pytest.raises(ValueError, match="build ShardedOptimizer before DistributedDataParallel"):
        ShardedOptimizer(module.parameters(), torch.optim.SGD, param_dtype=torch.bfloat16)
    del model
    ShardedOptimizer(module.parameters(), torch.optim.SGD, param_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="registers step hooks on itself"):
        ShardedOptimizer(net().parameters(), WithOwnHook, elementwise=True, lr=0.1)
    module = net()
    optimizer = ShardedOptimizer(module[0].parameters(), torch.optim.SGD)
    with pytest.raises(ValueError, match="or use DistributedDataParallel, under which several ShardedOptimizers"):
        ShardedDataParallel(module, optimizer)
    return True


def test_what_cannot_be_right_is_refused_when_it_is_built():
    run_ranks(refused_when_built, 2)


def two_optimizers():
    """Several ShardedOptimizers share a module under DistributedDataParallel."""
    found = []
    for make in (ShardedOptimizer, lambda params, cls, **kwargs: cls(params, **kwargs)):
        module = net()
        model = DistributedDataParallel(module)
        first = make(module[0].parameters(), torch.optim.SGD, lr=0.1)
        second = make(module[2].parameters(), torch.optim.AdamW, lr=0.01)
        for step in range(4):
            backward(model, step)
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
        found.append([param.detach().clone() for param in module.parameters()])
    return max((left - right).abs().max().item() for left, right in zip(*found, strict=True))


def test_two_sharded_optimizers_share_a_module_under_ddp():
    assert run_ranks(two_optimizers, 2) == [0, 0]


def half_precision_norms():
    """Gradients in float16, with float16 as the default dtype: their norm is larger than float16 can hold."""
    torch.set_default_dtype(torch.float16)
    try:
        norms = []
        for wrapping in (wrap, wrap_plain):
            module = nn.Linear(512, 512, bias=False)
            model, optimizer = wrapping(module)
            (model(torch.full((1, 512), 16.0)) * 16).sum().backward()
            if wrapping is wrap:
                norms.append(optimizer.clip_grad_norm_(1e9).item())
            else:
                norms.append(module.weight.grad.float().norm().item())
    finally:
        torch.set_default_dtype(torch.float32)
    return norms


def test_norms_are_float32():
    for ours, expected in run_ranks(half_precision_norms, 2):
        assert ours == pytest.approx(expected)
        assert ours > 65504


def global_hooks(wrap):
    """A hook around every optimizer's step, which decays weights: it runs once per step."""
    calls = []

    def decay(optimizer, args, kwargs):
        calls.append(type(optimizer).__name__)
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.data.mul_(0.9)

    handles = [register_optimizer_step_pre_hook(decay), register_optimizer_step_post_hook(decay)]
    try:
        module = net()
        weights = four_steps(wrap(module), module)
    finally:
        for handle in handles:
            handle.remove()
    assert len(calls) == 8
    return weights


def global_step_hooks(overlap):
    return same_under_both(global_hooks, TINY_MB, overlap)


@pytest.mark.parametrize("overlap", [False, True])
def test_global_step_hooks_run_once(overlap):
    assert run_ranks(global_step_hooks, 2, overlap) == [pytest.approx(0, abs=1e-6)] * 2


def entries_of_the_callers_own():
    module = net()
    model, optimizer = wrap(module)
    optimizer.state.setdefault("scale", {"mean": 1.0})
    optimizer.state["seen"]["steps"] = 3
    backward(model)
    optimizer.step()
    assert optimizer.state["scale"] == {"mean": 1.0}
    assert optimizer.state["seen"] == {"steps": 3}
    weight = module[0].weight
    for use in (
        lambda state: state[weight],
        lambda state: weight in state,
        lambda state: state.get(weight),
        lambda state: state.setdefault(weight, {}),
        lambda state: list(state),
        lambda state: len(state),
        lambda state: state.items(),
        lambda state: state.clear(),
    ):
        with pytest.raises(RuntimeError, match="the optimizer state is divided among the ranks"):
            use(optimizer.state)
    return True


def test_keys_of_the_state_that_are_not_parameters_are_the_callers():
    run_ranks(entries_of_the_callers_own, 2)


def data_replaced(wrap):
    """`param.data = ...`, as spectral normalization by hand and `vector_to_parameters` do."""
    module = net()
    model, optimizer = wrap(module)
    for step in range(4):
        backward(model, step)
        optimizer.step()
        module[0].weight.data = nn.functional.normalize(module[0].weight.data)
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(module.parameters()) * 0.9, module.parameters())
        optimizer.zero_grad()
        if wrap is not wrap_plain:  # DistributedDataParallel loses its hooks
            module.to(torch.float64).to(torch.float32)
    return [param.detach().clone() for param in module.parameters()]


def replaced_data(overlap):
    return same_under_both(data_replaced, TINY_MB, overlap)


@pytest.mark.parametrize("overlap", [False, True])
def test_data_that_are_replaced_are_taken_back_into_the_buffer(overlap):
    assert run_ranks(replaced_data, 2, overlap) == [pytest.approx(0, abs=1e-6)] * 2


def test_one_process_needs_no_group():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module = nn.Linear(4, 4)
        optimizer = ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
        model = ShardedDataParallel(module, optimizer, overlap=True)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
