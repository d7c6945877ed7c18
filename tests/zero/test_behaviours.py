"""DistributedDataParallel's behaviours: under ShardedDataParallel each is the same, or is refused."""

import collections
import contextlib
import copy
import dataclasses
import gc
import io
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nets import TINY_MB, average_gradients, backward, inputs, late_on_the_last_rank, net
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zero import ShardedDataParallel, ShardedOptimizer

Tensors = list[torch.Tensor]


class Wrap:
    """Wraps a module with this package's two classes, or with torch's."""

    def __init__(self, sharded: bool = True, by_hand: bool = False) -> None:
        self.sharded, self.by_hand = sharded, by_hand

    def optimizer(self, params: Any, cls: Any = torch.optim.AdamW, **options: Any) -> Any:
        return ShardedOptimizer(params, cls, bucket_mb=TINY_MB, lr=0.01, **options) if self.sharded else cls(params, lr=0.01)

    def model(self, module: nn.Module, optimizer: Any, **options: Any) -> Any:
        if self.by_hand:
            optimizer.register_step_pre_hook(lambda *_: average_gradients(module.parameters()))
            return module
        if not self.sharded:
            return DistributedDataParallel(module, **({"find_unused_parameters": "static_graph" not in options} | options))
        return ShardedDataParallel(module, optimizer)

    def __call__(self, module: nn.Module, groups: Any = None, **options: Any) -> Any:
        optimizer = self.optimizer(module.parameters() if groups is None else groups)
        return self.model(module, optimizer, **options), optimizer


def weights(*modules: nn.Module) -> Tensors:
    return [tensor.detach().clone() for module in modules for tensor in module.state_dict().values()]


def steps(model: nn.Module, optimizer: Any, count: int = 3, first: int = 0) -> None:
    for step in range(first, first + count):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def plain(model: nn.Module, module: nn.Module, step: int) -> None:
    backward(model, step)


def on(make: Any, train: Any, **options: Any) -> Any:
    """`train(model, module, optimizer)` of what `make` returns. What it has found comes before the weights."""

    def trains(wrap: Wrap) -> Tensors:
        module = make()
        model, optimizer = wrap(module, **options)
        found = train(model, module, optimizer) or []
        return [tensor.detach().clone() for tensor in found] + weights(module)

    return trains


def loop(each: Any = plain, make: Any = net, after: Any = None, clear: bool = True, **options: Any) -> Any:
    """Four steps, in each of which `each(model, module, step)` makes the gradients and returns what it has found."""

    def train(model: nn.Module, module: nn.Module, optimizer: Any) -> Tensors:
        found = []
        for step in range(4):
            found += each(model, module, step) or []
            optimizer.step()
            if after is not None:
                found += after(model, module, optimizer, step) or []
            if clear:
                optimizer.zero_grad()
        return found

    return on(make, train, **options)


# -- forward and backward ------------------------------------------------------------------------------------------------


def backward_twice(model, module, step):
    loss = model(inputs(step)).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def gradient_penalty(model, module, step):
    x = inputs(step).requires_grad_()
    loss = model(x).square().sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + gradient.square().sum()).backward()


def penalty_of_parameters(share_of_loss):
    def each(model, module, step):
        loss = model(inputs(step)).square().sum()
        gradients = torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in gradients)
        (penalty + share_of_loss * loss if share_of_loss else penalty).backward()

    return each


def two_losses(model, module, step):
    first, second = model(inputs(step)).split([1, 2], dim=1)
    first.square().sum().backward(retain_graph=True)
    second.abs().sum().backward()


def two_losses_together(model, module, step):
    """One of them with a given gradient."""
    first, second = model(inputs(step)).split([1, 2], dim=1)
    torch.autograd.backward([first.square().sum(), second], [None, torch.full_like(second, 0.5)])


def forward_without_backward(model, module, step):
    lost = model(inputs(step + 20))
    del lost
    backward(model, step)


def an_empty_batch(model, module, step):
    x = inputs(step)[: 0 if dist.get_rank() == step % 2 else 4 - step]
    model(x).square().sum().backward()


def under(context):
    def each(model, module, step):
        with context():
            model(inputs(step)).float().square().sum().backward()

    return each


def in_a_thread(function, *args):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    others: dict[str, Any]


Pair = collections.namedtuple("Pair", "first second")
OUTPUTS: dict[str, Any] = {  # what a forward returns, and where the loss finds its tensor
    "dict": (lambda x, y: {"logits": y, "none": None, "number": 3}, lambda output: output["logits"]),
    "dataclass": (lambda x, y: Output(y, {"x": x}), lambda output: output.logits),
    "namedtuple": (lambda x, y: Pair(y, [x]), lambda output: output.first),
    "list": (lambda x, y: [[y], x], lambda output: output[0][0]),
}


class Outputs(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inner, self.kind = net(), kind

    def forward(self, x, *, scale=1.0):
        return OUTPUTS[self.kind][0](x, self.inner(x) * scale)


def output_of_kind(kind):
    def each(model, module, step):
        OUTPUTS[kind][1](model(inputs(step), scale=2.0)).square().sum().backward()

    return loop(each, partial(Outputs, kind))


def penalty_before_forward(model, module, step):
    penalty = sum(param.square().sum() for param in module.parameters())
    (model(inputs(step)).square().sum() + 0.1 * penalty).backward()


def first_the_penalty_backward(model, module, step):
    loss = model(inputs(step)).square().sum()
    sum(param.square().sum() for param in module.parameters()).backward()
    loss.backward()


def saliency_on_one_rank(when):
    """`autograd.grad` of the inputs or of all parameters, also through a forward of the wrapper, is no backward."""

    def each(model, module, step):
        x = inputs(step).requires_grad_()
        if when == "before" and dist.get_rank() == 0:
            torch.autograd.grad(model(x).sum(), x)
        loss = model(x).square().sum()
        if when == "between" and dist.get_rank() == 0:
            torch.autograd.grad(loss, x, retain_graph=True)
        if when == "other forward" and dist.get_rank() == 0:
            torch.autograd.grad(module(x).sum(), list(module.parameters()))
        loss.backward()
        if when == "after" and dist.get_rank() == 0:
            torch.autograd.grad(module(x).sum(), x)

    return each


def input_gradient_by_wrapper(model, module, step):
    """An adversarial example: a forward and backward of the wrapper for the input's gradient."""
    x = inputs(step).requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x)
    model(inputs(step) + 0.1 * gradient.sign()).square().sum().backward()
    return [gradient]


def meta_learning(model, module, step):
    """MAML: an inner step by hand, and a backward through it."""
    params = dict(module.named_parameters())
    inner = torch.func.functional_call(module, params, inputs(step)).square().mean()
    each = torch.autograd.grad(inner, list(params.values()), create_graph=True)
    changed = {name: param - 0.1 * grad for (name, param), grad in zip(params.items(), each, strict=True)}
    outer = torch.func.functional_call(module, changed, inputs(step + 5)).square().sum()
    (outer + 0 * model(inputs(step)).sum()).backward()


def failing_forward(model, module, step):
    hook = module[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(inputs(step))
    hook.remove()
    backward(model, step)


def a_backward_of_a_part(model, module, step):
    """Then another one of everything."""
    model(inputs(step)).square().sum().backward(inputs=[module[2].weight])
    module.zero_grad()
    backward(model, step)


# -- gradients that are dropped ------------------------------------------------------------------------------------------


def a_dropped_batch(of):
    """By `zero_grad` of the wrapper or of the module."""

    def each(model, module, step):
        backward(model, 100 + step)
        {"wrapper": model, "module": module}[of].zero_grad()
        backward(model, step)

    return loop(each)


def gradients_of_zero(model, module, optimizer, step):
    """A step with them still decays and still has momentum."""
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()


def gradients_dropped_in_no_sync(wrap):
    """In the first micro-step a part is used, and its gradients are dropped; in the second it is not used."""
    module = TwoHeads()
    for param in module.parameters():
        param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None) if dropping else None)
    model, optimizer = wrap(module)
    for step in range(3):
        with model.no_sync():
            dropping = True
            model(inputs(step))[0].square().sum().backward()
        dropping = False
        model(inputs(step))[1].square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(module)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x):
        x = torch.tanh(self.body(x))
        return self.first(x), self.second(x)


def a_gan(wrap):
    """Two models trained in turn; the critic drops the gradients that the turn of the generator leaves in it."""
    generator, critic = net(8), net()
    (wrapped_generator, its_optimizer), (wrapped_critic, critics_optimizer) = wrap(generator), wrap(critic)
    for step in range(4):
        wrapped_critic.zero_grad()
        backward(wrapped_critic, step)
        wrapped_critic(wrapped_generator(inputs(step)).detach()).sum().backward()
        critics_optimizer.step()
        wrapped_generator.zero_grad()
        wrapped_critic(wrapped_generator(inputs(step))).square().sum().backward()
        its_optimizer.step()
    return weights(generator, critic)


# -- modules that change -------------------------------------------------------------------------------------------------


class Buffers(nn.Module):
    """Buffers that forward writes, replaces, resizes or registers, on all ranks or on one."""

    def __init__(self, how, extra=False):
        super().__init__()
        self.inner, self.how = net(), how
        if not how.startswith("register") or extra:
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        if not how.startswith("register"):
            self.register_buffer("cache", torch.zeros(2, 3))

    def forward(self, x):
        y = self.inner(x)
        mean = y.detach().mean(0)
        if hasattr(self, "calls"):
            self.calls += 1 + dist.get_rank()
        if self.how == "write":
            self.cache[0].lerp_(mean, 0.5)
        elif self.how == "replace":
            self.cache = self.cache + mean
        elif self.how == "resize":
            self.cache = torch.cat([self.cache, mean[None]])
        elif self.how == "resize in place":
            self.cache.resize_(self.cache.shape[0] + 1, 3).fill_(1.0)
        elif self.how == "none":
            self.cache = None
            self.how = "write later"
        elif not hasattr(self, "cache") and (self.how == "register" or dist.get_rank() == 1):
            self.register_buffer("cache", mean)
        cache = getattr(self, "cache", None)
        return y if cache is None else y + 0.1 * cache.mean()


def with_batch_norm():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def two_micro_steps(model, module, step):
    with model.no_sync():
        backward(model, 2 * step)
    backward(model, 2 * step + 1)


def evaluated_after_step(model, module, optimizer, step):
    """All ranks have the running statistics of rank 0, and evaluate with them."""
    model.eval()
    with torch.no_grad():
        found = [model(inputs(step)), *(buffer.float() for buffer in copy.deepcopy(module).buffers())]
    model.train()
    return found


def between_steps(change, make=net):
    """Four steps; `change(module, step)` before each but the first one."""

    def each(model, module, step):
        if step:
            change(module, step)
        backward(model, step)

    return loop(each, make)


def freeze(module, step):
    module[0].requires_grad_(step % 2 == 0)


def load(strict, assign=False):
    def change(module, step):
        state = {name: tensor * 0.9 for name, tensor in module.state_dict().items()}
        if not strict:
            state.pop("0.weight")
        module.load_state_dict(state, strict=strict, assign=assign)

    return change


def rewind(model, module, optimizer):
    """The wrapper loads the weights of an earlier step."""
    steps(model, optimizer, 2)
    kept = copy.deepcopy(model.state_dict())
    for _ in range(2):
        steps(model, optimizer, 2, first=2)
        model.load_state_dict(kept)
    steps(model, optimizer, 2, first=4)


def pruned(module, step):
    if step == 1:
        prune.l1_unstructured(module[0], "weight", amount=0.3)


# -- hooks ---------------------------------------------------------------------------------------------------------------


def hooked(install, on="module", later=False, **options):
    """Hooks that are installed in the module before it is wrapped, or later, or in the wrapper."""

    def trains(wrap):
        module, seen = net(), []
        if on == "module" and not later:
            install(module, seen)
        model, optimizer = wrap(module, **options)
        if on == "wrapper":
            install(model, seen)
        elif later:
            install(module, seen)
        steps(model, optimizer)
        return [tensor.detach().clone() for tensor in seen] + weights(module)

    return trains


def backward_hooks(module, seen):
    for part in module.modules():
        part.register_full_backward_hook(lambda part, inputs, outputs: seen.append(outputs[0].sum()))
        part.register_full_backward_pre_hook(lambda part, outputs: (outputs[0] * 0.9,))


def gradient_hooks(module, seen):
    for param in module.parameters():
        param.register_hook(lambda gradient: seen.append(gradient.sum()) or gradient.clamp(-0.1, 0.1))


def hooks_after_accumulation(module, seen):
    def halve(param):
        param.grad.mul_(0.5)

    for param in module.parameters():
        param.register_post_accumulate_grad_hook(halve)


def a_hook_that_drops_a_gradient(module, seen):
    module[0].weight.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))


def step_hooks(of_all_optimizers):
    """One before each step, and one after it that decays the weights; each runs once per step."""

    def train(model, module, optimizer):
        calls = []

        def decay(optimizer, *_):
            calls.append(2.0)
            for group in optimizer.param_groups:
                for param in group["params"]:
                    param.data.mul_(0.99)

        if of_all_optimizers:
            before, after = register_optimizer_step_pre_hook, register_optimizer_step_post_hook
        else:
            before, after = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
        handles = before(lambda *_: calls.append(1.0)), after(decay)
        try:
            steps(model, optimizer)
        finally:
            for handle in handles:
                handle.remove()
        return [torch.tensor(calls)]

    return on(net, train)


# -- optimizers ----------------------------------------------------------------------------------------------------------


def one_cycle(wrap):
    """A schedule, and another change of a group, from which somebody takes a copy."""
    module, rates = net(), []
    model, optimizer = wrap(module, [{"params": module[0].parameters()}, {"params": module[2].parameters(), "lr": 0.02}])
    scheduler = OneCycleLR(optimizer, max_lr=0.05, total_steps=10)
    for step in range(6):
        steps(model, optimizer, 1, first=step)
        scheduler.step()
        rates += [group["lr"] for group in optimizer.param_groups]
        optimizer.param_groups[0]["weight_decay"] *= 2
        assert copy.copy(optimizer.param_groups[0]).keys() >= {"lr", "params"}
    return [torch.tensor(rates), *weights(module)]


def a_group_replaced(model, module, optimizer, step):
    """Some schedulers and loaders put other dicts with the same parameters there."""
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.02 / (1 + step)}


def a_parameter_of_the_loss(wrap):
    """DistributedDataParallel does not average its gradient, so all ranks have the same data."""
    module, log_sigma = net(), nn.Parameter(torch.ones(3))
    model, optimizer = wrap(module, [*module.parameters(), log_sigma])
    for _ in range(4):
        (model(torch.ones(4, 8)) / log_sigma.exp() + log_sigma).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [log_sigma.detach(), *weights(module)]


def wrapped_after_a_step_alone(wrap):
    """The gradients that the inner optimizer saw last are not those that the wrapper sends."""
    module = net()
    optimizer = wrap.optimizer(module.parameters())
    backward(module)
    average_gradients(module.parameters())
    optimizer.step()
    optimizer.zero_grad()
    steps(wrap.model(module, optimizer), optimizer, first=1)
    return weights(module)


def a_closure(model, module, optimizer):
    found = []
    for step in range(3):

        def closure(step=step):
            optimizer.zero_grad()
            loss = model(inputs(step)).square().sum()
            loss.backward()
            return loss

        found.append(optimizer.step(closure).detach())
    return found


def scaled(enabled):
    def train(model, module, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, enabled=enabled)
        for step in range(3):
            scaler.scale(model(inputs(step)).square().sum()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    return on(net, train)


def with_complex_parameters():
    torch.manual_seed(0)
    return nn.Linear(8, 3, dtype=torch.complex64)


# -- copies, averages and saves ------------------------------------------------------------------------------------------


def a_part_saved(model, module, optimizer):
    """It takes that part, not the buffer in which it lies."""
    steps(model, optimizer)
    sizes = []
    for thing in (module[2].state_dict(), module[2].weight, copy.deepcopy(module[2].weight), list(module.parameters())[:1]):
        file = io.BytesIO()
        torch.save(thing, file)
        sizes.append(float(file.tell()))
    return [torch.tensor(sizes)]


# -- more ----------------------------------------------------------------------------------------------------------------


def no_sync(forward_inside, backward_inside, then_synchronized=True):
    def each(model, module, step):
        with model.no_sync() if forward_inside else contextlib.nullcontext():
            loss = model(inputs(step)).square().sum()
        with model.no_sync() if backward_inside else contextlib.nullcontext():
            loss.backward()
        if then_synchronized:
            backward(model, step + 40)

    return each


def failing_in_no_sync(model, module, step):
    with contextlib.suppress(ZeroDivisionError), model.no_sync():
        model(inputs(step))
        1 / 0  # noqa: B018
    backward(model, step)


def compiled(what):
    """Before or after the module is wrapped: it, a child, the wrapper, or a function that calls the wrapper."""

    def trains(wrap):
        module = net()
        inner = torch.compile(module, backend="eager") if what == "module" else module
        if what == "child":
            module[0].compile(backend="eager")
        model, optimizer = wrap(inner)
        call = model
        if what == "wrapper":
            call = torch.compile(model, backend="eager")
        elif what == "function":
            call = torch.compile(lambda x: model(x), backend="eager")
        elif what == "child, later":
            module[2].compile(backend="eager")
        steps(call, optimizer)
        return weights(module)

    return trains


def two_optimizers(wrap):
    """Two sharded optimizers for one module, with DistributedDataParallel around it."""
    module = net()
    matrices = [param for param in module.parameters() if param.dim() == 2]
    others = [param for param in module.parameters() if param.dim() != 2]
    both = wrap.optimizer(matrices, torch.optim.SGD), wrap.optimizer(others)
    model = DistributedDataParallel(module)
    for step in range(3):
        backward(model, step)
        for optimizer in both:
            optimizer.step()
        model.zero_grad()
    return weights(module)


BEHAVIOURS: dict[str, Any] = {
    "gradient penalty": loop(gradient_penalty),
    "penalty of gradients of parameters": loop(penalty_of_parameters(100)),
    "only a penalty of gradients": loop(penalty_of_parameters(0)),
    "siamese": loop(lambda model, _, step: (model(inputs(step)) - model(inputs(step + 50))).square().sum().backward()),
    "two losses together": loop(two_losses_together),
    "forward without backward": loop(forward_without_backward),
    "an empty batch": loop(an_empty_batch),
    "detect_anomaly": loop(under(partial(torch.autograd.detect_anomaly, check_nan=False))),
    "save_on_cpu": loop(under(torch.autograd.graph.save_on_cpu)),
    "autocast": loop(under(partial(torch.autocast, "cpu", torch.bfloat16))),
    "backward in a thread": loop(lambda model, _, step: in_a_thread(backward, model, step)),
    "forward in a thread": loop(lambda model, _, step: in_a_thread(model, inputs(step)).square().sum().backward()),
    **{f"output in a {kind}": output_of_kind(kind) for kind in OUTPUTS},
    "penalty before forward": loop(penalty_before_forward),
    **{
        f"saliency on one rank, {when}": loop(saliency_on_one_rank(when))
        for when in ("before", "between", "other forward", "after")
    },
    "adversarial examples": loop(input_gradient_by_wrapper),
    "meta-learning": loop(meta_learning),
    "failing forward": loop(failing_forward),
    **{f"a batch dropped by the {of}": a_dropped_batch(of) for of in ("wrapper", "module")},
    "steps without zero_grad": loop(clear=False),
    "gradients of zero": loop(after=gradients_of_zero),
    "nothing has a gradient": loop(lambda model, _, step: backward(model, step) if step % 2 else None),
    "gradients dropped in no_sync": gradients_dropped_in_no_sync,
    "a GAN": a_gan,
    **{
        f"buffers: {how}": loop(make=partial(Buffers, how))
        for how in ("write", "replace", "resize", "resize in place", "none", "register", "register on one rank")
    },
    "buffers: register another": loop(make=partial(Buffers, "register", True)),
    "BatchNorm": loop(two_micro_steps, with_batch_norm, evaluated_after_step),
    "between steps: freeze": between_steps(freeze),
    "between steps: prune": between_steps(pruned),
    "between steps: load": between_steps(load(True)),
    "between steps: load a part": between_steps(load(False)),
    "rewind": on(net, rewind),
    **{
        f"{install.__name__} on {on}{' later' * later}": hooked(install, on, later)
        for install in (backward_hooks, gradient_hooks)
        for on, later in (("module", False), ("module", True), ("wrapper", False))
    },
    "a hook after accumulation": hooked(hooks_after_accumulation),
    "a later hook after accumulation": hooked(hooks_after_accumulation, later=True),
    "a hook that drops a gradient": hooked(a_hook_that_drops_a_gradient, find_unused_parameters=False),
    "step hooks": step_hooks(of_all_optimizers=False),
    "global step hooks": step_hooks(of_all_optimizers=True),
    "OneCycleLR": one_cycle,
    "a group replaced": loop(after=a_group_replaced),
    "a parameter of the loss": a_parameter_of_the_loss,
    "wrapped after a step alone": wrapped_after_a_step_alone,
    "a closure": on(net, a_closure),
    "a disabled scaler": scaled(enabled=False),
    "complex parameters": loop(
        lambda model, _, step: model(inputs(step) + 0j).abs().square().sum().backward(), with_complex_parameters
    ),
    "a part saved": on(net, a_part_saved),
    "no_sync": loop(no_sync(True, True)),
    "no_sync around forward": loop(no_sync(True, False)),
    "no_sync around backward": loop(no_sync(False, True)),
    "failing in no_sync": loop(failing_in_no_sync),
    "traced": loop(make=lambda: torch.fx.symbolic_trace(net())),
    **{f"compiled {what}": compiled(what) for what in ("module", "child", "wrapper", "function", "child, later")},
    "static graph": loop(static_graph=True),
    "two optimizers": two_optimizers,
}
# here the ranks of DistributedDataParallel get different weights, so the gradients are averaged by hand
AVERAGED_BY_HAND: dict[str, Any] = {
    "backward twice": loop(backward_twice),
    "two losses": loop(two_losses),
    "first the penalty's backward": loop(first_the_penalty_backward),
    "backward of a part": loop(a_backward_of_a_part),
}
REFUSED: dict[str, Any] = {
    "a buffer on one rank": (loop(make=partial(Buffers, "register on one rank", True)), "buffers differ between the ranks"),
    "a scaler": (scaled(enabled=True), r"this gradient cannot be read or written: .*optimizer\.clip_grad_norm_"),
    "no_sync around the last backward": (loop(no_sync(False, True, False)), "must run outside of no_sync"),
}


def differences(part: int) -> dict[str, float]:
    """By behaviour of a half of them: the largest difference from torch's own."""
    found = {}
    with late_on_the_last_rank():
        for name in list(BEHAVIOURS | AVERAGED_BY_HAND)[part::2]:
            trains = (BEHAVIOURS | AVERAGED_BY_HAND)[name]
            expected = trains(Wrap(sharded=False, by_hand=name in AVERAGED_BY_HAND))
            result = trains(Wrap())
            gc.collect()
            assert [tensor.shape for tensor in result] == [tensor.shape for tensor in expected], name
            assert all(tensor.isfinite().all() for tensor in result), name
            found[name] = max((one - other).abs().max().item() for one, other in zip(result, expected, strict=True))
    return found


@pytest.mark.parametrize("part", range(2))
def test_behaviours_are_those_of_torchs_own(part):
    for found in run_ranks(differences, 2, part):
        assert found == {name: pytest.approx(0, abs=1e-6) for name in found}


def refusals() -> list[str]:
    """The refusals that did not come."""
    missing = []
    with late_on_the_last_rank():
        for name, (trains, reason) in REFUSED.items():
            message = ""
            try:
                trains(Wrap())
            except RuntimeError as error:
                message = str(error)
            if not re.search(reason, message):
                missing.append(f"{name}: {message}")
            gc.collect()
    return missing


def test_what_differs_is_refused():
    assert run_ranks(refusals, 2) == [[], []]
