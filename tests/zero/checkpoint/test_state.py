"""zero/checkpoint/state.py: the whole state of any optimizer on rank 0, and back into any other at any world size."""

import contextlib
import copy
import os
from collections import OrderedDict
from functools import partial

import pytest
import torch
import torch.distributed as dist
from checkpoints import VALUES
from ranks import run_in_turn
from torch.distributed.optim import ZeroRedundancyOptimizer
from toy import assert_equal, batch, largest_difference, make_toy, of_rank_0, sharded_toy, train, weights

from run.checkpoint_folder import SaveReport
from run.checkpoint_writer import CheckpointWriter
from zero import ShardedDataParallel, ShardedOptimizer
from zero import checkpoint as ckpt
from zero.checkpoint.state import snapshot
from zero.sharded_state import partition

ELEMENTWISE = {name: {} for name in ("Adam", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "Rprop", "ASGD")}
ELEMENTWISE |= {name: {"momentum": 0.9} for name in ("SGD", "RMSprop")}


def everything(model, optimizer):
    return snapshot(optimizer, model).in_memory()


def steps_there_and_back(name, kwargs, group=None):
    """The state of steps, consolidation, restoring and more steps is that of the plain optimizer."""
    optimizer_cls = getattr(torch.optim, name)
    model, oracle = make_toy(), make_toy()
    sharded = ShardedOptimizer(model.parameters(), optimizer_cls, group, bucket_mb=0.0002, lr=0.01, **kwargs)
    plain = optimizer_cls(oracle.parameters(), lr=0.01, **kwargs)  # Adagrad also makes state for frozen ones
    steps = partial(train, rank=0, steps=3, decay_lr=False)
    steps(model, sharded)
    steps(oracle, plain)
    state = ckpt.consolidate(sharded)
    assert (state is None) == (dist.get_rank(group) != 0)
    if state is not None:
        assert_equal(state, plain.state_dict(), name)
    ckpt.restore(sharded, plain.state_dict())
    steps(model, sharded)
    steps(oracle, plain)
    assert largest_difference(weights(model), weights(oracle)) == 0.0, name
    return len(sharded.placed.owned)


def on_a_subgroup():
    group = dist.new_group([1, 2])
    return steps_there_and_back("AdamW", {}, group) if dist.get_rank() else None


def test_kernel_choice_is_the_running_optimizers():
    saved = torch.optim.AdamW(make_toy().param_groups(), betas=(0.9, 0.95), fused=True)
    optimizer = torch.optim.AdamW(make_toy().param_groups(), lr=0.5, fused=False, foreach=True)
    ckpt.restore(optimizer, saved.state_dict())
    assert [(group["fused"], group["foreach"]) for group in optimizer.param_groups] == [(False, True)] * 2
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)


class Odd(torch.nn.Linear):
    """Extra state, a buffer that is inf by design, and weights."""

    def __init__(self):
        super().__init__(8, 8)
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
        self.extra = OrderedDict(calls=[1, 2.0, "three", None])

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def odd_models(folder):
    """What a file holds of them: extra state, a mask, and weights as they were written after the last step."""
    for background in (False, True):
        torch.manual_seed(0)
        module = Odd()
        optimizer = ShardedOptimizer(module.parameters(), torch.optim.AdamW, param_dtype="bfloat16", lr=0.1)
        model = ShardedDataParallel(module, optimizer)
        model(torch.ones(4, 8, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.set_parameter(module.weight, module.weight.clamp(-0.1, 0.1))
        writer = CheckpointWriter(folder, background=background)
        whole = ckpt.model_state_dict(module, optimizer)
        writer.write(module, optimizer, VALUES)
        writer.wait()
        if dist.get_rank() == 0:
            assert type(whole["_extra_state"]) is OrderedDict
            assert [type(outcome) for outcome in writer.outcomes()] == [SaveReport]
            saved = ckpt.load(f"{folder}/ckpt.pt")["model"]
            assert saved["weight"].abs().max() <= 0.1001
            assert saved["_extra_state"] == module.extra
            assert torch.equal(saved["mask"], module.mask.float())
        module.extra = {"object": object()}
        with pytest.raises(ValueError, match="_extra_state is more than"):  # on all ranks
            _ = writer.write(module, optimizer, VALUES), writer.wait()


def weights_that_freeze_and_thaw(folder):
    """After it was wrapped. What is saved of a weight is what the plan says, its master, or for a frozen one itself."""
    for requires_grad in (True, False):
        module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8).requires_grad_(requires_grad))
        optimizer = ShardedOptimizer(module.parameters(), torch.optim.AdamW, param_dtype="bfloat16", lr=0.1)
        ShardedDataParallel(module, optimizer)
        module[1].requires_grad_(not requires_grad)
        ckpt.save(f"{folder}/ckpt.pt", module, optimizer, **VALUES)
        saved = ckpt.load(f"{folder}/ckpt.pt")["model"]
        assert saved.keys() == module.state_dict().keys()
        for name, value in module.state_dict().items():
            assert torch.equal(saved[name].bfloat16(), value), name
        assert saved["1.weight"].dtype == (torch.float32 if requires_grad else torch.bfloat16)


def state_dict_of_another_module():
    """Parameters in flight are waited for through any module, here one outside of the wrapper, right after a step."""
    model, optimizer = sharded_toy(overlap=["hidden"])
    toy, outside = model.module, torch.nn.Linear(7, 7)
    outside.weight = toy.hidden.weight
    model(*batch(0, dist.get_rank())).backward()
    optimizer.step()
    saved = ckpt.model_state_dict(outside, optimizer)
    whole = ckpt.model_state_dict(toy, optimizer)
    assert (saved is None) == (whole is None) == (dist.get_rank() != 0)
    if saved is not None:
        assert torch.equal(saved["weight"], toy.hidden.weight)
        assert whole["head.weight"] is whole["embedding.weight"]
        for tensor in whole.values():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes, "it carries no buffer"


def models_that_differ():
    """Rank 1 passes another module, without the weight that both ranks divide."""
    module = torch.nn.Linear(8, 8)
    optimizer = divide(module, torch.optim.AdamW, param_dtype="bfloat16")
    passed = module if dist.get_rank() == 0 else torch.nn.Sequential(module)
    for save in (ckpt.model_state_dict, everything):
        with pytest.raises(ckpt.CheckpointError) as error:
            save(passed, optimizer)
        message = "model.weight has 64 elements on rank 0, but the ranks hold 32; save the same model on all ranks"
        assert str(error.value) == message


SHAPES = ((17,), (), (1,), (1, 1), (4, 5))  # on two ranks, rank 0 has the last element of the first, rank 1 the others


class Keeping(torch.optim.Optimizer):
    """SGD with momentum, and state of each kind that a class may keep."""

    def __init__(self, params, lr=0.01, kind="nested"):
        super().__init__(params, {"lr": lr, "kind": kind})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(group["kind"], param, self.state[param])
                    param.sub_(self.state[param]["mu"], alpha=group["lr"])

    def update(self, kind, param, state):
        momentum = state.setdefault("mu", torch.zeros_like(param))  # an entry of this name is one number in ASGD
        momentum.mul_(0.9).add_(param.grad)
        if kind == "nested":  # as in AggMo
            buffers = state.setdefault("momentum_buffer", {beta: torch.zeros_like(param) for beta in (0.0, 0.99)})
            for beta, buffer in buffers.items():
                param.sub_(buffer.mul_(beta).add_(param.grad), alpha=0.01)
            state["counts"] = (state.get("counts", (0, None))[0] + 1, None, [torch.tensor(3.0)])
        elif kind == "history":
            state["history"] = torch.stack([momentum, param.grad])
        elif kind == "norm":
            state["norm"] = param.grad.norm()
        elif kind == "single":
            state["count"] = torch.ones(1)
        elif kind == "late" and param.numel() == 1:
            state["late"] = 1.0
        elif kind == "text":
            state["text"] = "a"
        elif kind == "twice":
            state["a"], state["a.b"] = {"b": torch.zeros_like(param)}, torch.ones_like(param)


def make_list():
    generator = torch.Generator().manual_seed(0)
    return torch.nn.ParameterList(torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES)


def divide(model, optimizer_cls, **kwargs):
    return ShardedOptimizer(model.parameters(), optimizer_cls, bucket_mb=1e-6, elementwise=optimizer_cls is Keeping, **kwargs)


def update(model, optimizer, steps):
    for step in steps:
        for number, param in enumerate(model.parameters()):
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(100 * step + number))
        optimizer.step()


def there_and_back(kwargs, folder):
    """The state in memory and in a file goes on as if it had never been interrupted."""
    optimizer_cls = Keeping if "kind" in kwargs else torch.optim.AdamW
    model, oracle = make_list(), make_list()
    optimizer, plain = divide(model, optimizer_cls, **kwargs), optimizer_cls(oracle.parameters(), **kwargs)
    of_ranks = map(partition(optimizer).plan.slices, range(2))
    assert [(slices[0].number, slices[0].numel) for slices in of_ranks] == [(0, 1), (0, 16)]
    update(model, optimizer, range(3))
    update(oracle, plain, range(3))
    expected = copy.deepcopy(plain.state_dict())
    update(oracle, plain, range(3, 6))
    state = of_rank_0(ckpt.consolidate(optimizer))
    assert_equal(state, expected)
    os.makedirs(folder, exist_ok=True)
    ckpt.save(f"{folder}/ckpt.pt", model, optimizer, **VALUES)
    saved = ckpt.load(f"{folder}/ckpt.pt")
    if dist.get_rank() == 0:
        assert_equal(saved["optimizer"], expected)
    for weights_, its_state in ((ckpt.model_state_dict(model, optimizer), state), (saved["model"], saved["optimizer"])):
        for resume in (divide, lambda model, cls, **kwargs: cls(model.parameters(), **kwargs)):
            resumed = make_list()
            resumed.load_state_dict(of_rank_0(weights_))
            its_optimizer = resume(resumed, optimizer_cls, **kwargs)
            ckpt.restore(its_optimizer, its_state)
            update(resumed, its_optimizer, range(3, 6))
            assert largest_difference(weights(resumed), weights(oracle)) == 0
            assert_equal(of_rank_0(ckpt.consolidate(its_optimizer)), plain.state_dict())


REFUSED = {
    "history": "'history' of parameter 0 in shape (2, ",
    "norm": "'norm' of parameter 0 as torch.float32 ",
    "single": "'count' of parameter 0 as a number per element, torch.float32 on rank 0 and torch.float32 [1.0] on rank 1",
    "late": "'late' of parameter 0 as 1.0 on rank 0 and nothing on rank 1",
    "twice": "two entries of the state are named 'a.b'; rename one of them",
    "text": "'text' of parameter 0 as str",
}


def refused(*kinds):
    """All ranks say why, and none waits for another."""
    for kind, message in ((kind, REFUSED[kind]) for kind in kinds):
        model = make_list()
        optimizer = divide(model, Keeping, kind=kind, shard_size=2)
        update(model, optimizer, range(2))
        for save in (partial(ckpt.consolidate, optimizer), partial(everything, model, optimizer)):
            with pytest.raises(ckpt.CheckpointError) as error:
                save()
            assert str(error.value).removeprefix("Keeping keeps ").startswith(message), error.value
            assert ("ZeroRedundancyOptimizer takes any" in str(error.value)) == (kind not in ("text", "twice"))


def tensor_learning_rates():
    """What is saved does not change with the optimizer, and the optimizer does not change with what was restored."""
    model = make_list()
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5)),
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=torch.tensor(0.5)),
        divide(model, torch.optim.AdamW, lr=torch.tensor(0.5)),
    ]
    for optimizer in optimizers:
        update(model, optimizer, range(1))
        state, outline = ckpt.consolidate(optimizer), snapshot(optimizer).outline
        optimizer.param_groups[0]["lr"].fill_(0.25)
        if dist.get_rank() == 0:
            assert state["param_groups"][0]["lr"] == outline["optimizer"]["param_groups"][0]["lr"] == 0.5
        state = of_rank_0(state)
        ckpt.restore(optimizer, state)
        state["param_groups"][0]["lr"].fill_(0.125)
        assert optimizer.param_groups[0]["lr"] == partition(optimizer).inner.param_groups[0]["lr"] == 0.5


def other_classes():
    saved = {}
    for name, kwargs in {**ELEMENTWISE, "AdamW": {"amsgrad": True}}.items():
        model = make_list()
        optimizer = divide(model, getattr(torch.optim, name), **kwargs)
        saved[f"new {name}"] = of_rank_0(ckpt.consolidate(optimizer))
        update(model, optimizer, range(1))
        saved[name] = of_rank_0(ckpt.consolidate(optimizer))
    saved["AdamW and more"] = copy.deepcopy(saved["AdamW"])
    for entries in saved["AdamW and more"]["state"].values():
        entries["more"] = torch.tensor(1.0)
    accepted = set()
    for name, state in saved.items():
        for cls in (torch.optim.AdamW, torch.optim.SGD, type("Mine", (torch.optim.Adam,), {})):
            optimizer = cls(make_list().parameters())
            with contextlib.suppress(ckpt.CheckpointError):
                ckpt.restore(optimizer, state)
                accepted.add((name, cls.__name__))
    state_of_adam = {(name, cls) for name in ("Adam", "AdamW", "RAdam", "AdamW and more") for cls in ("AdamW", "Mine")}
    fresh = {(name, cls) for name in saved if name.startswith("new ") for cls in ("AdamW", "SGD", "Mine")}
    fresh -= {("new Adagrad", cls) for cls in ("AdamW", "SGD", "Mine")}  # it has state before its first step
    assert accepted == state_of_adam | fresh | {("SGD", "SGD"), ("AdamW and more", "SGD")}, accepted
    with pytest.raises(ckpt.CheckpointError, match="is step, exp_avg, exp_avg_sq, max_exp_avg_sq of Adam or AdamW, not of SGD"):
        ckpt.restore(divide(make_list(), torch.optim.SGD, momentum=0.9), saved["AdamW"])


def strides_of(state_dict):
    return {index: [value.stride() for value in state.values()] for index, state in state_dict["state"].items()}


def any_strides(optimizer_cls, folder):
    """Zero-size, frozen, channels_last and transposed parameters; Adagrad also has state of frozen ones."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last))
    module.empty = torch.nn.Parameter(torch.zeros(0, 3))
    module.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    module.expanded = torch.nn.Parameter(torch.ones(3, 1).expand(3, 2), requires_grad=False)
    module.sliced = torch.nn.Parameter(torch.randn(6, 6)[::2, ::3].t(), requires_grad=False)
    module.transposed = torch.nn.Parameter(torch.randn(5, 7).t())
    strides = [param.stride() for param in module.parameters()]
    plain = copy.deepcopy(module)
    optimizer = ShardedOptimizer(module.parameters(), optimizer_cls, bucket_mb=0.0002, lr=0.01)
    reference = optimizer_cls(plain.parameters(), lr=0.01)
    assert [param.stride() for param in module.parameters()] == strides
    for trained, its_optimizer in ((module, optimizer), (plain, reference)):
        for step in range(3):
            images = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(step))
            loss = trained[0](torch.ones(8)).square().sum() + trained[1](images).square().sum()
            (loss + trained.empty.sum() + (trained.transposed * torch.arange(5.0)).square().sum()).backward()
            its_optimizer.step()
            its_optimizer.zero_grad()
    whole, saved = ckpt.consolidate(optimizer), ckpt.model_state_dict(module, optimizer)
    if dist.get_rank() == 0:
        expected = reference.state_dict()
        assert strides_of(whole) == strides_of(expected)
        assert_equal(whole, expected)
        assert_equal(saved, dict(plain.state_dict()))
    state, expected = of_rank_0(whole), strides_of(reference.state_dict())
    strides_of_model = {name: held.stride() for name, held in of_rank_0(saved).items()}
    partly_frozen = copy.deepcopy(module)
    partly_frozen[0].requires_grad_(False)  # whose state stays
    again = ShardedOptimizer(partly_frozen.parameters(), optimizer_cls, bucket_mb=0.0005, lr=0.01)
    ckpt.restore(again, state)
    restored = ckpt.consolidate(again)
    if dist.get_rank() == 0:
        assert_equal(restored["state"], whole["state"])
    ckpt.restore(reference, state)
    assert strides_of(reference.state_dict()) == expected
    ckpt.save(f"{folder}/ckpt.pt", module, optimizer, **VALUES)
    read = ckpt.load(f"{folder}/ckpt.pt")
    assert {name: held.stride() for name, held in read["model"].items()} == strides_of_model
    ckpt.restore(again, read["optimizer"])
    restored = ckpt.consolidate(again)
    if dist.get_rank() == 0:
        assert_equal(restored["state"], whole["state"])


def test_state_of_every_class_and_kind_goes_there_and_back(tmp_path):
    classes = [partial(steps_there_and_back, *each) for each in ELEMENTWISE.items()]
    kinds = [{"kind": "nested"}, {"kind": "mu"}, {"amsgrad": True}]
    strides = [partial(any_strides, cls, str(tmp_path)) for cls in (torch.optim.AdamW, torch.optim.Adagrad)]
    run_in_turn(2, *classes, *strides, *(partial(there_and_back, kwargs, f"{tmp_path}/{kwargs}") for kwargs in kinds))
    [[_, *owned]] = run_in_turn(3, on_a_subgroup)
    assert all(owned)


def test_models_with_more_than_weights_and_state_of_any_shape(tmp_path):
    run_in_turn(2, *(partial(of, str(tmp_path)) for of in (odd_models, weights_that_freeze_and_thaw)))
    run_in_turn(2, state_dict_of_another_module, tensor_learning_rates)


def test_a_state_dict_of_copies_lacks_the_masters():
    model = torch.nn.Linear(4, 4)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, param_dtype="bfloat16")
    assert ckpt.model_state_dict(model, optimizer)["weight"].dtype == torch.float32
    model._register_state_dict_hook(lambda _, state, *__: state.update({"weight": state["weight"].clone()}))
    with pytest.raises(ckpt.CheckpointError, match="a copy of weight, which lacks its master"):
        ckpt.model_state_dict(model, optimizer)


def test_what_cannot_be_saved_or_restored_is_refused():
    run_in_turn(2, models_that_differ, partial(refused, *REFUSED), other_classes)
    run_in_turn(4, partial(refused, "late"))  # there are two replicas
