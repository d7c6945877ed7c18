"""zero/layout.py, flags.py, build.py: shards and slices of any shapes; flags choose classes, whose plan is what is built."""

import itertools
from functools import partial
from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_in_turn
from torch.nn.parallel import DistributedDataParallel
from toy import MODES, Toy, assert_equal, build_toy, make_toy, refused, train, weights

from forecast.modes import without_effect
from model import GPT, GPTConfig
from zero import ShardedDataParallel, ShardedOptimizer
from zero import checkpoint as ckpt
from zero.autocast import autocast_parameters
from zero.build import build
from zero.flags import Flags
from zero.held_bytes import held_bytes
from zero.layout import Layout, ParameterSpec, Plan, auto_bucket_mb, parameter_specs, plan
from zero.options import Options
from zero.sharded_state import parameters, partition, zero_redundancy_plan
from zero.tensors import from_dlpack

settings.register_profile("few", deadline=None, max_examples=50)  # a loaded machine may take any time
settings.load_profile("few")


def assert_one_owner(numels, slices):
    """Of every element; a parameter without elements also has one."""
    owners = [[0] * max(numel, 1) for numel in numels]
    for piece in slices:
        for element in range(piece.start, max(piece.stop, 1)):
            owners[piece.number][element] += 1
    assert all(count == 1 for parameter in owners for count in parameter)


@given(
    numels=st.lists(st.integers(0, 50), max_size=12),
    world_size=st.integers(1, 9),
    bucket_numel=st.integers(1, 200),
    align=st.sampled_from([1, 2, 8]),
)
def test_equal_shards_tile_the_flat_buffer_and_slices_lie_in_them(numels, world_size, bucket_numel, align):
    layout = Layout.by_element(dict(enumerate(numels)), world_size, bucket_numel=bucket_numel, align=align)
    assert_one_owner(numels, (piece for rank in range(world_size) for piece in layout.slices(rank)))
    for rank in range(world_size):
        for piece in layout.slices(rank):
            numel, begin = layout.numels[piece.number], layout.offsets[piece.number] + piece.start
            assert 0 <= piece.start < piece.stop <= numel or numel == piece.stop == 0
            assert piece.start % align == 0, "cuts lie between vectors"
            assert piece.stop % align == 0 or piece.stop == numel
            assert any(shards[rank].start <= begin and begin + piece.numel <= shards[rank].stop for shards in layout.shards)
    assert len({len(shard) for shards in layout.shards for shard in shards}) <= 1
    assert all(0 < len(bucket) < bucket_numel + align * world_size for bucket in layout.buckets)
    assert all(len(shards) == world_size for shards in layout.shards)
    starts = [shard.start for shards in layout.shards for shard in shards]
    assert [*starts, layout.padded_numel] == [0, *(shard.stop for shards in layout.shards for shard in shards)]
    assert all(start % align == 0 for start in starts)
    taken = sorted((offset, offset + numel) for offset, numel in zip(layout.offsets.values(), numels, strict=True) if numel)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(taken)), "parameters do not overlap"
    assert not taken or taken[-1][1] <= layout.padded_numel
    padding = layout.padded_numel - sum(numels)
    assert 0 <= padding < align * (world_size * max(1, len(layout.buckets)) + len(layout.numels))


@pytest.mark.parametrize(
    ("params", "world_size", "expected"),
    [
        *((0, 1, 4), (0.8e6, 2, 4), (0.8e6, 64, 4)),  # one bucket
        *((10.7e6, 2, 14.27), (10.7e6, 64, 14.27)),
        *((124e6, 2, 25), (124e6, 25, 25), (124e6, 64, 64), (1558e6, 8, 155.8), (1558e6, 1024, 1024)),
    ],
)
def test_the_automatic_bucket_size(params, world_size, expected):
    assert auto_bucket_mb(int(4 * params), world_size) == pytest.approx(expected, rel=1e-3)


def test_automatic_buckets_follow_the_bytes_of_the_trainable_parameters():
    sizes = (3_000_000, True), (3_000_000, True), (80_000_000, False)
    specs = [ParameterSpec((numel,), torch.float32, torch.device("cpu"), is_trainable) for numel, is_trainable in sizes]
    for param_dtype, megabytes in [("float32", 8), ("bfloat16", 4)]:
        (buffer,) = plan(specs, 2, Options(param_dtype=param_dtype)).buffers
        sizes = [len(bucket) * buffer.dtype.itemsize / 1e6 for bucket in buffer.layout.buckets]
        assert sizes == pytest.approx([megabytes] * 3, rel=1e-4)


FLOATS = [torch.float32, torch.bfloat16, torch.float64]
specs = st.lists(
    st.builds(
        ParameterSpec,
        shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
        dtype=st.sampled_from(FLOATS),
        device=st.just(torch.device("meta")),
        matrices=st.just(0),
        matrix_dtype=st.just(torch.bfloat16),
        requires_grad=st.booleans(),
        group=st.integers(0, 2),
        position=st.integers(-1, 5),
        autocast=st.sampled_from([None, torch.bfloat16]),
    ),
    max_size=9,
)
options = st.fixed_dictionaries(
    {"bucket_mb": st.sampled_from([75, 0.0002, 0.000001]), "param_dtype": st.sampled_from(["auto", "bfloat16"])}
)


@given(specs, st.integers(1, 9), options)
def test_every_element_has_one_owner_in_every_plan(params, world_size, kwargs):
    sharded, torchs = plan(params, world_size, Options(**kwargs)), zero_redundancy_plan(params, world_size)
    for planned in (sharded, torchs, Plan(tuple(params), 1)):
        slices = itertools.chain(*(planned.slices(rank) for rank in range(planned.world_size)))
        assert_one_owner([spec.numel for spec in params], slices)


SIZES = GPTConfig(block_size=8, vocab_size=19, n_layer=2, n_head=2, n_embd=24, bias=False)
FLAGS = *MODES.values(), Flags(bucket_mb=0.0002, param_dtype="bfloat16"), Flags()
MODELS = {  # and their parameter groups
    "a GPT": (lambda: GPT(SIZES), lambda model: model.param_groups(0.1)),
    "frozen ones": (Toy, lambda model: [*model.param_groups(), {"params": list(model.frozen.parameters())}]),
}


def planned_and_built(flags):
    """The plan that flags choose for a model on the meta device is that of the optimizer that they build."""
    for name, (make, groups_of) in MODELS.items():
        with torch.device("meta"):
            meta = make()
        autocast = autocast_parameters(meta, torch.bfloat16)
        planned = flags.plan(parameter_specs(groups_of(meta), meta.parameters(), autocast=autocast), dist.get_world_size())
        model = make()
        wrapper, optimizer = build(model, groups_of(model), flags, autocast=torch.bfloat16, lr=0.01)
        is_sharded, part = isinstance(optimizer, ShardedOptimizer), partition(optimizer)
        assert type(wrapper) is (ShardedDataParallel if is_sharded else DistributedDataParallel)
        assert all(planned.slices(rank) == part.plan.slices(rank) for rank in range(planned.world_size)), name
        if part.owned:
            assert [piece.numel for piece in planned.slices(part.rank)] == [own.local.numel() for own in part.owned]
            assert [own.local for own in part.owned] == parameters(part.inner)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_is_built_is_what_was_planned(world_size):
    run_in_turn(world_size, *(partial(planned_and_built, flags) for flags in FLAGS))


# -- what the flags choose -----------------------------------------------------------------------------------------------


def flags_that_do_not_go_together():
    model = make_toy()
    groups, mps = model.param_groups(), torch.device("mps")
    dtypes = "auto, float32, bfloat16, bfloat16_remainder"
    refused(ValueError, "zero1_impl='other' is not one of sharded, torch", Flags, zero1_impl="other")
    refused(ValueError, f"param_dtype='float8' is not one of {dtypes}", Flags, param_dtype="float8")
    refused(ValueError, "bucket_mb=0 must be 'auto' or a positive number", Flags, bucket_mb=0)
    refused(ValueError, "bucket_mb='large' must be 'auto' or a positive number", Flags, bucket_mb="large")
    message = "param_dtype and state_dtype do not support device=mps"
    refused(ValueError, message, build, model, groups, Flags(state_dtype="int8"), device=mps)
    refused(ValueError, "Invalid learning rate", build, model, groups, lr=-1.0)
    for others in ({"use_zero1": False}, {"zero1_impl": "torch"}):
        for name, value in (("param_dtype", "bfloat16"), ("state_dtype", "int8"), ("shard_gradients", True), ("shard_size", 2)):
            message = f"{name}={value} needs use_zero1=True, zero1_impl='sharded'"
            refused(ValueError, message, build, model, groups, Flags(**others, **{name: value}))


def test_flags_that_do_not_go_together():
    run_in_turn(2, flags_that_do_not_go_together)


# -- without torch.distributed ------------------------------------------------------------------------------------------


def test_without_a_process_group_there_is_no_wrapper():
    model = make_toy()
    built, optimizer = build(model, model.param_groups(), lr=0.01)
    assert built is model
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults["fused"]


def built(muon=False, **flags):
    assert not dist.is_initialized()
    return build_toy(Flags(bucket_mb=0.0002, **flags), muon=muon, freeze=False, overlap=["hidden"])


@pytest.mark.parametrize(
    ("flags", "implementation", "idle"),
    [
        ({}, "adamw", ["use_zero1=True"]),
        ({"use_zero1": False}, "adamw", []),
        ({"zero1_impl": "torch"}, "adamw", ["use_zero1=True", "zero1_impl=torch"]),
        ({"shard_gradients": True, "shard_size": 8}, "adamw", ["shard_size=8", "use_zero1=True", "shard_gradients=True"]),
        ({"param_dtype": "bfloat16", "shard_gradients": True}, "sharded", []),
        ({"state_dtype": "int8", "shard_gradients": True, "bucket_mb": 1.0}, "sharded", ["shard_gradients=True"]),
        ({"param_dtype": "bfloat16_remainder", "state_dtype": "int8", "shard_size": 8}, "sharded", ["shard_size=8"]),
    ],
)
def test_which_flags_act(flags, implementation, idle):
    assert Flags(**flags).implementation(1) == implementation
    assert without_effect(Flags(**flags), 1) == idle
    assert without_effect(Flags(**flags), 2) == []


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("muon", [False, True])
def test_remainders_are_float32_masters(muon):
    """Bit for bit, in half the bytes."""
    ends, held = [], []
    for param_dtype in ("bfloat16", "bfloat16_remainder"):
        model, optimizer = built(muon, param_dtype=param_dtype)
        train(model, optimizer, 0, steps=20, clip=0.01)
        ends.append([weights(model), ckpt.model_state_dict(model.module, optimizer), ckpt.consolidate(optimizer)])
        held.append(held_bytes(optimizer)["master"])
    assert held[0] == 2 * held[1] > 0
    assert_equal(*ends)
    assert {tensor.dtype for name, tensor in ends[0][0].items()} == {torch.bfloat16}


def test_parameters_move_while_their_gpu_is_the_current_one(monkeypatch):
    """DLPack refuses to export the memory of another one."""
    calls = mock.MagicMock(**{"export.side_effect": from_dlpack})
    monkeypatch.setattr(torch.cuda, "device_of", calls.device_of)
    monkeypatch.setattr("zero.tensors.from_dlpack", calls.export)
    _, optimizer = built(param_dtype="bfloat16")
    each = ["device_of", "device_of().__enter__", "export", "device_of().__exit__"]
    assert [name for name, *_ in calls.mock_calls] == each * len(optimizer.placed.number_of)
    assert calls.device_of.call_args_list == calls.export.call_args_list, "of the same tensor"
