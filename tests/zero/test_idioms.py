"""Usual ways to use a model and an optimizer: under ShardedDataParallel each does the same as in PyTorch."""

import collections
import copy
import functools
import gc
import types

import pytest
import torch
import torch.distributed as dist
from nets import TINY_MB, backward, inputs, make_gathers_late, net, same_under_both, wrap, wrap_plain
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from zero import ShardedDataParallel, ShardedOptimizer


def a_gan(wrap):
    """Two models trained in turn; the critic drops the gradients that the turn of the generator leaves in it."""
    generator, critic = nn.Linear(8, 8), net()
    torch.manual_seed(1)
    for param in generator.parameters():
        nn.init.normal_(param)
    (wrapped_generator, its_optimizer), (wrapped_critic, critics_optimizer) = wrap(generator), wrap(critic)
    for step in range(5):
        wrapped_critic.zero_grad()
        backward(wrapped_critic, step)
        wrapped_critic(wrapped_generator(inputs(step)).detach()).sum().backward()
        critics_optimizer.step()
        wrapped_generator.zero_grad()
        wrapped_critic(wrapped_generator(inputs(step))).square().sum().backward()
        its_optimizer.step()
    return [param.detach().clone() for module in (generator, critic) for param in module.parameters()]


def a_dropped_batch(of):
    """`zero_grad` of the wrapper, of the module or of a part of it drops the gradients of a batch."""

    def trains(wrap):
        module = net()
        model, optimizer = wrap(module)
        zero_grad = {"wrapper": model.zero_grad, "module": module.zero_grad, "part": module[0].zero_grad}[of]
        for step in range(4):
            backward(model, 100 + step)
            zero_grad()
            backward(model, step)
            optimizer.step()
            module.zero_grad()
        return [param.detach().clone() for param in module.parameters()]

    return trains


def a_step_without_zero_grad(wrap):
    """Gradients add up over steps, clipped ones and new ones."""
    module = net()
    model, optimizer = wrap(module)
    for step in range(4):
        backward(model, step)
        optimizer.step()
    return [param.detach().clone() for param in module.parameters()]


def one_gradient_less(wrap):
    """`param.grad = None` takes one parameter out of the step."""
    module = net()
    model, optimizer = wrap(module)
    for step in range(4):
        backward(model, step)
        module[0].weight.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in module.parameters()]


def gradients_of_zero(wrap):
    """After zero_grad(set_to_none=False) a step still decays and still has momentum."""
    module = net()
    model, optimizer = wrap(module)
    for step in range(3):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
    return [param.detach().clone() for param in module.parameters()]


def nothing_had_a_gradient(wrap):
    module = net()
    model, optimizer = wrap(module)
    optimizer.step()
    optimizer.zero_grad()
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    return [param.detach().clone() for param in module.parameters()]


def averages(wrap):
    """A moving average by deepcopy, of the module and of the wrapper, right after each step."""
    module = net()
    model, optimizer = wrap(module)
    average = AveragedModel(model)
    copies = []
    for step in range(3):
        backward(model, step)
        optimizer.step()
        average.update_parameters(model)
        copies += [param.detach().clone() for param in copy.deepcopy(module).parameters()]
        optimizer.zero_grad()
    return [*copies, *(param.detach().clone() for param in average.parameters())]


def unfreezing(wrap):
    """Train a part, unfreeze the rest, go on with a new optimizer while the old wrapper is still there."""
    module = net()
    module[0].requires_grad_(False)
    model, optimizer = wrap(module)
    for step in range(2):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    module[0].requires_grad_(True)
    new_model, new_optimizer = wrap(module)
    for step in range(2):
        backward(new_model, step)
        new_optimizer.step()
        new_optimizer.zero_grad()
    return [param.detach().clone() for param in module.parameters()]


def clamped(how):
    """Weights clipped right after the step, as for a Wasserstein critic, over what the optimizer hands out."""

    def trains(wrap):
        module = net()
        model, optimizer = wrap(module)
        for step in range(4):
            backward(model, step)
            optimizer.step()
            for group in optimizer.param_groups:
                for param in dict(group)["params"] if how == "copied group" else group["params"]:
                    param.data.clamp_(-0.1, 0.1)
            optimizer.zero_grad()
        return [param.detach().clone() for param in module.parameters()]

    return trains


def a_parameter_of_the_loss(wrap):
    """DistributedDataParallel does not average its gradient, so all ranks have the same data."""
    module, log_sigma = net(), nn.Parameter(torch.ones(3))
    if wrap is wrap_plain:
        model = DistributedDataParallel(module)
        optimizer = torch.optim.AdamW([*module.parameters(), log_sigma], lr=0.01)
    else:
        optimizer = ShardedOptimizer([*module.parameters(), log_sigma], torch.optim.AdamW, bucket_mb=TINY_MB, lr=0.01)
        model = ShardedDataParallel(module, optimizer)
    for _ in range(4):
        (model(torch.ones(4, 8)) / log_sigma.exp() + log_sigma).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in (*module.parameters(), log_sigma)]


def a_part_zeroed_between_micro_steps(wrap):
    """Synchronized micro-steps; between them the gradients of a part are dropped."""
    module = net()
    model, optimizer = wrap(module)
    for step in range(4):
        backward(model, step)
        module[0].zero_grad()
        backward(model, 100 + step)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in module.parameters()]


def batch_norm(wrap):
    """All ranks have the running statistics of rank 0, and evaluate with them."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model, optimizer = wrap(module)
    found = []
    for step in range(4):
        model.require_backward_grad_sync = step % 2 == 1
        backward(model, step)
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            found += [model(inputs(step)), model(inputs(step)), *(buffer.float() for buffer in copy.deepcopy(module).buffers())]
        model.train()
    return [*found, *(param.detach().clone() for param in module.parameters())]


def hyperparameters_changed(wrap):
    """A schedule in param_groups, and its copy of a group, between steps that are still gathering."""
    module = net()
    model, optimizer = wrap(module)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    for step in range(4):
        backward(model, step)
        optimizer.step()
        scheduler.step()
        optimizer.param_groups[0]["weight_decay"] *= 2
        assert copy.copy(optimizer.param_groups[0]).keys() >= {"lr", "params"}
        optimizer.zero_grad()
    return [param.detach().clone() for param in module.parameters()]


class Holder(nn.Module):
    """Reads a parameter of another module through some holder, which is made at once or by the first forward."""

    def __init__(self, kind, late):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.kind, self.held = kind, None
        self.hold() if not late else None

    def hold(self):
        weight = self.first.weight
        outside = nn.Linear(8, 8)
        outside.weight = weight
        self.held = {
            "list": lambda: [weight],
            "set": lambda: {weight},
            "deque": lambda: collections.deque([weight]),
            "namespace": lambda: types.SimpleNamespace(weight=weight),
            "partial": lambda: functools.partial(nn.functional.linear, weight=weight),
            "function": lambda: lambda: weight,
            "module": lambda: [outside],
        }[self.kind]()

    def forward(self, x):
        if self.held is None:
            self.hold()
        weight = {
            "list": lambda: self.held[0],
            "set": lambda: next(iter(self.held)),
            "deque": lambda: self.held[0],
            "namespace": lambda: self.held.weight,
            "partial": lambda: self.held.keywords["weight"],
            "function": lambda: self.held(),
            "module": lambda: self.held[0].weight,
        }[self.kind]()
        return self.second(torch.tanh(x @ weight)) + self.first(x)


def three_steps(wrap, module):
    """The parameters after the plainest loop."""
    model, optimizer = wrap(module)
    for step in range(3):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in module.parameters()]


def held_elsewhere(kind, late):
    def trains(wrap):
        torch.manual_seed(0)
        return three_steps(wrap, Holder(kind, late))

    return trains


def a_hook_drops_a_gradient(wrap):
    module = net()
    module[0].weight.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    return three_steps(wrap, module)


def groups_replaced(wrap):
    """Some schedulers and loaders put other dicts with the same parameters there."""
    module = net()
    model, optimizer = wrap(module)
    for step in range(4):
        backward(model, step)
        optimizer.step()
        optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.02 / (1 + step)}
        optimizer.zero_grad()
    return [param.detach().clone() for param in module.parameters()]


def a_backward_that_fails(wrap):
    """Its gradients are dropped by the module, and training goes on."""
    module = net()
    model, optimizer = wrap(module)
    for step in range(4):
        hook = module[0].weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            backward(model, 100 + step)
        hook.remove()
        if wrap is wrap_plain:  # it has all-reduced a part, and would wait for the rest
            model = DistributedDataParallel(module)
        module.zero_grad()
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in module.parameters()]


def a_frozen_critic(wrap):
    """The critic is frozen for a while, as in the turn of a generator."""
    module = net()
    model, optimizer = wrap(module)
    for step in range(3):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
        module.requires_grad_(False)
        module(inputs(step).requires_grad_()).sum().backward()
        module.requires_grad_(True)
    return [param.detach().clone() for param in module.parameters()]


IDIOMS = {
    "a GAN": a_gan,
    "a batch dropped by the wrapper": a_dropped_batch("wrapper"),
    "a batch dropped by the module": a_dropped_batch("module"),
    "a batch dropped by a part": a_dropped_batch("part"),
    "a step without zero_grad": a_step_without_zero_grad,
    "one gradient less": one_gradient_less,
    "gradients of zero": gradients_of_zero,
    "nothing had a gradient": nothing_had_a_gradient,
    "averages": averages,
    "unfreezing": unfreezing,
    "a frozen critic": a_frozen_critic,
    "weights clamped over param_groups": clamped("group"),
    "weights clamped over a copy of param_groups": clamped("copied group"),
    "a parameter of the loss": a_parameter_of_the_loss,
    "a part zeroed between micro-steps": a_part_zeroed_between_micro_steps,
    "BatchNorm": batch_norm,
    "hyperparameters changed": hyperparameters_changed,
    "a hook drops a gradient": a_hook_drops_a_gradient,
    "groups replaced": groups_replaced,
    "a backward that fails": a_backward_that_fails,
}


# how a model may hold a weight of another of its modules, for its forward; with overlapped all-gathers, these reads are refused
HELD = {
    f"held in a {kind}{', later' * late}": held_elsewhere(kind, late)
    for kind in ("list", "set", "deque", "namespace", "partial", "function", "module")
    for late in (False, True)
}


class ReplacesGradients(torch.optim.Optimizer):
    """SGD with a decay that is not added in place."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad = param.grad + 0.1 * param
                    param.sub_(param.grad, alpha=group["lr"])


def other_views_of_gradients():
    """What the inner optimizer saw last differs from what has been sent, in two ways; by rank, the largest differences."""
    after = {}
    for name in ("wrapped after a step alone", "gradients replaced by the class"):
        for sharded in (True, False):
            module = net()
            alone = name == "wrapped after a step alone"
            cls, kwargs = (torch.optim.AdamW, {"lr": 0.01}) if alone else (ReplacesGradients, {})
            if sharded:
                optimizer = ShardedOptimizer(module.parameters(), cls, bucket_mb=TINY_MB, elementwise=True, **kwargs)
            else:
                optimizer = cls(module.parameters(), **kwargs)
            if alone:
                backward(module)
                for param in module.parameters():
                    dist.all_reduce(param.grad)
                    param.grad /= dist.get_world_size()
                optimizer.step()
                module.zero_grad()
            model = ShardedDataParallel(module, optimizer) if sharded else DistributedDataParallel(module)
            for step in range(1, 4):
                backward(model, step)
                optimizer.step()
                model.zero_grad(set_to_none=alone)
            after[name, sharded] = [param.detach() for param in module.parameters()]
    return [
        max((one - other).abs().max().item() for one, other in zip(after[name, True], after[name, False], strict=True))
        for name, sharded in after
        if sharded
    ]


def test_the_update_uses_the_gradients_that_were_sent():
    for differences in run_ranks(other_views_of_gradients, 2):
        assert max(differences) < 1e-6, differences


def all_idioms(bucket_mb, overlap):
    make_gathers_late()
    idioms = IDIOMS if overlap else IDIOMS | HELD
    return {name: same_under_both(trains, bucket_mb, overlap) for name, trains in idioms.items()}


@pytest.mark.parametrize(
    ("bucket_mb", "overlap"),
    [
        (TINY_MB, False),
        (TINY_MB, True),
        (75, True),
        pytest.param(75, False, marks=pytest.mark.slow("one bucket with overlap has the same gradients", seconds=30)),
    ],
)
def test_idioms_do_the_same_as_with_torchs_own(bucket_mb, overlap):
    for differences in run_ranks(all_idioms, 2, bucket_mb, overlap):
        assert differences == {name: pytest.approx(0, abs=1e-6) for name in differences}
        assert differences.keys() >= IDIOMS.keys()


def refused_reads():
    for trains in HELD.values():
        with pytest.raises(RuntimeError, match=r"uses first\.weight before its all-gather has ended"):
            trains(lambda module: wrap(module, overlap=True))
        gc.collect()
    return True


def test_overlap_names_a_parameter_that_is_read_past_its_module():
    run_ranks(refused_reads, 2)
