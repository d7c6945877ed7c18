"""The arithmetic of buckets, shards and slices, for any shapes and world size; no process group."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero.layout import Layout

layouts = st.builds(
    Layout,
    numels=st.lists(st.integers(0, 50), max_size=12).map(tuple),
    world_size=st.integers(1, 9),
    bucket_numel=st.integers(1, 200),
    align=st.sampled_from([1, 2, 8]),
)


@given(layouts)
def test_every_element_of_every_parameter_has_exactly_one_owner(layout):
    owners = [[0] * numel for numel in layout.numels]
    for rank in range(layout.world_size):
        for piece in layout.slices(rank):
            assert 0 <= piece.start < piece.stop <= layout.numels[piece.param]
            for element in range(piece.start, piece.stop):
                owners[piece.param][element] += 1
    assert all(count == 1 for parameter in owners for count in parameter)


@given(layouts)
def test_buckets_tile_the_flat_buffer_and_shards_tile_the_buckets(layout):
    end = 0
    for bucket in layout.buckets:
        assert bucket.start == end
        assert 0 < bucket.numel <= layout.bucket_numel
        for rank in range(layout.world_size):
            shard = layout.shard(bucket, rank)
            assert shard.start == end
            assert shard.numel * layout.world_size == bucket.numel
            end = shard.stop
        assert bucket.stop == end
    assert end == layout.padded_numel
    padding = layout.padded_numel - sum(layout.numels)
    assert 0 <= padding < layout.align * (layout.world_size + len(layout.numels))


@given(layouts)
def test_a_slice_lies_inside_one_of_its_owners_shards(layout):
    for rank in range(layout.world_size):
        shards = [layout.shard(bucket, rank) for bucket in layout.buckets]
        for piece in layout.slices(rank):
            begin = layout.offsets[piece.param] + piece.start
            assert any(shard.start <= begin and begin + piece.numel <= shard.stop for shard in shards)


@given(layouts)
def test_cuts_lie_between_vectors(layout):
    for rank in range(layout.world_size):
        for piece in layout.slices(rank):
            assert piece.start % layout.align == 0
            assert piece.stop % layout.align == 0 or piece.stop == layout.numels[piece.param]


def gpt2_124m_numels():
    block = [768, 768, 768 * 2304, 2304, 768 * 768, 768, 768, 768, 768 * 3072, 3072, 3072 * 768, 768]
    return (50257 * 768, 1024 * 768, *(block * 12), 768, 768)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8, 64])
def test_gpt2_124m_is_divided_evenly(world_size):
    numels = gpt2_124m_numels()
    assert sum(numels) == 124_439_808
    layout = Layout(numels[::-1], world_size, bucket_numel=25_000_000 // 4, align=16)
    by_rank = [sum(piece.numel for piece in layout.slices(rank)) for rank in range(world_size)]
    assert sum(by_rank) == sum(numels)
    assert max(by_rank) / (sum(by_rank) / world_size) <= 1.001


def test_impossible_layouts_are_refused():
    with pytest.raises(ValueError, match="world_size"):
        Layout((1,), 0, 1)
    with pytest.raises(ValueError, match="bucket_numel"):
        Layout((1,), 1, 0)
