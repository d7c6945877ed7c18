"""The measurements of a run: speed, phases of a step, communication, memory. run/metrics.py says what each metric is."""

import math
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from distributed import machine
from distributed.launch import launched
from distributed.ranks import print0
from distributed.watchdog import position
from run.communication import CommunicationMeter
from run.guard import Reading
from run.memory_meter import Memory
from run.metrics import EXPOSED_KEYS, SENT_KEYS, Point
from zero.collectives import KINDS
from zero.host_comm import gather_objects
from zero.stopwatch import Stopwatch, mark, region

INTERVAL = 10  # iterations; the first logged one of each interval measures what needs a collective, too
_HOST = torch.device("cpu")


class Meter:
    """Measures the iterations of a run and logs the metrics. Needs to be created on all ranks.

    Args:
        memory: has the logger, which receives the metrics.
        tokens_per_iter: of all ranks together.
        first, last: numbers of the first iteration of this process and of the last one of the run.
        elapsed_s: wall time of the run before this process.
    """

    _WARM_UP = 5  # number of first iterations that do not count for the MFU

    def __init__(
        self, memory: Memory, dtype: str, tokens_per_iter: int, flops_per_token: float, first: int, last: int, elapsed_s: float
    ) -> None:
        self.log, self.memory, self.device = memory.log, memory, memory.device
        self.tokens_per_iter = tokens_per_iter
        self.flops_per_iter = flops_per_token * tokens_per_iter / launched().world_size  # of one rank
        self._first, self._last, self._elapsed_before = first, last, elapsed_s
        self.peak_flops = machine.peak_flops(self.device, machine.DTYPES[dtype])  # FLOP/s of this rank
        if self.device.type == "cuda":  # the large matrices do not belong to the memory of the run
            torch.cuda.empty_cache()
            self.memory.forget_peak()
        if self.peak_flops:
            print0(f"mfu is relative to {self.peak_flops / 1e12:.3g} TFLOP/s per rank in {dtype}")
        self._mfu: dict[str, float] = {}  # running mean in percent, as in nanoGPT; empty if not measured yet
        self._communication = CommunicationMeter(self.memory.model, self.memory.optimizer)
        self._phases = Stopwatch()
        self._last_interval = -1  # number of the last interval that was measured
        self._is_measured = False  # whether this iteration is measured
        self._waited_for: set[str] = set()  # kinds of collectives that the run has used
        self._begin, self._in_lap, self._sent = mark(self.device), 0, self._communication.sent_bytes()  # of the current lap
        self._started = time.perf_counter()

    def restart(self) -> None:
        """Restart the clock. What happened since the last restart or log is not counted."""
        self._waited_for |= self._end_lap().waits.read_ms().keys()

    def elapsed_s(self) -> float:
        """Return the wall time of the run so far, of all its processes."""
        return self._elapsed_before + self._own_s()

    def begin_iteration(self, iteration: int, is_logged: bool) -> None:
        """Note that an iteration begins, and whether `end_iteration` will be called for it."""
        self._is_measured = is_logged and iteration // INTERVAL > self._last_interval
        if self._is_measured:
            self._last_interval = iteration // INTERVAL
        self._in_lap += 1

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase of an iteration: "forward", "backward", "data", "clip" or "update". A profiler shows its name."""
        device = _HOST if name == "data" else self.device
        with position.at(name), region(name), self._phases.measure(name, device):
            yield

    def measure_memory(self, point: Point) -> None:
        """Measure the memory at a point of the step, if this iteration is measured."""
        if self._is_measured:
            with self._phases.measure("memory", _HOST):  # on a CPU, it may wait for the parameters
                self.memory.measure(point)

    def end_iteration(self, number: int, reading: Reading, lr: float, tokens: int, is_logged: bool) -> "Iteration":
        """Return what is to be read of an iteration, for `log_iteration`. Needs to be called on all ranks.

        The host waits for the device only if this iteration is measured, because the ranks are compared. `tokens`: what all
        ranks together have seen.
        """
        if not is_logged:
            return Iteration(number, reading, lr, tokens)
        lap = self._end_lap()
        over_ranks = self._over_ranks(reading.read().loss_of_rank, lap) if self._is_measured else {}
        return Iteration(number, reading, lr, tokens, lap, over_ranks, self.memory.peak())

    def log_iteration(self, ended: "Iteration") -> None:
        """Log the metrics of an iteration, for which the host waits. Call it on rank 0.

        Times are means over the iterations since the last restart or log.
        """
        assert ended.lap is not None
        figures, (phases, waited) = ended.figures.read(), ended.lap.read()
        seconds, sent = phases["lap"] / 1000, ended.lap.sent
        made = ended.number - self._first + 1  # iterations of this process
        if made > self._WARM_UP and self.peak_flops:
            mfu = self.flops_per_iter / seconds / self.peak_flops * 100
            self._mfu = {"mfu": 0.9 * self._mfu.get("mfu", mfu) + 0.1 * mfu}
        self._waited_for |= waited.keys()
        tokens_per_s, world_size, exposed_ms = self.tokens_per_iter / seconds, launched().world_size, sum(waited.values())
        event: dict[str, Any] = {
            "iter": ended.number,
            "iter/loss": figures.loss,
            "iter/grad_norm": figures.grad_norm,
            "iter/tokens": ended.tokens,
            "lr": ended.lr,
            **self._mfu,
            "throughput/tokens_per_second": tokens_per_s,
            "throughput/tokens_per_second_per_rank": tokens_per_s / world_size,
            "throughput/tflops_per_rank": self.flops_per_iter / seconds / 1e12,
            "throughput/eta_hours": (self._last - ended.number) * self._own_s() / made / 3600,
            "time/elapsed_s": self.elapsed_s(),
            "time/step_ms": seconds * 1000,
            "time/data_ms": phases["data"],
            "time/forward_backward_ms": phases["forward"] + phases["backward"],
            "time/optimizer_ms": phases["clip"] + phases["update"],
        }
        if world_size > 1:  # without the collectives that the run has not used
            event |= {
                "comm/exposed_ms": exposed_ms,
                **{EXPOSED_KEYS[kind]: waited.get(kind, 0.0) for kind in KINDS if kind in self._waited_for},
                "comm/exposed_percent": exposed_ms / (seconds * 1000) * 100,
                "comm/sent_mb_per_step": sum(sent.values()) / ended.lap.length / 1e6,
                **{SENT_KEYS[kind]: sent[kind] / ended.lap.length / 1e6 for kind in KINDS if self._sent[kind]},
            }
        percent = f"{event['mfu']:.2f}%" if self._mfu else "n/a"
        peak_of = "tensors" if self.device.type == "cuda" else "process"
        self.log.log(
            event | ended.over_ranks,
            f"iter {ended.number}: loss {figures.loss:.4f}, time {seconds * 1000:.2f}ms, mfu {percent}, "
            f"{tokens_per_s:,.0f} tok/s, {peak_of} {ended.peak / 1e9:.2f} GB at the peak",
        )

    def log_evaluation(self, iteration: int, losses: dict[str, float], lr: float, seconds: float, tokens: int) -> None:
        """Log the losses by split of an evaluation, which ran before this iteration. `tokens`: see `end_iteration`."""
        bytes_per_token = self.log.summary.facts["val_bytes_per_token"]
        bits = {"val/bits_per_byte": losses["val"] / math.log(2) / bytes_per_token} if bytes_per_token else {}
        event = {
            "iter": iteration,
            **{f"{split}/loss": loss for split, loss in losses.items()},
            **bits,
            "iter/tokens": tokens,
            "lr": lr,
            **self._mfu,
            "time/elapsed_s": self.elapsed_s(),
            "time/eval_s": seconds,
        }
        more = "".join(f" ({figure:.4f} bits per byte)" for figure in bits.values())
        self.log.log(event, f"step {iteration}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}{more}")

    def _over_ranks(self, loss: float, lap: "Lap") -> dict[str, float]:
        """Return the metrics that compare the ranks. Needs to be called on all ranks. `loss`: of this rank."""
        phases, waited = lap.read()
        computed = "forward", "backward", "clip", "update", "memory", *(["data"] if self.device.type == "cpu" else [])
        computed_ms = sum(phases[name] for name in computed) - sum(waited.values())  # without waits for other ranks
        by_rank = gather_objects((loss, computed_ms, self.memory.held_before_step, self.memory.take()))
        losses, times, held, memories = zip(*by_rank, strict=True)
        values_of = {name: [of_rank[name] for of_rank in memories] for name in memories[0]}
        values_of = {name: values for name, values in values_of.items() if name.endswith("_mb") or any(values)}  # no 0 counters
        event = {f"memory/{name}": max(values) for name, values in values_of.items()}
        if self.memory.prediction is not None:
            event["memory/predicted_mb"] = self.memory.prediction.peak / 1e6
        if len(losses) > 1:  # there are ranks to compare
            event["iter/loss_max_rank"] = float(np.max(losses))  # nan if a loss is nan
            event["time/rank_spread_ms"] = max(times) - min(times)
            event["time/slowest_rank"] = times.index(max(times))
            differing = {name: values for name, values in values_of.items() if len(set(values)) > 1}
            event |= {f"memory/{name}_min": min(values) for name, values in differing.items()}
            event |= {f"memory/{name}_rank": values.index(max(values)) for name, values in differing.items()}
        saved = sum(self.memory.plain.values()) - max(held)
        if self.memory.has_state and self.memory.plain and saved:  # not before the first update, nor without sharding
            event["memory/saved_mb"] = saved / 1e6
        return event

    def _own_s(self) -> float:
        return time.perf_counter() - self._started

    def _end_lap(self) -> "Lap":
        """Return what was spent since the last restart or log, and begin anew. Does not wait for the device."""
        end, sent = mark(self.device), self._communication.sent_bytes()
        self._phases.add("lap", self._begin, end)
        since = {kind: count - self._sent[kind] for kind, count in sent.items()}
        lap = Lap(self._in_lap, self._phases.take(), self._communication.waits.take(), since)
        self._begin, self._in_lap, self._sent = end, 0, sent  # the time of logging is part of the next iteration
        return lap


class Lap(NamedTuple):
    """What a rank has spent in some iterations."""

    length: int  # number of iterations
    phases: Stopwatch  # by phase of an iteration; "memory": its measurement; "lap": all of it
    waits: Stopwatch  # by kind of collective
    sent: dict[str, int]  # bytes by kind of collective

    def read(self) -> tuple[defaultdict[str, float], dict[str, float]]:
        """Return the means over the iterations in ms: by phase, and waits by kind. Waits until the device has ended the lap."""
        phases, waits = ({name: ms / self.length for name, ms in of.read_ms().items()} for of in (self.phases, self.waits))
        return defaultdict(float, phases), waits


class Iteration(NamedTuple):
    """An iteration that has ended on the host, while a GPU may still compute it."""

    number: int
    figures: Reading
    lr: float
    tokens: int  # that all ranks together have seen
    lap: Lap | None = None  # since the last one that was logged; None: it is not logged
    over_ranks: dict[str, float] = {}  # metrics that compare the ranks, if it is measured
    peak: int = 0  # bytes
