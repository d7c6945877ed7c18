"""What a rank holds and sends, and what the activations of a micro-step take. `forecast.run_memory` finds both for a run.

The figures are of a steady state, from the second step on. A GPU's peaks count what its allocator rounds up, not workspaces.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch

from model import GPTConfig
from zero.host_comm import MESSAGE_BYTES
from zero.layout import Plan

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
    """What one rank holds and sends, by default the one with the most optimizer state."""

    plan: Plan
    rank: int  # of the plan. A plan without sharding has only rank 0
    world_size: int  # with more ranks than in the plan, there are replicas of the state
    micro_steps: int  # per iteration on each rank
    shard_gradients: bool
    points: dict[Point, dict[str, int]]  # bytes of the model and its optimizer by purpose, see `zero.held_bytes.held_bytes`
    moments: list[Moment]  # of an iteration
    construction: int  # most bytes while the model is wrapped
    saving: int  # most bytes while a checkpoint is saved
    saved: int  # bytes that a rank saves; without masters, rank 0 has all weights
    sent: dict[str, int]  # bytes that this rank sends per iteration, by kind of collective
    uneven: float = 1.0  # its optimizer state, divided by the mean over the ranks
    largest_buckets: int = 0  # largest bytes of communication buffers at one time, in addition to gradients and their shards
    least_exposed: float = 0.0  # part of the gradients whose communication nothing hides: at least a bucket
    newton_schulz: int = 0  # FLOPs of an iteration of Newton-Schulz, for the matrices of this rank
    matrix_rounds: int = 0  # in which matrices are exchanged
    frozen: int = 0  # bytes of the weights of the model that are not in the plan, and not in the figures above
    activations: Activations = field(default_factory=Activations)
    on_cpu: bool = False
    async_save: bool = False  # a setting of train.py: training goes on while a checkpoint is written

    def at(self, point: Point) -> dict[str, int]:
        """Return the bytes of the model and its optimizer at a point of a step by purpose."""
        held = self.points[point]
        return held | {"parameters": held["parameters"] + self.frozen}

    @property
    def peak(self) -> int:
        """Peak bytes from the first line of the program to the end of training, without saves."""
        return max(self.frozen + self.construction, self.peak_of_training)

    @property
    def peak_of_training(self) -> int:
        """Peak bytes of training, after the first step."""
        return self.frozen + max(moment.held + self._beside(moment) for moment in self.moments)

    @property
    def saving_peak(self) -> int:
        """Peak bytes on the device while a checkpoint is saved, and trained meanwhile with `async_save`."""
        meanwhile = max(self.frozen + self.saving, self.peak if self.async_save else 0)
        return meanwhile + (self.saved_copy if self.on_cpu else 0)

    @property
    def saved_copy(self) -> int:
        """Bytes of main memory for a copy of what a rank saves, with `async_save`."""
        return self.frozen + self.saved if self.async_save else 0

    def _beside(self, moment: Moment) -> int:
        activations = self.activations
        if moment.beside != "layers":
            return getattr(activations, moment.beside, 0)
        # layers free their activations at the same rate; the last phase begins with the gradients of the first layer
        gradients, last_gradient = self.gradients
        until = gradients - last_gradient - activations.first_layer_gradients
        freed = max(0, activations.layers - activations.embedding) * min(1.0, moment.arrived / max(1, until))
        return activations.layers - int(freed)

    @cached_property
    def gradients(self) -> tuple[int, int]:
        """See `gradient_bytes`."""
        return gradient_bytes(self.plan)

    @property
    def exposed_share(self) -> float:
        """Part of the gradients whose communication nothing hides.

        The gradient of the parameter that is registered first, the embedding, arrives last, and forward reads it first.
        """
        gradients, last_gradient = self.gradients
        return min(1.0, max(self.least_exposed, last_gradient / gradients))

    @property
    def exposed_weights(self) -> float:
        """The same part of the weights, some of which may have fewer bytes than their gradients."""
        return min(1.0, max(self.least_exposed, self.gradients[1] / self.points["after wrapping"]["parameters"]))


def gradient_bytes(plan: Plan) -> tuple[int, int]:
    """Return the bytes of all gradients, and of the last one: of the parameter that is registered first, the embedding."""
    in_order = sorted(plan.params, key=lambda spec: spec.position)
    each = [spec.numel * (plan.param_dtype or spec.dtype).itemsize for spec in in_order]
    return sum(each), each[0]


def arriving(plan: Plan, rank: int) -> int:
    """Return the most bytes of other ranks in main memory while a rank writes: a piece that it writes, and the next one."""
    pieces: dict[int, list[tuple[int, int]]] = {}  # of an entry of each parameter: first element, bytes that arrive
    for other in range(plan.world_size):
        for number, start, stop, _ in plan.slices(other):
            nbytes = 0 if other == rank else (stop - start) * plan.update_dtypes[number].itemsize
            messages = 1 + (nbytes > MESSAGE_BYTES)  # more than two are alike
            pieces.setdefault(number, []).extend([(start, min(nbytes, MESSAGE_BYTES))] * messages)
    in_order = ([count for _, count in sorted(of_param)] for of_param in pieces.values())
    return max(sum(pair) for counts in in_order for pair in zip(counts, [*counts[1:], counts[0]], strict=True))
