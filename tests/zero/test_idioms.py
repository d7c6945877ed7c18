"""Usual ways to use a model and an optimizer: under ShardedDataParallel each does the same as in PyTorch, or is refused."""

import collections
import copy
import functools
import gc
import io
import pickle
import types

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import _disable_current_modes

from zero import ShardedDataParallel, ShardedOptimizer, checkpoint
from zero.collectives import Communicator
from zero.placeholders import SentGradient
from zero.state import local_chunks
from zero.waiting import WaitingDict

TINY_MB = 0.0002  # 50 elements: several buckets


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def wrap(module, bucket_mb=TINY_MB, **kwargs):
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.AdamW, bucket_mb=bucket_mb, lr=0.01)
    return ShardedDataParallel(module, optimizer, **kwargs), optimizer


def wrap_plain(module, bucket_mb=None):
    return DistributedDataParallel(module), torch.optim.AdamW(module.parameters(), lr=0.01)


def inputs(step=0):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def backward(model, step=0):
    model(inputs(step)).square().sum().backward()


def make_gathers_late():
    """On the last rank a gather arrives only when somebody waits for it; until then its place holds nan."""
    if dist.get_rank() != dist.get_world_size() - 1:
        return
    all_gather = Communicator.all_gather

    class Late:
        def __init__(self, bucket, arriving, works):
            self.bucket, self.arriving, self.works = bucket, arriving, works

        def wait(self):
            for work in self.works:
                work.wait()
            with _disable_current_modes():  # a real gather is no operation of this thread
                self.bucket.copy_(self.arriving)

    def late(comm, bucket, sizes):
        arriving = bucket.clone()
        works = all_gather(comm, arriving, sizes)
        bucket.fill_(float("nan"))
        return [Late(bucket, arriving, works)]

    Communicator.all_gather = late


def same_under_both(trains, bucket_mb, overlap):
    """`trains(wrap)` gives the same tensors with this package's two classes as with torch's two."""
    ours = trains(lambda module: wrap(module, bucket_mb, overlap=overlap))
    gc.collect()
    plain = trains(wrap_plain)
    assert len(ours) == len(plain)
    assert all(tensor.isfinite().all() for tensor in ours)
    return max((left - right).abs().max().item() for left, right in zip(ours, plain, strict=True))


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
    ("bucket_mb", "overlap"), [(TINY_MB, False), (TINY_MB, True), (75, True), pytest.param(75, False, marks=pytest.mark.slow)]
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
        assert all(param.grad is None and not param._post_accumulate_grad_hooks for param in module.parameters())
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


class Counting(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


class Scaled(torch.optim.SGD):
    def step(self, closure=None, scale=1.0):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(scale)
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


def step_with_arguments():
    weights = []
    for scale in (1.0, 3.0):
        module = nn.Linear(8, 3)
        nn.init.ones_(module.weight)
        optimizer = ShardedOptimizer(module.parameters(), Scaled, elementwise=True, lr=0.1)
        module(torch.ones(2, 8)).sum().backward()
        optimizer.step(scale=scale)
        weights.append(1 - module.weight.detach())
    return (weights[1] / weights[0]).mean().item()


def test_arguments_of_step_reach_the_inner_optimizer():
    assert run_ranks(step_with_arguments, 2) == pytest.approx([3.0, 3.0])


class WithExtraState(nn.Linear):
    def get_extra_state(self):
        return {"calls": [1, 2]}

    def set_extra_state(self, state):
        assert state == {"calls": [1, 2]}


def consolidated(optimizer_cls):
    """Zero-size, frozen, channels_last and transposed parameters, and extra state: as the unsharded optimizer has them."""
    torch.manual_seed(0)
    module = nn.Sequential(WithExtraState(8, 8), nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last))
    module.empty = nn.Parameter(torch.zeros(0, 3))
    module.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    module.expanded = nn.Parameter(torch.ones(3, 1).expand(3, 2), requires_grad=False)
    module.sliced = nn.Parameter(torch.randn(6, 6)[::2, ::3].t(), requires_grad=False)
    module.transposed = nn.Parameter(torch.randn(5, 7).t())
    strides = [param.stride() for param in module.parameters()]
    plain = copy.deepcopy(module)
    optimizer = ShardedOptimizer(module.parameters(), optimizer_cls, bucket_mb=TINY_MB, lr=0.01)
    reference = optimizer_cls(plain.parameters(), lr=0.01)
    assert [param.stride() for param in module.parameters()] == strides
    for trained, its_optimizer in ((module, optimizer), (plain, reference)):
        for step in range(3):
            images = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(step))
            loss = trained[0](torch.ones(8)).square().sum() + trained[1](images).square().sum()
            (loss + trained.empty.sum() + (trained.transposed * torch.arange(5.0)).square().sum()).backward()
            its_optimizer.step()
            its_optimizer.zero_grad()
    whole, weights = checkpoint.consolidate(optimizer), checkpoint.model_state_dict(module, optimizer)
    if dist.get_rank() == 0:
        expected = reference.state_dict()
        assert whole["param_groups"] == expected["param_groups"]
        assert whole["state"].keys() == expected["state"].keys()
        for index, state in expected["state"].items():
            assert whole["state"][index].keys() == state.keys()
            for key, value in state.items():
                assert torch.equal(whole["state"][index][key], value), (index, key)
        assert weights.keys() == plain.state_dict().keys()
        assert weights.pop("0._extra_state") == {"calls": [1, 2]}
        assert all(torch.equal(weights[name], plain.state_dict()[name]) for name in weights)
    states = [whole]
    dist.broadcast_object_list(states)
    partly_frozen = copy.deepcopy(module)
    partly_frozen[0].requires_grad_(False)  # whose state stays
    again = ShardedOptimizer(partly_frozen.parameters(), optimizer_cls, bucket_mb=0.0005, lr=0.01)
    checkpoint.restore(again, states[0])
    restored = checkpoint.consolidate(again)
    if dist.get_rank() == 0:
        for index, state in whole["state"].items():
            assert all(torch.equal(restored["state"][index][key], value) for key, value in state.items())
    with pytest.raises(ValueError, match="shards hold contiguous parameters"):
        local_chunks(module, optimizer)
    return True


@pytest.mark.parametrize("optimizer_cls", [torch.optim.AdamW, torch.optim.Adagrad])  # Adagrad also has state of frozen ones
def test_consolidated_state_is_the_unsharded_optimizers(optimizer_cls):
    run_ranks(consolidated, 2, optimizer_cls)


def written_weights():
    """bfloat16 weights with masters: a value written in place between steps counts; all others keep full precision."""
    module = nn.Linear(8, 8)
    optimizer = ShardedOptimizer(
        module.parameters(), torch.optim.SGD, bucket_mb=TINY_MB, param_dtype=torch.bfloat16, lr=1e-5, momentum=0.9
    )
    model = ShardedDataParallel(module, optimizer)
    for _ in range(3):
        model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    masters = [bucket.master.clone() for bucket in optimizer.buckets]
    assert any((master != master.bfloat16()).any() for master in masters)
    with torch.no_grad():
        module.weight[0] = 7.0
    module.weight.data[1] = 9.0
    model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    return [*(module.weight[row].float().mean().item() for row in (0, 1)), module.weight[2:].abs().max().item() < 1]


def test_a_weight_written_in_place_reaches_its_master():
    assert run_ranks(written_weights, 2) == [[7.0, 9.0, True]] * 2


def late_reads():
    """A gradient of a parameter that was read through a reference taken before step, past its module, is refused."""
    make_gathers_late()
    module = net()
    model, optimizer = wrap(module, overlap=True)
    references = list(module.parameters())
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"2\.weight has a gradient, but its all-gather was never waited for"):
        (inputs() @ references[2].t()).sum().backward()
    optimizer.zero_grad()
    assert model(inputs()).isfinite().all()
    assert all(param.isfinite().all() for param in references)
    return True


def test_a_gradient_of_a_read_past_the_module_is_refused():
    run_ranks(late_reads, 2)


def compiled(how):
    def trains(wrap):
        module = net()
        inner = torch.compile(module, backend="eager") if how == "module before wrapping" else module
        if how == "child":
            module[0].compile(backend="eager")
        model, optimizer = wrap(inner)
        call = model
        if how == "wrapper":
            call = torch.compile(model, backend="eager")
        elif how == "function":
            call = torch.compile(lambda x: model(x), backend="eager")
        elif how == "child after wrapping":
            module[2].compile(backend="eager")
        for step in range(4):
            backward(call, step)
            optimizer.step()
            optimizer.zero_grad()
        return [param.detach().clone() for param in module.parameters()]

    return trains


def all_compiled(bucket_mb, overlap):
    make_gathers_late()
    hows = ("module before wrapping", "child", "wrapper", "function", "child after wrapping")
    return {how: same_under_both(compiled(how), bucket_mb, overlap) for how in hows}


@pytest.mark.parametrize(("bucket_mb", "overlap"), [(75, True), (TINY_MB, True), (TINY_MB, False)])
def test_what_is_compiled_waits_too(bucket_mb, overlap):
    for differences in run_ranks(all_compiled, 2, bucket_mb, overlap):
        assert differences == dict.fromkeys(differences, pytest.approx(0, abs=1e-6))
