"""DistributedDataParallel's behaviours: under ShardedDataParallel each is the same, with and without overlap, or is refused."""

import collections
import contextlib
import copy
import dataclasses
import gc
import io
import multiprocessing
import os
import re
import threading
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from nets import TINY_MB, backward, inputs, make_gathers_late, net
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize, prune
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from zero import ShardedDataParallel, ShardedOptimizer

Tensors = list[torch.Tensor]


class ByHand(nn.Module):
    """A module whose gradients are averaged before the step."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module(*args)

    def average(self, *_: Any) -> None:
        for param in self.module.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()


class Wrap:
    """Wraps a module with torch's two classes, or with this package's. `overlap` is None for torch's."""

    def __init__(self, overlap: bool | None, by_hand: bool = False) -> None:
        self.overlap, self.by_hand = overlap, by_hand

    def __call__(self, module: nn.Module, groups: Any = None, cls: Any = torch.optim.AdamW, **options: Any) -> Any:
        params = module.parameters() if groups is None else groups
        if self.by_hand:
            model, optimizer = ByHand(module), cls(params, lr=0.01)
            optimizer.register_step_pre_hook(model.average)
            return model, optimizer
        if self.overlap is None:
            options = {"find_unused_parameters": "static_graph" not in options} | options
            return DistributedDataParallel(module, **options), cls(params, lr=0.01)
        optimizer = ShardedOptimizer(params, cls, bucket_mb=TINY_MB, lr=0.01)
        return ShardedDataParallel(module, optimizer, overlap=self.overlap), optimizer

    def synchronize(self, optimizer: Any) -> None:
        """The rule of overlapped all-gathers, before a read through a reference that was taken beforehand."""
        if self.overlap:
            optimizer.synchronize()


def weights(*modules: nn.Module) -> Tensors:
    return [tensor.detach().clone() for module in modules for tensor in module.state_dict().values()]


def steps(model: nn.Module, optimizer: Any, count: int = 3, first: int = 0) -> None:
    for step in range(first, first + count):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def loop(each: Any, make: Any = net, after: Any = None, **options: Any) -> Any:
    """Four steps, in each of which `each(model, module, step)` makes the gradients and returns what it has found."""

    def trains(wrap: Wrap) -> Tensors:
        module = make()
        model, optimizer = wrap(module, **options)
        found = []
        for step in range(4):
            found += each(model, module, step) or []
            optimizer.step()
            if after is not None:
                found += after(model, module, optimizer, step) or []
            optimizer.zero_grad()
        return [tensor.detach().clone() for tensor in found] + weights(module)

    return trains


def plain_each(model: nn.Module, module: nn.Module, step: int) -> None:
    backward(model, step)


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


def penalty_of_parameters(model, module, step):
    loss = model(inputs(step)).square().sum()
    each = torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
    (loss + 0.01 * sum(gradient.square().sum() for gradient in each)).backward()


def only_a_penalty(model, module, step):
    loss = model(inputs(step)).square().sum()
    each = torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
    sum(gradient.square().sum() for gradient in each).backward()


def siamese(model, module, step):
    (model(inputs(step)) - model(inputs(step + 50))).square().sum().backward()


def two_losses(model, module, step):
    first, second = model(inputs(step)).split([1, 2], dim=1)
    first.square().sum().backward(retain_graph=True)
    second.abs().sum().backward()


def two_losses_together(model, module, step):
    first, second = model(inputs(step)).split([1, 2], dim=1)
    torch.autograd.backward([first.square().sum(), second.abs().sum()])


def given_gradient(model, module, step):
    output = model(inputs(step))
    output.backward(torch.full_like(output, 0.5))


def forwards_between(context):
    def each(model, module, step):
        loss = model(inputs(step)).square().sum()
        with context():
            found = [module(inputs(step + 7)).clone(), model(inputs(step + 8)).clone()]
        loss.backward()
        return [tensor + 0 for tensor in found]

    return each


def forward_after_step(context, of_wrapper):
    def after(model, module, optimizer, step):
        model.eval()
        with context():
            output = (model if of_wrapper else module)(inputs(step + 9))
        model.train()
        return [output.clone()]

    return after


def forward_without_backward(model, module, step):
    lost = model(inputs(step + 20))
    del lost
    backward(model, step)


def shapes(model, module, step):
    x = inputs(step).repeat(step + 1, 1)[: 1 + 3 * step]
    model(x).square().sum().backward()


def an_empty_batch(model, module, step):
    x = inputs(step)[: 0 if dist.get_rank() == step % 2 else 4]
    model(x).square().sum().backward()


def detect_anomaly(model, module, step):
    with torch.autograd.detect_anomaly(check_nan=False):
        backward(model, step)


def saved_elsewhere(model, module, step):
    with torch.autograd.graph.save_on_cpu():
        loss = model(inputs(step)).square().sum()
    loss.backward()


def autocast(model, module, step):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(inputs(step)).float().square().sum()
    loss.backward()


def in_a_thread(function):
    def each(model, module, step):
        errors = []

        def run():
            try:
                function(model, module, step)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]

    return each


def forward_in_a_thread(model, module, step):
    losses = []
    in_a_thread(lambda *_: losses.append(model(inputs(step)).square().sum()))(model, module, step)
    losses[0].backward()


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    others: dict[str, Any]


Pair = collections.namedtuple("Pair", "first second")


class Outputs(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inner, self.kind = net(), kind

    def forward(self, x, *, scale=1.0):
        y = self.inner(x) * scale
        return {
            "dict": lambda: {"logits": y, "none": None, "number": 3},
            "dataclass": lambda: Output(y, {"x": x}),
            "namedtuple": lambda: Pair(y, [x]),
            "list": lambda: [[y], x],
        }[self.kind]()


def output_of_kind(kind):
    def each(model, module, step):
        output = model(inputs(step), scale=2.0)
        y = {
            "dict": lambda: output["logits"],
            "dataclass": lambda: output.logits,
            "namedtuple": lambda: output.first,
            "list": lambda: output[0][0],
        }[kind]()
        y.square().sum().backward()

    return loop(each, lambda: Outputs(kind))


def functional_call(model, module, step):
    changed = {name: 1.01 * param for name, param in module.named_parameters()}
    loss = torch.func.functional_call(module, changed, inputs(step)).square().sum()
    (loss + model(inputs(step)).square().sum()).backward()


def functional_gradients(model, module, step):
    params = {name: param.detach() for name, param in module.named_parameters()}
    backward(model, step)
    each = torch.func.grad(lambda params: torch.func.functional_call(module, params, inputs(step)).square().sum())(params)
    return list(each.values())


def forward_mode(model, module, step):
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(inputs(step), torch.ones(4, 8))
        tangent = torch.autograd.forward_ad.unpack_dual(module(x)).tangent.detach()
    backward(model, step)
    return [tangent]


def penalty_outside(model, module, step):
    loss = sum(param.abs().sum() for param in module.parameters())
    (model(inputs(step)).square().sum() + 0.1 * loss).backward()


def penalty_before_forward(model, module, step):
    penalty = sum(param.square().sum() for param in module.parameters())
    (model(inputs(step)).square().sum() + 0.1 * penalty).backward()


def first_the_penalty_backward(model, module, step):
    loss = model(inputs(step)).square().sum()
    sum(param.square().sum() for param in module.parameters()).backward()
    loss.backward()


def saliency_on_one_rank(when):
    def each(model, module, step):
        if when == "before" and dist.get_rank() == 0:
            x = inputs(step).requires_grad_()
            torch.autograd.grad(module(x).sum(), x)
        loss = model(x := inputs(step).requires_grad_()).square().sum()
        if when == "between" and dist.get_rank() == 0:
            torch.autograd.grad(loss, x, retain_graph=True)
        if when == "other forward" and dist.get_rank() == 0:
            torch.autograd.grad(module(x).sum(), list(module.parameters()))
        loss.backward()
        if when == "after" and dist.get_rank() == 0:
            x = inputs(step).requires_grad_()
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


def a_failing_backward(wrap):
    module = net()
    model, optimizer = wrap(module)
    for step in range(3):
        loss = model(inputs(step)).square().sum()
        if wrap.overlap is not None:
            hook = module[0].weight.register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loss.backward()
            hook.remove()
            optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return weights(module)


def a_backward_of_a_part(model, module, step):
    """Then another one of everything."""
    model(inputs(step)).square().sum().backward(inputs=[module[2].weight])
    module.zero_grad()
    backward(model, step)


# -- modules that change -------------------------------------------------------------------------------------------------


class Buffers(nn.Module):
    """Buffers that forward writes, replaces, resizes or registers."""

    def __init__(self, how, extra=False):
        super().__init__()
        self.inner, self.how = net(), how
        if how != "register" or extra:
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        if how != "register":
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
        elif self.how == "register" and not hasattr(self, "cache"):
            self.register_buffer("cache", mean)
        if self.cache is not None:
            y = y + 0.1 * self.cache.mean()
        return y


class Dropped(nn.Module):
    """Runs one of its layers, another one in each step, and another one on each rank."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.calls = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), 0

    def forward(self, x):
        self.calls += 1
        return self.layers[(self.calls + dist.get_rank()) % 3](x)


def between_steps(change, every=1, make=net):
    """Four steps; `change(module, step)` before each but the first one."""

    def trains(wrap):
        module = make()
        model, optimizer = wrap(module)
        for step in range(4):
            if step:
                change(module, step)
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        return weights(module)

    return trains


def freeze(module, step):
    module[0].requires_grad_(step % 2 == 0)


def write_weights(module, step):
    with torch.no_grad():
        for param in module.parameters():
            param.mul_(0.9)


def write_data(module, step):
    module[0].weight.data[1] = 0.5
    module[2].bias.data.zero_()


def initialize_again(module, step):
    torch.manual_seed(step)
    module.apply(lambda part: part.reset_parameters() if isinstance(part, nn.Linear) else None)


def normalize_rows(module, step):
    module[0].weight.data = F.normalize(module[0].weight.data, dim=1)


def orthogonal(module, step):
    """Its strides are those of a transposed matrix."""
    module[0].weight.data = torch.linalg.qr(module[0].weight.data)[0].t().contiguous().t()


def from_vector(module, step):
    vector = nn.utils.parameters_to_vector(module.parameters()).detach() * 0.9
    nn.utils.vector_to_parameters(vector, module.parameters())


def load(strict, assign=False):
    def change(module, step):
        state = {name: tensor * 0.9 for name, tensor in module.state_dict().items()}
        if not strict:
            state.pop("0.weight")
        module.load_state_dict(state, strict=strict, assign=assign)

    return change


def load_into_wrapper(model, module, optimizer, step):
    model.load_state_dict({name: tensor * 0.9 for name, tensor in model.state_dict().items()})


def rewind(wrap):
    """The weights of an earlier step are loaded again."""
    module = net()
    model, optimizer = wrap(module)
    kept = None
    for step in range(5):
        backward(model, step)
        optimizer.step()
        if step == 1:
            kept = copy.deepcopy(model.state_dict())
        if step == 3:
            model.load_state_dict(kept)
        optimizer.zero_grad()
    return weights(module)


def parametrized(module, step):
    if step == 1:
        parametrize.register_parametrization(module[0], "weight", nn.Tanh(), unsafe=True)
    if step == 3:
        parametrize.remove_parametrizations(module[0], "weight", leave_parametrized=False)


def pruned(module, step):
    if step == 1:
        prune.l1_unstructured(module[0], "weight", amount=0.3)


def a_part_deleted(module, step):
    if step == 2:
        module.extra = None


class WithExtra(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.extra = net(), nn.Linear(8, 3)

    def forward(self, x):
        return self.inner(x) + (0 if self.extra is None else self.extra(x))


class Same(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def tied_later(module, step):
    module.second.weight = module.first.weight


def swapped(module, step):
    module.first, module.second = module.second, module.first


# -- hooks ---------------------------------------------------------------------------------------------------------------


def hooked(install, on="module", later=False):
    """Hooks that are installed in the module before it is wrapped, or later, or in the wrapper."""

    def trains(wrap):
        module, seen = net(), []
        if on == "module" and not later:
            install(module, seen)
        model, optimizer = wrap(module)
        if on == "wrapper":
            install(model, seen)
        elif later:
            install(module, seen)
        steps(model, optimizer)
        return [tensor.detach().clone() for tensor in seen] + weights(module)

    return trains


def forward_hooks(module, seen):
    for part in module.modules():
        part.register_forward_pre_hook(lambda part, args: seen.append(args[0].sum()))
        part.register_forward_hook(lambda part, args, output: seen.append(output.sum()) or output * 0.99)


def hooks_that_read(module, seen):
    for part in module.modules():
        part.register_forward_pre_hook(lambda part, args: seen.extend(param.sum() for param in part.parameters()))


def backward_hooks(module, seen):
    for part in module.modules():
        part.register_full_backward_hook(lambda part, inputs, outputs: seen.append(outputs[0].sum()))
        part.register_full_backward_pre_hook(lambda part, outputs: (outputs[0] * 0.9,))


def gradient_hooks(module, seen):
    for param in module.parameters():
        param.register_hook(lambda gradient: seen.append(gradient.sum()) or gradient.clamp(-0.1, 0.1))


def halve(param):
    param.grad.mul_(0.5)


def hooks_after_accumulation(module, seen):
    for param in module.parameters():
        param.register_post_accumulate_grad_hook(halve)


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


def there_and_back(module, step):
    """torch replaces the autograd nodes of the parameters."""
    module.double().float()


def global_forward_hook(wrap):
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda part, args, output: seen.append(output.sum().detach()))
    try:
        module = net()
        model, optimizer = wrap(module)
        steps(model, optimizer)
    finally:
        handle.remove()
    return [torch.stack(seen), *weights(module)]


def step_hooks(wrap):
    module, calls = net(), []
    model, optimizer = wrap(module)
    optimizer.register_step_pre_hook(lambda *_: calls.append(1.0))

    def decay(optimizer, *_):
        calls.append(2.0)
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.data.mul_(0.99)

    optimizer.register_step_post_hook(decay)
    steps(model, optimizer)
    return [torch.tensor(calls), *weights(module)]


def global_step_hooks(wrap):
    calls = []

    def decay(optimizer, *_):
        calls.append(2.0)
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.data.mul_(0.99)

    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append(1.0)),
        register_optimizer_step_post_hook(decay),
    ]
    try:
        module = net()
        model, optimizer = wrap(module)
        steps(model, optimizer)
    finally:
        for handle in handles:
            handle.remove()
    return [torch.tensor(calls), *weights(module)]


# -- optimizers ----------------------------------------------------------------------------------------------------------


def scheduled(make, metric=False):
    def trains(wrap):
        module = net()
        model, optimizer = wrap(module, [{"params": module[0].parameters()}, {"params": module[2].parameters(), "lr": 0.02}])
        scheduler = make(optimizer)
        rates = []
        for step in range(6):
            backward(model, step)
            optimizer.step()
            scheduler.step(*([1.0] if metric else []))
            rates += [group["lr"] for group in optimizer.param_groups]
            optimizer.zero_grad()
        return [torch.tensor(rates), *weights(module)]

    return trains


def a_closure(wrap):
    module = net()
    model, optimizer = wrap(module)
    found = []
    for step in range(3):

        def closure(step=step):
            optimizer.zero_grad()
            loss = model(inputs(step)).square().sum()
            loss.backward()
            return loss

        found.append(optimizer.step(closure).detach())
    return [*found, *weights(module)]


def a_disabled_scaler(wrap):
    module = net()
    model, optimizer = wrap(module)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for step in range(3):
        scaler.scale(model(inputs(step)).square().sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return weights(module)


def a_scaler(wrap):
    module = net()
    model, optimizer = wrap(module)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for step in range(3):
        scaler.scale(model(inputs(step)).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return weights(module)


def three_phases(wrap, delete=False):
    """A second optimizer, if `delete` after the first one and its wrapper have been deleted."""
    module = net()
    for phase in range(3):
        model, optimizer = wrap(module)
        steps(model, optimizer, 2, first=10 * phase)
        if delete:
            del model, optimizer
            gc.collect()
    return weights(module)


def a_batch_skipped(model, module, step):
    if step == 1:
        backward(model, 77)
        module.zero_grad()
    backward(model, step)


def complex_parameters(wrap):
    torch.manual_seed(0)
    module = nn.Linear(8, 3, dtype=torch.complex64)
    model, optimizer = wrap(module)
    for step in range(3):
        model(inputs(step).to(torch.complex64)).abs().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [torch.view_as_real(tensor) for tensor in weights(module)]


# -- copies, averages and saves ------------------------------------------------------------------------------------------


def saved_after_step(model, module, optimizer, step):
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    return list(torch.load(file).values())


def saved_by_one_rank(model, module, optimizer, step):
    if dist.get_rank() == 0:
        return saved_after_step(model, module, optimizer, step)


def evaluated_by_one_rank(model, module, optimizer, step):
    if dist.get_rank() == 1:
        with torch.no_grad():
            return [module(inputs(step + 30))]


def a_part_saved(wrap):
    module = net()
    model, optimizer = wrap(module)
    steps(model, optimizer)
    sizes = []
    for thing in (module[2].state_dict(), module[2].weight, copy.deepcopy(module[2].weight), list(module.parameters())[:1]):
        file = io.BytesIO()
        torch.save(thing, file)
        sizes.append(float(file.tell()))
    return [torch.tensor(sizes), *weights(module)]


def a_copy_trains(wrap):
    module = net()
    model, optimizer = wrap(module)
    steps(model, optimizer)
    other = copy.deepcopy(module)
    other_model, other_optimizer = wrap(other)
    steps(other_model, other_optimizer, 2, first=5)
    steps(model, optimizer, 2, first=8)
    return weights(module, other)


def swa(wrap):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model, optimizer = wrap(module)
    average = AveragedModel(module)
    scheduler = SWALR(optimizer, 0.02, anneal_epochs=2)
    for step in range(4):
        backward(model, step)
        optimizer.step()
        average.update_parameters(module)
        scheduler.step()
        optimizer.zero_grad()
    update_bn([inputs(step) for step in range(3)], average)
    return weights(module, average)


def ema_over_a_list(wrap):
    module = net()
    model, optimizer = wrap(module)
    params = list(module.parameters())
    means = [param.detach().clone() for param in params]
    for step in range(4):
        backward(model, step)
        optimizer.step()
        wrap.synchronize(optimizer)
        torch._foreach_lerp_(means, [param.detach() for param in params], 0.5)
        optimizer.zero_grad()
    return [*means, *weights(module)]


def ema_fused(wrap):
    module = net()
    model, optimizer = wrap(module)
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(4):
        backward(model, step)
        optimizer.step()
        average.update_parameters(model.module)
        optimizer.zero_grad()
    return weights(module, average)


def swapped_weights(wrap):
    """Evaluates with averaged weights that are swapped in and out again."""
    module = net()
    model, optimizer = wrap(module)
    means = [param.detach().clone() for param in module.parameters()]
    found = []
    for step in range(4):
        backward(model, step)
        optimizer.step()
        kept = [param.detach().clone() for param in module.parameters()]
        for mean, param in zip(means, module.parameters(), strict=True):
            mean.lerp_(param.detach(), 0.5)
            param.data.copy_(mean)
        with torch.no_grad():
            found.append(model(inputs(step)))
        for value, param in zip(kept, module.parameters(), strict=True):
            param.data.copy_(value)
        optimizer.zero_grad()
    return [*found, *weights(module)]


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


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x):
        x = torch.tanh(self.body(x))
        return self.first(x), self.second(x)


def heads_in_turn(model, module, step):
    model(inputs(step))[step % 2].square().sum().backward()


def heads_by_rank(model, module, step):
    model(inputs(step))[dist.get_rank()].square().sum().backward()


def functional_call_of_a_part(model, module, optimizer, step):
    with torch.no_grad():
        return [torch.func.functional_call(module, {"0.weight": torch.ones(8, 8)}, inputs(step))]


def functional_call_of_the_wrapper(model, module, optimizer, step):
    with torch.no_grad():
        return [torch.func.functional_call(model, {"module.0.weight": torch.ones(8, 8)}, inputs(step))]


def shallow_copy(model, module, optimizer, step):
    with torch.no_grad():
        return [copy.copy(module)(inputs(step)), copy.copy(module[0])(inputs(step))]


def forked(model, module, optimizer, step):
    """A child process reads the weights."""
    receiver, sender = multiprocessing.get_context("fork").Pipe(False)
    pid = os.fork()
    if pid == 0:
        try:
            sender.send([param.detach().numpy().tolist() for param in module.parameters()])
        except RuntimeError as error:
            sender.send(str(error))
        os._exit(0)
    found = receiver.recv()
    os.waitpid(pid, 0)
    if isinstance(found, str):
        raise RuntimeError(found)
    return [torch.tensor(values) for values in found]


def traced():
    return torch.fx.symbolic_trace(net())


class OuterLookahead:
    """Wraps an optimizer of any kind, and goes back to slow weights in every second step."""

    def __init__(self, inner):
        self.inner, self.calls = inner, 0
        self.params = [param for group in inner.param_groups for param in group["params"]]
        self.slow = [param.detach().clone() for param in self.params]

    def step(self, wrap):
        self.inner.step()
        self.calls += 1
        if self.calls % 2 == 0:
            wrap.synchronize(self.inner)
            for slow, param in zip(self.slow, self.params, strict=True):
                slow.lerp_(param.detach(), 0.5)
                param.data.copy_(slow)


def outer_lookahead(wrap):
    module = net()
    model, optimizer = wrap(module)
    outer = OuterLookahead(optimizer)
    for step in range(5):
        backward(model, step)
        outer.step(wrap)
        optimizer.zero_grad()
    return weights(module)


def two_optimizers(wrap):
    """Two sharded optimizers for one module, with DistributedDataParallel around it."""
    module = net()
    matrices = [param for param in module.parameters() if param.dim() == 2]
    others = [param for param in module.parameters() if param.dim() != 2]
    if wrap.overlap is None:
        both = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]
    else:
        both = [
            ShardedOptimizer(matrices, torch.optim.Muon, partition="parameter", bucket_mb=TINY_MB, lr=0.02),
            ShardedOptimizer(others, torch.optim.AdamW, bucket_mb=TINY_MB, lr=0.01),
        ]
    model = DistributedDataParallel(module)
    for step in range(3):
        backward(model, step)
        for optimizer in both:
            optimizer.step()
        model.zero_grad()
    return weights(module)


def tbptt(wrap):
    """A recurrent network with a state that goes from step to step."""
    torch.manual_seed(0)
    module = nn.LSTM(8, 8, num_layers=2)
    model, optimizer = wrap(module)
    state = None
    for step in range(4):
        output, state = model(inputs(step)[:, None], state)
        state = tuple(part.detach() for part in state)
        output.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*state, *weights(module)]


def clip_by_hand(wrap):
    module = net()
    model, optimizer = wrap(module)
    backward(model)
    torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
    optimizer.step()
    return weights(module)


def only_a_part_runs(model, module, step):
    module[0](inputs(step)).square().sum().backward()


def grows(module, step):
    if step == 2:
        module.extra = nn.Linear(8, 3)


no_context: Any = torch.enable_grad
BEHAVIOURS: dict[str, Any] = {
    "gradient penalty": loop(gradient_penalty),
    "penalty of gradients of parameters": loop(penalty_of_parameters),
    "only a penalty of gradients": loop(only_a_penalty),
    "siamese": loop(siamese),
    "two losses together": loop(two_losses_together),
    "a given gradient": loop(given_gradient),
    "no_grad between": loop(forwards_between(torch.no_grad)),
    "inference_mode between": loop(forwards_between(torch.inference_mode)),
    "grad between": loop(forwards_between(no_context)),
    "no_grad after step": loop(plain_each, after=forward_after_step(torch.no_grad, True)),
    "no_grad after step, module": loop(plain_each, after=forward_after_step(torch.no_grad, False)),
    "inference_mode after step": loop(plain_each, after=forward_after_step(torch.inference_mode, True)),
    "inference_mode after step, module": loop(plain_each, after=forward_after_step(torch.inference_mode, False)),
    "grad after step, module": loop(plain_each, after=forward_after_step(no_context, False)),
    "forward without backward": loop(forward_without_backward),
    "shapes": loop(shapes),
    "an empty batch": loop(an_empty_batch),
    "detect_anomaly": loop(detect_anomaly),
    "save_on_cpu": loop(saved_elsewhere),
    "autocast": loop(autocast),
    "backward in a thread": loop(in_a_thread(plain_each)),
    "forward in a thread": loop(forward_in_a_thread),
    **{f"output in a {kind}": output_of_kind(kind) for kind in ("dict", "dataclass", "namedtuple", "list")},
    "functional_call": loop(functional_call),
    "functional gradients": loop(functional_gradients),
    "forward mode": loop(forward_mode),
    "penalty outside": loop(penalty_outside),
    "penalty before forward": loop(penalty_before_forward),
    **{
        f"saliency on one rank, {when}": loop(saliency_on_one_rank(when))
        for when in ("before", "between", "other forward", "after")
    },
    "adversarial examples": loop(input_gradient_by_wrapper),
    "meta-learning": loop(meta_learning),
    "failing forward": loop(failing_forward),
    "failing backward": a_failing_backward,
    **{
        f"buffers: {how}": loop(plain_each, partial(Buffers, how))
        for how in ("write", "replace", "resize", "resize in place", "none")
    },
    "buffers: register": loop(plain_each, partial(Buffers, "register")),
    "buffers: register another": loop(plain_each, partial(Buffers, "register", True)),
    "layers dropped": loop(plain_each, Dropped),
    **{
        f"between steps: {change.__name__}": between_steps(change)
        for change in (freeze, write_weights, write_data, initialize_again, normalize_rows, from_vector, pruned)
    },
    "between steps: load": between_steps(load(True)),
    "between steps: load a part": between_steps(load(False)),
    "load into the wrapper": loop(plain_each, after=load_into_wrapper),
    "rewind": rewind,
    "a part deleted": between_steps(a_part_deleted, make=WithExtra),
    "tied later": between_steps(tied_later, make=Same),
    "swapped": between_steps(swapped, make=Same),
    **{
        f"{install.__name__} on {on}{' later' * later}": hooked(install, on, later)
        for install in (forward_hooks, hooks_that_read, backward_hooks, gradient_hooks)
        for on, later in (("module", False), ("module", True), ("wrapper", False))
    },
    "global forward hook": global_forward_hook,
    "step hooks": step_hooks,
    "global step hooks": global_step_hooks,
    "OneCycleLR": scheduled(partial(lr_scheduler.OneCycleLR, max_lr=0.05, total_steps=10)),
    "ReduceLROnPlateau": scheduled(partial(lr_scheduler.ReduceLROnPlateau, patience=1), metric=True),
    "LambdaLR": scheduled(partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.9**step)),
    "SequentialLR": scheduled(
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], milestones=[2]
        )
    ),
    "a closure": a_closure,
    "a disabled scaler": a_disabled_scaler,
    "three phases": partial(three_phases, delete=True),
    "three phases without deletion": three_phases,
    "a batch skipped": loop(a_batch_skipped),
    "complex parameters": complex_parameters,
    "saved after step": loop(plain_each, after=saved_after_step),
    "saved by one rank": loop(plain_each, after=saved_by_one_rank),
    "evaluated by one rank": loop(plain_each, after=evaluated_by_one_rank),
    "a part saved": a_part_saved,
    "a copy trains": a_copy_trains,
    "SWA": swa,
    "EMA over a list": ema_over_a_list,
    "EMA, fused": ema_fused,
    "swapped weights": swapped_weights,
    "no_sync": loop(no_sync(True, True)),
    "no_sync around forward": loop(no_sync(True, False)),
    "no_sync around backward": loop(no_sync(False, True)),
    "failing in no_sync": loop(failing_in_no_sync),
    "heads in turn": loop(heads_in_turn, TwoHeads),
    "heads by rank": loop(heads_by_rank, TwoHeads),
    "functional_call of a part": loop(plain_each, after=functional_call_of_a_part),
    "functional_call of the wrapper": loop(plain_each, after=functional_call_of_the_wrapper),
    "shallow copy": loop(plain_each, after=shallow_copy),
    "traced": loop(plain_each, traced),
    "static graph": loop(plain_each, static_graph=True),
    "outer lookahead": outer_lookahead,
    "two optimizers": two_optimizers,
    "tbptt": tbptt,
    "a hook after accumulation": hooked(hooks_after_accumulation),
    "a later hook after accumulation": hooked(hooks_after_accumulation, later=True),
    "a hook that drops gradients in no_sync": gradients_dropped_in_no_sync,
}
# here the ranks of DistributedDataParallel get different weights, so the gradients are averaged by hand
AVERAGED_BY_HAND: dict[str, Any] = {
    "backward twice": loop(backward_twice),
    "two losses": loop(two_losses),
    "first the penalty's backward": loop(first_the_penalty_backward),
    "backward of a part": loop(a_backward_of_a_part),
    "only a part runs": loop(only_a_part_runs),
    "parametrized": between_steps(parametrized),
    "other dtypes in between": between_steps(there_and_back),
}
SENT = "this gradient cannot be read or written: .*optimizer\\.clip_grad_norm_"
REFUSED: dict[str, Any] = {
    "data with other strides": (between_steps(orthogonal), r"0\.weight was moved or replaced"),
    "weights assigned": (between_steps(load(True, assign=True)), r"0\.weight, .* replaced \(for example by load_state_dict"),
    "a new part": (between_steps(grows, make=WithExtra), r"extra\.weight, extra\.bias require gradients"),
    "a scaler": (a_scaler, SENT),
    "clip by hand": (clip_by_hand, SENT),
    "no_sync around the last backward": (loop(no_sync(False, True, False)), "must run outside of no_sync"),
}


def differences(names: list[str]) -> dict[str, float]:
    """By behaviour and overlap: the largest difference from torch's own."""
    make_gathers_late()
    gc.freeze()  # otherwise each collection looks at all of torch
    found = {}
    for name in names:
        trains = (BEHAVIOURS | AVERAGED_BY_HAND)[name]
        expected = trains(Wrap(None, by_hand=name in AVERAGED_BY_HAND))
        for overlap in (False, True):
            result = trains(Wrap(overlap))
            gc.collect()
            assert [tensor.shape for tensor in result] == [tensor.shape for tensor in expected], name
            assert all(tensor.isfinite().all() for tensor in result), name
            pairs = zip(result, expected, strict=True)
            found[f"{name}, overlap={overlap}"] = max((left - right).abs().max().item() for left, right in pairs)
    return found


@pytest.mark.parametrize("part", range(4))
def test_behaviours_are_those_of_torchs_own(part):
    for found in run_ranks(differences, 2, list(BEHAVIOURS | AVERAGED_BY_HAND)[part::4]):
        assert found == {name: pytest.approx(0, abs=1e-6) for name in found}


def refusals() -> list[str]:
    """The refusals that did not come."""
    gc.freeze()
    missing = []
    for name, (trains, reason) in REFUSED.items():
        for overlap in (False, True):
            message = ""
            try:
                trains(Wrap(overlap))
            except RuntimeError as error:
                message = str(error)
            if not re.search(reason, message):
                missing.append(f"{name}, overlap={overlap}: {message}")
            gc.collect()
    return missing


def test_what_differs_is_refused():
    assert run_ranks(refusals, 2) == [[], []]


def fork(overlap: bool) -> Tensors:
    return loop(plain_each, after=forked)(Wrap(overlap))


def test_a_forked_process_reads_the_weights_or_is_told_to_wait():
    assert len(run_ranks(fork, 2, False)[0]) == 20
    with pytest.raises(RuntimeError, match="this process was forked while all-gathers were in flight"):
        run_ranks(fork, 2, True)
