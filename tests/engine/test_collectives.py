"""Every way in which a bucket can travel gives the same sums and the same shards."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from zero import collectives
from zero.collectives import Communicator


def travel(between_cpus, native, old_names, dtype, sizes):
    """Reduce-scatter and all-gather with the choices of a backend forced; gloo knows all the functions."""
    Communicator._is_between_cpus = lambda self, bucket: between_cpus
    Communicator._is_native = lambda self, bucket, sizes: native and min(sizes) == max(sizes)
    if old_names:  # those of torch 2.11
        collectives._reduce_scatter_single = dist.reduce_scatter_tensor
        collectives._all_gather_single = dist.all_gather_into_tensor
    comm, rank = Communicator(None), dist.get_rank()
    buckets = [torch.arange(sum(sizes), dtype=dtype) / 7 + r for r in range(comm.world_size)]
    expected = sum(bucket.float() for bucket in buckets).split(sizes)[rank]
    shard = torch.empty(sizes[rank])
    for first in (True, False):
        comm.add(comm.reduce_scatter(buckets[rank].clone(), sizes), shard, first=first)
    torch.testing.assert_close(shard, 2 * expected, rtol=1e-6, atol=1e-6)  # added up in float32, whatever was sent
    assert comm.sent_bytes["reduce-scatter"] == 2 * (sum(sizes) - sizes[rank]) * dtype.itemsize

    bucket = torch.full((sum(sizes),), float("nan"), dtype=dtype)
    bucket.split(sizes)[rank].fill_(rank)
    gather = comm.all_gather(bucket, sizes)
    comm.wait("all-gather", gather.works, bucket.device)
    assert [part.tolist() for part in bucket.split(sizes)] == [[float(r)] * size for r, size in enumerate(sizes)]
    assert comm.sent_bytes["all-gather"] == (comm.world_size - 1) * sizes[rank] * dtype.itemsize
    assert set(comm.waited_ms()) == {"reduce-scatter", "all-gather"}
    return True


@pytest.mark.parametrize("sizes", [[6, 6, 6], [5, 0, 7], [4, 4]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("between_cpus", "native", "old_names"),
    [(True, False, False), (False, False, False), (False, True, False), (False, True, True)],
    ids=["gloo", "gloo on a GPU", "nccl", "nccl, torch 2.11"],
)
def test_every_way(between_cpus, native, old_names, dtype, sizes):
    run_ranks(travel, len(sizes), between_cpus, native, old_names, dtype, sizes)


def test_a_group_of_one_needs_no_process_group():
    comm = Communicator(None)
    bucket, shard = torch.arange(4.0), torch.empty(4)
    comm.add(comm.reduce_scatter(bucket, [4]), shard, first=True)
    assert torch.equal(shard, bucket)
    assert not comm.all_gather(bucket, [4]).works
    assert not sum(comm.sent_bytes.values())
