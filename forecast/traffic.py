"""Bytes of communication buffers over an iteration. Arithmetic only."""

import math
from collections import Counter

import torch

from zero.collectives import KEPT_BYTES

FlatTensor = tuple[int, torch.dtype]  # number of elements, dtype


class Traffic:
    """Counts the bytes that communication takes, with those that a `zero.collectives.Pool` keeps, and without shards."""

    def __init__(self, on_cpu: bool) -> None:
        self.now = 0
        self.peak = 0
        self.in_flight = 0  # at the end of the last backward but one
        self.between = 0  # when that has arrived
        self.before_step = self.after_step = 0
        self.shards = 0  # bytes of the shards that have arrived in this iteration
        self.steps: list[tuple[float, float, int]] = []  # of the last backward, see `add_step`
        self._smallest_kept = KEPT_BYTES if on_cpu else math.inf
        self._free: Counter[FlatTensor] = Counter()  # what the pool keeps
        self._free_shards = 0  # bytes of this that shards have left there, and will take again

    def acquire(self, tensor: FlatTensor) -> None:
        if self._free[tensor]:
            self._free[tensor] -= 1
        else:
            self.now += nbytes_of(tensor)
            self.peak = max(self.peak, self.now - self._free_shards)

    def release(self, tensor: FlatTensor) -> None:
        if nbytes_of(tensor) >= self._smallest_kept:
            self._free[tensor] += 1
        else:
            self.now -= nbytes_of(tensor)

    def clear(self) -> None:
        """Free what the pool keeps."""
        self.now -= sum(nbytes_of(tensor) * count for tensor, count in self._free.items())
        self._free.clear()
        self._free_shards = 0

    def hold(self, shard: FlatTensor, received: list[FlatTensor]) -> list[FlatTensor]:
        """Count a tensor as a shard. Its memory is one of `received` if that fits; return the others."""
        self.shards += nbytes_of(shard)
        self.now -= nbytes_of(shard)
        self._free_shards = max(0, self._free_shards - nbytes_of(shard))
        if shard in received:
            return received[1:]  # all are equal
        self.acquire(shard)
        return received

    def drop(self, shard: FlatTensor) -> None:
        """Release a shard."""
        self.shards -= nbytes_of(shard)
        self.now += nbytes_of(shard)
        self.release(shard)
        self._free_shards += nbytes_of(shard) if nbytes_of(shard) >= self._smallest_kept else 0

    def add_step(self, start: float, stop: float) -> None:
        """Note the bytes of communication and shards while the bytes of gradients in buckets rise from `start` to `stop`."""
        self.steps.append((start, stop, self.now + self.shards))


def nbytes_of(tensor: FlatTensor) -> int:
    numel, dtype = tensor
    return numel * dtype.itemsize
