"""The measurements of a run: speed, phases of a step, communication, memory. run/metrics.py says what each metric is."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.profiler import record_function

from distributed import machine
from distributed.heartbeat import position
from distributed.launch import launched
from distributed.ranks import gather_numbers, mean_over_ranks, print0
from run.memory_meter import MemoryCheck, Point
from zero.communication import KINDS, CommunicationMeter
from zero.stopwatch import Stopwatch

INTERVAL = 10  # iterations; the first logged one of each interval measures what needs a collective, too
_HOST = torch.device("cpu")


class Meter:
    """Measures the iterations of a run and logs the metrics. Needs to be created on all ranks.

    To add a metric, add it to the event in `log_iteration` or `log_evaluation`, and to run/metrics.py.

    Args:
        memory_check: the prediction of the memory, with the meter of the memory and the logger that receives the metrics.
        dtype: dtype of the computation.
        tokens_per_iter: tokens per iteration, all ranks together.
        flops_per_token: FLOPs of the model per token.
        max_iters: last iteration of the run.
        elapsed_s: wall time of the run before this process.
    """

    _WARM_UP = 5  # number of first iterations that do not count for the MFU

    def __init__(
        self,
        memory_check: MemoryCheck,
        dtype: str,
        tokens_per_iter: int,
        flops_per_token: float,
        max_iters: int,
        elapsed_s: float = 0.0,
    ) -> None:
        self.log, self.memory, self.memory_check = memory_check.log, memory_check.memory, memory_check
        self.device = self.memory.device
        self.tokens_per_iter = tokens_per_iter
        self.flops_per_iter = flops_per_token * tokens_per_iter / launched().world_size  # of one rank
        self.max_iters, self._elapsed_before = max_iters, elapsed_s
        self.peak_flops = machine.peak_flops(self.device, machine.DTYPES[dtype])  # FLOP/s of this rank
        print0(f"mfu is relative to {self.peak_flops / 1e12:.3g} TFLOP/s per rank in {dtype}")
        self._mfu: dict[str, float] = {}  # running mean in percent, as in nanoGPT; empty if not measured yet
        self._communication = CommunicationMeter(self.memory.model, self.memory.optimizer)
        self._phases = Stopwatch()
        self._iterations = 0  # number of iterations since construction
        self._last_interval = -1  # number of the last interval that was measured
        self._is_measured = False  # whether this iteration is measured
        self.restart()
        self._started = self._begin

    def restart(self, new_peak: bool = False) -> None:
        """Restart the clock. What happened since the last restart or log is not counted. Begin a new peak if `new_peak`."""
        if new_peak:
            self.memory.forget_peak()
        self._begin, self._timed, self._before = time.perf_counter(), 0, self._totals()

    def elapsed_s(self) -> float:
        """Return the wall time of the run so far, of all its processes."""
        return self._elapsed_before + time.perf_counter() - self._started

    def begin_iteration(self, iteration: int, is_logged: bool) -> None:
        """Note that an iteration begins, and whether `log_iteration` will be called for it."""
        self._is_measured = is_logged and iteration // INTERVAL > self._last_interval
        if self._is_measured:
            self._last_interval = iteration // INTERVAL
        self._iterations += 1
        self._timed += 1

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase of an iteration: "forward", "backward", "data", "clip" or "update". A profiler shows its name."""
        device = _HOST if name == "data" else self.device
        with position.at(name), record_function(name), self._phases.measure(name, device):
            yield

    def measure_memory(self, point: Point) -> None:
        """Measure the memory at a point of the step, if this iteration is measured."""
        if self._is_measured:
            with self._phases.measure("memory", _HOST):  # on a CPU, it may wait for the parameters
                self.memory.measure(point)

    def log_iteration(
        self, iteration: int, loss: torch.Tensor, grad_norm: torch.Tensor, lr: float, tokens: int
    ) -> dict[str, Any]:
        """Log and return the metrics of an iteration. Times are means over the iterations since the last restart or log.

        Needs to be called on all ranks. Waits for the device.

        Args:
            loss: mean loss of this rank over the iteration, a scalar.
            grad_norm: gradient norm before clipping, a scalar.
            lr: learning rate.
            tokens: tokens that all ranks together have seen.
        """
        global_loss = mean_over_ranks(loss.clone())
        end = time.perf_counter()
        seconds = (end - self._begin) / self._timed
        if self._iterations > self._WARM_UP:
            mfu = self.flops_per_iter / seconds / self.peak_flops * 100
            self._mfu = {"mfu": 0.9 * self._mfu.get("mfu", mfu) + 0.1 * mfu}
        elapsed_s = end - self._started
        now = self._totals()
        spent = now.per_iteration_since(self._before, self._timed)
        phases, waited, sent = spent.phase_ms, spent.waited_ms, spent.sent_bytes
        exposed_ms = sum(waited.values())
        forward_backward_ms, optimizer_ms = phases["forward"] + phases["backward"], phases["clip"] + phases["update"]
        event: dict[str, Any] = {
            "iter": iteration,
            "iter/loss": global_loss,
            "iter/grad_norm": grad_norm.item(),
            "iter/tokens": tokens,
            "lr": lr,
            **self._mfu,
            "throughput/tokens_per_second": self.tokens_per_iter / seconds,
            "throughput/tokens_per_second_per_rank": self.tokens_per_iter / seconds / launched().world_size,
            "throughput/tflops_per_rank": self.flops_per_iter / seconds / 1e12,
            "throughput/eta_hours": (self.max_iters - iteration) * elapsed_s / self._iterations / 3600,
            "time/elapsed_s": self.elapsed_s(),
            "time/step_ms": seconds * 1000,
            "time/data_ms": phases["data"],
            "time/forward_backward_ms": forward_backward_ms,
            "time/optimizer_ms": optimizer_ms,
        }
        if launched().world_size > 1:  # without the collectives that the run has not used
            event |= {
                "comm/exposed_ms": exposed_ms,
                **{f"comm/exposed_{_key(kind)}_ms": waited[kind] for kind in KINDS if now.waited_ms[kind]},
                "comm/exposed_percent": exposed_ms / (seconds * 1000) * 100,
                "comm/sent_mb_per_step": sum(sent.values()) / 1e6,
                **{f"comm/sent_{_key(kind)}_mb_per_step": sent[kind] / 1e6 for kind in KINDS if now.sent_bytes[kind]},
            }
        if self._is_measured:
            computed_ms = forward_backward_ms + optimizer_ms + phases["memory"] - exposed_ms
            event |= self._over_ranks(loss.item(), computed_ms + (phases["data"] if self.device.type == "cpu" else 0))
        percent = f"{event['mfu']:.2f}%" if self._mfu else "n/a"
        self.log.log(
            event,
            f"iter {iteration}: loss {global_loss:.4f}, time {seconds * 1000:.2f}ms, mfu {percent}, "
            f"{self.tokens_per_iter / seconds:,.0f} tok/s, {self.memory.peak_of} {self.memory.peak() / 1e9:.2f} GB at the peak",
        )
        self._begin, self._timed, self._before = end, 0, now  # the time of logging is part of the next iteration
        return event

    def log_evaluation(self, iteration: int, losses: dict[str, float], lr: float, seconds: float) -> None:
        """Log the losses of an evaluation.

        Args:
            iteration: iteration before which the evaluation ran.
            losses: loss by split.
            lr: learning rate.
            seconds: duration of the evaluation.
        """
        event = {
            "iter": iteration,
            **{f"{split}/loss": loss for split, loss in losses.items()},
            "lr": lr,
            **self._mfu,
            "time/elapsed_s": self.elapsed_s(),
            "time/eval_s": seconds,
        }
        self.log.log(event, f"step {iteration}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")

    def _over_ranks(self, loss: float, computed_ms: float) -> dict[str, float]:
        """Return the metrics that compare the ranks. Needs to be called on all ranks.

        Args:
            loss: loss of this rank.
            computed_ms: time of an iteration in which this rank did not wait for other ranks.
        """
        memory = self.memory.take()
        own = [loss, computed_ms, self.memory.held_before_step, *memory.values()]
        losses, times, held, *by_figure = zip(*gather_numbers(own), strict=True)  # each: one number per rank
        figures = zip(memory, by_figure, strict=True)
        values_of = {name: values for name, values in figures if name.endswith("_mb") or any(values)}  # no counters at 0
        event = {f"memory/{name}": max(values) for name, values in values_of.items()}
        event["memory/predicted_mb"] = self.memory_check.predicted_peak / 1e6
        if len(losses) > 1:  # there are ranks to compare
            event["iter/loss_max_rank"] = float(np.max(losses))  # nan if a loss is nan
            event["time/rank_spread_ms"] = max(times) - min(times)
            event["time/slowest_rank"] = times.index(max(times))
            differing = {name: values for name, values in values_of.items() if len(set(values)) > 1}
            event |= {f"memory/{name}_min": min(values) for name, values in differing.items()}
            event |= {f"memory/{name}_rank": values.index(max(values)) for name, values in differing.items()}
        has_state = min(values_of["optimizer_state_mb"]) > 0 or self.memory_check.compared
        saved = self.memory_check.plain - max(held)
        if has_state and saved:  # not before the first update, and not for what is not sharded
            event["memory/saved_mb"] = saved / 1e6
        return event

    def _totals(self) -> "Spent":
        phase_ms = dict.fromkeys(("forward", "backward", "data", "clip", "update", "memory"), 0.0) | self._phases.read_ms()
        return Spent(phase_ms, self._communication.waited_ms(), self._communication.sent_bytes())


class Spent(NamedTuple):
    """What a rank has spent since the start of the run, or in an iteration."""

    phase_ms: Mapping[str, float]  # by phase of an iteration; "memory": its measurement
    waited_ms: Mapping[str, float]  # by kind of collective
    sent_bytes: Mapping[str, float]  # by kind of collective

    def per_iteration_since(self, before: "Spent", iterations: int) -> "Spent":
        """Return the means over the iterations since `before`."""
        pairs = zip(self, before, strict=True)
        return Spent(*({key: (total - old.get(key, 0.0)) / iterations for key, total in now.items()} for now, old in pairs))


def _key(kind: str) -> str:
    return kind.replace("-", "_")
