"""A parity check for the user: the same optimizer without sharding, on a copy of the model, and how far the weights differ."""

import copy
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from distributed.ranks import gather_numbers, print0
from run.checkpoints import Checkpoints
from run.guard import Guard
from zero import ShardedGradScaler
from zero.build import build, clip_grad_norm_
from zero.flags import Flags
from zero.optimizer import hyperparameters
from zero.sharded_state import parameters, partition
from zero.tensors import flattened


def check_device(iterations: int, device_type: str) -> None:
    """Raise ValueError if `shadow_check` is on and the random numbers of the device cannot be repeated (mps)."""
    if iterations and device_type not in ("cpu", "cuda"):
        raise ValueError(f"shadow_check={iterations} does not support device={device_type}; use --shadow_check=0")


class Shadow:
    """Trains a copy of the model with DistributedDataParallel and the plain optimizer, and compares weights after each update.

    The copy gets the sequences of the run, its random numbers, its hyperparameters and its checkpoint. The run does not change:
    its weights are bit for bit those of a run without the check. After the last iteration, rank 0 prints the largest difference
    of each parameter, over all iterations and all ranks. Then the copy is dropped.

    Every rank compares whole weights, so a wrong all-gather is seen on any rank. If the weights are bfloat16, each rank
    compares its float32 masters instead.

    The copy takes 16 bytes per parameter on each rank: weights, gradients and AdamW's two moments in float32; and 4 more while
    DistributedDataParallel accumulates gradients outside of its buckets (`forecast.run_memory` predicts it). Its activations do
    not add to those of the run, because one micro-step runs after the other. As under DistributedDataParallel, every trainable
    parameter must have a gradient. Every method needs to be called on all ranks.

    Args:
        iterations: number of iterations to check; 0: every method returns at once.
        model: the model of the run, before `zero.build.build` wraps it and moves its weights.
        groups: its parameter groups.
        checkpoints, checkpoint: the checkpoint from which the run resumes, or None.

    Raises:
        ValueError: if the random numbers of the device cannot be repeated (mps).
    """

    def __init__(
        self,
        iterations: int,
        model: torch.nn.Module,
        groups: list[dict[str, Any]],
        checkpoints: Checkpoints,
        checkpoint: dict[str, Any] | None,
        device: torch.device,
    ) -> None:
        self._remaining, self._made = iterations, 0  # iterations
        if not iterations:
            return
        self._device = device
        check_device(iterations, self._device.type)
        self._names = {param: name for name, param in model.named_parameters()}
        self._raw, groups = copy.deepcopy((model, groups))
        for part, copied in zip(model.modules(), self._raw.modules(), strict=True):
            if part._compiled_call_impl is not None:  # a copy is not compiled, and eager kernels round differently
                copied.compile()
        self._model: Any
        self._model, self._optimizer = build(self._raw, groups, Flags(use_zero1=False), device=device)
        if checkpoint is not None:
            checkpoints.restore(self._optimizer, checkpoint)

    def follow(
        self,
        optimizer: torch.optim.Optimizer,
        scaler: ShardedGradScaler,
        limit: int,
        autocast: AbstractContextManager[Any],
        micro_steps: int,
        grad_clip: float,
    ) -> None:
        """Set how the run trains, before its first iteration.

        Args:
            optimizer, scaler: those of the run. The scaler is copied.
            limit: see `Guard`.
            autocast: the context in which forward computes.
            micro_steps: micro-steps per iteration on each rank.
            grad_clip: maximum gradient norm; 0.0: no clipping.
        """
        if not self._remaining:
            return
        self._part = partition(optimizer)
        self._scaler = copy.deepcopy(scaler)
        self._guard = Guard(self._raw, self._optimizer, self._scaler, limit)
        self._autocast, self._micro_steps, self._max_norm = autocast, micro_steps, grad_clip or math.inf
        self._losses: list[torch.Tensor] = []  # of the micro-steps of this iteration
        # by parameter: the largest difference, the largest weight
        self._largest = torch.zeros(2, len(self._part.params), device=self._device)

    def micro_step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Run forward and backward of the copy. Call it before the forward of the run, which draws the same random numbers.

        Args:
            x, y: tokens and targets, each (batch, time) int64.
        """
        if not self._remaining:
            return
        self._model.require_backward_grad_sync = len(self._losses) == self._micro_steps - 1
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices, device_type=self._device.type):
            with self._autocast:
                loss = self._model(x, y)[1]
            self._scaler.scale(loss / self._micro_steps).backward()
        self._losses.append(loss.detach())

    def update(self) -> bool:
        """Update the copy and compare. Call it after the update of the run; waits for parameters in flight.

        Returns:
            Whether this was the last iteration: the result is printed, and the copy is dropped.
        """
        if not self._remaining:
            return False
        for own, group in zip(self._optimizer.param_groups, self._part.optimizer.param_groups, strict=True):
            own.update(hyperparameters(group))
        self._scaler.unscale_(self._optimizer)
        norms = clip_grad_norm_(self._optimizer, self._max_norm)
        self._guard.check(torch.stack(self._losses).sum(), norms)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        self._losses.clear()
        self._compare()
        self._made += 1
        self._remaining -= 1
        if not self._remaining:
            self.finish()
        return not self._remaining

    def finish(self) -> None:
        """Print the result and drop the copy, unless this is done. Call it at the end of the run, which may come early."""
        if self._made:
            self._report()
            del self._raw, self._model, self._optimizer, self._scaler, self._guard
        self._remaining = self._made = 0

    @torch.no_grad()
    def _compare(self) -> None:
        for number, values, plain in self._pairs():
            figures = torch.stack(((values - plain).abs().max(), plain.abs().max()))
            self._largest[:, number] = torch.maximum(self._largest[:, number], figures)  # nan stays

    def _pairs(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield the number of a parameter, its elements in the run, and the same elements in the copy."""
        part, params, plain = self._part, parameters(self._part.optimizer), parameters(self._optimizer)  # waits for all-gathers
        if part.plan.has_masters:
            for (number, start, stop), read in zip(part.slices[part.rank], part.readers, strict=True):
                yield number, read(), flattened(plain[number], params[number])[start:stop]
        else:
            for number, (param, same) in enumerate(zip(params, plain, strict=True)):
                yield number, param, same

    def _report(self) -> None:
        by_rank = np.array(gather_numbers(self._largest.flatten().tolist()))  # (ranks, 2 * parameters)
        differences, weights = by_rank.max(axis=0).reshape(2, -1).tolist()
        figures = {
            self._names[param]: (difference, difference / weight if weight else difference)
            for param, difference, weight in zip(self._part.params, differences, weights, strict=True)
        }
        width, plain = max(map(len, figures)), f"plain {type(self._optimizer).__name__}"
        print0(f"{f'largest difference from {plain}':{width}}   absolute   of the largest weight")
        for name in filter(figures.get, self._names.values()):
            print0("{:{}}   {:8.1e}   {:8.1e}".format(name, width, *figures[name]))
        worst = max(figures, key=lambda name: (math.isnan(figures[name][0]), figures[name]))
        after = f"shadow check: after {self._made} iteration{'s' if self._made > 1 else ''}"
        if figures[worst][0] == 0:
            print0(f"{after}, all {len(figures)} parameters are bit-identical to {plain}")
            return
        plan = self._part.plan
        rounded = [text for text, is_so in (("weights", plan.has_masters), ("moments", plan.state_dtype != "float32")) if is_so]
        reasons = [f"{' and '.join(rounded)} are rounded"] if rounded else []
        if any(spec.matrices and spec.matrix_dtype == torch.bfloat16 for spec in plan.params):
            reasons.append("Newton-Schulz in bfloat16 amplifies rounding, as that of the clipped norm")
        why = f"; differences are expected, because {' and '.join(reasons)}" if reasons else ""
        print0(f"{after}, the largest difference from {plain} is {figures[worst][0]:.1e}, in {worst}{why}")
