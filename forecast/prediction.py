"""What a rank holds and sends, and the same of what is not ours: DistributedDataParallel, ZeroRedundancyOptimizer, FSDP2.

The figures are those of a steady state, from the second step on. They count the elements of tensors. The allocator of a GPU
rounds tensors up, and its libraries (cuBLAS, NCCL) take workspaces in addition. `forecast.dry_run` predicts `zero`.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch

from model import GPTConfig
from zero.host_comm import MESSAGE_BYTES
from zero.layout import Plan
from zero.muon.matrices import iteration_flops, stacked

_BUCKET_BYTES = 25_000_000  # of DistributedDataParallel, by default
PURPOSES = ("parameters", "gradients", "state", "master", "buckets")

# before the first step; after a micro-step that is not the last one of its iteration; after the last backward and after
# clipping; after the update and `zero_grad`, when all parameters have arrived
Point = Literal["after wrapping", "accumulating", "before step", "after step"]
Optimizer = tuple[type[torch.optim.Optimizer], dict[str, Any]]  # its class and arguments


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


class Moment(NamedTuple):
    """A part of an iteration."""

    held: int  # most bytes of the model, its optimizer and its communication
    beside: str = ""  # a phase of `Activations` that runs meanwhile; "": none
    arrived: int = 0  # of "layers": bytes of the gradients that have arrived in this backward


@dataclass(frozen=True)
class Prediction:
    """What one rank holds and sends."""

    plan: Plan
    rank: int  # of the plan. A plan without sharding has only rank 0
    world_size: int  # with more ranks than in the plan, there are replicas of the state
    micro_steps: int  # per iteration on each rank
    shard_gradients: bool
    frozen: int  # bytes of the weights of the model that are not in the plan, and not in the following figures
    points: dict[Point, dict[str, int]]  # bytes of the model and its optimizer by purpose, see `zero.held_bytes.held_bytes`
    moments: list[Moment]  # of an iteration
    construction: int  # most bytes while the model is wrapped
    sent: dict[str, int]  # bytes that this rank sends per iteration, by kind of collective
    largest_buckets: int = 0  # largest bytes of communication buffers at one time, in addition to gradients and their shards
    least_exposed: float = 0.0  # part of the gradients whose communication nothing hides: at least a bucket
    newton_schulz: int = 0  # FLOPs of an iteration of Newton-Schulz, for the matrices of this rank
    matrix_rounds: int = 0  # in which matrices are exchanged
    gathered_in_forward: float = 1.0  # part of the all-gathers

    def at(self, point: Point) -> dict[str, int]:
        """Return the bytes of the model and its optimizer at a point of a step by purpose."""
        held = self.points[point]
        return held | {"parameters": held["parameters"] + self.frozen}

    def peak_of_training(self, activations: Activations) -> int:
        """Return the peak bytes of training, after the first step."""
        return self.frozen + max(moment.held + self._beside(moment, activations) for moment in self.moments)

    def _beside(self, moment: Moment, activations: Activations) -> int:
        if moment.beside != "layers":
            return getattr(activations, moment.beside, 0)
        # layers free their activations at the same rate; the last phase begins with the gradients of the first layer
        until = self.full_gradients - self.last_gradient - activations.first_layer_gradients
        freed = max(0, activations.layers - activations.embedding) * min(1.0, moment.arrived / max(1, until))
        return activations.layers - int(freed)

    @cached_property
    def full_gradients(self) -> int:
        """Bytes of the gradients of all parameters."""
        return sum(spec.numel * (self.plan.param_dtype or spec.dtype).itemsize for spec in self.plan.params)

    @cached_property
    def last_gradient(self) -> int:
        """Bytes of the gradient that arrives last: that of the parameter that is registered first, the embedding."""
        spec = min(self.plan.params, key=lambda spec: spec.position)
        return spec.numel * (self.plan.param_dtype or spec.dtype).itemsize

    @property
    def exposed_share(self) -> float:
        """Part of the gradients, and of the weights, whose communication nothing hides.

        The gradient of the parameter that is registered first, the embedding, arrives last, and forward reads it first.
        """
        return min(1.0, max(self.least_exposed, self.last_gradient / self.full_gradients))

    @cached_property
    def owned(self) -> int:
        """Bytes of the elements of the owned slices, in the dtype of the update."""
        return sum(slice_.numel * self.plan.update_dtypes[slice_.number].itemsize for slice_ in self.plan.slices(self.rank))

    @cached_property
    def decoded_slice(self) -> int:
        """Bytes of the largest slice in float32, 0 if state and masters already are. A checkpoint decodes slices one by one."""
        if self.plan.state_dtype == "float32" and not any(buffer.has_remainders for buffer in self.plan.buffers):
            return 0
        return 4 * max(slice_.numel for slice_ in self.plan.slices(self.rank))

    @cached_property
    def arriving(self) -> int:
        """Largest bytes of a checkpoint that arrive on rank 0, in main memory: a piece that is written and the next one."""
        largest = 4 * max(slice_.numel for slice_ in self.plan.slices(self.rank))
        return 2 * min(MESSAGE_BYTES, largest) if self.plan.world_size > 1 else 0

    @cached_property
    def weights(self) -> int:
        """Bytes of all weights, in the dtype of the update."""
        specs = zip(self.plan.params, self.plan.update_dtypes, strict=True)
        return self.frozen + sum(spec.numel * dtype.itemsize for spec, dtype in specs)


def sent_by_data_parallel(plan: Plan, world_size: int) -> dict[str, int]:
    """Return the bytes that a rank sends per iteration with DistributedDataParallel, by kind of collective.

    An all-reduce counts as a ring, 2 (N - 1) / N of its bytes, a broadcast as the mean over the ranks, (N - 1) / N.
    """
    gradients = sum(spec.numel * spec.dtype.itemsize for spec in plan.params)
    one_way = gradients * (world_size - 1) // world_size
    return {"all-reduce": 2 * one_way} | ({"broadcast": one_way} if plan.world_size > 1 else {})


def _beside_all(held: int, at_the_end: int | None = None) -> list[Moment]:
    """Return the moments of a micro-step that holds `held`, and with the last activations `at_the_end`."""
    first = [Moment(held, phase) for phase in ("forward", "loss", "layers")]
    return [*first, Moment(held if at_the_end is None else at_the_end, "embedding")]


def replicated(
    plan: Plan, rank: int, world_size: int, micro_steps: int, distributed: bool, in_place: bool = False, frozen: int = 0
) -> Prediction:
    """Return the prediction for AdamW or ZeroRedundancyOptimizer, see `forecast.run_memory.predicted`.

    The buckets of DistributedDataParallel exist from construction on. Gradients are views into them, except those that
    accumulate outside. In the last backward, these move into buckets one by one.
    """
    gradients = sum(spec.numel * spec.dtype.itemsize for spec in plan.params)
    last = min(plan.params, key=lambda spec: spec.position)
    last_gradient, state = last.numel * last.dtype.itemsize, plan.state_bytes[rank]
    buckets = gradients if distributed else 0
    outside = gradients if distributed and micro_steps > 1 and not in_place else 0
    held, summed = gradients + state + buckets, micro_steps - bool(outside)  # micro-steps whose gradients add up in one place
    if buckets and not outside:
        moments = _beside_all(held)
    elif summed > 1:
        moments = _beside_all(held + gradients)
    else:
        moments = _beside_all(held, held + gradients - last_gradient)
    if outside:
        moments += _beside_all(held + gradients, held + last_gradient)
    of_gradients: dict[Point, int] = {
        "after wrapping": buckets,
        "accumulating": gradients + outside,
        "before step": gradients,
        "after step": buckets,
    }
    fixed = {"parameters": gradients, "state": state, "master": 0, "buckets": 0}
    points = {point: fixed | {"gradients": count} for point, count in of_gradients.items()}
    points["after wrapping"]["state"] = 0
    matrices = [spec for spec in (plan.params[slice_.number] for slice_ in plan.slices(rank)) if spec.matrices]
    return Prediction(
        *(plan, rank, world_size, micro_steps, False, frozen, points, moments),
        construction=gradients + buckets,
        sent=sent_by_data_parallel(plan, world_size) if distributed else {},
        least_exposed=_BUCKET_BYTES / gradients,
        newton_schulz=sum(spec.matrices * iteration_flops(stacked(spec.shape, spec.matrices)) for spec in matrices),
        matrix_rounds=1 if matrices else 0,
    )


def fully_sharded(
    plan: Plan, world_size: int, micro_steps: int, block_numel: int, root_numel: int, itemsize: int, frozen: int = 0
) -> Prediction:
    """Return what PyTorch's fully_shard (FSDP2) would take, to say when ZeRO-1 is the wrong tool. train.py does not have it.

    Each block and the model are sharded with its defaults: in every micro-step, the weights of a block are gathered in forward
    and again in backward, those outside of the blocks once, and all gradients are reduce-scattered. A collective counts as a
    ring, as with NCCL. Weights, gradients and state are exact up to padding. The peak is an estimate, within 2 %: beside the
    largest activations, it counts three whole blocks and what lies outside of the blocks.

    Args:
        plan: see `zero.layout.replicated_plan`.
        block_numel, root_numel: parameters of a block, and outside of the blocks.
        itemsize: bytes per element of gathered weights, and of gradients that are sent.
        frozen: bytes of the weights of the model that are not in the plan, in float32.
    """
    trained = sum(spec.numel for spec in plan.params)
    gathered = trained + frozen // 4
    weights, state = -(-4 * gathered // world_size), -(-plan.state_bytes[0] // world_size)
    after = {"parameters": weights, "gradients": 0, "state": state, "master": 0, "buckets": 0}
    before, largest, root = after | {"gradients": weights}, (root_numel + 3 * block_numel) * itemsize, root_numel * itemsize
    held, one_way = sum(before.values()), itemsize * (world_size - 1) / world_size
    return Prediction(
        *(plan, 0, world_size, micro_steps, True, 0),
        points={"after wrapping": after | {"state": 0}, "accumulating": before, "before step": before, "after step": after},
        moments=_beside_all(held + largest, held + root),
        construction=weights,
        sent={
            "all-gather": micro_steps * int((2 * gathered - root_numel) * one_way),
            "reduce-scatter": micro_steps * int(trained * one_way),
        },
        largest_buckets=largest,
        least_exposed=root_numel / gathered,
        gathered_in_forward=gathered / (2 * gathered - root_numel),
    )
