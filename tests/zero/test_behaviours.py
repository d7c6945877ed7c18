"""DistributedDataParallel's behaviours: under ShardedDataParallel each is the same, or is refused."""

import contextlib
import copy
import dataclasses
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.distributed as dist
from blocks import Part
from nets import TINY_MB, backward, inputs, late_on_the_last_rank, net, steps
from ranks import run_in_turn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zero import ShardedDataParallel, ShardedOptimizer


class Wrap:
    """Wraps a module with this package's two classes, or with torch's."""

    def __init__(self, sharded):
        self.sharded = sharded

    def optimizer(self, params, cls=torch.optim.AdamW):
        return ShardedOptimizer(params, cls, bucket_mb=TINY_MB, lr=0.01) if self.sharded else cls(params, lr=0.01)

    def __call__(self, module, groups=None, **options):
        optimizer = self.optimizer(module.parameters() if groups is None else groups)
        if self.sharded:
            return ShardedDataParallel(module, optimizer), optimizer
        return DistributedDataParallel(
            module, **{"find_unused_parameters": "static_graph" not in options, **options}
        ), optimizer


def weights(*modules):
    return [tensor.detach().clone() for module in modules for tensor in module.state_dict().values()]


def on(make, train, **options):
    """`train(model, module, optimizer)` of what `make` returns. What it has found comes before the weights."""

    def trains(wrap):
        torch.manual_seed(0)
        module = make()
        model, optimizer = wrap(module, **options)
        found = train(model, module, optimizer) or []
        return [tensor.detach().clone() for tensor in found] + weights(module)

    return trains


def loop(each=lambda model, _, step: backward(model, step), make=net, after=None, clear=True, between=None, **options):
    """Four steps, in each of which `each(model, module, step)` makes the gradients and returns what it has found.

    `between(module, step)` comes before each but the first one.
    """

    def train(model, module, optimizer):
        found = []
        for step in range(4):
            if between is not None and step:
                between(module, step)
            found += each(model, module, step) or []
            optimizer.step()
            if after is not None:
                found += after(model, module, optimizer, step) or []
            if clear:
                optimizer.zero_grad()
        return found

    return on(make, train, **options)


def loss_of(model, x):
    return model(x).square().sum()


def backward_of_each(losses, model):
    """Under DistributedDataParallel, whose ranks would get different weights, only one of the sum."""
    for loss in [sum(losses)] if isinstance(model, DistributedDataParallel) else losses:
        loss.backward(retain_graph=True)


def named(functions):
    return {name.replace("_", " "): each for name, each in vars(functions).items() if callable(each)}


# -- what makes the gradients of a step ----------------------------------------------------------------------------------


class Each:
    """Functions of the wrapper, the module and the step."""

    def gradient_penalty(model, module, step):
        loss = loss_of(model, x := inputs(step).requires_grad_())
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + gradient.square().sum()).backward()

    def two_losses_together(model, module, step):
        """One of them with a given gradient."""
        first, second = model(inputs(step)).split([1, 2], dim=1)
        torch.autograd.backward([first.square().sum(), second], [None, torch.full_like(second, 0.5)])

    def forward_without_backward(model, module, step):
        lost = model(inputs(step + 20))
        del lost
        backward(model, step)

    def an_empty_batch(model, module, step):
        loss_of(model, inputs(step)[: 0 if dist.get_rank() == step % 2 else 4 - step]).backward()

    def backward_twice(model, module, step):
        backward_of_each([loss_of(model, inputs(step))] * 2, model)

    def two_losses(model, module, step):
        first, second = model(inputs(step)).split([1, 2], dim=1)
        backward_of_each([first.square().sum(), second.abs().sum()], model)

    def failing_forward(model, module, step):
        hook = module[2].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(inputs(step))
        hook.remove()
        backward(model, step)

    def failing_in_no_sync(model, module, step):
        with contextlib.suppress(ZeroDivisionError), model.no_sync():
            model(inputs(step))
            1 / 0  # noqa: B018
        backward(model, step)


def penalty_of_gradients(share_of_loss, model, module, step):
    loss = loss_of(model, inputs(step))
    gradients = torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
    penalty = sum(gradient.square().sum() for gradient in gradients)
    (penalty + share_of_loss * loss if share_of_loss else penalty).backward()


def under(context, model, module, step):
    with context():
        model(inputs(step)).float().square().sum().backward()


def in_a_thread(function, *args):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


Output, Pair = dataclasses.make_dataclass("Output", ["logits", "others"]), namedtuple("Pair", "first second")
OUTPUTS = {  # what a forward returns, and where the loss finds its tensor
    "dict": (lambda x, y: {"logits": y, "none": None, "number": 3}, lambda output: output["logits"]),
    "dataclass": (lambda x, y: Output(y, {"x": x}), lambda output: output.logits),
    "namedtuple": (lambda x, y: Pair(y, [x]), lambda output: output.first),
    "list": (lambda x, y: [[y], x], lambda output: output[0][0]),
}


def with_output(kind):
    module = net()
    module.forward = lambda x, *, scale=1.0: OUTPUTS[kind][0](x, nn.Sequential.forward(module, x) * scale)
    return module


def output_of_kind(kind, model, module, step):
    OUTPUTS[kind][1](model(inputs(step), scale=2.0)).square().sum().backward()


def saliency_on_one_rank(when, model, module, step):
    """`autograd.grad` of the inputs or of all parameters, also through a forward of the wrapper, is no backward."""
    x = inputs(step).requires_grad_()
    now = when if dist.get_rank() == 0 else ""
    if now == "before":
        torch.autograd.grad(model(x).sum(), x)
    loss = loss_of(model, x)
    if now == "between":
        torch.autograd.grad(loss, x, retain_graph=True)
    if now == "other forward":
        torch.autograd.grad(module(x).sum(), list(module.parameters()))
    loss.backward()
    if now == "after":
        torch.autograd.grad(module(x).sum(), x)


def gradients_of_zero(model, module, optimizer, step):
    """A step with them still decays and still has momentum."""
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()


def no_sync(forward_inside, backward_inside, then_synchronized, model, module, step):
    with model.no_sync() if forward_inside else contextlib.nullcontext():
        loss = loss_of(model, inputs(step))
    with model.no_sync() if backward_inside else contextlib.nullcontext():
        loss.backward()
    if then_synchronized:
        backward(model, step + 40)


def with_buffers(registers=False):
    """Buffers that forward writes, differently on each rank, or registers on one."""

    def forward(part, x):
        y = part.inner(x)
        part.calls += 1 + dist.get_rank()
        part.mean.lerp_(y.detach().mean(0), 0.5)
        if registers and dist.get_rank() == 1:
            part.register_buffer("more", torch.zeros(3))
        return y + 0.1 * part.mean

    return Part(forward, inner=net(), calls=torch.zeros((), dtype=torch.int64), mean=torch.zeros(3))


def evaluated_after_step(model, module, optimizer, step):
    """All ranks have the running statistics of rank 0, and evaluate with them."""
    model.eval()
    with torch.no_grad():
        found = [model(inputs(step)), *(buffer.float() for buffer in copy.deepcopy(module).buffers())]
    model.train()
    return found


def load(strict, module, step):
    state = {name: tensor * 0.9 for name, tensor in module.state_dict().items() if strict or name != "0.weight"}
    module.load_state_dict(state, strict=strict)


def compiled(what, wrap):
    """Before or after the module is wrapped: it, a child, the wrapper, or a function that calls the wrapper.

    Torch's own wrapper computes the same without a compiler, which takes longer there.
    """
    module, compile = net(), partial(torch.compile, backend="eager")
    what = what if wrap.sharded else "nothing"
    if what == "child":
        module[0].compile(backend="eager")
    model, optimizer = wrap(compile(module) if what == "module" else module)
    if what == "child, later":
        module[2].compile(backend="eager")
    call = {"wrapper": compile(model), "function": compile(lambda x: model(x))}.get(what, model)
    steps(call, optimizer, 3)
    return weights(module)


def hooked(install, when="before", **options):
    """Hooks that are installed in the module before it is wrapped, or later, or in the wrapper."""

    def trains(wrap):
        module, seen = net(), []
        if when == "before":
            install(module, seen)
        model, optimizer = wrap(module, **options)
        if when != "before":
            install(model if when == "in the wrapper" else module, seen)
        steps(model, optimizer, 3)
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


def step_hooks(of_all_optimizers, model, module, optimizer):
    """One before each step, and one after it that decays the weights; each runs once per step."""
    calls = []

    def decay(optimizer, *_):
        calls.append(2.0)
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.data.mul_(0.99)

    before, after = register_optimizer_step_pre_hook, register_optimizer_step_post_hook
    if not of_all_optimizers:
        before, after = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
    handles = before(lambda *_: calls.append(1.0)), after(decay)
    try:
        steps(model, optimizer, 3)
    finally:
        for handle in handles:
            handle.remove()
    return [torch.tensor(calls)]


# -- whole trainings -----------------------------------------------------------------------------------------------------


def a_closure(model, module, optimizer):
    def closure(step):
        optimizer.zero_grad()
        loss = loss_of(model, inputs(step))
        loss.backward()
        return loss

    return [optimizer.step(partial(closure, step)).detach() for step in range(3)]


class TrainingOf:
    """Functions of a way to wrap, which return the weights."""

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
            loss_of(wrapped_critic, wrapped_generator(inputs(step))).backward()
            its_optimizer.step()
        return weights(generator, critic)

    def one_cycle(wrap):
        """A schedule, and another change of a group, from which somebody takes a copy."""
        module, rates = net(), []
        model, optimizer = wrap(module, [{"params": module[0].parameters()}, {"params": module[2].parameters(), "lr": 0.02}])
        scheduler = OneCycleLR(optimizer, max_lr=0.05, total_steps=10)
        for step in range(6):
            steps(model, optimizer, first=step)
            scheduler.step()
            rates += [group["lr"] for group in optimizer.param_groups]
            optimizer.param_groups[0]["weight_decay"] *= 2
            assert copy.copy(optimizer.param_groups[0]).keys() >= {"lr", "params"}
        return [torch.tensor(rates), *weights(module)]

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


def each_with(each, *values):
    return {f"{each.__name__}: {value}": loop(partial(each, value)) for value in values}


BEHAVIOURS = {
    **{name: loop(each) for name, each in named(Each).items()},
    "a closure": on(net, a_closure),
    **named(TrainingOf),
    **each_with(penalty_of_gradients, 100, 0),
    **each_with(saliency_on_one_rank, "before", "between", "other forward", "after"),
    **{f"output in a {kind}": loop(partial(output_of_kind, kind), partial(with_output, kind)) for kind in OUTPUTS},
    "siamese": loop(lambda model, _, step: loss_of(lambda x: model(x) - model(inputs(step + 50)), inputs(step)).backward()),
    "detect_anomaly": loop(partial(under, partial(torch.autograd.detect_anomaly, check_nan=False))),
    "save_on_cpu": loop(partial(under, torch.autograd.graph.save_on_cpu)),
    "autocast": loop(partial(under, partial(torch.autocast, "cpu", torch.bfloat16))),
    "backward in a thread": loop(lambda model, _, step: in_a_thread(backward, model, step)),
    "forward in a thread": loop(lambda model, _, step: in_a_thread(model, inputs(step)).square().sum().backward()),
    "steps without zero_grad": loop(clear=False),
    "gradients of zero": loop(after=gradients_of_zero),
    "nothing has a gradient": loop(lambda model, _, step: backward(model, step) if step % 2 else None),
    "no_sync": loop(partial(no_sync, True, True, True)),
    "no_sync around forward": loop(partial(no_sync, True, False, True)),
    "no_sync around backward": loop(partial(no_sync, False, True, True)),
    "buffers": loop(partial(no_sync, True, True, True), with_buffers, evaluated_after_step),
    "freeze": loop(between=lambda module, step: module[0].requires_grad_(step % 2 == 0)),
    "prune": loop(between=lambda module, step: step == 1 and prune.l1_unstructured(module[0], "weight", 0.3)),
    "load": loop(between=partial(load, True)),
    "load a part": loop(between=partial(load, False)),
    **{f"compiled {what}": partial(compiled, what) for what in ("module", "child", "wrapper", "function", "child, later")},
    "traced": loop(make=lambda: torch.fx.symbolic_trace(net())),
    "static graph": loop(static_graph=True),
    **{
        f"{install.__name__} {when}": hooked(install, when)
        for install in (backward_hooks, gradient_hooks)
        for when in ("before", "later", "in the wrapper")
    },
    "a hook after accumulation": hooked(hooks_after_accumulation),
    "a later hook after accumulation": hooked(hooks_after_accumulation, "later"),
    "a hook that drops a gradient": hooked(
        lambda module, _: module[0].weight.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None)),
        find_unused_parameters=False,
    ),
    "step hooks": on(net, partial(step_hooks, False)),
    "global step hooks": on(net, partial(step_hooks, True)),
    "complex parameters": loop(
        lambda model, _, step: model(inputs(step) + 0j).abs().square().sum().backward(),
        lambda: nn.Linear(8, 3, dtype=torch.complex64),
    ),
}
REFUSED = {
    "a buffer on one rank": (loop(make=partial(with_buffers, True)), "buffers differ between the ranks"),
    "no_sync around the last backward": (loop(partial(no_sync, False, True, False)), "must run outside of no_sync"),
}


def is_torchs_own(name):
    with late_on_the_last_rank():
        expected, result = (BEHAVIOURS[name](Wrap(sharded)) for sharded in (False, True))
    assert all(tensor.isfinite().all() for tensor in result)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-6)


def is_refused(name):
    trains, reason = REFUSED[name]
    with late_on_the_last_rank(), pytest.raises(RuntimeError, match=reason):
        trains(Wrap(sharded=True))


def test_behaviours_are_those_of_torchs_own_or_refused():
    run_in_turn(2, *(partial(is_torchs_own, name) for name in BEHAVIOURS), *(partial(is_refused, name) for name in REFUSED))
