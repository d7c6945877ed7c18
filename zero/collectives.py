"""Reduce-scatter and all-gather of flat buckets, each the fast way of its backend, and what they cost."""

import time
from collections import Counter
from typing import NamedTuple

import torch
import torch.distributed as dist

# torch 2.13 renamed these two; torch 2.11 has only the old names
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

sent_bytes: Counter[str] = Counter()  # by this process, by kind of collective
waited_s: Counter[str] = Counter()  # how long the computation stood still for each kind: exposed communication


class Gather(NamedTuple):
    """An all-gather in flight. Until `wait` returns, only this rank's shard of `bucket` may be read."""

    bucket: torch.Tensor  # (world_size * shard_numel,)
    works: list[dist.Work]

    def wait(self) -> None:
        _wait("all-gather", self.works)


class Reduction(NamedTuple):
    """A reduce-scatter in flight. Until `add_to` returns, nothing in `bucket` may be written or given away."""

    bucket: torch.Tensor  # (world_size * shard_numel,)
    own: torch.Tensor | None  # (shard_numel,), this rank's part of `bucket`; None where the backend adds up by itself
    received: list[torch.Tensor]  # the same part of the other ranks' buckets, or the backend's sum; each (shard_numel,)
    works: list[dist.Work]

    def add_to(self, shard: torch.Tensor, first: bool) -> None:
        """Wait, then put the sum over the ranks into `shard`, (shard_numel,): over what is there if `first`, else added."""
        _wait("reduce-scatter", self.works)
        *others, last = [part for part in (self.own, *self.received) if part is not None]
        if others and first:
            total, *rest = others
            for part in rest:
                total.add_(part)
            torch.add(total, last, out=shard)
        elif first:
            shard.copy_(last)
        else:
            for part in others:
                last.add_(part)
            shard.add_(last)


class Pool:
    """Tensors of the last steps, to be filled again: fresh memory costs a CPU more than the sum that it is for."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype, torch.device], list[torch.Tensor]] = {}

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """A flat tensor of the size and kind of `like`, with any content."""
        free = self._free.get(_kind(like))
        return free.pop() if free else torch.empty_like(like)

    def give_back(self, tensor: torch.Tensor) -> None:
        self._free.setdefault(_kind(tensor), []).append(tensor)


def _kind(tensor: torch.Tensor) -> tuple[int, torch.dtype, torch.device]:
    return tensor.numel(), tensor.dtype, tensor.device


def reduce_scatter(bucket: torch.Tensor, group: dist.ProcessGroup | None, pool: Pool) -> Reduction:
    """Start summing every rank's `bucket` into shards, one for each rank. Needs to be called on all ranks, in one order.

    Gloo's native reduce-scatter takes twice as long as its all-reduce; there every pair of ranks exchanges the two parts
    that the other one owns, and each adds up its own: the bytes of a ring, `(N - 1) / N` of the bucket sent by each.

    Args:
        bucket: (world_size * shard_numel,), contiguous.
        pool: gives the tensors to receive in; all tensors of the result go back to it when they have been added up.
    """
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    parts = bucket.chunk(world_size)  # each (shard_numel,)
    sent_bytes["reduce-scatter"] += (world_size - 1) * parts[rank].nbytes
    if dist.get_backend(group) != "gloo":
        total = pool.take(parts[rank])
        work = _reduce_scatter_single(total, bucket, group=group, async_op=True)
        return Reduction(bucket, None, [total], [work])
    received, works = [], []
    for distance in range(1, world_size):
        source, target = (rank - distance) % world_size, (rank + distance) % world_size
        received.append(pool.take(parts[rank]))
        works.append(dist.irecv(received[-1], group_src=source, group=group))
        works.append(dist.isend(parts[target], group_dst=target, group=group))
    return Reduction(bucket, parts[rank], received, works)


def all_gather(bucket: torch.Tensor, group: dist.ProcessGroup | None) -> Gather:
    """Start filling `bucket` with every rank's own shard, in place. Needs to be called on all ranks, in one order.

    Gloo's native all-gather takes more than three times as long as one broadcast per shard (448 ms against 134 ms for
    124M float32 elements on 2 ranks), so there each owner broadcasts its shard.

    Args:
        bucket: (world_size * shard_numel,), contiguous; this rank's shard holds what the others are to receive.
    """
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    shards = bucket.chunk(world_size)  # each (shard_numel,)
    sent_bytes["all-gather"] += (world_size - 1) * shards[rank].nbytes
    if dist.get_backend(group) == "gloo":
        works = [dist.broadcast(shard, group_src=owner, group=group, async_op=True) for owner, shard in enumerate(shards)]
    else:
        works = [_all_gather_single(bucket, shards[rank], group=group, async_op=True)]
    return Gather(bucket, works)


def _wait(kind: str, works: list[dist.Work]) -> None:
    begin = time.perf_counter()
    for work in works:
        work.wait()
    waited_s[kind] += time.perf_counter() - begin
