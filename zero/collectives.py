"""Reduce-scatter and all-gather of flat buckets, each the fast way of its backend, and what they cost."""

import time
from collections import Counter, defaultdict, deque
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# torch 2.13 renamed these two; torch 2.11 has only the old names
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

LONG_TIMEOUT = timedelta(days=1)  # where ranks wait for a disk, which may take longer than any step


@cache
def cpu_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """A group of the same ranks that sends from main memory: `group` itself, or one beside it if it is NCCL's.

    Needs to be called on all ranks of the group, the first time.
    """
    if dist.get_backend(group) == "gloo":
        return group
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    return dist.new_group(ranks, timeout=LONG_TIMEOUT, backend="gloo", use_local_synchronization=True)


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, by rank, on all ranks. Needs to be called on all ranks; without torch.distributed on one."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast_object(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Rank 0's value, on all ranks. Needs to be called on all ranks; without torch.distributed on one."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, group_src=0, group=group)
    return values[0]


class AllGatherWork(NamedTuple):
    """An all-gather in flight. Until its works are done, only this rank's shard of `bucket` may be read."""

    bucket: torch.Tensor  # (sum of sizes,)
    works: list[dist.Work]


class ReduceScatterWork(NamedTuple):
    """A reduce-scatter in flight. Until its works are done, nothing in `bucket` may be written and no part read."""

    bucket: torch.Tensor  # (sum of sizes,)
    parts: list[torch.Tensor]  # what adds up to this rank's shard; each (sizes[rank],)
    received: list[torch.Tensor]  # the tensors from the pool that hold them
    works: list[dist.Work]


class Pool:
    """CPU tensors of the last steps, to be filled again: fresh memory costs a CPU more than the sum that it is for."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def acquire(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """A tensor, (numel,), of the dtype and device of `like`, with any content."""
        free = self._free.get((numel, like.dtype))
        return free.pop() if free and like.device.type == "cpu" else like.new_empty(numel)

    def release(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "cpu":  # a GPU's own allocator is a pool already
            self._free.setdefault((tensor.numel(), tensor.dtype), []).append(tensor)

    def clear(self) -> None:
        """Let go of the memory."""
        self._free.clear()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for free in self._free.values() for tensor in free)


class Communicator:
    """The collectives of one process group, and what they cost. Without torch.distributed, a group of one.

    Every method but those that only count needs to be called on all ranks, in one order. A bucket is a flat tensor,
    (sum of sizes,), the shards of the ranks end to end, `sizes[r]` elements owned by rank r.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        self.group = group
        self.world_size = dist.get_world_size(group) if distributed else 1
        self.rank = dist.get_rank(group) if distributed else 0
        self.pool = Pool()
        self.sent_bytes: Counter[str] = Counter()  # by this rank, by kind of collective
        self._waited_s: defaultdict[str, float] = defaultdict(float)
        self._waits: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()  # on a GPU: not read yet

    def reduce_scatter(self, bucket: torch.Tensor, sizes: list[int]) -> ReduceScatterWork:
        """Start to bring together what adds up to each rank's shard; `add` does the sum.

        Between CPUs every pair of ranks exchanges the two parts that the other one owns, and each adds up its own: the
        bytes of a ring, `(N - 1) / N` of the bucket sent by each, in half the time of gloo's own reduce-scatter.
        Anything of less than float32 is exchanged as well (all-to-all), so that it can be added up in float32: a ring
        would round every partial sum. Between GPUs the rest is NCCL's own.
        """
        parts = bucket.split(sizes)
        own = parts[self.rank]
        self.sent_bytes["reduce-scatter"] += bucket.nbytes - own.nbytes
        if self.world_size == 1:
            return ReduceScatterWork(bucket, [own], [], [])
        if self._is_between_cpus(bucket):
            received: list[torch.Tensor] = []
            works: list[Any] = []
            for distance in range(1, self.world_size):
                source, target = (self.rank - distance) % self.world_size, (self.rank + distance) % self.world_size
                if own.numel():
                    received.append(self.pool.acquire(own.numel(), own))
                    works.append(dist.irecv(received[-1], group_src=source, group=self.group))
                if sizes[target]:
                    works.append(dist.isend(parts[target], group_dst=target, group=self.group))
            return ReduceScatterWork(bucket, [own, *received], received, works)
        if self._is_native(bucket, sizes) and bucket.dtype in (torch.float32, torch.float64):
            total = self.pool.acquire(own.numel(), own)
            work = _reduce_scatter_single(total, bucket, group=self.group, async_op=True)
            return ReduceScatterWork(bucket, [total], [total], [work])
        gathered = self.pool.acquire(self.world_size * own.numel(), own)
        work = dist.all_to_all_single(gathered, bucket, [own.numel()] * self.world_size, sizes, group=self.group, async_op=True)
        return ReduceScatterWork(bucket, list(gathered.chunk(self.world_size)), [gathered], [work])

    def add(self, reduction: ReduceScatterWork, shard: torch.Tensor, first: bool) -> None:
        """Wait, then put the sum over the ranks into `shard`, (sizes[rank],): over what is there if `first`, else added.

        The sum is made in the dtype of `shard`, which may be wider than the bucket's. The tensors of the reduction go back
        to the pool.
        """
        self.wait("reduce-scatter", reduction.works, shard.device)
        total, *rest = reduction.parts if first else (shard, *reduction.parts)
        if not rest:
            shard.copy_(total)
        for part in rest:
            total = torch.add(total.to(shard.dtype), part, out=shard)
        for tensor in (reduction.bucket, *reduction.received):
            self.pool.release(tensor)

    def all_gather(self, bucket: torch.Tensor, sizes: list[int]) -> AllGatherWork:
        """Start filling `bucket` with every rank's own shard, in place.

        Gloo's own all-gather takes more than three times as long as one broadcast per shard (448 ms against 134 ms for
        124M float32 elements on 2 ranks), so there, and where shards are not equal, each owner broadcasts its shard.
        """
        shards = bucket.split(sizes)
        own = shards[self.rank]
        self.sent_bytes["all-gather"] += (self.world_size - 1) * own.nbytes
        if self.world_size == 1:
            works = []
        elif self._is_native(bucket, sizes):
            works = [_all_gather_single(bucket, own, group=self.group, async_op=True)]
        else:
            works = [
                dist.broadcast(shard, group_src=owner, group=self.group, async_op=True)
                for owner, shard in enumerate(shards)
                if shard.numel()
            ]
        return AllGatherWork(bucket, works)

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> list[dist.Work]:
        """Start an all-reduce in place."""
        if self.world_size == 1:
            return []
        return [dist.all_reduce(tensor, op=op, group=self.group, async_op=True)]

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite a contiguous tensor with that of rank 0."""
        if self.world_size > 1 and tensor.numel():
            dist.broadcast(tensor, group_src=0, group=self.group)

    def wait(self, kind: str, works: list[dist.Work], device: torch.device) -> None:
        """Have the computation wait for collectives; how long it stood still is counted as `kind`."""
        if device.type != "cuda":
            start = time.perf_counter()
            for work in works:
                work.wait()
            self._waited_s[kind] += time.perf_counter() - start
            return
        with torch.cuda.device(device):  # events belong to a device, and the wait to its current stream
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for work in works:
                work.wait()  # for NCCL the stream waits, not this thread
            end.record()
        self._waits.append((kind, begin, end))
        while len(self._waits) > 1 and self._waits[0][2].query():
            self._read_first_wait()

    def waited_ms(self) -> dict[str, float]:
        """How long the computation has stood still, by kind of collective: exposed communication. Waits for the device."""
        while self._waits:
            self._waits[0][2].synchronize()
            self._read_first_wait()
        return {kind: seconds * 1000 for kind, seconds in self._waited_s.items()}

    def _read_first_wait(self) -> None:
        kind, begin, end = self._waits.popleft()
        self._waited_s[kind] += begin.elapsed_time(end) / 1000

    def _is_between_cpus(self, bucket: torch.Tensor) -> bool:
        """Whether ranks can send each other parts of the bucket: gloo does so for tensors in main memory only."""
        return bucket.device.type == "cpu"

    def _is_native(self, bucket: torch.Tensor, sizes: list[int]) -> bool:
        """Whether the backend's own functions are the fast ones, and take these shards."""
        return bucket.device.type != "cpu" and dist.get_backend(self.group) != "gloo" and min(sizes) == max(sizes)
