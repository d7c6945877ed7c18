"""zero/layout.py: the arithmetic of buckets, shards and slices, for any shapes and world size; no process group."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zero.layout import Layout, ParameterSpec, auto_bucket_mb, plan
from zero.options import Options

sizes = {
    "numels": st.lists(st.integers(0, 50), max_size=12),
    "world_size": st.integers(1, 9),
    "bucket_numel": st.integers(1, 200),
    "align": st.sampled_from([1, 2, 8]),
}
by_element = st.fixed_dictionaries(sizes)

settings.register_profile("no deadline", deadline=None)  # a loaded machine may take any time
settings.load_profile("no deadline")


@given(by_element)
def test_every_element_has_one_owner_whose_slices_lie_in_its_shards_and_are_cut_between_vectors(args):
    layout = Layout.by_element(**args)
    owners = [[0] * max(numel, 1) for numel in layout.numels]  # one without elements also has an owner
    for rank in range(args["world_size"]):
        for piece in layout.slices(rank):
            numel, begin = layout.numels[piece.param], layout.offsets[piece.param] + piece.start
            assert 0 <= piece.start < piece.stop <= numel or numel == piece.stop == 0
            assert piece.start % args["align"] == 0
            assert piece.stop % args["align"] == 0 or piece.stop == numel
            assert any(shards[rank].start <= begin and begin + piece.numel <= shards[rank].stop for shards in layout.shards)
            for element in range(piece.start, max(piece.stop, 1)):
                owners[piece.param][element] += 1
    assert all(count == 1 for parameter in owners for count in parameter)


@given(by_element)
def test_equal_shards_tile_the_flat_buffer_and_parameters_do_not_overlap(args):
    layout = Layout.by_element(**args)
    assert len({len(shard) for shards in layout.shards for shard in shards}) <= 1
    for bucket in layout.buckets:
        assert 0 < len(bucket) < args["bucket_numel"] + args["align"] * args["world_size"]
    end = 0
    for shards in layout.shards:
        assert len(shards) == args["world_size"]
        for shard in shards:
            assert shard.start == end
            end = shard.stop
            assert shard.start % args["align"] == 0
    assert end == layout.padded_numel
    taken = sorted((offset, offset + numel) for offset, numel in zip(layout.offsets, layout.numels, strict=True) if numel)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(taken))
    assert not taken or taken[-1][1] <= layout.padded_numel
    padding = layout.padded_numel - sum(layout.numels)
    assert 0 <= padding < args["align"] * (args["world_size"] * max(1, len(layout.buckets)) + len(layout.numels))


@pytest.mark.parametrize("world_size", [2, 3, 4, 8, 64])
def test_gpt2_124m_is_divided_evenly(world_size):
    block = [768, 768, 768 * 2304, 2304, 768 * 768, 768, 768, 768, 768 * 3072, 3072, 3072 * 768, 768]
    numels = (50257 * 768, 1024 * 768, *(block * 12), 768, 768)
    assert sum(numels) == 124_439_808
    layout = Layout.by_element(numels[::-1], world_size, bucket_numel=25_000_000 // 4, align=16)
    by_rank = [sum(piece.numel for piece in layout.slices(rank)) for rank in range(world_size)]
    assert sum(by_rank) == sum(numels)
    assert max(by_rank) / (sum(by_rank) / world_size) <= 1.001


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
    def spec(numel, is_trainable):
        return ParameterSpec((numel,), torch.float32, torch.device("cpu"), is_trainable)

    specs = [spec(3_000_000, True), spec(3_000_000, True), spec(80_000_000, False)]
    for param_dtype, megabytes in [("float32", 8), ("bfloat16", 4)]:
        (buffer,) = plan(specs, 2, Options(param_dtype=param_dtype)).buffers
        sizes = [len(bucket) * buffer.dtype.itemsize / 1e6 for bucket in buffer.layout.buckets]
        assert sizes == pytest.approx([megabytes] * 3, rel=1e-4)
