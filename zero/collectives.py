"""Reduce-scatter and all-gather of flat buckets, with the fast method of each backend. Counts bytes and wait time."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zero.host_comm import TAG, timeout_of
from zero.options import Options
from zero.stopwatch import Stopwatch, mark
from zero.tensors import MAIN_MEMORY, pieces

# torch 2.13 renamed these two functions; torch 2.11 has only the old names
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

KINDS = ("all-reduce", "reduce-scatter", "all-to-all", "all-gather", "broadcast")  # of collectives
KEPT_BYTES = 4_000_000  # bytes of the smallest tensor that a Pool keeps
PART = 2**22  # elements that are broadcast at a time
SUMMED_BY_NCCL = (torch.float32, torch.float64)  # other dtypes are added up in float32, see `Communicator.reduce_scatter`
GRADIENTS, PARAMETERS, MATRICES = TAG + 1, TAG + 2, TAG + 3  # so that no parameter is ever taken for a gradient


@cache  # each group has threads on a CPU, and memory on a GPU: all optimizers of the same ranks share one
def _subgroup(group: Any, members: range) -> dist.ProcessGroup:
    """Return a process group of some ranks of `group`, with its backend and timeout. Needs to be called on these ranks."""
    world: Any = dist.group.WORLD
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) < world.size() and world.bound_device_id is not None:
        reason = "because with init_process_group(device_id=...) every rank takes part in each new group; leave device_id out"
        raise ValueError(f"shard_size in a process_group of {len(ranks)} ranks would wait for all {world.size()}, {reason}")
    chosen, backend = [ranks[member] for member in members], dist.get_backend(group)
    return dist.new_group(chosen, timeout=timeout_of(group), backend=backend, use_local_synchronization=True)


class ReduceScatterWork(NamedTuple):
    """A reduce-scatter in flight. Until its works are done, `bucket` may not be written and `parts` may not be read."""

    bucket: torch.Tensor  # (shard_size * numel,)
    parts: list[torch.Tensor]  # their sum is this rank's shard; each (numel,), or (ranks, numel) for one from each rank
    received: list[torch.Tensor]  # the tensors from the pool that hold received parts
    works: list[dist.Work]


class AllToAllWork(NamedTuple):
    """An all-to-all in flight. Until its works are done, `outgoing` may not be written and `incoming` may not be read."""

    outgoing: torch.Tensor  # (sum of the sizes that this rank sends,)
    incoming: torch.Tensor  # (sum of the sizes that it receives,)
    works: list[dist.Work]


class Pool:
    """CPU tensors of `KEPT_BYTES` or more, which are kept for reuse: fresh memory would take more time than the sum in it.

    `is_on_cpu`: that of a Communicator.
    """

    def __init__(self, is_on_cpu: Callable[[torch.Tensor], bool]) -> None:
        self._is_on_cpu = is_on_cpu
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def acquire(self, numel: int, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a tensor, (numel,), as `like` or in `dtype`, with undefined content: perhaps nearly all of a larger one."""
        dtype, of_free = dtype or like.dtype, self._free.items() if self._is_on_cpu(like) else ()
        fitting = [size for (size, kind), free in of_free if free and kind == dtype and numel <= size <= 1.1 * numel]
        return self._free[min(fitting), dtype].pop()[:numel] if fitting else like.new_empty(numel, dtype=dtype)

    def release(self, tensor: torch.Tensor) -> None:
        tensor = tensor if tensor._base is None else tensor._base
        if self._is_on_cpu(tensor) and tensor.nbytes >= KEPT_BYTES:
            self._free.setdefault((tensor.numel(), tensor.dtype), []).append(tensor)

    def clear(self) -> None:
        self._free.clear()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for free in self._free.values() for tensor in free)


class Communicator:
    """The collectives of one process group, with counters of bytes and wait time.

    Construction and all collectives need to be called on all ranks, in the same order. A bucket is a flat tensor: the equal
    shards of the ranks of a shard group, end to end. With several shard groups, each holds a replica of every shard, and
    the ranks with the same shard form a replica group: hybrid sharding, as in PyTorch FSDP (`HYBRID_SHARD`) and Megatron-LM
    (`num_distributed_optimizer_instances`). `group`: all ranks that train. `options` say how many of them a shard group has.
    """

    checks_values = True  # whether parameters must have values in memory of their own, which those of a dry run have not
    is_gloo = False
    shard_group: dist.ProcessGroup | None
    replica_group: dist.ProcessGroup | None

    def __init__(self, group: dist.ProcessGroup | None, options: Options = Options()) -> None:
        distributed = dist.is_initialized()
        self._prepare(group, *((dist.get_rank(group), dist.get_world_size(group)) if distributed else (0, 1)), options)
        self.is_gloo = distributed and dist.get_backend(group) == "gloo"
        if self.replicas > 1:
            first = self.replica * self.shard_size
            whole = group or dist.group.WORLD
            self.shard_group = _subgroup(whole, range(first, first + self.shard_size))
            self.replica_group = _subgroup(whole, range(self.shard_rank, self.world_size, self.shard_size))

    def _prepare(self, group: Any, rank: int, world_size: int, options: Options) -> None:
        self.group, self.rank, self.world_size, self.options = group, rank, world_size, options
        self.shard_size = options.sharing(world_size)
        self.replicas = world_size // self.shard_size
        self.replica, self.shard_rank = divmod(rank, self.shard_size)
        self.shard_group, self.replica_group = group, None
        self._mean_factor = torch.full((), 1 / world_size, dtype=torch.float64, device="cpu")  # a tensor takes less time
        self._mean_factors: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}
        self.pool = Pool(self.is_on_cpu)
        self.sent_bytes: Counter[str] = Counter()  # bytes that this rank sent, by kind of collective
        self.waits = Stopwatch(of_collectives=True)  # exposed communication: time that the computation waited, by kind

    def is_on_cpu(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is sent as between CPUs. Tests override this, so that gloo sends as between GPUs."""
        return tensor.device.type in MAIN_MEMORY

    @property
    def is_alone(self) -> bool:
        """Whether a shard is the whole bucket, so that nothing is sent."""
        return self.shard_size == 1

    def divide(self, gradient: torch.Tensor, place: torch.Tensor) -> None:
        """Write a gradient, divided by the number of ranks, to its place. If this has another dtype, it is computed in that."""
        factor = self._mean_factor
        if gradient.dtype != place.dtype:  # a factor with a dimension counts for the dtype of the product
            if (key := (place.device, place.dtype)) not in self._mean_factors:
                self._mean_factors[key] = factor.reshape(1).to(place)
            factor = self._mean_factors[key]
        torch.mul(gradient, factor, out=place)

    def reduce_scatter(self, bucket: torch.Tensor) -> ReduceScatterWork:
        """Start a reduce-scatter over the shard group: send the parts of each shard to the rank that owns it.

        `sum_of` adds them up. Between CPUs, each pair of ranks exchanges the parts that the other rank owns: as many bytes as
        in a ring, in half the time of gloo's own reduce-scatter. Between GPUs, float32 and float64 buckets use NCCL's own. All
        others use an all-to-all, so that they are added up in float32, while a ring would round every partial sum.
        """
        self.sent_bytes["reduce-scatter"] += bucket.nbytes - bucket.nbytes // self.shard_size
        if self.is_alone:
            return ReduceScatterWork(bucket, [bucket], [], [])
        native = self._is_native(bucket) and bucket.dtype in SUMMED_BY_NCCL
        own = bucket.numel() // self.shard_size
        if self.is_on_cpu(bucket):  # gloo sends only from main memory
            received = [self.pool.acquire(own, bucket) for _ in range(self.shard_size - 1)]
            parts, sources = bucket.chunk(self.shard_size), [source for source, _ in self._peers()]
            works = self._exchange(parts, dict(zip(sources, received, strict=True)), GRADIENTS)
            return ReduceScatterWork(bucket, [parts[self.shard_rank], *received], received, works)
        place = bucket.new_empty(own if native else bucket.numel())  # for the sum, or for all parts
        start: Any = _reduce_scatter_single if native else dist.all_to_all_single
        works = self._start(start, place, bucket, group=self.shard_group)
        return ReduceScatterWork(bucket, [place if native else place.view(self.shard_size, -1)], [place], works)

    def sum_of(self, reduction: ReduceScatterWork, shard: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """Wait for a reduce-scatter and return its sum over the shard group, added to `shard` if there is one.

        The sum is computed in the dtype of `like`, a shard. Without `shard`, it reuses a received part if that fits.
        The other tensors of the reduction return to the pool. On a single rank, the bucket itself is the result.
        """
        self.wait("reduce-scatter", reduction.works, like.device)
        parts, received = reduction.parts, reduction.received
        if parts[0].dim() > 1:
            total = parts[0].sum(0, dtype=like.dtype)
            return total if shard is None else shard.add_(total)
        before = [] if shard is None else [shard]
        if not before and self.world_size == 1 and not received and reduction.bucket.dtype != torch.float16:
            return reduction.bucket  # a GradScaler unscales float16 in float32 only
        if not before and received and (received[0].shape, received[0].dtype) == (like.shape, like.dtype):
            shard, *received = received
        elif shard is None or shard.dtype != like.dtype:
            shard, received = self.pool.acquire(like.numel(), like), received + before
        parts = before + parts
        if self.is_on_cpu(shard) and parts[-1].dtype != shard.dtype:  # a CPU adds two dtypes slowly
            for place, *addends in pieces(shard, *parts):
                self._write_sum(addends, place)
        else:
            self._write_sum(parts, shard)
        for tensor in (reduction.bucket, *received):
            self.pool.release(tensor)
        return shard

    def _write_sum(self, parts: list[torch.Tensor], place: torch.Tensor) -> None:
        """Write the sum of the parts to `place`, in its dtype, added from first to last. `place` may be the first part."""
        total = parts[0]
        if total is not place and (len(parts) == 1 or total.dtype != place.dtype):
            total = place.copy_(total)
        for part in parts[1:]:
            total = torch.add(total, part.to(place.dtype) if self.is_on_cpu(place) else part, out=place)

    def all_gather(self, bucket: torch.Tensor) -> list[dist.Work]:
        """Start an in-place all-gather: fill `bucket` with the shards of all ranks of the shard group.

        Between CPUs, each rank sends its shard to each other rank. Gloo's own all-gather takes more than three times as long.
        """
        numel = bucket.numel() // self.shard_size
        own = bucket[self.shard_rank * numel : (self.shard_rank + 1) * numel]
        self.sent_bytes["all-gather"] += (self.shard_size - 1) * own.nbytes
        if not self.is_alone and self._is_native(bucket):
            return self._start(_all_gather_single, bucket, own, group=self.shard_group)
        shards = bucket.chunk(self.shard_size)
        if self.is_on_cpu(bucket) or self.is_alone:
            return self._exchange([own] * self.shard_size, dict(enumerate(shards)), PARAMETERS)
        works: list[dist.Work] = []
        for owner, shard in enumerate(shards):
            works += self._start(dist.broadcast, shard, group_src=owner, group=self.shard_group)
        return works

    def all_to_all(self, outgoing: torch.Tensor, sent: list[int], received: list[int]) -> AllToAllWork:
        """Start an all-to-all over the shard group: each rank sends a part of `outgoing` to every rank.

        `outgoing`: the parts in the order of the ranks, (sum of sent,). `sent`, `received`: elements to and from each rank.
        """
        incoming = outgoing.new_empty(sum(received))
        parts, places = outgoing.split(sent), incoming.split(received)
        self.sent_bytes["all-to-all"] += outgoing.nbytes - parts[self.shard_rank].nbytes
        if self.is_on_cpu(outgoing) or self.is_alone:
            places[self.shard_rank].copy_(parts[self.shard_rank])
            return AllToAllWork(outgoing, incoming, self._exchange(parts, dict(enumerate(places)), MATRICES))
        works = self._start(dist.all_to_all_single, incoming, outgoing, received, sent, group=self.shard_group)
        return AllToAllWork(outgoing, incoming, works)

    def all_reduce_shard(self, shard: torch.Tensor) -> list[dist.Work]:
        """Start an in-place all-reduce of a shard over its replicas. All of them get the same bits."""
        if self.replicas == 1 or not shard.numel():
            return []
        self.sent_bytes["all-reduce"] += 2 * shard.nbytes * (self.replicas - 1) // self.replicas
        return self._start(dist.all_reduce, shard, group=self.replica_group)

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> list[dist.Work]:
        """Start an in-place all-reduce over all ranks."""
        return [] if self.world_size == 1 else self._start(dist.all_reduce, tensor, op=op, group=self.group)

    def broadcast_parts(self, values: torch.Tensor, place: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Broadcast flat values of rank 0 in parts. Yield (first element, part), a view of `place` if the dtypes agree."""
        for first in range(0, values.numel(), PART):
            part = place[first : first + PART]
            if part.dtype != values.dtype:
                part = torch.empty_like(part, dtype=values.dtype)
            part.copy_(values[first : first + PART])
            for work in self._start(dist.broadcast, part, group_src=0, group=self.group) if self.world_size > 1 else ():
                work.wait()
            yield first, part

    def wait(self, kind: str, works: list[dist.Work], device: torch.device) -> None:
        """Make the computation wait for collectives. The wait time is counted under `kind`."""
        begin = mark(device)
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            while works:  # a receive must not be waited for twice, even if this is interrupted
                works.pop(0).wait()  # with NCCL, the current stream of the device waits, not this thread
        self.waits.add(kind, begin, mark(device))

    def _start(self, collective: Any, *args: Any, **how: Any) -> list[dist.Work]:
        """Start a collective. A dry run overrides this method and `_exchange`, so that it talks to nobody."""
        return [collective(*args, async_op=True, **how)]

    def _exchange(self, parts: Sequence[torch.Tensor], places: dict[int, torch.Tensor], tag: int) -> list[dist.Work]:
        """Start to send a part to each other rank, `parts[rank]`, and to receive one from it, in `places[rank]`."""
        works: list[Any] = []
        for source, target in self._peers():
            if parts[target].numel():  # with gloo, a receive before the send takes longer, 2 % of a step of 10M parameters
                works.append(dist.isend(parts[target], group_dst=target, group=self.shard_group, tag=tag))
            if places[source].numel():
                works.append(dist.irecv(places[source], group_src=source, group=self.shard_group, tag=tag))
        return works

    def _peers(self) -> Iterator[tuple[int, int]]:
        """Yield the rank to receive from and the rank to send to, for each round of a pairwise exchange."""
        for distance in range(1, self.shard_size):
            yield (self.shard_rank - distance) % self.shard_size, (self.shard_rank + distance) % self.shard_size

    def _is_native(self, bucket: torch.Tensor) -> bool:
        """Return whether the backend's own functions are the fast method."""
        return not self.is_on_cpu(bucket) and not self.is_gloo
