"""zero/checkpoint/state.py: the whole state of any optimizer on rank 0, and back into any other at any world size."""

import contextlib
import copy
import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.optim import ZeroRedundancyOptimizer
from toy import assert_equal, batch, build_toy, largest_difference, make_toy, train, weights

from zero import ShardedDataParallel, ShardedOptimizer
from zero import checkpoint as ckpt
from zero.build import build
from zero.checkpoint.state import full_state, local_chunks
from zero.flags import Flags
from zero.sharded_state import partition

STEPS = 4  # before and after the save


def train_and_save(mode):
    """The consolidated checkpoint, on rank 0. Every rank trains on the same batches, so the world size does not matter."""
    model, optimizer = build_toy(mode)
    train(model, optimizer, rank=0, steps=STEPS)
    state = ckpt.consolidate(optimizer)
    assert (state is None) == (dist.get_rank() != 0)
    return {"model": weights(model), "optimizer": state}


def resume_and_train(mode, saved):
    model, optimizer = build_toy(mode, seed=99)
    getattr(model, "module", model).load_state_dict(saved["model"])
    before = copy.deepcopy(saved["optimizer"])
    ckpt.restore(optimizer, saved["optimizer"])
    assert_equal(saved["optimizer"], before)
    train(model, optimizer, rank=0, steps=STEPS, first=STEPS)
    return {"model": weights(model), "optimizer": ckpt.consolidate(optimizer)}


def train_without_interruption():
    """Plain AdamW: its own state_dict() halfway and at the end, and the weights."""
    model, optimizer = build_toy("adamw")
    train(model, optimizer, rank=0, steps=STEPS)
    halfway = {"model": weights(model), "optimizer": copy.deepcopy(optimizer.state_dict())}
    train(model, optimizer, rank=0, steps=STEPS, first=STEPS)
    return halfway, {"model": weights(model), "optimizer": optimizer.state_dict()}


@pytest.fixture(scope="module")
def uninterrupted():
    return run_ranks(train_without_interruption, 1)[0]


@pytest.mark.parametrize(("mode", "world_size"), [("adamw", 2), ("torch", 2), ("torch", 3), ("sharded", 1), ("sharded", 4)])
def test_consolidated_state_is_what_adamw_would_hold(mode, world_size, uninterrupted):
    saved = run_ranks(train_and_save, world_size, mode)[0]
    if world_size in (1, 2, 4):  # elsewhere the mean of equal gradients is rounded
        assert_equal(saved, uninterrupted[0])
    else:
        assert largest_difference(saved["model"], uninterrupted[0]["model"]) < 1e-6
        for index, state in uninterrupted[0]["optimizer"]["state"].items():
            assert largest_difference(saved["optimizer"]["state"][index], state) < 1e-6


@pytest.mark.parametrize(
    ("mode", "world_size"), [("adamw", 2), ("torch", 2), ("torch", 4), ("sharded", 1), ("sharded", 2), ("sharded", 4)]
)
def test_any_state_resumes_anywhere(mode, world_size, uninterrupted):
    """All files are equal (above), so resuming from one of them is resuming from any."""
    halfway, end = uninterrupted
    assert_equal(run_ranks(resume_and_train, world_size, mode, halfway)[0], end)


def test_one_process_resumes_without_a_process_group(uninterrupted):
    halfway, end = uninterrupted
    resumed = resume_and_train("adamw", halfway)
    assert largest_difference(resumed["model"], end["model"]) < 1e-6  # other threads than in the ranks, other rounding


class Large(torch.nn.Module):
    """Two parameters of 28 MB, no two elements of which have the same gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (torch.nn.Parameter(torch.zeros(7_000_000)) for _ in range(2))

    def forward(self, x):
        return (self.first * x - self.second * x).sum()


def large_parameters(implementation):
    """What each rank owns takes several messages of 25 MB, whose elements must meet again in order."""
    model, oracle = Large(), Large()
    wrapped, optimizer = build(model, [{"params": list(model.parameters())}], Flags(zero1_impl=implementation), lr=0.01)
    plain = torch.optim.AdamW(oracle.parameters(), lr=0.01, fused=True)
    x = torch.arange(7_000_000.0)
    for each, its_optimizer in ((wrapped, optimizer), (oracle, plain)):
        each(x).backward()
        its_optimizer.step()
    state = ckpt.consolidate(optimizer)
    assert (state is None) == (dist.get_rank() != 0)
    if state is not None:
        assert_equal(state, plain.state_dict())
        assert state["state"][1]["exp_avg"].unique().numel() == 7_000_000


@pytest.mark.parametrize("implementation", ["torch", "sharded"])
def test_messages_are_cut_and_joined(implementation):
    run_ranks(large_parameters, 2, implementation)


ELEMENTWISE = {
    "SGD": {"momentum": 0.9},
    "Adam": {},
    "NAdam": {},
    "RAdam": {},
    "Adamax": {},
    "RMSprop": {"momentum": 0.9},
    "Adagrad": {},
    "Adadelta": {},
    "Rprop": {},
    "ASGD": {},
}


def other_optimizers_there_and_back():
    """For every class: the state of steps, consolidation, restoring and more steps is that of the plain optimizer."""
    for name, kwargs in ELEMENTWISE.items():
        optimizer_cls = getattr(torch.optim, name)
        model, oracle = make_toy(), make_toy()
        sharded = ShardedOptimizer(model.parameters(), optimizer_cls, bucket_mb=0.0002, lr=0.01, **kwargs)
        plain = optimizer_cls(oracle.parameters(), lr=0.01, **kwargs)  # Adagrad also makes state for frozen ones

        def steps(model, optimizer):
            for step in range(3):
                optimizer.zero_grad()
                model(*batch(step, rank=0)).backward()
                optimizer.step()

        steps(model, sharded)
        steps(oracle, plain)
        state = ckpt.consolidate(sharded)
        if state is not None:
            assert_equal(state, plain.state_dict(), name)
        ckpt.restore(sharded, plain.state_dict())
        steps(model, sharded)
        steps(oracle, plain)
        assert largest_difference(weights(model), weights(oracle)) == 0.0, name


def test_every_elementwise_optimizer_is_saved_and_restored():
    run_ranks(other_optimizers_there_and_back, 2)


def on_a_subgroup():
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    model, oracle = make_toy(), make_toy()
    sharded = ShardedOptimizer(model.parameters(), torch.optim.AdamW, process_group=group, bucket_mb=0.0002)
    plain = torch.optim.AdamW(oracle.parameters())
    for step in range(3):
        for toy, optimizer in ((model, sharded), (oracle, plain)):
            optimizer.zero_grad()
            toy(*batch(step, rank=0)).backward()
            optimizer.step()
    state = ckpt.consolidate(sharded)
    assert (state is None) == (dist.get_rank() == 2)
    if state is not None:
        assert_equal(state, plain.state_dict())
    ckpt.restore(sharded, plain.state_dict())
    assert largest_difference(weights(model), weights(oracle)) == 0.0
    return len(sharded.owned)


def test_a_process_group_that_is_not_the_world():
    assert all(run_ranks(on_a_subgroup, 3)[1:])


def test_the_file_of_another_model_is_refused(uninterrupted):
    model = torch.nn.Linear(3, 2)
    with pytest.raises(ckpt.CheckpointError, match="in its groups"):
        ckpt.restore(torch.optim.AdamW(model.parameters()), uninterrupted[0]["optimizer"])
    optimizer, other = torch.optim.AdamW(model.parameters()), torch.nn.Linear(2, 3)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    with pytest.raises(ckpt.CheckpointError, match="shape"):
        ckpt.restore(torch.optim.AdamW(other.parameters()), optimizer.state_dict())


def test_kernel_choice_is_the_running_optimizers(uninterrupted):
    model, _ = build_toy("adamw")
    optimizer = torch.optim.AdamW(model.param_groups(), lr=0.5, fused=False, foreach=True)
    ckpt.restore(optimizer, uninterrupted[0]["optimizer"])
    assert [(group["fused"], group["foreach"]) for group in optimizer.param_groups] == [(False, True)] * 2
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)


def test_saved_tensors_carry_no_buffer_and_stay_tied(tmp_path):
    model, optimizer = build_toy("sharded")
    state = ckpt.model_state_dict(model, optimizer)
    assert state["head.weight"] is state["embedding.weight"]
    for tensor in state.values():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


class Odd(torch.nn.Module):
    """Extra state, a buffer that is inf by design, and weights."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
        self.extra = {"calls": [1, 2.0, "three", None]}

    def forward(self, x):
        return self.inner(x)

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def odd_models(folder):
    """What a file holds of them: extra state, a mask, and weights as they were written after the last step."""
    for format in ckpt.FORMATS:
        torch.manual_seed(0)
        module = Odd()
        optimizer = ShardedOptimizer(module.parameters(), torch.optim.AdamW, param_dtype=torch.bfloat16, lr=0.1)
        model = ShardedDataParallel(module, optimizer)
        model(torch.ones(4, 8, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        module.inner.weight.data.clamp_(-0.1, 0.1)
        writer = ckpt.CheckpointWriter(folder, format=format)
        values = {"model_args": {}, "iter_num": 1, "best_val_loss": 1.0, "config": {}}
        writer.save(module, optimizer, values)
        if dist.get_rank() == 0:
            assert [type(outcome) for outcome in writer.outcomes()] == [ckpt.SaveReport]
            saved = ckpt.load(f"{folder}/ckpt.pt")["model"]
            assert saved["inner.weight"].abs().max() <= 0.1001
            assert saved["_extra_state"] == module.extra
            assert torch.equal(saved["mask"], module.mask.float())
        module.inner.weight.data[0, 0] = torch.inf
        writer.save(module, optimizer, values)
        assert dist.get_rank() or [str(outcome) for outcome in writer.outcomes()] == ["inner.weight is not finite"]
        module.inner.weight.data[0, 0] = 0
        module.extra = {"object": object()}
        with pytest.raises(ValueError, match="_extra_state is more than") if dist.get_rank() == 0 else contextlib.nullcontext():
            writer.save(module, optimizer, values)
    return True


def test_models_with_more_than_weights(tmp_path):
    run_ranks(odd_models, 2, str(tmp_path))


def state_dict_of_another_module():
    """The whole state dict, right after a step, of a module outside of the wrapper; and the weights when all have arrived."""
    toy = make_toy()
    outside = torch.nn.Linear(7, 7)
    outside.weight = toy.hidden.weight
    optimizer = ShardedOptimizer(toy.param_groups(), torch.optim.AdamW, bucket_mb=0.0002, lr=0.01)
    model = ShardedDataParallel(toy, optimizer, overlap=True)
    model(*batch(0, dist.get_rank())).backward()
    optimizer.step()
    saved = ckpt.model_state_dict(outside, optimizer)
    return None if saved is None else saved["weight"], toy.hidden.weight.detach()


def test_parameters_in_flight_are_waited_for_through_any_module():
    (saved, weight), (none, _) = run_ranks(state_dict_of_another_module, 2)
    assert none is None
    assert torch.equal(saved, weight)
    assert saved.isfinite().all()


def models_that_differ():
    """Rank 1 passes another module, without the weight that both ranks divide."""
    module = torch.nn.Linear(8, 8)
    optimizer = divide(module, torch.optim.AdamW, param_dtype=torch.bfloat16)
    passed = module if dist.get_rank() == 0 else torch.nn.Sequential(module)
    for save in (ckpt.model_state_dict, full_state, local_chunks):
        with pytest.raises(ckpt.CheckpointError) as error:
            save(passed, optimizer)
        message = "model.weight has 64 elements on rank 0, but the ranks hold 32; save the same model on all ranks"
        assert str(error.value) == message
    return True


def test_models_that_differ_between_ranks_are_refused():
    run_ranks(models_that_differ, 2)


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


def everywhere(state):
    """What rank 0 has, on all ranks."""
    states = [state]
    dist.broadcast_object_list(states)
    return states[0]


def there_and_back(kwargs, folder):
    """The state in memory, in each kind of file, and after each conversion, goes on as if it had never been interrupted."""
    optimizer_cls = Keeping if "kind" in kwargs else torch.optim.AdamW
    model, oracle = make_list(), make_list()
    optimizer, plain = divide(model, optimizer_cls, **kwargs), optimizer_cls(oracle.parameters(), **kwargs)
    assert [(slices[0].param, slices[0].numel) for slices in partition(optimizer).slices] == [(0, 1), (0, 16)]
    update(model, optimizer, range(3))
    update(oracle, plain, range(3))
    expected = copy.deepcopy(plain.state_dict())
    update(oracle, plain, range(3, 6))
    state = everywhere(ckpt.consolidate(optimizer))
    assert_equal(state, expected)
    loaded = [(ckpt.model_state_dict(model, optimizer), state, None)]
    for format in ckpt.FORMATS:
        path = f"{folder}/{format}/ckpt.pt"
        if dist.get_rank() == 0:
            os.mkdir(os.path.dirname(path))
        dist.barrier()
        values = {"model_args": {}, "iter_num": 3, "best_val_loss": 0.0, "config": {}}
        ckpt.CheckpointWriter(os.path.dirname(path), format=format).save(model, optimizer, values)
        if dist.get_rank() == 0:
            ckpt.convert(path, f"{path}.converted.pt")
        dist.barrier()
        for each in (path, f"{path}.converted.pt"):
            saved = ckpt.load(each)
            loaded.append((saved["model"], saved["optimizer"], ckpt.chunk_reader(each, saved)))
    for weights_, its_state, read_chunks in loaded:
        for resume in (divide, lambda model, cls, **kwargs: cls(model.parameters(), **kwargs)):
            resumed = make_list()
            resumed.load_state_dict(everywhere(weights_))
            its_optimizer = resume(resumed, optimizer_cls, **kwargs)
            ckpt.restore(its_optimizer, its_state, read_chunks)
            update(resumed, its_optimizer, range(3, 6))
            assert largest_difference(weights(resumed), weights(oracle)) == 0
            assert_equal(everywhere(ckpt.consolidate(its_optimizer)), plain.state_dict())
    return True


@pytest.mark.parametrize("kwargs", [{"kind": "nested"}, {"kind": "mu"}, {"amsgrad": True}], ids=str)
def test_state_of_any_name_and_in_dicts(kwargs, tmp_path):
    run_ranks(there_and_back, 2, kwargs, str(tmp_path))


REFUSED = {
    "history": "'history' of parameter 0 in shape (2, 1) for 1 elements",
    "norm": "'norm' of parameter 0 as torch.float32 ",
    "single": "'count' of parameter 0 as a number per element, torch.float32 on rank 0 and torch.float32 [1.0] on rank 1",
    "late": "'late' of parameter 0 as 1.0 on rank 0 and nothing on rank 1",
    "text": "'text' of parameter 0 as str",
    "twice": "'a.b' of parameter 0 twice",
}


def refused():
    """All ranks say the same, and none waits for another."""
    for kind, message in REFUSED.items():
        model = make_list()
        optimizer = divide(model, Keeping, kind=kind, shard_size=2)
        update(model, optimizer, range(2))
        for save in (partial(ckpt.consolidate, optimizer), *(partial(f, model, optimizer) for f in (full_state, local_chunks))):
            with pytest.raises(ckpt.CheckpointError) as error:
                save()
            assert str(error.value).startswith(f"Keeping keeps {message}"), error.value
            assert everywhere(str(error.value)) == str(error.value)
            assert ("use partition='parameter'" in str(error.value)) == (kind not in ("text", "twice"))
    return True


@pytest.mark.parametrize("world_size", [2, 4])  # with 4, there are two replicas
def test_state_that_cannot_be_joined_is_refused_when_it_is_saved(world_size):
    run_ranks(refused, world_size)


def state_of_whole_parameters():
    """With partition='parameter' there is nothing to join: state has any shape."""
    model, oracle = make_list(), make_list()
    optimizer, plain = (
        divide(model, Keeping, kind="history", partition="parameter"),
        Keeping(oracle.parameters(), kind="history"),
    )
    update(model, optimizer, range(2))
    update(oracle, plain, range(2))
    state = everywhere(ckpt.consolidate(optimizer))
    assert_equal(state, plain.state_dict())
    again = divide(make_list(), Keeping, partition="parameter")
    ckpt.restore(again, state)
    assert_equal(everywhere(ckpt.consolidate(again)), state)
    return True


def test_state_of_whole_parameters_has_any_shape():
    run_ranks(state_of_whole_parameters, 2)


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
        state, (outline, _) = ckpt.consolidate(optimizer), local_chunks(model, optimizer)
        optimizer.param_groups[0]["lr"].fill_(0.25)
        if dist.get_rank() == 0:
            assert state["param_groups"][0]["lr"] == outline["optimizer"]["param_groups"][0]["lr"] == 0.5
        state = everywhere(state)
        ckpt.restore(optimizer, state)
        state["param_groups"][0]["lr"].fill_(0.125)
        assert optimizer.param_groups[0]["lr"] == partition(optimizer).inner.param_groups[0]["lr"] == 0.5
    return True


def test_a_tensor_learning_rate_is_copied():
    run_ranks(tensor_learning_rates, 2)


def other_classes():
    saved = {}
    for name, kwargs in {**ELEMENTWISE, "AdamW": {"amsgrad": True}}.items():
        model = make_list()
        optimizer = divide(model, getattr(torch.optim, name), **kwargs)
        saved[f"new {name}"] = everywhere(ckpt.consolidate(optimizer))
        update(model, optimizer, range(1))
        saved[name] = everywhere(ckpt.consolidate(optimizer))
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
    return True


def test_state_of_another_class_is_refused():
    run_ranks(other_classes, 2)
