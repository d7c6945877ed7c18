"""zero/layout.py, zero/flags.py: shards and slices of any shapes; a plan without memory is that of the built optimizer."""

import itertools
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_in_turn
from toy import MODES, Toy, refused

from model import GPT, GPTConfig
from zero.autocast import autocast_parameters
from zero.build import build
from zero.flags import Flags
from zero.layout import Layout, ParameterSpec, Plan, auto_bucket_mb, parameter_specs, plan, zero_redundancy_plan
from zero.options import Options
from zero.sharded_state import parameters, partition

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
    refused(ValueError, "world", plan, specs, 0)


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
        part = partition(build(model, groups_of(model), flags, autocast=torch.bfloat16, lr=0.01)[1])
        assert all(planned.slices(rank) == part.plan.slices(rank) for rank in range(planned.world_size)), name
        if part.owned:
            assert [piece.numel for piece in planned.slices(part.rank)] == [own.local.numel() for own in part.owned]
            assert [own.local for own in part.owned] == parameters(part.inner)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_is_built_is_what_was_planned(world_size):
    run_in_turn(world_size, *(partial(planned_and_built, flags) for flags in FLAGS))
