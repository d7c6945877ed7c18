"""A parity check for the user: the same optimizer without sharding, on a copy of the model, and how far the weights differ."""

import copy
import math
from contextlib import AbstractContextManager
from typing import Any

import torch

from distributed.exits import exit_on_wrong_input
from distributed.launch import launched
from distributed.ranks import print0
from run.checkpoints import Checkpoints
from run.guard import Guard
from run.rank_checks import check_gradients
from zero import ShardedGradScaler, ShardedOptimizer
from zero.build import build, clip_grad_norm_
from zero.flags import Flags
from zero.host_comm import gather_objects
from zero.sharded_state import hyperparameters, parameters, partition
from zero.tensors import flattened


class Shadow:
    """Trains a copy of the model with DistributedDataParallel and the plain optimizer, and compares weights after each update.

    The copy gets the sequences of the run, its random numbers, its hyperparameters and its checkpoint. The weights of the run
    are bit for bit those of a run without the check. After the last iteration, rank 0 prints the largest difference of all
    iterations, ranks and parameters, and the copy is dropped.

    Every rank compares whole weights, so a wrong all-gather is seen on any rank. If the weights are bfloat16, each rank
    compares its float32 masters instead.

    The copy takes 16 bytes per parameter on each rank, and 4 more while DistributedDataParallel accumulates gradients outside
    of its buckets. Its activations do not add to those of the run, because one micro-step runs after the other. Every trainable
    parameter must have a gradient. Every method needs to be called on all ranks.

    Args:
        iterations: number of iterations to check; 0: every method returns at once.
        model, groups: those of the run, before `zero.build.build` wraps the model and moves its weights.
        checkpoint: the checkpoint from which the run resumes, or None.

    Raises ValueError if the random numbers of the device cannot be repeated (mps).
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
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"shadow_check={iterations} does not support device={device.type}; use --shadow_check=0")
        self._names = {param: name for name, param in model.named_parameters()}
        self._raw, groups = copy.deepcopy((model, groups))
        for part, copied in zip(model.modules(), self._raw.modules(), strict=True):
            if part._compiled_call_impl is not None:  # a copy is not compiled, and eager kernels round differently
                copied.compile()
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
        """Set what the copy follows: the optimizer of the run, a copy of its scaler, and how it computes on each rank.

        `limit`: see `Guard`. The copy decides for itself which updates to skip.
        """
        if not self._remaining:
            return
        self._part, self._scaler = partition(optimizer), copy.deepcopy(scaler)
        self._guard = Guard(self._optimizer, self._scaler, limit, alert=lambda *_: None)
        self._autocast, self._micro_steps, self._max_norm = autocast, micro_steps, grad_clip or math.inf
        # two numbers have the same sum in any order; `shard_gradients` may add micro-steps in another one
        self._is_exact = launched().world_size <= 2 and micro_steps == 1 and not grad_clip
        self._losses: list[torch.Tensor] = []  # of the micro-steps of this iteration
        self._largest = torch.zeros(len(parameters(optimizer)), device=self._device)  # difference, by parameter

    def micro_step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Run forward and backward of the copy. Call it before the forward of the run, which draws the same random numbers.

        `x` and `y` are tokens and targets, each (batch, time) int64.
        """
        if not self._remaining:
            return
        self._model.require_backward_grad_sync = len(self._losses) == self._micro_steps - 1  # type: ignore[assignment]
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices, device_type=self._device.type):
            with self._autocast:
                loss = self._model(x, y)[1]
            self._scaler.scale(loss / self._micro_steps).backward()
        self._losses.append(loss.detach())

    def update(self) -> bool:
        """Update the copy and compare. Call it after the update of the run, for whose parameters it waits.

        Return whether this was the last iteration: the result is printed, and the copy is dropped.
        """
        if not self._remaining:
            return False
        if not self._made:
            with exit_on_wrong_input():
                check_gradients(self._model, "use --shadow_check=0")
        for own, group in zip(self._optimizer.param_groups, self._part.optimizer.param_groups, strict=True):
            own.update(hyperparameters(group))
        self._scaler.unscale_(self._optimizer)
        norm = clip_grad_norm_(self._optimizer, self._max_norm)
        self._guard.check(torch.stack(self._losses).sum(), norm)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        self._compare()
        self._losses.clear()
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
        part, params, plain = self._part, parameters(self._part.optimizer), parameters(self._optimizer)
        if isinstance(part.optimizer, ShardedOptimizer):
            part.optimizer.synchronize()
        differences = ((number, own - plain[number]) for number, own in enumerate(params))
        if part.plan.has_masters:
            differences = (
                (own.number, own.read() - flattened(plain[own.number], own.param)[own.start : own.stop]) for own in part.owned
            )
        for number, difference in differences:
            self._largest[number] = torch.maximum(self._largest[number], difference.abs().max())  # nan stays

    def _report(self) -> None:
        largest = torch.tensor(gather_objects(self._largest.tolist())).amax(0)  # (parameters,)
        plan, plain = self._part.plan, f"plain {type(self._optimizer).__name__}"
        after = f"shadow check: after {self._made} iteration{'s' if self._made > 1 else ''}"
        if not largest.any():
            print0(f"{after}, all {len(largest)} parameters are bit-identical to {plain}")
            return
        worst = int(largest.argmax())  # the first nan, if there is one
        reasons = ["weights or moments are rounded"] if plan.has_masters or plan.state_dtype != "float32" else []
        if any(spec.matrices and spec.matrix_dtype == torch.bfloat16 for spec in plan.params):
            reasons.append("Newton-Schulz in bfloat16 amplifies rounding, as that of the clipped norm")
        if self._device.type == "cuda" and torch.backends.cuda.flash_sdp_enabled():
            reasons.append("attention on a GPU adds up in another order each time (without benchmarks/exact.py)")
        why = "; two ranks without clipping must find the same bits: this is a fault" if self._is_exact else ""
        if reasons:
            why = f"; differences are expected, because {' and '.join(reasons)}"
        name = self._names[parameters(self._part.optimizer)[worst]]
        print0(f"{after}, the largest difference from {plain} is {largest[worst]:.1e}, in {name}{why}")
