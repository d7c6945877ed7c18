"""Bytes of memory and of communication on one rank, predicted from a plan. Arithmetic only: no tensors, no process group.

The figures are those of a steady state, from the second step on. They count the elements of tensors. The allocator of a GPU
rounds tensors up, and its libraries (cuBLAS, NCCL) take workspaces in addition.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch

from forecast.matrix_rounds import RoundSizes, round_sizes
from forecast.traffic import BucketTensors, FlatTensor, Traffic
from model import GPTConfig
from zero.codecs import codec_of, encoded_nbytes
from zero.collectives import KEPT_BYTES, PART, SUMMED_BY_NCCL, received_numels
from zero.host_comm import MESSAGE_BYTES
from zero.layout import BufferPlan, ParameterSpec, Plan
from zero.muon.matrices import iteration_flops, matrix_plan, stacked
from zero.tensors import piece_numel

_BUCKET_BYTES = 25_000_000  # of DistributedDataParallel, by default
PURPOSES = ("parameters", "gradients", "state", "master", "buckets")

# before the first step; after a micro-step that is not the last one of its iteration; after the last backward and after
# clipping; after the update and `zero_grad`, when all parameters have arrived
Point = Literal["after wrapping", "accumulating", "before step", "after step"]


def sent_by_data_parallel(plan: Plan, world_size: int) -> dict[str, int]:
    """Return the bytes that a rank sends per iteration with DistributedDataParallel, by kind of collective.

    An all-reduce counts as a ring, 2 (N - 1) / N of its bytes, a broadcast as the mean over the ranks, (N - 1) / N.
    """
    gradients = sum(spec.numel * spec.dtype.itemsize for spec in plan.params)
    one_way = gradients * (world_size - 1) // world_size
    return {"all-reduce": 2 * one_way} | ({"broadcast": one_way} if plan.world_size > 1 else {})


@dataclass(frozen=True)
class Workload:
    """What a micro-step computes, and on what kind of device."""

    config: GPTConfig  # sequences have `block_size` tokens
    batch_size: int  # sequences per micro-step
    dtype: str  # of the computation, a key of `machine.DTYPES`
    device_type: str  # 'cuda', 'cpu', ...
    activation_checkpointing: bool = False  # see `GPT`
    loss_chunk: int = 0  # see `GPT`
    compiled: bool = False  # see `GPT.compile_blocks`


class Activations(NamedTuple):
    """Bytes of activations in a micro-step, in addition to parameters and to gradients that have arrived.

    After `saved`, these are peaks by phase. Each figure is linear in the number of layers.
    """

    saved: int = 0  # what forward keeps for backward
    forward: int = 0
    loss: int = 0  # backward until the first gradient arrives
    layers: int = 0  # from then on, until the first gradient of the first layer arrives
    embedding: int = 0  # from then on; the gradient that arrives last is included
    first_layer_gradients: int = 0  # no activations: bytes of the gradients with which the last phase begins

    @property
    def before_embedding(self) -> int:
        """The peak of all phases but the last."""
        return max(self.forward, self.loss, self.layers)


@dataclass(frozen=True)
class Prediction:
    """Predictions for one rank, here of a single process. There is a subclass for each wrapper.

    Args:
        plan: the plan of any implementation for the parameters that are trained, see `zero.flags` and `zero.layout`.
        rank: a rank of the plan. A plan without sharding has only rank 0.
        world_size: number of ranks. With more ranks than in the plan, there are replicas of the state.
        micro_steps: micro-steps per iteration on each rank.
        shard_gradients: see `zero.ShardedDataParallel`.
        on_cpu: gloo, and large buckets are kept from step to step. On a GPU, the backend is NCCL.
        in_place: gradients accumulate in the buckets of DistributedDataParallel: with `zero_grad(set_to_none=False)`.
        frozen: bytes of the weights of the model that are not in the plan.
    """

    plan: Plan
    rank: int = 0
    world_size: int = 1
    micro_steps: int = 1
    shard_gradients: bool = False
    on_cpu: bool = False
    in_place: bool = False
    frozen: int = 0

    def at(self, point: Point) -> dict[str, int]:
        """Return the bytes of the model and its optimizer at a point of a step by purpose, see `zero.held_bytes.held_bytes`."""
        gradients, buckets = self._gradients_and_buckets(point)
        return {
            "parameters": self.parameters,
            "gradients": gradients,
            "state": 0 if point == "after wrapping" else self.state,
            "master": self.master,
            "buckets": buckets,
        }

    def peak_of_training(self, activations: Activations) -> int:
        """Return the peak bytes of training, after the first step."""
        return self.parameters + self.state + self.master + self._largest_of_a_step(activations)

    def sent(self) -> dict[str, int]:
        """Return the bytes that this rank sends per iteration, by kind of collective."""
        return {}

    @cached_property
    def exposed_share(self) -> float:
        """Part of the gradients, and of the weights, whose communication nothing hides: at least a bucket.

        The gradient of the parameter that is registered first, the embedding, arrives last, and forward reads it first.
        """
        return min(1.0, max(_BUCKET_BYTES, self._last_gradient) / self.full_gradients)

    @cached_property
    def matrix_rounds(self) -> list[RoundSizes]:
        """What this rank exchanges of Muon's matrices in each round; empty: none. Here: one round without exchange."""
        specs = [spec for _, spec, _ in self._owned if spec.matrices]  # of whole parameters
        flops = [spec.matrices * iteration_flops(stacked(spec.shape, spec.matrices)) for spec in specs]
        return [RoundSizes(iteration_flops=sum(flops))] if flops else []

    @property
    def largest_buckets(self) -> int:
        """Largest bytes of communication buffers at one time, in addition to gradients and their shards."""
        return 0

    @cached_property
    def construction(self) -> int:
        """Peak bytes while the model is wrapped, on rank 0, which has its weights on the CPU.

        They move to their places one after the other. If the device is the CPU, the memory of the flat buffers exists beside
        those that have not moved, although the system provides its pages only as they fill. Weights that are rounded arrive in
        their own dtype first, in parts, of which there are two at a time.
        """
        specs = [(self.plan.params[number], buffer.dtype) for buffer in self.plan.buffers for number in buffer.layout.numels]
        not_moved = self.on_cpu * sum(spec.numel * spec.dtype.itemsize for spec, _ in specs)
        peak, before = not_moved, 0
        for spec, dtype in specs:
            for first in range(0, spec.numel, PART) if spec.dtype != dtype else ():
                part = min(PART, spec.numel - first) * spec.dtype.itemsize
                peak, before = max(peak, not_moved + before + part), part
            not_moved -= self.on_cpu * spec.numel * spec.dtype.itemsize
        return sum(self.at("after wrapping").values()) + peak

    @cached_property
    def parameters(self) -> int:
        """Bytes of the weights that forward and backward use, with padding."""
        padding = 0
        for buffer in self.plan.buffers:
            padding += (buffer.layout.padded_numel - sum(buffer.layout.numels.values())) * buffer.dtype.itemsize
        return self.frozen + self.full_gradients + padding

    @cached_property
    def full_gradients(self) -> int:
        """Bytes of the gradients of all parameters."""
        return sum(map(self._bytes_of, self.plan.params))

    @cached_property
    def state(self) -> int:
        """Bytes of the per-element optimizer state of the owned slices. `step` counters, 4 bytes each, are not counted."""
        codec, total = codec_of(self.plan.state_dtype), 0
        for dtype, spec, numel in self._owned:
            is_encoded = dtype == torch.float32 and spec.shape  # a number, which has no dimensions, is not encoded
            total += spec.state_tensors * (encoded_nbytes(codec, numel) if is_encoded else numel * dtype.itemsize)
        return total

    @cached_property
    def owned(self) -> int:
        """Bytes of the elements of the owned slices, in the dtype of the update."""
        return sum(numel * dtype.itemsize for dtype, _, numel in self._owned)

    @cached_property
    def decoded_slice(self) -> int:
        """Bytes of the largest slice in float32, 0 if state and masters already are. A checkpoint decodes slices one by one."""
        if self.plan.state_dtype == "float32" and not any(buffer.has_remainders for buffer in self.plan.buffers):
            return 0
        return 4 * max(numel for _, _, numel in self._owned)

    @cached_property
    def arriving(self) -> int:
        """Largest bytes of a checkpoint that arrive on rank 0, in main memory: a piece that is written and the next one."""
        return 2 * min(MESSAGE_BYTES, 4 * max(numel for _, _, numel in self._owned)) if self.plan.world_size > 1 else 0

    @cached_property
    def master(self) -> int:
        """Bytes of the masters of the owned slices."""
        held = [(buffer, shard) for buffer, shard in self._own_shards if buffer.has_masters]
        return sum(len(shard) * (2 if buffer.has_remainders else buffer.update_dtype.itemsize) for buffer, shard in held)

    @cached_property
    def weights(self) -> int:
        """Bytes of all weights, in the dtype of the update."""
        specs = zip(self.plan.params, self.plan.update_dtypes, strict=True)
        return self.frozen + sum(spec.numel * dtype.itemsize for spec, dtype in specs)

    def _gradients_and_buckets(self, point: Point) -> tuple[int, int]:
        return self.full_gradients if point in ("accumulating", "before step") else 0, 0

    def _largest_of_a_step(self, activations: Activations) -> int:
        """Return the largest bytes of gradients, buckets and activations together."""
        return self._accumulating(activations, self.micro_steps)

    def _accumulating(self, activations: Activations, micro_steps: int) -> int:
        """Return the largest bytes of gradients and activations while the gradients of some micro-steps accumulate."""
        before, embedding = activations.before_embedding, activations.embedding
        if micro_steps > 1:
            return self.full_gradients + max(before, embedding)
        return max(before, self.full_gradients - self._last_gradient + embedding)

    def _before_last_backward(self, activations: Activations) -> int:
        """Return the peak of gradients and activations before the last backward moves sums into buckets; 0: it moves none."""
        if self.micro_steps == 1 or self.in_place or self.shard_gradients:
            return 0
        earlier = self._accumulating(activations, self.micro_steps - 1)
        return max(earlier, self.full_gradients + activations.before_embedding)

    def _bytes_of(self, spec: ParameterSpec) -> int:
        """Return the bytes of a weight, and of its gradient."""
        return spec.numel * (self.plan.param_dtype or spec.dtype).itemsize

    @property
    def _owned(self) -> list[tuple[torch.dtype, ParameterSpec, int]]:
        """Of each slice that is updated: the dtype of the update, the spec of the parameter and the number of elements."""
        dtypes, specs = self.plan.update_dtypes, self.plan.params
        return [(dtypes[slice_.number], specs[slice_.number], slice_.numel) for slice_ in self.plan.slices(self.rank)]

    @cached_property
    def _own_shards(self) -> list[tuple[BufferPlan, range]]:
        """The shard of this rank of each bucket, with the buffer that it lies in."""
        return [(buffer, shards[self.rank]) for buffer in self.plan.buffers for shards in buffer.layout.shards]

    @cached_property
    def _last_parameter(self) -> int:
        """Number of the parameter whose gradient arrives last: the one that is registered first."""
        return min(range(len(self.plan.params)), key=lambda number: self.plan.params[number].position)

    @property
    def _last_gradient(self) -> int:
        return self._bytes_of(self.plan.params[self._last_parameter])


@dataclass(frozen=True)
class DataParallelPrediction(Prediction):
    """For DistributedDataParallel with `gradient_as_bucket_view`."""

    def sent(self) -> dict[str, int]:
        return sent_by_data_parallel(self.plan, self.world_size)

    def _gradients_and_buckets(self, point: Point) -> tuple[int, int]:
        # its buckets exist from construction on; gradients are views into them, except those that accumulate outside
        return self.full_gradients * (2 if point == "accumulating" and not self.in_place else 1), 0

    def _largest_of_a_step(self, activations: Activations) -> int:
        outside = self._before_last_backward(activations)
        own = self._last_gradient if outside else 0  # in the last backward, gradients move into buckets one by one
        return self.full_gradients + max(activations.before_embedding, own + activations.embedding, outside)


@dataclass(frozen=True)
class ShardedPrediction(Prediction):
    """For ShardedDataParallel."""

    def sent(self) -> dict[str, int]:
        replicas = self.world_size // self.plan.world_size
        one_way = (self.plan.world_size - 1) * sum(len(shard) * buffer.dtype.itemsize for buffer, shard in self._own_shards)
        sent = {"reduce-scatter": one_way * (self.micro_steps if self.shard_gradients else 1), "all-gather": one_way}
        if replicas > 1:
            own = [len(shard) * self._gradient_dtype(buffer, self.micro_steps).itemsize for buffer, shard in self._own_shards]
            sent["all-reduce"] = sum(2 * nbytes * (replicas - 1) // replicas for nbytes in own)
        if self.matrix_rounds:
            sent["all-to-all"] = sum(sizes.sent for sizes in self.matrix_rounds) * self._matrix_itemsize
        return sent

    @cached_property
    def exposed_share(self) -> float:
        whole = sum(buffer.layout.padded_numel * buffer.dtype.itemsize for buffer in self.plan.buffers)
        return max(1 / len(self._own_shards), 1 - self._bytes_before_last / whole)

    @cached_property
    def matrix_rounds(self) -> list[RoundSizes]:
        return round_sizes(matrix_plan(self.plan), self.rank)

    @property
    def largest_buckets(self) -> int:
        return self._traffic.largest

    @cached_property
    def update(self) -> int:
        """Largest bytes that an update takes in addition."""
        return max(self._decoded(buffer, shard) for buffer, shard in self._own_shards) + self._exchanged

    def _decoded(self, buffer: BufferPlan, shard: range) -> int:
        """Return the bytes of float32 copies of what a bucket has in another form, while it is updated."""
        copied = len(shard) * buffer.has_remainders
        for part in buffer.layout.placed_in(shard):
            spec = self.plan.params[part.number]
            if spec.matrices:  # its directions; its momentum and its gradient are needed earlier, see `_exchanged`
                copied += part.numel
            else:
                copied += part.numel * (spec.state_tensors * self._is_encoded + self._is_narrow(buffer))
        # and after it the masters, with a piece of them that is rounded
        rounded = (len(shard) + min(len(shard), piece_numel(self.on_cpu))) * buffer.has_remainders
        return 4 * max(copied, rounded) + self._of_codec(len(shard))

    @cached_property
    def _exchanged(self) -> int:
        """Largest bytes that the exchange of matrices takes in an update, in a stage of `zero.muon.exchange`.

        While a round is sent, there are float32 tensors of its slices, and those of the codec. While the one before it is
        transformed, there are its elements, whole matrices and the temporary tensors of Newton-Schulz, then what is sent back
        and received. The directions of the one before that return, and those of earlier rounds may wait for the update of
        their bucket.
        """
        if not self.matrix_rounds:
            return 0
        nothing, peak = [RoundSizes()] * 2, 0
        is_narrow = any(map(self._is_narrow, self.plan.buffers))
        padded = nothing + self.matrix_rounds + nothing
        for arrived, (returning, transformed, sent) in enumerate(zip(padded, padded[1:], padded[2:], strict=False), -2):
            waiting = sum(round_.held for round_ in self.matrix_rounds[: max(0, arrived)] if round_.until > arrived)
            waiting += returning.held + returning.received + transformed.received
            message = sent.held + sent.received
            while_transformed = message + transformed.received
            while_transformed += max(transformed.temporary, transformed.received + transformed.held)
            # the result, the gradient and the momentum
            before_sent = 4 * sent.held * (1 + is_narrow + self._is_encoded) + self._of_codec(sent.held)
            while_sent = self._matrix_itemsize * transformed.held
            while_sent += max(before_sent, 4 * sent.held + self._matrix_itemsize * message)
            peak = max(peak, self._matrix_itemsize * waiting + max(while_sent, self._matrix_itemsize * while_transformed))
        return peak

    @property
    def _matrix_itemsize(self) -> int:
        return next(spec.matrix_dtype for spec in self.plan.params if spec.matrices).itemsize

    def _gradients_and_buckets(self, point: Point) -> tuple[int, int]:
        if point == "accumulating" and not self.shard_gradients:
            return self.full_gradients, 0  # kept buckets are freed
        return self._traffic.at.get(point, (0, 0))

    def _largest_of_a_step(self, activations: Activations) -> int:
        forward, loss = activations.forward, activations.loss
        # until the first gradient of an iteration arrives, there is what the step before has left
        beside = {"after step": max(forward, loss), "accumulating": forward, "between": loss, "before step": self.update}
        found = [sum(held) + beside[point] for point, held in self._traffic.at.items()]
        return max(*found, self._while_sending(activations), self._before_last_backward(activations))

    def _while_sending(self, activations: Activations) -> int:
        """Return the largest bytes of gradients, buckets and activations while a backward sends gradients."""
        layers, embedding = activations.layers, activations.embedding
        accumulated = self.full_gradients if self.micro_steps > 1 and not self.shard_gradients else 0
        before_last = max(1, self._bytes_before_last)
        before_first_layer = max(1, before_last - activations.first_layer_gradients)  # which ends the phase of the layers

        def held(moved: float) -> int:
            """Return gradients and activations when `moved` bytes are in buckets: layers free both at the same rate."""
            if moved == math.inf:  # after backward
                return 0
            if moved > before_last:
                return self._last_gradient
            freed = int(max(0, layers - embedding) * min(1.0, moved / before_first_layer))
            return (embedding if moved == before_last else layers - freed) + max(0, accumulated - int(moved))

        peak = 0
        for start, stop, others in self._traffic.intervals:
            peak = max(peak, others + held(start), others + held(max(start, min(stop, before_last))))
        return peak

    def _gradient_dtype(self, buffer: BufferPlan, micro_steps: int) -> torch.dtype:
        """Return the dtype of gradient shards: for sums over ranks or (shard_gradients) micro-steps that of the update."""
        has_one_term = self.world_size == 1 and not (self.shard_gradients and micro_steps > 1)
        return buffer.dtype if has_one_term else buffer.update_dtype

    def _is_narrow(self, buffer: BufferPlan) -> bool:
        """Return whether an update needs copies of the gradients in its own dtype."""
        return self._gradient_dtype(buffer, self.micro_steps) != buffer.update_dtype

    @property
    def _is_encoded(self) -> bool:
        """Whether an update needs the state in float32."""
        return self.plan.state_dtype != "float32"

    def _of_codec(self, numel: int) -> int:
        """Return the bytes of what a codec computes while it encodes the state of so many elements, in pieces."""
        codec = codec_of(self.plan.state_dtype)
        return 0 if codec is None else codec.scratch * min(numel, piece_numel(self.on_cpu))

    @cached_property
    def _bytes_before_last(self) -> int:
        """Bytes of the buckets before the place of the gradient that arrives last."""
        before = 0
        for buffer in self.plan.buffers:
            if self._last_parameter in buffer.layout.offsets:
                return before + buffer.layout.offsets[self._last_parameter] * buffer.dtype.itemsize
            before += buffer.layout.padded_numel * buffer.dtype.itemsize
        return before

    @cached_property
    def _traffic(self) -> Traffic:
        ranks, buckets = self.plan.world_size, []
        for buffer, shard in self._own_shards:
            own, dtype = len(shard), buffer.dtype
            numels = received_numels(own, ranks, self.on_cpu, dtype in SUMMED_BY_NCCL) if ranks > 1 else []
            first, last = (FlatTensor(own, self._gradient_dtype(buffer, micro_steps)) for micro_steps in (1, self.micro_steps))
            received = [FlatTensor(numel, dtype) for numel in numels]
            buckets.append(BucketTensors(FlatTensor(ranks * own, dtype), received, first, last))
        traffic = Traffic(buckets, KEPT_BYTES if self.on_cpu else math.inf, is_alone=self.world_size == 1)
        for _ in range(2):
            traffic.run_iteration(self.micro_steps, self.shard_gradients)
        return traffic
