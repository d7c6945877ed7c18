"""What programs expect of an optimizer: the interface of torch.optim and of ZeroRedundancyOptimizer."""

import copy
import gc
import itertools
import math
import weakref
from collections import defaultdict
from contextlib import nullcontext
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from blocks import Part
from nets import TINY_MB, net, wrap
from ranks import run_in_turn, run_ranks
from torch import nn
from torch.distributed.checkpoint import CheckpointException, load, save
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import StepLR
from toy import assert_equal, of_rank_0, refused, weights

from zero import Muon, ShardedDataParallel, ShardedOptimizer
from zero.build import clip_grad_norm_
from zero.checkpoint import consolidate

NAMES = r"call optimizer\.consolidate_state_dict\(\) on all ranks"


def sharded_and_plain(cls=AdamW, make=net, lr=0.01, **options):
    """Two equal modules, each with its optimizer of this class."""
    module, oracle = make(), make()
    return (module, ShardedOptimizer(module.parameters(), cls, lr=lr, **options)), (oracle, cls(oracle.parameters(), lr=lr))


def train(pairs, steps, exact=True):
    """Models with their optimizers, on data that are the same on all ranks: gradients are the means. The models stay equal."""
    for step, (model, optimizer) in itertools.product(steps, pairs):
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()
    if exact:
        assert_equal(*(weights(model) for model, _ in (pairs[0], pairs[-1])))


# -- state dicts -------------------------------------------------------------------------------------------------------


def with_unused():
    module = net()
    module.register_parameter("unused", nn.Parameter(torch.ones(9)))
    return module


def state_dicts(to, **kwargs):
    """Under a schedule, and with a parameter that never has a gradient, and so no state."""
    (module, optimizer), (oracle, plain) = pairs = sharded_and_plain(make=with_unused, bucket_mb=TINY_MB, **kwargs)
    assert_equal(optimizer.state_dict(), plain.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state_dict()["state"] == {}, "there is no state yet"
    seen = []
    optimizer.register_state_dict_post_hook(lambda _, saved: seen.append(len(saved["state"])))
    optimizer.register_load_state_dict_pre_hook(lambda _, loaded: {**loaded, "loaded": seen.append("loading")})
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    schedulers = [StepLR(each, 1, 0.5) for each in (optimizer, plain)]
    for step in range(2):
        train(pairs, [step])
        for scheduler in schedulers:
            scheduler.step()
        refused(RuntimeError, NAMES, optimizer.state_dict)
    optimizer.state["seen"], plain.state["seen"] = 3, 3  # which callers may keep there
    refused(ValueError, "to=9 is not one of the ranks 0 to", optimizer.consolidate_state_dict, 9)
    optimizer.consolidate_state_dict(to)
    if dist.get_rank() == to:
        optimizer.state_dict()["state"].clear()  # is the caller's own
        assert_equal(saved := optimizer.state_dict(), plain.state_dict())
        assert (saved["param_groups"][0]["lr"], saved["state"].keys()) == (0.0025, {1, 2, 3, 4, "seen"})
        assert seen[-1] == 5  # hooks see four parameters and the caller's entry
    else:
        assert_equal(optimizer.state_dict()["param_groups"], plain.state_dict()["param_groups"])
    refused(ValueError, "this state dict has no state", optimizer.load_state_dict, optimizer.state_dict())  # each rank its own
    train([(module, optimizer)], [2])
    with torch.no_grad():
        for param, value in zip(module.parameters(), oracle.parameters(), strict=True):
            param.copy_(value)
    saved = plain.state_dict()
    optimizer.load_state_dict(saved)
    assert_equal(saved, plain.state_dict(), "is only read")
    assert (optimizer.state["seen"], seen[-2:]) == (3, ["loading", "loaded"])
    refused(RuntimeError, NAMES, optimizer.state_dict)
    train(pairs, [2])


def without_state():
    """Nothing is gathered: before the first step, twice, and of a class without state, where later steps go on."""
    for optimizer_class, steps in ((AdamW, 0), (SGD, 1), (torch.optim.Adagrad, 0)):
        torch.manual_seed(0)
        small = nn.Linear(8, 1, bias=False)
        optimizer = ShardedOptimizer(small.parameters(), optimizer_class, lr=0.01)
        assert bool(optimizer.placed.owned) == (dist.get_rank() == 0), "the last rank has nothing"
        for _ in range(steps + 2):
            optimizer.consolidate_state_dict()
            optimizer.consolidate_state_dict()
            consolidated = consolidate(optimizer)
            if consolidated is not None:
                assert_equal(optimizer.state_dict(), consolidated)
                assert bool(consolidated["state"]) == (optimizer_class is torch.optim.Adagrad)
            train([(small, optimizer)], range(steps))


def gathered_by_a_hook():
    """After every second step, for a program whose saving cannot be edited."""
    (_, optimizer), (_, plain) = pairs = sharded_and_plain(Adam)
    steps = itertools.count(1)
    optimizer.register_step_post_hook(lambda each, *_: next(steps) % 2 or each.consolidate_state_dict())
    for step in range(4):
        train(pairs, [step])
        if step % 2 and dist.get_rank() == 0:
            assert_equal(optimizer.state_dict(), plain.state_dict())


def what_distributed_checkpoint_does():
    """It makes a step without gradients where `state` looks empty, renames the entries of what it gets, and sends them."""
    (module, optimizer), (oracle, plain) = pairs = sharded_and_plain()
    train(pairs, range(3))
    expected = dcp.get_optimizer_state_dict(oracle, plain)
    before = consolidate(optimizer)
    optimizer.consolidate_state_dict()
    if dist.get_rank() == 0:
        found = dcp.get_optimizer_state_dict(module, optimizer)
        assert_equal(found["state"], expected["state"])
        assert float(found["state"]["0.weight"]["step"]) == 3
        assert found["param_groups"] == expected["param_groups"]
    assert_equal(consolidate(optimizer), before)
    for from_rank_0 in (False, True):
        new = net()
        again = ShardedOptimizer(new.parameters(), AdamW, lr=0.01)
        again.allocate_state()
        options = dcp.StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank_0)
        given = {} if from_rank_0 and dist.get_rank() else copy.deepcopy(expected)
        dcp.set_optimizer_state_dict(new, again, given, options=options)
        held = consolidate(again)
        assert_equal(held and held["state"], before and before["state"])
    dcp.set_optimizer_state_dict(module, optimizer, expected)
    train(pairs, [3])


class Program(Stateful):
    """As in the tutorial of torch.distributed.checkpoint."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = dcp.get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, saved):
        dcp.set_state_dict(self.model, self.optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])


def program(folder, wrapped, optimizer_class, first, last, allocates=True):
    """Steps from `first` to `last`, with the same gradients on all ranks. It resumes from the folder, or saves there."""
    module = net()
    optimizer = ShardedOptimizer(module.parameters(), optimizer_class, lr=0.01, bucket_mb=TINY_MB)
    model = ShardedDataParallel(module, optimizer) if wrapped else module
    if first:
        if allocates:
            optimizer.allocate_state()
        try:
            load({"app": Program(module, optimizer)}, checkpoint_id=folder)
        except (CheckpointException, ValueError) as error:
            return str(error)
        with pytest.raises(RuntimeError, match="has made no step") if optimizer_class is AdamW else nullcontext():
            optimizer.allocate_state()
    train([(model, optimizer)], range(first, last))
    if not first:
        optimizer.consolidate_state_dict()
        save({"app": Program(module, optimizer)}, checkpoint_id=folder)
    return weights(module)


@pytest.mark.parametrize("wrapped", [True, False])
def test_programs_of_distributed_checkpoint_go_on(tmp_path, wrapped):
    """On another number of ranks. Without `allocate_state`, they would lose the state, and are refused."""
    for optimizer_class in (AdamW, SGD):
        folder = str(tmp_path / optimizer_class.__name__)
        run_ranks(program, 2, folder, wrapped, optimizer_class, 0, 3)
        resumed, *_ = run_ranks(program, 3, folder, wrapped, optimizer_class, 3, 6)
        whole, *_ = run_ranks(program, 2, f"{folder} whole", wrapped, optimizer_class, 0, 6)
        if wrapped:  # a mean over three ranks is rounded
            assert all(torch.allclose(resumed[name], whole[name], rtol=0, atol=1e-7) for name in whole)
        else:
            assert_equal(resumed, whole)
    for said in run_ranks(program, 2, str(tmp_path / "AdamW"), wrapped, AdamW, 3, 6, False):
        assert "call allocate_state() on all ranks before it loads" in said


def state_that_differs_between_the_ranks():
    (_, optimizer), (_, plain) = pairs = sharded_and_plain()
    train(pairs, range(3))
    for spoil in (
        lambda other: other["state"].clear(),
        lambda other: other["state"][0].pop("exp_avg"),
        lambda other: other["state"][0]["step"].add_(1),
        lambda other: other["param_groups"][0].update(lr=0.5),
    ):
        other = copy.deepcopy(plain.state_dict())
        if dist.get_rank() == 1:
            spoil(other)
        refused(ValueError, "load the same state dict on all ranks", optimizer.load_state_dict, other)


def is_reset(name, **kwargs):
    """All state, on all ranks, as it is reset in an unsharded optimizer."""
    (module, optimizer), (_, plain) = pairs = sharded_and_plain(**kwargs)
    train(pairs, range(3), exact=not kwargs)
    before = weights(module)
    RESETS[name](optimizer)
    plain.state.clear()
    assert_equal(weights(module), before)
    train(pairs, range(3, 6), exact=not kwargs)
    whole = consolidate(optimizer)
    assert whole is None or {int(of["step"]) for of in whole["state"].values()} == {3}


RESETS = {
    "cleared": lambda optimizer: optimizer.state.clear(),
    "assigned": lambda optimizer: setattr(optimizer, "state", defaultdict(dict)),
    "with keys": lambda optimizer: [optimizer.state.__setitem__(key, {}) for key in optimizer.state],
    "in a loop": lambda optimizer: [entry.zero_() for of_slice in optimizer.state.values() for entry in of_slice.values()],
}


def refuses_the_state_of_others():
    module = net()
    optimizer = ShardedOptimizer(module.parameters(), AdamW, lr=0.01)
    refused(TypeError, r"state\.clear\(\)", optimizer.__setstate__, {"state": {}})
    train([(module, optimizer)], [0])
    held = consolidate(optimizer)
    with pytest.raises(RuntimeError, match="divided among the ranks"):
        optimizer.state = {"mine": 3, module[0].weight: {}}
    optimizer.state = optimizer.state
    for key in list(optimizer.state):  # as when it is moved
        optimizer.state[key] = optimizer.state.pop(key)
    assert_equal(consolidate(optimizer), held)
    optimizer.consolidate_state_dict()
    optimizer.state.clear()
    refused(RuntimeError, NAMES, optimizer.state_dict)


def takes_over(optimizer_class, **arguments):
    """The class, the groups and the state of an optimizer that has made steps."""
    pairs = []
    for module in (net(), net()):
        groups = [{"params": [module[0].weight], "lr": 0.03}, {"params": [*module.parameters()][1:]}]
        pairs.append((module, optimizer_class(groups, lr=0.01, **arguments)))
    train(pairs, range(3))
    (module, optimizer), (_, plain) = pairs
    optimizer = ShardedOptimizer(optimizer, bucket_mb=TINY_MB)
    held = consolidate(optimizer)
    assert dist.get_rank() or held["state"].keys() == plain.state_dict()["state"].keys()
    assert all(optimizer.defaults[key] == plain.defaults[key] for key in arguments)
    train([(module, optimizer), pairs[1]], range(3, 6))


class Scaled(SGD):
    def __init__(self, params, lr=0.1, scale=1.0):
        super().__init__(params, lr=lr)


def what_is_not_taken_over():
    with pytest.raises(ValueError, match=r"Scaled does not keep scale=1\.0 in its defaults"):
        ShardedOptimizer(Scaled(net().parameters(), scale=10.0), elementwise=True)
    scheduled, hooked = AdamW(net().parameters()), AdamW(net().parameters())
    StepLR(scheduled, 1)
    hooked.register_step_post_hook(lambda *_: None)
    for each in (scheduled, hooked):
        refused(ValueError, "has a scheduler or hooks, which would stay with it", ShardedOptimizer, each)
    module = net()
    on_one_rank = AdamW(module.parameters(), lr=0.1)
    on_one_rank.state["seen"] = 5
    if dist.get_rank() == 0:
        train([(module, on_one_rank)], [0])
    refused(ValueError, "load the same state dict on all ranks", ShardedOptimizer, on_one_rank)


def test_another_optimizer_is_taken_over():
    calls = partial(takes_over, AdamW, betas=(0.8, 0.9), weight_decay=0.3), partial(takes_over, SGD, momentum=0.9)
    run_in_turn(2, *calls, what_is_not_taken_over)


def test_state_is_reset_or_refused():
    calls = [partial(is_reset, name) for name in RESETS]
    calls += [partial(is_reset, name, state_dtype="int8") for name in RESETS if name != "in a loop"]
    run_in_turn(2, *calls, refuses_the_state_of_others, state_that_differs_between_the_ranks)


def test_state_dicts():
    as_views = partial(state_dicts, 1, parameters_as_bucket_view=True)
    run_in_turn(2, partial(state_dicts, 0), as_views, without_state, gathered_by_a_hook, what_distributed_checkpoint_does)
    run_in_turn(4, partial(state_dicts, 3, shard_size=2))


# -- add_param_group ---------------------------------------------------------------------------------------------------


def tower(make, **kwargs):
    """Layers and their optimizer: the first one is frozen in a group, the second in none, and a head comes later."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    layers[:2].requires_grad_(False)
    model = Part(lambda part, x: part.head(part.layers(x).tanh()), layers=layers, head=nn.Identity())
    matrices = {"matrices": 1, "ns_dtype": "float32"} if Muon in (make, kwargs.get("optimizer_class")) else {}
    weights_ = [model.layers[0].weight, model.layers[2].weight]
    biases = [model.layers[0].bias, model.layers[2].bias]
    groups = [{"params": weights_, **matrices}, {"params": biases, "lr": 0.02}]
    return model, make(groups, lr=0.01, **kwargs)


def grow(model, optimizer, stage):
    if stage == 0:  # thaw a layer that is in the groups, and add a head
        model.layers[0].requires_grad_(True)
        torch.manual_seed(7)
        model.head = nn.Linear(8, 5)
        optimizer.add_param_group({"params": model.head.parameters(), "lr": 0.03})
    else:
        model.layers[1].requires_grad_(True)
        optimizer.add_param_group({"params": model.layers[1].parameters()})


def groups_are_added(optimizer_class=Adam, exact=True, **options):
    sharded = tower(ShardedOptimizer, optimizer_class=optimizer_class, bucket_mb=TINY_MB, **options)
    (model, optimizer), (_, plain) = pairs = sharded, tower(optimizer_class)
    places = {name: param.data_ptr() for name, param in model.named_parameters() if param.requires_grad}
    for step in range(9):
        for pair in pairs if step in (3, 6) else ():
            grow(*pair, stage=step // 3 - 1)
        train(pairs, [step], exact)
    assert all(model.get_parameter(name).data_ptr() == place for name, place in places.items()), "the others do not move"
    whole = consolidate(optimizer)
    if exact and whole is not None:
        assert_equal(whole, plain.state_dict())
    return weights(model), whole or {}


def resumed(model_state, saved, **options):
    """On another number of ranks, with all groups from the beginning; and the unsharded run."""
    pairs = []
    for make in (partial(ShardedOptimizer, optimizer_class=Adam, bucket_mb=TINY_MB, **options), Adam):
        model, optimizer = tower(make)
        grow(model, optimizer, 0)
        grow(model, optimizer, 1)
        model.load_state_dict(model_state)
        optimizer.load_state_dict(copy.deepcopy(saved))  # the ranks share its memory, and torch does not copy it
        pairs.append((model, optimizer))
    train(pairs, [90])


def test_groups_are_added_after_steps():
    groups_are_added()  # in this process
    ((model, saved), *_), *_ = run_in_turn(2, groups_are_added)
    run_in_turn(3, partial(resumed, model, saved))


CODED = {"param_dtype": "bfloat16_remainder", "state_dtype": "int8"}
OPTIONS = {"param_dtype": "bfloat16"}, CODED, {"state_dtype": "bfloat16"}


def a_group_is_updated_as_by_an_optimizer_of_its_own(**options):
    """With masters and codecs, bit for bit, and the earlier ones go on: after three steps, the second layer thaws."""
    ends = []
    for is_added in (True, False):
        model, optimizer = tower(ShardedOptimizer, optimizer_class=Adam, bucket_mb=1.0, **options)
        model.layers[:2].to(dtype := model.layers[2].weight.dtype)  # what is frozen stays as it is
        optimizers = [optimizer]
        for step in range(6):
            if step == 3 and is_added:
                grow(model, optimizer, 1)
            elif step == 3:
                second = model.layers[1].requires_grad_().parameters()
                optimizers.append(ShardedOptimizer(second, Adam, bucket_mb=1.0, lr=0.01, **options))
            model.zero_grad()
            model(torch.ones(4, 8, dtype=dtype)).float().square().sum().backward()
            for each in optimizers:
                each.step()
        states = [consolidate(each) or {"state": {}} for each in optimizers]
        ends.append([weights(model), [entries for state in states for entries in state["state"].values()]])
    assert_equal(*ends)


def no_place_for_a_group():
    module = net()
    model, optimizer = wrap(module)
    with pytest.raises(RuntimeError, match="laid out once; give all groups to the constructor"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    model, optimizer = tower(ShardedOptimizer, optimizer_class=Adam)
    refused(ValueError, "more than one parameter group", optimizer.add_param_group, {"params": model.layers[2].bias})
    with pytest.raises(ValueError, match="build the same model on all ranks"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3 + dist.get_rank()))]})
    assert len(optimizer.param_groups) == 2, "nothing has been added"


def moved_before_the_first_step():
    """As `Accelerator.prepare` does: after it, parameters have other memory."""
    (module, optimizer), (oracle, plain) = pairs = sharded_and_plain()
    for each in (module, oracle) if dist.get_rank() == 0 else (oracle,):  # also if the other rank has nothing to move
        each._apply(torch.clone)
    before = weakref.ref(optimizer.placed.buckets[0])
    train(pairs, [0])
    gc.collect()
    assert before() is None, "parameters that are laid out anew free the first buffers"
    optimizer.consolidate_state_dict()
    if dist.get_rank() == 0:
        assert_equal(optimizer.state_dict(), plain.state_dict())
    optimizer = ShardedOptimizer(module.parameters(), AdamW, param_dtype="bfloat16")
    module._apply(torch.clone)
    refused(RuntimeError, "was moved or replaced after", optimizer.step)


def test_groups_with_masters_codecs_and_matrices():
    rounded = [partial(a_group_is_updated_as_by_an_optimizer_of_its_own, **options) for options in OPTIONS]
    with_muon = [partial(groups_are_added, Muon), partial(groups_are_added, Muon, exact=False, state_dtype="int8")]
    run_in_turn(2, *rounded, *with_muon, no_place_for_a_group, moved_before_the_first_step)


# -- norms, train and eval ---------------------------------------------------------------------------------------------


def clipped(value, norm_type=2.0):
    """The norm and the clipped gradients of slices, against torch's of whole ones; one gradient is not contiguous."""
    torch.manual_seed(0)
    gradients = [torch.randn(6, 5), torch.randn(5, 4).t(), torch.randn(7), torch.randn(())]
    gradients[1][2, 3] = value
    params, oracle = ([torch.nn.Parameter(torch.zeros_like(g)) for g in gradients] for _ in range(2))
    sharded = ShardedOptimizer(params, SGD, bucket_mb=0.0001, lr=1.0)
    plain = SGD(oracle, lr=1.0)
    for param, other, gradient in zip(params, oracle, gradients, strict=True):
        param.grad, other.grad = gradient.clone(memory_format=torch.preserve_format), gradient.clone()
    for optimizer in (sharded, plain):
        clip_grad_norm_(optimizer, torch.inf)  # only measures
    torch.testing.assert_close([other.grad for other in oracle], gradients, rtol=0, atol=0, equal_nan=True)
    norm, expected = sharded.clip_grad_norm_(0.1, norm_type), nn.utils.clip_grad_norm_(oracle, 0.1, norm_type)
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0, equal_nan=True)
    if norm.isfinite():
        assert sharded.clip_grad_norm_(torch.inf, norm_type) == pytest.approx(0.1, rel=1e-3)
    for param, other in zip(params, oracle, strict=True):  # on every rank: a loop may add to them
        torch.testing.assert_close(param.grad, other.grad, rtol=1e-6, atol=1e-9, equal_nan=True)
    sharded.step()
    plain.step()
    for param, other in zip(params, oracle, strict=True):
        torch.testing.assert_close(param, other, rtol=1e-6, atol=1e-9, equal_nan=True)


class Averaged(SGD):
    """Weights that are interpolated in `eval`, as those of schedule-free classes are."""

    rounded_state = ("slow",)

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["training"] = True

    def step(self, closure=None):
        assert all(group["training"] for group in self.param_groups)
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault("slow", param.detach().clone()).lerp_(param.detach(), 0.25)

    @torch.no_grad()
    def _move(self, training):
        for group in self.param_groups:
            for param in group["params"] if group["training"] != training else ():
                slow = self.state[param]["slow"]
                param.copy_(2 * param - slow if training else (param + slow) / 2)
            group["training"] = training

    def eval(self):
        self._move(False)

    def train(self):
        self._move(True)


def train_and_eval(tolerance=0.0, **options):
    (module, optimizer), (oracle, plain) = sharded_and_plain(Averaged, elementwise=True, bucket_mb=TINY_MB, **options)
    model = ShardedDataParallel(module, optimizer, overlap=[module[0]])

    def forward(x):
        return model(x.to(module[0].weight.dtype)).float()

    for step in range(6):
        train([(forward, optimizer), (oracle, plain)], [step], exact=False)
        if step % 2:
            optimizer.consolidate_state_dict()
            sent = optimizer.comm.sent_bytes["all-gather"]
            for each in (optimizer, plain) * 2:  # the second time changes nothing
                each.eval()
            of_one_gather = sum(bucket.shard.nbytes for bucket in optimizer.placed.buckets)
            assert optimizer.comm.sent_bytes["all-gather"] == sent + of_one_gather
            refused(RuntimeError, NAMES, optimizer.state_dict)
            assert optimizer.param_groups[0]["training"] is False
            held = torch.cat([weight.float().flatten() for weight in weights(module).values()])
            expected = torch.cat([weight.flatten() for weight in weights(oracle).values()])
            torch.testing.assert_close(held, expected, rtol=tolerance, atol=tolerance)
            assert torch.equal(held, of_rank_0(held))
            optimizer.train()
            plain.train()
    assert not hasattr(ShardedOptimizer(net().parameters(), AdamW), "eval")
    refused(AttributeError, "'ShardedOptimizer' object has no attribute 'evaluate'", getattr, optimizer, "evaluate")


def test_norms_train_and_eval():
    options = {"param_dtype": "bfloat16_remainder", "state_dtype": "bfloat16"}
    run_in_turn(2, train_and_eval, partial(train_and_eval, 0.05, **options))
    values = [partial(clipped, value) for value in (1.0, math.inf, math.nan)]
    norms = [partial(clipped, 1.0, norm_type) for norm_type in (1.0, 3.5, math.inf, "inf")]
    for clips in values + norms:
        clips()  # in this process
    run_in_turn(3, *values, *norms)


# -- what is refused ---------------------------------------------------------------------------------------------------


def on_one_rank(rank):
    """The group's timeout is one second."""
    optimizer = ShardedOptimizer(net().parameters(), AdamW, dist.new_group(timeout=timedelta(seconds=1)))
    if dist.get_rank() == rank:
        missing = "Ranks 1 failed" if rank == 0 else ""  # only rank 0 knows who it is
        with pytest.raises(RuntimeError, match=f"not all ranks are here: .* outside of `if rank == 0`.*{missing}"):
            optimizer.consolidate_state_dict()
    dist.barrier()


def test_refusals():
    for rank in (0, 1):
        run_ranks(on_one_rank, 2, rank)
