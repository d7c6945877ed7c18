"""The tensors of the reduce-scatters of an iteration, bucket by bucket, as ShardedDataParallel holds them. Arithmetic only."""

import math
from collections import Counter
from typing import NamedTuple

import torch


class FlatTensor(NamedTuple):
    numel: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class BucketTensors(NamedTuple):
    """The tensors of the gradients of a bucket."""

    bucket: FlatTensor
    received: list[FlatTensor]  # all are equal
    shard: FlatTensor  # after the first micro-step that is sent
    total: FlatTensor  # after the others


class Traffic:
    """Counts the bytes of communication buffers, with those that a `zero.collectives.Pool` keeps, and of gradient shards.

    Args:
        buckets: in the order in which they are sent.
        kept_bytes: smallest tensor that the pool keeps.
        is_alone: there is a single rank, whose bucket may become the shard.
    """

    def __init__(self, buckets: list[BucketTensors], kept_bytes: float, is_alone: bool) -> None:
        self.largest = 0  # most bytes in use at one time, without shards
        # by point of a step: bytes of shards, and of all else. "between": the buckets of a micro-step have arrived
        self.at: dict[str, tuple[int, int]] = {}
        # of the last backward: (start, stop, all bytes) while the bytes of gradients in buckets rise from start to stop
        self.intervals: list[tuple[float, float, int]] = []
        self._buckets, self._kept_bytes, self._is_alone = buckets, kept_bytes, is_alone
        self._in_flight: Counter[FlatTensor] = Counter()  # the tensors of at most one bucket
        self._shards: Counter[FlatTensor] = Counter()
        self._kept: Counter[FlatTensor] = Counter()  # those in use that the pool will keep, and those that it has

    def run_iteration(self, micro_steps: int, shard_gradients: bool) -> None:
        """Count an iteration. The second one finds what the first one has left in the pool."""
        if micro_steps > 1 and not shard_gradients:
            self._kept.clear()  # before the micro-steps that are not sent
        backwards = min(4, micro_steps) if shard_gradients else 1  # more of them are alike
        for micro_step in range(backwards):
            filled, self.intervals = 0, []  # bytes of gradients in buckets
            for number, tensors in enumerate(self._buckets):
                start, filled = filled, filled + tensors.bucket.nbytes
                self._in_flight[tensors.bucket] += 1
                self._add_interval(start, filled)
                if number > 0:
                    self._arrive(self._buckets[number - 1], micro_step)
                    self._add_interval(filled, filled)
                self._in_flight = Counter([tensors.bucket, *tensors.received])
                self._add_interval(filled, filled)
            if micro_step < backwards - 1:
                self._note("accumulating")
            self._arrive(self._buckets[-1], micro_step)
            self._add_interval(math.inf, math.inf)
            self._in_flight.clear()
            if micro_step < backwards - 1:
                self._note("between")
        if shard_gradients:
            self._kept.clear()
        self._note("before step")
        self._shards.clear()
        self._note("after step")

    def _arrive(self, sent: BucketTensors, micro_step: int) -> None:
        """Make the sum of a bucket that was in flight a shard, or add it to the shard."""
        if micro_step == 0:
            if sent.shard in ([sent.bucket] if self._is_alone else sent.received):
                self._in_flight[sent.shard] -= 1  # whose memory it takes
            self._shards[sent.shard] += 1
        elif micro_step == 1:  # a single gradient becomes a sum, which may have another dtype
            self._shards[sent.shard] -= 1
            self._shards[sent.total] += 1

    def _everything(self) -> int:
        """Return the bytes of all tensors, and of those that the pool keeps for later."""
        in_use = self._in_flight + self._shards
        self.largest = max(self.largest, _nbytes(in_use) - _nbytes(self._shards))
        self._kept |= Counter({tensor: count for tensor, count in in_use.items() if tensor.nbytes >= self._kept_bytes})
        return _nbytes(in_use | self._kept)

    def _note(self, point: str) -> None:
        self.at[point] = _nbytes(self._shards), self._everything() - _nbytes(self._shards)

    def _add_interval(self, start: float, stop: float) -> None:
        self.intervals.append((start, stop, self._everything()))


def _nbytes(tensors: dict[FlatTensor, int]) -> int:
    return sum(count * tensor.nbytes for tensor, count in tensors.items())
