"""The memory of a run: what it takes at the points of a step, and whether that is what was predicted."""

import resource
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from distributed.launch import launched
from distributed.ranks import print0
from forecast.prediction import Activations, Optimizer, Prediction, Workload
from forecast.run_memory import planned_optimizer, predicted, predicted_activations
from run.logger import Logger
from run.metrics import POINT_KEYS, Point
from run.report import size
from zero.flags import Flags
from zero.held_bytes import held_bytes
from zero.host_comm import gather_objects, is_rank_0
from zero.layout import ParameterSpec
from zero.optimizer import ShardedOptimizer
from zero.sharded_state import parameters, partition

TOLERANCE = 0.05  # a larger relative difference between prediction and measurement causes a warning ...
GPU_WORKSPACES = 100_000_000  # ... if it is also more than this on a GPU, where cuBLAS and others take workspaces


class Memory:
    """What a run takes on this rank, and what was predicted. The constructor and `compare` need to be called on all ranks.

    No other method waits for the device or for another rank. On a GPU, the memory at a point is what the allocator has
    allocated. On a CPU, it is the bytes of the model, its optimizer and its communication (`zero.held_bytes`), because the
    memory of the process also holds what the system's allocator has not returned to the system. The peak is that of the
    allocator on a GPU, and of the process on a CPU.

    Args:
        log: receives the prediction and what is compared with it.
        model, optimizer: what `zero.build.build` returned.
        workload: of a micro-step.
        flags: those that `build` was given.
        micro_steps: the number of them per iteration on each rank.
    """

    def __init__(
        self,
        log: Logger,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        workload: Workload,
        flags: Flags,
        micro_steps: int,
    ) -> None:
        self.log, self.model, self.optimizer, self.compiled = log, model, optimizer, workload.compiled
        self.device = next(model.parameters()).device
        self.held_before_step = 0  # bytes of the model, its optimizer and its communication
        self._state = 0  # bytes of optimizer state, with masters
        self.has_state = False  # whether this rank had state (not masters) before the last step, or `compare` saw any
        self._points: dict[str, int] = dict.fromkeys(POINT_KEYS, 0)
        self._largest_peak = 0
        self.measure("after init")
        launch, plan, on_cpu = launched(), partition(optimizer).plan, workload.device_type == "cpu"
        activations = _tried("activations", lambda: predicted_activations(workload, plan.weights)) if is_rank_0() else None
        frozen = sum(param.nbytes for param in set(model.parameters()) - set(parameters(optimizer)))
        how: dict[str, Any] = {"distributed": launch.distributed, "frozen": frozen}
        alone = partial(predicted, plan.params, Flags(use_zero1=False), _optimizer_of(plan.params), **how)
        how |= {"world_size": launch.world_size, "micro_steps": micro_steps, "on_cpu": on_cpu}
        how["activations"] = activations or Activations()
        own = partial(predicted, plan.params, flags, _optimizer_of(plan.params), **how)
        self.compared = False
        self.prediction: Prediction | None = _tried("memory", own) if is_rank_0() else None  # which announces and compares it
        self.predicted = self.prediction.at("before step") if self.prediction else {}
        # bytes that one rank would hold without sharding before its step
        self.plain: dict[str, int] = alone().at("before step") if self.prediction else {}

    def measure(self, point: Point) -> None:
        """Measure what this rank holds now.

        "after init": before the first step. "before step": all gradients are there. "after step": gradients are dropped,
        parameters may still be in flight.
        """
        on_gpu = self.device.type == "cuda"
        held = {} if on_gpu and point != "before step" else held_bytes(self.optimizer, self.model)
        if point == "before step":
            self.held_before_step = sum(held.values())
            self._state, self.has_state = held["state"] + held["master"], self.compared or held["state"] > 0
        self._points[point] = torch.cuda.memory_allocated(self.device) if on_gpu else sum(held.values())

    def peak(self) -> int:
        """Return the peak in bytes since the process started."""
        return max(self._largest_peak, peak_bytes(self.device))

    def forget_peak(self) -> None:
        """Begin a new peak: what the process took until now does not belong to the run."""
        self._largest_peak = 0
        reset_peak(self.device)

    def take(self) -> dict[str, float]:
        """Return the figures by name, and begin a new peak."""
        peak, self._largest_peak = peak_bytes(self.device), self.peak()
        reset_peak(self.device)
        figures = {POINT_KEYS[point].removeprefix("memory/"): count / 1e6 for point, count in self._points.items()}
        figures |= {"peak_mb": peak / 1e6, "optimizer_state_mb": self._state / 1e6}
        if self.device.type == "cuda":
            counters = torch.cuda.memory_stats(self.device)
            figures["reserved_mb"] = torch.cuda.memory_reserved(self.device) / 1e6
            figures |= {"alloc_retries": counters.get("num_alloc_retries", 0), "ooms": counters.get("num_ooms", 0)}
        return figures

    def announce(self, iteration: int) -> None:
        """Print and log the prediction, if there is one."""
        if self.prediction is None:
            return
        peak, parts = self.prediction.peak, {"activations": self.prediction.activations.saved, **self.predicted}
        held = _parts({**parts, "temporary tensors": max(0, peak - sum(parts.values()))})
        on_cpu = ", without Python and its libraries" if self.device.type == "cpu" else ""
        name, whole = type(partition(self.optimizer).inner).__name__, self.plain["state"]
        plain = f"; plain {name} would hold {size(whole)} of state on each rank" if whole > parts["state"] else ""
        print0(f"predicted memory: {size(peak)} at the peak of the fullest rank{on_cpu}; {held}{plain}")
        self.log.log({"iter": iteration, **_logged("predicted", {"peak": peak, **parts}), **_logged("unsharded", self.plain)})

    def compare(self, iteration: int) -> None:
        """Print and log once what the fullest rank holds. Call it on all ranks, after an update and before `zero_grad`."""
        if self.compared:
            return
        on_gpu = self.device.type == "cuda"
        held = held_bytes(self.optimizer, self.model)
        by_rank = gather_objects((sum(held.values()), self.peak() if on_gpu else 0, held))
        self.has_state = self.compared = any(held["state"] for _, _, held in by_rank)
        if not self.compared or not is_rank_0():  # no state: no update has been made yet, because float16 has overflowed
            return
        total, _, held = max(by_rank, key=lambda rank: rank[0])
        peak = max(peak for _, peak, _ in by_rank)
        event: dict[str, Any] = {"iter": iteration, **_logged("measured", held)}
        if on_gpu:
            event["memory/measured_peak_mb"] = peak / 1e6
        self.log.log(event)
        if self.prediction is None:
            return
        predicted = sum(self.predicted.values())
        line = f"memory of tensors: {size(total)} of parameters, gradients, state and buckets (predicted {size(predicted)})"
        print0(line + (f", {size(peak)} at the peak (predicted {size(self.prediction.peak)})" if on_gpu else ""))
        if self._differs(predicted, total):
            self.log.warn(f"model and optimizer take {_parts(held)}; predicted were {_parts(self.predicted)}")
        is_comparable = self.prediction.activations.saved > 0 and not (self.compiled and peak < self.prediction.peak)
        if on_gpu and is_comparable and self._differs(self.prediction.peak, peak):
            self.log.warn(
                f"the peak is {size(peak)}; predicted were {_parts(self.predicted)}, and activations of "
                f"{size(self.prediction.activations.saved)}"
            )

    def _differs(self, predicted: int, measured: int) -> bool:
        allowed = max(TOLERANCE * predicted, GPU_WORKSPACES if self.device.type == "cuda" else 0)
        return abs(measured - predicted) > allowed


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: allocated memory on a GPU, the resident set size on a CPU.

    It is the peak since the last `reset_peak`, or since the process started.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux reports KiB


def reset_peak(device: torch.device) -> None:
    """Begin a new peak, where the system can: on a GPU, and on Linux."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        with suppress(OSError), open("/proc/self/clear_refs", "w") as file:  # not writable in every container
            file.write("5")  # man 5 proc: resets the peak resident set size


def _tried(what: str, predict: Callable[[], Any]) -> Any:
    """Return a prediction, or None if it fails."""
    try:
        return predict()
    except Exception as error:  # a model or an optimizer that was changed may do what tensors without memory cannot do
        print0(f"note: {what} cannot be predicted: {type(error).__name__}: {error}")
        return None


def _parts(by_purpose: dict[str, int]) -> str:
    return ", ".join(f"{size(count)} of {purpose}" for purpose, count in by_purpose.items() if count)


def _logged(which: str, by_purpose: dict[str, int]) -> dict[str, float]:
    return {f"memory/{which}_{purpose}_mb": count / 1e6 for purpose, count in by_purpose.items() if count}


def _optimizer_of(specs: Sequence[ParameterSpec]) -> Optimizer:
    return planned_optimizer({} if any(spec.matrices for spec in specs) else None)


def describe(optimizer: torch.optim.Optimizer, without_effect: list[str]) -> str:
    """Return one line for the console: the implementation, and what it holds in another form than float32.

    `without_effect`: what `forecast.modes.without_effect` returned.
    """
    part = partition(optimizer)
    plan, forms = part.plan, [type(part.inner).__name__]
    idle = f"; without effect on one rank: {', '.join(without_effect)}" if without_effect else ""
    if not isinstance(optimizer, ShardedOptimizer | ZeroRedundancyOptimizer):
        return f"Using plain {forms[0]}{idle}"
    if plan.state_dtype != "float32":
        forms.append(f"state in {plan.state_dtype} between updates")
    if plan.has_masters:
        kind = "remainders" if any(buffer.has_remainders for buffer in plan.buffers) else "float32 masters"
        weights = {str(buffer.dtype).removeprefix("torch.") for buffer in plan.buffers if buffer.has_masters}
        forms.append(f"{kind} of the {', '.join(weights)} {'Linear weights' if plan.weights == 'autocast' else 'weights'}")
    name, count = ("sharded", optimizer.comm.replicas) if isinstance(optimizer, ShardedOptimizer) else ("torch", 1)
    how = f"{type(optimizer).__name__} on one rank"
    if plan.world_size * count > 1:
        ranks = f"{plan.world_size} rank{'s' * (plan.world_size > 1)}{f' in each of {count} groups' if count > 1 else ''}"
        how = f"ZeRO-1 optimizer state sharding: zero1_impl='{name}' ({type(optimizer).__name__}) over {ranks}"
    return f"Using {how}: {', '.join(forms)}{idle}"
