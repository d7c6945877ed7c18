"""Bytes of memory and of communication on one rank, predicted from a plan. Arithmetic only: no tensors, no process group.

The figures are those of a steady state, from the second step on. They count the elements of tensors. The allocator of a GPU
rounds tensors up, and its libraries (cuBLAS, NCCL) take workspaces in addition.
"""

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch

from zero.codecs import STATE_CODECS
from zero.collectives import KEPT_BYTES, PART
from zero.layout import ParameterSpec, Plan

PURPOSES = ("parameters", "gradients", "state", "master", "buckets")

# before the first step; after a micro-step that is not the last one of its iteration; after the last backward and after
# clipping; after the update and `zero_grad`, when all parameters have arrived
Point = Literal["wrapped", "accumulating", "before step", "after step"]


class Activations(NamedTuple):
    """Bytes of activations in a micro-step, in addition to parameters and to gradients that have arrived.

    After `saved`, these are peaks by phase. Each figure is linear in the number of layers.
    """

    saved: int  # what forward keeps for backward
    forward: int
    loss: int  # backward until the first gradient arrives
    layers: int  # from then on, until the first gradient of the first layer arrives
    embedding: int  # from then on; the gradient that arrives last is included


@dataclass(frozen=True)
class Prediction:
    """Predictions for one rank, here of a single process. There is a subclass for each wrapper.

    Args:
        plan: the plan of any implementation, see `zero.flags` and `zero.layout`.
        rank: a rank of the plan. A plan without sharding has only rank 0.
        world_size: number of ranks. With more ranks than in the plan, there are replicas of the state.
        micro_steps: micro-steps per iteration on each rank.
        shard_gradients: see `zero.ShardedDataParallel`.
        on_cpu: gloo, and large buckets are kept from step to step. On a GPU, the backend is NCCL.
        tensors_per_parameter: per-element state tensors in the dtype of the update: 2 for AdamW. `step` counters, 4 bytes per
            slice, are not counted.
    """

    plan: Plan
    rank: int = 0
    world_size: int = 1
    micro_steps: int = 1
    shard_gradients: bool = False
    on_cpu: bool = False
    tensors_per_parameter: int = 2

    def at(self, point: Point) -> dict[str, int]:
        """Return the bytes of the model and its optimizer at a point of a step, by purpose.

        Returns:
            parameters  the weights that forward and backward use, with the padding of flat buffers
            gradients   full gradients, or with ShardedDataParallel after the last backward the shards of this rank
            state       per-element optimizer state
            master      masters of the owned slices, or their remainders
            buckets     other memory for communication: buckets in flight, and on a CPU the large ones kept for the next step
        """
        gradients, buckets = self._gradients_and_buckets(point)
        return {
            "parameters": self.parameters,
            "gradients": gradients,
            "state": 0 if point == "wrapped" else self.state,
            "master": self.master,
            "buckets": buckets,
        }

    def peak(self, activations: Activations) -> int:
        """Return the peak bytes of a run: of its construction, or of its training."""
        return max(self.construction, self.peak_of_training(activations))

    def peak_of_training(self, activations: Activations) -> int:
        """Return the peak bytes of training, after the first step."""
        return self.parameters + self.state + self.master + self._largest_of_a_step(activations)

    def sent(self) -> dict[str, int]:
        """Return the bytes that this rank sends per iteration, by kind of collective.

        An all-reduce counts as a ring, 2 (N - 1) / N of its bytes. ZeroRedundancyOptimizer broadcasts every parameter: the
        figure is the mean over the ranks, (N - 1) / N of the bytes.
        """
        return {}

    @property
    def largest_buckets(self) -> int:
        """Largest bytes of communication buffers at one time, in addition to gradients and their shards."""
        return 0

    @property
    def construction(self) -> int:
        """Peak bytes while the model is wrapped, on rank 0, which has its weights on the CPU.

        They move to their places one after the other. If the device is the CPU, the memory of the flat buffers exists beside
        those that have not moved, although the system provides its pages only as they fill. Weights that are rounded arrive in
        their own dtype first, in parts, of which there are two at a time.
        """
        wrapped = sum(self.at("wrapped").values())
        not_moved = sum(spec.numel * spec.dtype.itemsize for spec in self.plan.params) if self.on_cpu else 0
        peak = before = 0
        for buffer in self.plan.buffers:
            for spec in (self.plan.params[number] for number in buffer.params):
                for first in range(0, spec.numel, PART) if spec.dtype != buffer.dtype else ():
                    part = min(PART, spec.numel - first) * spec.dtype.itemsize
                    peak, before = max(peak, not_moved + before + part), part
                peak = max(peak, not_moved)
                not_moved -= spec.numel * spec.dtype.itemsize if self.on_cpu else 0
        return wrapped + peak

    def _gradients_and_buckets(self, point: Point) -> tuple[int, int]:
        return self.full_gradients if point in ("accumulating", "before step") else 0, 0

    def _largest_of_a_step(self, activations: Activations) -> int:
        """Return the largest bytes of gradients, buckets and activations together."""
        before = max(activations.forward, activations.loss, activations.layers)  # before the embedding
        if self.micro_steps > 1:
            return self.full_gradients + max(before, activations.embedding)
        return max(before, self.full_gradients - self._last_gradient + activations.embedding)

    @cached_property
    def parameters(self) -> int:
        """Bytes of the weights that forward and backward use."""
        total = sum(spec.numel * self._dtype_of_frozen(spec).itemsize for spec in self.plan.params if not spec.requires_grad)
        if not self.plan.buffers:
            return total + self.full_gradients
        return total + sum(buffer.layout.padded_numel * buffer.dtype.itemsize for buffer in self.plan.buffers)

    @cached_property
    def full_gradients(self) -> int:
        """Bytes of the gradients of all parameters."""
        if not self.plan.buffers:
            return sum(spec.numel * spec.dtype.itemsize for spec in self.plan.params if spec.requires_grad)
        return sum(sum(buffer.layout.numels) * buffer.dtype.itemsize for buffer in self.plan.buffers)

    @cached_property
    def state(self) -> int:
        """Bytes of the per-element optimizer state of the owned slices."""
        codec = STATE_CODECS[self.plan.state_dtype]
        if codec is None:
            return self.decoded_state
        return self.tensors_per_parameter * sum(
            codec.nbytes(stop - start) if self._is_encoded(number) else (stop - start) * self.plan.update_dtype(number).itemsize
            for number, start, stop in self.plan.slices(self.rank)
            if self.plan.params[number].requires_grad
        )

    @cached_property
    def decoded_state(self) -> int:
        """Bytes of the same state in the dtype of the update."""
        return self.tensors_per_parameter * self.plan.updated_bytes[self.rank]

    @cached_property
    def decoded_slice(self) -> int:
        """Largest bytes of a float32 copy of what a slice holds in another form, which a checkpoint needs one by one."""
        if self.plan.state_dtype == "float32" and not self.plan.has_remainders:
            return 0
        return 4 * max(stop - start for _, start, stop in self.plan.slices(self.rank))

    @cached_property
    def decoded(self) -> list[int]:
        """Bytes of float32 copies of what each bucket holds in another form, while it is updated."""
        return [
            4
            * shards[self.rank].numel
            * (buffer.has_remainders + self.tensors_per_parameter * (self.plan.state_dtype != "float32"))
            for buffer in self.plan.buffers
            for shards in buffer.layout.shards
        ]

    def _is_encoded(self, number: int) -> bool:
        """Return whether the state of a parameter is encoded: that of a number, which has no dimensions, is not."""
        return self.plan.update_dtype(number) == torch.float32 and bool(self.plan.params[number].shape)

    @cached_property
    def whole_state(self) -> int:
        """Bytes of the per-element optimizer state of all ranks together."""
        return self.tensors_per_parameter * sum(self.plan.updated_bytes)

    @cached_property
    def master(self) -> int:
        """Bytes of the masters of the owned slices."""
        return sum(
            shards[self.rank].numel * buffer.master_itemsize for buffer in self.plan.buffers for shards in buffer.layout.shards
        )

    @cached_property
    def consolidated(self) -> int:
        """Bytes in the main memory of rank 0 while it saves a consolidated checkpoint: weights and state of all ranks."""
        specs = enumerate(self.plan.params)
        return self.whole_state + sum(spec.numel * self.plan.update_dtype(number).itemsize for number, spec in specs)

    def _dtype_of_frozen(self, spec: ParameterSpec) -> torch.dtype:
        return spec.dtype

    def _accumulating(self, activations: Activations) -> list[int]:
        """Return the largest bytes of full gradients and activations where gradients accumulate in their own memory."""
        _, forward, loss, layers, embedding = activations
        if self.micro_steps == 1:
            return []
        before = max(forward, loss, layers)
        if self.micro_steps == 2:  # in the first backward, and until the last one
            return [self.full_gradients - self._last_gradient + embedding, self.full_gradients + before]
        return [self.full_gradients + max(before, embedding)]

    @cached_property
    def _last_gradient(self) -> int:
        """Bytes of the gradient that arrives last: that of the parameter that is registered first."""
        number = self._last_parameter
        if number is None:
            return 0
        return self.plan.params[number].numel * (self.plan.param_dtype or self.plan.params[number].dtype).itemsize

    @cached_property
    def _last_parameter(self) -> int | None:
        trainable = [number for number, spec in enumerate(self.plan.params) if spec.requires_grad]
        return min(trainable, key=lambda number: self.plan.params[number].position, default=None)


@dataclass(frozen=True)
class DataParallelPrediction(Prediction):
    """For DistributedDataParallel with `gradient_as_bucket_view`."""

    def sent(self) -> dict[str, int]:
        one_way = self.full_gradients * (self.world_size - 1) // self.world_size
        return {"all-reduce": 2 * one_way} | ({"broadcast": one_way} if self.plan.world_size > 1 else {})

    def _gradients_and_buckets(self, point: Point) -> tuple[int, int]:
        # its buckets exist from construction on; gradients are views into them, except those that accumulate
        return self.full_gradients * (2 if point == "accumulating" else 1), 0

    def _largest_of_a_step(self, activations: Activations) -> int:
        _, forward, loss, layers, embedding = activations
        own = self._last_gradient if self.micro_steps > 1 else 0  # in the last backward, gradients move into buckets one by one
        return self.full_gradients + max(forward, loss, layers, own + embedding, *self._accumulating(activations))


@dataclass(frozen=True)
class ShardedPrediction(Prediction):
    """For ShardedDataParallel."""

    def sent(self) -> dict[str, int]:
        others, replicas = self.plan.world_size - 1, self.world_size // self.plan.world_size
        scattered = gathered = 0
        for buffer in self.plan.buffers:
            own = sum(shards[self.rank].numel for shards in buffer.layout.shards)
            scattered += (buffer.layout.padded_numel - own) * buffer.dtype.itemsize
            gathered += others * own * buffer.dtype.itemsize
        sent = {"reduce-scatter": scattered * (self.micro_steps if self.shard_gradients else 1), "all-gather": gathered}
        if replicas > 1:
            sent["all-reduce"] = sum(2 * own * (replicas - 1) // replicas for own in self._own_bytes)
        return sent

    @property
    def largest_buckets(self) -> int:
        return self._traffic.peak

    @cached_property
    def gradient_shards(self) -> int:
        """Bytes of the mean gradients of the owned slices under ShardedDataParallel."""
        return sum(self._own_bytes)

    def _gradients_and_buckets(self, point: Point) -> tuple[int, int]:
        if point == "wrapped":
            return 0, 0
        if point == "accumulating" and not self.shard_gradients:
            return self.full_gradients, 0  # kept buckets are freed
        if point == "accumulating":  # the last reduce-scatter is in flight
            arrived = self._own_bytes if self.micro_steps > 2 else self._own_bytes[:-1]
            return sum(arrived), self._traffic.in_flight
        return self.gradient_shards if point == "before step" else 0, self._traffic.after_step

    def _largest_of_a_step(self, activations: Activations) -> int:
        _, forward, loss, layers, embedding = activations
        local = [] if self.shard_gradients else self._accumulating(activations)
        if self.shard_gradients and self.micro_steps > 1:
            local = [
                sum(self._gradients_and_buckets("accumulating")) + forward,
                self.gradient_shards + self._traffic.between + loss,
            ]
        update = sum(self._gradients_and_buckets("before step")) + max(self.decoded, default=0)
        # until the first gradient of an iteration arrives, there is what the step before has left
        return max(*local, self._traffic.after_step + max(forward, loss), self._while_sending(layers, embedding), update)

    def _while_sending(self, layers: int, embedding: int) -> int:
        """Return the largest bytes of gradients, buckets and activations while a backward sends gradients."""
        accumulated = self.full_gradients if self.micro_steps > 1 and not self.shard_gradients else 0
        before_last = max(1, self._bytes_before_last)

        def held(moved: float) -> int:
            """Return gradients and activations when `moved` bytes are in buckets: layers free both at the same rate."""
            if moved > before_last:
                return self._last_gradient if moved < math.inf else 0
            freed = max(0, layers - embedding) * int(moved) // before_last
            return (embedding if moved == before_last else layers - freed) + max(0, accumulated - int(moved))

        peak = 0
        for start, stop, buckets in self._traffic.steps:
            peak = max(peak, buckets + held(start), buckets + held(max(start, min(stop, before_last))))
        return peak

    def _dtype_of_frozen(self, spec: ParameterSpec) -> torch.dtype:
        return self.plan.param_dtype or spec.dtype

    @cached_property
    def _own_bytes(self) -> list[int]:
        """Bytes of the gradient shard of each bucket."""
        return [
            shards[self.rank].numel * buffer.update_dtype.itemsize
            for buffer in self.plan.buffers
            for shards in buffer.layout.shards
        ]

    @property
    def _bytes_before_last(self) -> int:
        """Bytes of the buckets before the place of the gradient that arrives last."""
        before = 0
        for buffer in self.plan.buffers:
            if self._last_parameter in buffer.params:
                return before + buffer.layout.offsets[buffer.params.index(self._last_parameter)] * buffer.dtype.itemsize
            before += buffer.layout.padded_numel * buffer.dtype.itemsize
        return before

    @cached_property
    def _traffic(self) -> "_Traffic":
        """The reduce-scatters of an iteration, bucket by bucket, as ShardedDataParallel runs them."""
        traffic = _Traffic(self.on_cpu)
        stop: float = 0  # bytes of gradients in buckets; after backward infinite
        arrived: set[int] = set()
        in_flight: list[tuple[int, _Tensor, list[_Tensor], _Tensor]] = []  # number, bucket, received, shard; at most one

        def finish() -> None:
            for number, bucket, received, shard in in_flight:
                if number not in arrived:
                    traffic.add_shard(shard, received)
                    traffic.add_step(stop, stop)
                    arrived.add(number)
                for tensor in (bucket, *received):
                    traffic.release(tensor)
            in_flight.clear()

        buckets = [(buffer, shards) for buffer in self.plan.buffers for shards in buffer.layout.shards]
        for _ in range(2):  # the second iteration finds what the first one has left in the pool
            arrived.clear()
            traffic.shards = 0
            if self.micro_steps > 1 and not self.shard_gradients:
                traffic.clear()
            for _ in range(min(3, self.micro_steps) if self.shard_gradients else 1):
                traffic.in_flight = traffic.now
                finish()
                traffic.between = traffic.now
                stop, traffic.steps = 0, []
                for number, (buffer, shards) in enumerate(buckets):
                    own = shards[self.rank].numel
                    bucket = shards[-1].stop - shards[0].start, buffer.dtype
                    start, stop = stop, stop + _nbytes(bucket)
                    traffic.acquire(bucket)
                    traffic.add_step(start, stop)
                    finish()
                    if self.on_cpu or self.plan.world_size == 1:
                        received = [(own, buffer.dtype)] * (self.plan.world_size - 1 if own else 0)
                    elif buffer.dtype in (torch.float32, torch.float64):
                        received = [(own, buffer.dtype)]  # NCCL's own reduce-scatter
                    else:
                        received = [(self.plan.world_size * own, buffer.dtype)]  # all-to-all
                    for tensor in received:
                        traffic.acquire(tensor)
                    traffic.add_step(stop, stop)
                    in_flight.append((number, bucket, received, (own, buffer.update_dtype)))
            stop = math.inf
            finish()
            if self.shard_gradients:
                traffic.clear()
            traffic.after_step = traffic.now
        return traffic


_Tensor = tuple[int, torch.dtype]  # number of elements, dtype


class _Traffic:
    """Counts the bytes that communication takes, with those that a `zero.collectives.Pool` keeps, and without shards."""

    def __init__(self, on_cpu: bool) -> None:
        self.now = 0
        self.peak = 0
        self.in_flight = 0  # at the end of the last backward but one
        self.between = 0  # when that has arrived
        self.after_step = 0
        self.shards = 0  # bytes of the shards that have arrived in this iteration
        self.steps: list[tuple[float, float, int]] = []  # of the last backward, see `add_step`
        self._smallest_kept = KEPT_BYTES if on_cpu else math.inf
        self._free: Counter[_Tensor] = Counter()  # what the pool keeps

    def acquire(self, tensor: _Tensor) -> None:
        if self._free[tensor]:
            self._free[tensor] -= 1
        else:
            self.now += _nbytes(tensor)
            self.peak = max(self.peak, self.now)

    def release(self, tensor: _Tensor) -> None:
        if _nbytes(tensor) >= self._smallest_kept:
            self._free[tensor] += 1
        else:
            self.now -= _nbytes(tensor)

    def clear(self) -> None:
        """Free what the pool keeps."""
        self.now -= sum(_nbytes(tensor) * count for tensor, count in self._free.items())
        self._free.clear()

    def add_shard(self, shard: _Tensor, received: list[_Tensor]) -> None:
        """Add a shard, whose memory is one of `received` if that fits."""
        self.shards += _nbytes(shard)
        if shard in received:
            received.remove(shard)
            self.now -= _nbytes(shard)

    def add_step(self, start: float, stop: float) -> None:
        """Note the bytes of communication and shards while the bytes of gradients in buckets rise from `start` to `stop`."""
        self.steps.append((start, stop, self.now + self.shards))


def _nbytes(tensor: _Tensor) -> int:
    numel, dtype = tensor
    return numel * dtype.itemsize
