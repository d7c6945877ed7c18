"""The tensors of the reduce-scatters of an iteration, bucket by bucket, as ShardedDataParallel acquires and releases them."""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch

from zero.collectives import Pool


@dataclass(frozen=True)
class FlatTensor:
    """What a `Pool` reads of a flat tensor."""

    size: int  # elements
    dtype: torch.dtype
    device: torch.device

    def numel(self) -> int:
        return self.size

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def new_empty(self, numel: int) -> Self:
        return replace(self, size=numel)


class BucketTensors(NamedTuple):
    """The tensors that a bucket of gradients takes."""

    bucket: FlatTensor
    received: list[FlatTensor]  # all are equal
    first_shard: FlatTensor  # after the first micro-step that is sent
    last_shard: FlatTensor  # after the others


class Traffic:
    """Counts the bytes of communication buffers, with those that a `Pool` keeps, and of gradient shards.

    Args:
        buckets: in the order in which they are sent.
        micro_steps: of an iteration.
        shard_gradients: every micro-step sends its gradients, not the last one only.
        is_alone: there is a single rank, whose bucket may become the shard.
    """

    def __init__(self, buckets: list[BucketTensors], micro_steps: int, shard_gradients: bool, is_alone: bool) -> None:
        self.largest = 0  # most bytes in use at one time, without shards
        # by point of a step: bytes of shards, and of all else. "between": the buckets of a micro-step have arrived
        self.at: dict[str, tuple[int, int]] = {"after wrapping": (0, 0)}
        # of the last backward: bytes of everything while the bytes of gradients in buckets rise from a start to a stop
        self.steps: list[tuple[float, float, int]] = []
        self._buckets, self._is_alone = buckets, is_alone
        self._pool: Any = Pool()
        self._in_use = self._shards = 0  # bytes; shards are in use, too
        self._in_flight: tuple[int, BucketTensors] | None = None  # number of the micro-step, bucket
        for _ in range(2):  # the second iteration finds what the first one has left in the pool
            if micro_steps > 1 and not shard_gradients:
                self._pool.clear()  # before the micro-steps that are not sent
            self._run_iteration(min(4, micro_steps) if shard_gradients else 1, shard_gradients)  # more micro-steps are alike

    def _run_iteration(self, backwards: int, shard_gradients: bool) -> None:
        filled: float = 0  # bytes of gradients in buckets
        for micro_step in range(backwards):
            self._note("accumulating")
            self._arrive(filled)
            self._note("between")
            filled, self.steps = 0, []
            for bucket in self._buckets:
                before, filled = filled, filled + bucket.bucket.nbytes
                self._acquire(bucket.bucket)
                self._add_step(before, filled)
                self._arrive(filled)
                for tensor in bucket.received:
                    self._acquire(tensor)
                self._add_step(filled, filled)
                self._in_flight = micro_step, bucket
        self._arrive(math.inf)
        if shard_gradients:
            self._pool.clear()
        self._note("before step")
        for bucket in self._buckets:
            self._release(bucket.last_shard, is_shard=True)
        self._note("after step")

    def _arrive(self, filled: float) -> None:
        """Make the sum of the bucket in flight, if there is one, a shard, or add it to the shard."""
        if self._in_flight is None:
            return
        (micro_step, (bucket, received, first, last)), self._in_flight = self._in_flight, None
        others = [*received, bucket]
        if micro_step == 0 and first in ([bucket] if self._is_alone else received):
            others.remove(first)  # whose memory the shard takes
            self._shards += first.nbytes
        elif micro_step == 0:
            self._acquire(first, is_shard=True)
        elif micro_step == 1 and first != last:  # a single gradient becomes a sum
            self._release(first, is_shard=True)
            self._acquire(last, is_shard=True)
        self._add_step(filled, filled)
        for tensor in others:
            self._release(tensor)

    def _acquire(self, tensor: FlatTensor, is_shard: bool = False) -> None:
        self._pool.acquire(tensor.size, tensor)
        self._in_use += tensor.nbytes
        self._shards += is_shard * tensor.nbytes
        self.largest = max(self.largest, self._in_use - self._shards)

    def _release(self, tensor: FlatTensor, is_shard: bool = False) -> None:
        self._pool.release(tensor)
        self._in_use -= tensor.nbytes
        self._shards -= is_shard * tensor.nbytes

    def _note(self, point: str) -> None:
        self.at[point] = self._shards, self._in_use + self._pool.nbytes - self._shards

    def _add_step(self, start: float, stop: float) -> None:
        self.steps.append((start, stop, self._in_use + self._pool.nbytes))
