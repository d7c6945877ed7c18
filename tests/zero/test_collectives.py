"""zero/collectives.py: every way in which a bucket can travel gives the same sums and the same shards."""

import importlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from zero import collectives

NEW_NAMES = "reduce_scatter_single", "all_gather_single"  # of torch 2.13
OLD_NAMES = "reduce_scatter_tensor", "all_gather_into_tensor"


class LooksLikeOnGpu(torch.Tensor):
    """A tensor in main memory that says it is on a GPU; gloo carries it all the same."""

    device = torch.device("cuda", 0)


DTYPES = torch.float32, torch.bfloat16


def travel(looks_like_on_gpu, looks_like_nccl, old_names):
    """By dtype: the functions of torch that are called on another backend or in another version of torch; gloo knows all."""
    if old_names:  # those of torch 2.11
        for name in NEW_NAMES:
            if hasattr(dist, name):
                delattr(dist, name)
    if looks_like_nccl:
        dist.get_backend = lambda group=None: "nccl"
    names = *NEW_NAMES, *OLD_NAMES, "isend", "irecv", "all_to_all_single", "broadcast"
    spies = {name: mock.Mock(wraps=getattr(dist, name)) for name in names if hasattr(dist, name)}
    vars(dist).update(spies)
    importlib.reload(collectives)
    found = []
    for dtype in DTYPES:
        for spy in spies.values():
            spy.reset_mock()
        there_and_back(looks_like_on_gpu, dtype)
        found.append([name for name, spy in spies.items() if spy.called])
    return found


def there_and_back(looks_like_on_gpu, dtype, numel=6):
    """Reduce-scatter and all-gather of shards of `numel` elements."""
    comm, rank = collectives.Communicator(None), dist.get_rank()

    def place(bucket):
        return bucket.as_subclass(LooksLikeOnGpu) if looks_like_on_gpu else bucket

    buckets = [torch.arange(comm.world_size * numel, dtype=dtype) / 7 + r for r in range(comm.world_size)]
    expected = sum(bucket.float() for bucket in buckets).split(numel)[rank]
    shard = None
    for _ in range(2):
        shard = comm.sum_of(comm.reduce_scatter(place(buckets[rank].clone())), shard, torch.empty(numel))
    assert shard.dtype == torch.float32
    # added up in float32, whatever was sent
    torch.testing.assert_close(shard.as_subclass(torch.Tensor), 2 * expected, rtol=1e-6, atol=1e-6)
    assert comm.sent_bytes["reduce-scatter"] == 2 * (comm.world_size - 1) * numel * dtype.itemsize

    bucket = torch.full((comm.world_size * numel,), float("nan"), dtype=dtype)
    bucket.split(numel)[rank].fill_(rank)
    gather = comm.all_gather(place(bucket))
    comm.wait("all-gather", gather, bucket.device)
    assert [part.tolist() for part in bucket.split(numel)] == [[float(r)] * numel for r in range(comm.world_size)]
    assert comm.sent_bytes["all-gather"] == (comm.world_size - 1) * numel * dtype.itemsize
    assert set(comm.waits.read_ms()) == {"reduce-scatter", "all-gather"}


@pytest.mark.parametrize(
    ("looks_like_on_gpu", "looks_like_nccl", "old_names"),
    [(False, False, False), (True, False, False), (True, True, False), (True, True, True)],
    ids=["gloo", "gloo on a GPU", "nccl", "nccl, torch 2.11"],
)
def test_every_way(looks_like_on_gpu, looks_like_nccl, old_names):
    reduce_scatter, all_gather = OLD_NAMES if old_names or not hasattr(dist, NEW_NAMES[0]) else NEW_NAMES
    results = run_ranks(travel, 3, looks_like_on_gpu, looks_like_nccl, old_names)
    for dtype, *called in zip(DTYPES, *results, strict=True):
        fast = {
            reduce_scatter if looks_like_nccl and dtype == torch.float32 else "all_to_all_single",  # else added up in float32
            all_gather if looks_like_nccl else "broadcast",
        }
        assert set().union(*called) == (fast if looks_like_on_gpu else {"isend", "irecv"}), dtype


def receive_of_the_users_own():
    """A message between two ranks that is received before an all-gather and sent after it."""
    comm, rank = collectives.Communicator(None), dist.get_rank()
    bucket, message = torch.full((4,), float(rank)), torch.full((2,), 7.0)
    own = dist.irecv(message, 0) if rank == 1 else None
    gather = comm.all_gather(bucket)
    if rank == 0:
        own = dist.isend(message, 1)
    comm.wait("all-gather", gather, bucket.device)
    own.wait()
    return bucket.tolist(), message.tolist()


def test_messages_of_the_user_are_not_mixed_up_with_shards():
    assert run_ranks(receive_of_the_users_own, 2) == [([0.0, 0.0, 1.0, 1.0], [7.0, 7.0])] * 2
