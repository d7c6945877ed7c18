"""zero/checkpoint/state.py: the whole state of any optimizer on rank 0, and back into any other at any world size."""

import contextlib
import copy
from collections import OrderedDict
from functools import partial

import pytest
import torch
import torch.distributed as dist
from checkpoints import VALUES
from ranks import run_in_turn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils._pytree import tree_map_only
from toy import assert_equal, make_toy, of_rank_0, refused, weights

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


def models_that_differ():
    """One rank passes a copy, which has no masters, or another module, without the weight that both ranks divide."""
    module = torch.nn.Linear(8, 8)
    optimizer = divide(module, torch.optim.AdamW, param_dtype="bfloat16")
    for of_rank, other in ((0, copy.deepcopy(module)), (1, copy.deepcopy(module)), (1, torch.nn.Sequential(module))):
        passed = other if dist.get_rank() == of_rank else module
        for save in (ckpt.model_state_dict, everything):
            with pytest.raises(ckpt.CheckpointError, match=r"weight has .* on rank 0, but the ranks hold .*; save the same"):
                save(passed, optimizer)


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


def make_any():
    """Tied and frozen parameters, and some that are not contiguous or have no elements."""
    module = make_toy()
    module.conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    module.empty = torch.nn.Parameter(torch.zeros(0, 3))
    module.expanded = torch.nn.Parameter(torch.ones(3, 1).expand(3, 2), requires_grad=False)
    module.sliced = torch.nn.Parameter(torch.randn(6, 6)[::2, ::3].t(), requires_grad=False)
    module.transposed = torch.nn.Parameter(torch.randn(5, 7).t())
    return module


def divide(model, optimizer_cls, **kwargs):
    return ShardedOptimizer(model.parameters(), optimizer_cls, bucket_mb=1e-6, elementwise=optimizer_cls is Keeping, **kwargs)


def update(model, optimizer, steps):
    for step in steps:
        for number, param in enumerate(model.parameters()):
            if param.requires_grad:
                gradient = torch.randn(param.shape, generator=torch.Generator().manual_seed(100 * step + number))
                param.grad = torch.empty_like(param).copy_(gradient)  # with the strides of the parameter
        optimizer.step()


def assert_alike(a, b):
    """Equal, and with the same strides."""
    assert_equal(a, b)
    assert tree_map_only(torch.Tensor, torch.Tensor.stride, a) == tree_map_only(torch.Tensor, torch.Tensor.stride, b)


def there_and_back(make, optimizer_cls, kwargs, folder, group=None):
    """The state in memory and in a file goes on as if it had never been interrupted. Adagrad also has state of frozen ones."""
    model, oracle = make(), make()
    strides = [param.stride() for param in model.parameters()]
    optimizer = divide(model, optimizer_cls, process_group=group, **kwargs)
    assert [param.stride() for param in model.parameters()] == strides
    plain = optimizer_cls(oracle.parameters(), **kwargs)
    if make is make_list:
        of_ranks = map(partition(optimizer).plan.slices, range(2))
        assert [(slices[0].number, slices[0].numel) for slices in of_ranks] == [(0, 1), (0, 16)]
    update(model, optimizer, range(3))
    update(oracle, plain, range(3))
    state, whole = ckpt.consolidate(optimizer), ckpt.model_state_dict(model, optimizer)
    assert (state is None) == (whole is None) == (dist.get_rank(group) != 0)
    ckpt.save(f"{folder}/ckpt.pt", model, optimizer, **VALUES)
    saved = ckpt.load(f"{folder}/ckpt.pt")
    if state is not None:
        for its_state in (state, saved["optimizer"]):
            assert_alike(its_state, plain.state_dict())
        assert_equal(dict(whole), dict(oracle.state_dict()))
        assert_alike(dict(saved["model"]), dict(whole))
        assert make is make_list or whole["head.weight"] is whole["embedding.weight"]
        for name, tensor in whole.items():  # `sliced` is a part of something else
            assert tensor.untyped_storage().nbytes() <= tensor.nbytes or name == "sliced", "it carries no buffer"
    update(oracle, plain, range(3, 6))
    for its_state, its_weights in of_rank_0([(state, whole), (saved["optimizer"], saved["model"])], group):
        for resume in (partial(divide, process_group=group), lambda model, cls, **kwargs: cls(model.parameters(), **kwargs)):
            resumed = copy.deepcopy(make())  # in which no parameter has gaps
            its_weights.pop("expanded", None)  # torch writes into no such tensor
            resumed.load_state_dict(its_weights, strict=False)
            its_optimizer = resume(resumed, optimizer_cls, **kwargs)
            ckpt.restore(its_optimizer, its_state)
            update(resumed, its_optimizer, range(3, 6))
            assert_equal(weights(resumed), weights(oracle))
            held = ckpt.consolidate(its_optimizer)
            if held is not None:
                assert_alike(held, plain.state_dict())
        partly_frozen = make()
        for param in [*partly_frozen.parameters()][::2]:  # whose state stays
            param.requires_grad_(False)
        its_optimizer = divide(partly_frozen, optimizer_cls, process_group=group, **kwargs)
        ckpt.restore(its_optimizer, its_state)
        held = ckpt.consolidate(its_optimizer)
        if held is not None:
            assert_equal(held["state"], its_state["state"])
    return len(optimizer.placed.owned)


def on_a_subgroup(folder):
    group = dist.new_group([1, 2])
    return there_and_back(make_any, torch.optim.AdamW, {}, folder, group) if dist.get_rank() else None


REFUSED = {
    "history": "'history' of parameter 0 in shape (2, ",
    "norm": "'norm' of parameter 0 as torch.float32 ",
    "single": "'count' of parameter 0 as a number per element, torch.float32 on rank 0 and torch.float32 [1.0] on rank 1",
    "late": "'late' of parameter 0 as 1.0 on rank 0 and nothing on rank 1",
    "twice": "two entries of the state are named 'a.b'; rename one of them",
    "text": "'text' of parameter 0 as str",
}


def state_that_is_refused(*kinds):
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


def test_state_of_every_class_and_kind_goes_there_and_back(tmp_path):
    cases = [(make_any, getattr(torch.optim, name), kwargs) for name, kwargs in ELEMENTWISE.items()]
    cases += [(make_list, Keeping, {"kind": "nested"}), (make_list, Keeping, {"kind": "mu"})]
    cases += [(make, torch.optim.AdamW, {"amsgrad": True}) for make in (make_list, make_any)]
    run_in_turn(2, *(partial(there_and_back, *case, str(tmp_path)) for case in cases))
    [[_, *owned]] = run_in_turn(3, partial(on_a_subgroup, str(tmp_path)))
    assert all(owned)


def test_models_with_more_than_weights_and_state_of_any_shape(tmp_path):
    run_in_turn(2, *(partial(of, str(tmp_path)) for of in (odd_models, weights_that_freeze_and_thaw)), tensor_learning_rates)


def test_a_state_dict_of_copies_lacks_the_masters():
    model = torch.nn.Linear(4, 4)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, param_dtype="bfloat16")
    assert ckpt.model_state_dict(model, optimizer)["weight"].dtype == torch.float32
    model._register_state_dict_hook(lambda _, state, *__: state.update({"weight": state["weight"].clone()}))
    refused(ckpt.CheckpointError, "a copy of weight, which lacks its master", ckpt.model_state_dict, model, optimizer)


def test_what_cannot_be_saved_or_restored_is_refused():
    run_in_turn(2, models_that_differ, partial(state_that_is_refused, *REFUSED), other_classes)
    run_in_turn(4, partial(state_that_is_refused, "late"))  # there are two replicas
