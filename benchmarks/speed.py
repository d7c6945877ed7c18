"""Time of a step: the whole, its phases, and the communication that the computation waits for."""

import glob
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contenders import FSDP2, Contender, Setup
from distributed.launch import launched
from zero.communication import CommunicationMeter

PHASES = ("forward and backward", "optimizer")


def time_rows(setup: Setup, modes: list[str], block_size: int, rounds: int, steps_per_turn: int) -> list[dict[str, Any]]:
    """Return one row per mode. The modes take turns. Needs to be called on all ranks.

    On a noisy machine, only measurements that were taken close together can be compared: the ratio is that of a mode to the
    first mode in the same round, and its median over the rounds. The milliseconds are medians as well, so on a noisy machine
    they can have another order; the quartiles of the ratios say how certain it is. The first round is not counted.
    """
    setup = replace(setup, config=replace(setup.config, block_size=block_size))
    contenders = {mode: TimedContender(setup, mode) for mode in modes}
    turns: dict[str, list[dict[str, float]]] = {mode: [] for mode in modes}
    for _ in range(rounds + 1):
        for mode in modes:
            turns[mode].append(contenders[mode].turn(steps_per_turn))
    rows = []
    for mode in modes:
        counted, reference = turns[mode][1:], turns[modes[0]][1:]
        medians = {column: statistics.median(turn[column] for turn in counted) for column in counted[0]}
        compared = ratio_to([turn["ms per step"] for turn in counted], [turn["ms per step"] for turn in reference])
        rows.append({"mode": mode, "block_size": block_size, **medians, **compared})
    return rows


def seconds_of(setup: Setup, mode: str) -> tuple[float, float]:
    """Return how long a model with its first step takes, and a later step. Needs to be called on all ranks."""
    begin = time.perf_counter()
    contender = Contender(setup, mode).wrap()
    ends = []
    for _ in range(2):
        contender.step()
        contender.wait()
        ends.append(time.perf_counter())
    return ends[0] - begin, ends[1] - ends[0]


def ratio_to(times: list[float], reference: list[float]) -> dict[str, Any]:
    """Return the median of the ratios of the same rounds with its quartiles, and the milliseconds of each round."""
    ratios = [own / other for own, other in zip(times, reference, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {"ratio": middle, "ratio, quartiles": [low, high], "rounds, ms": times}


class TimedContender:
    """A contender that is timed. Every method needs to be called on all ranks."""

    def __init__(self, setup: Setup, mode: str) -> None:
        self.contender = Contender(setup, mode).wrap()
        self.on_gpu = setup.device.type == "cuda"
        self.communication = CommunicationMeter(self.contender.model, self.contender.optimizer)
        self._seconds = dict.fromkeys(PHASES, 0.0)

    def turn(self, steps: int) -> dict[str, float]:
        """Run a few steps and return milliseconds per step and megabytes sent per rank and step, counted on this machine.

        A turn ends when every all-gather has ended. So once per turn, the time includes an all-gather that would normally
        overlap with the next forward. On a GPU, the phases are timed in one more step, which waits for the device between
        them.
        """
        dist.barrier()
        self._seconds, exposed = dict.fromkeys(PHASES, 0.0), dict.fromkeys(PHASES, 0.0)
        local, remote = sent_bytes()
        begin = time.perf_counter()
        for _ in range(steps):
            if self.on_gpu:
                self.contender.step()
            else:
                self._step(exposed)
        waited = self._waited()
        self.contender.wait()
        if not self.on_gpu:
            exposed["end of the turn"] = self._waited() - waited
        whole = (time.perf_counter() - begin) / steps
        dist.barrier()
        local, remote = (now - before for now, before in zip(sent_bytes(), (local, remote), strict=True))
        timed_steps = steps
        if self.on_gpu:
            self._step(exposed)
            timed_steps = 1
        figures = {"ms per step": whole * 1000}
        for phase in PHASES:
            figures[f"{phase}, ms"] = (self._seconds[phase] - exposed[phase]) * 1000 / timed_steps
        if self.contender.mode not in FSDP2:  # FSDP2 does not report how long it waits
            figures["exposed communication, ms"] = sum(exposed.values()) * 1000 / timed_steps
        if dist.get_backend() == "gloo":
            launch = launched()
            on_several = launch.local_world_size < launch.world_size
            share = steps * launch.local_world_size * 1e6
            figures["MB sent"] = (local + (remote if on_several else 0)) / share
            if on_several:
                figures["MB to other machines"] = remote / share
        return figures

    def _step(self, exposed: dict[str, float]) -> None:
        """Run one step, add the seconds of its phases, and add to `exposed` the seconds that they waited."""
        with self._phase("forward and backward", exposed):
            self.contender.forward().backward()
        with self._phase("optimizer", exposed):
            self.contender.clip()
            self.contender.update()

    @contextmanager
    def _phase(self, phase: str, exposed: dict[str, float]) -> Iterator[None]:
        waited, begin = self._waited(), time.perf_counter()
        yield
        if self.on_gpu:
            torch.cuda.synchronize()
        self._seconds[phase] += time.perf_counter() - begin
        exposed[phase] += self._waited() - waited

    def _waited(self) -> float:
        """Return the seconds that the computation has waited for collectives so far."""
        return sum(self.communication.waited_ms().values()) / 1000


def sent_bytes() -> tuple[int, int]:
    """Return the bytes sent over the loopback interface of this machine, and over all others; 0 if they cannot be read."""
    counts = {"lo": 0}
    for path in glob.glob("/sys/class/net/*/statistics/tx_bytes"):
        with open(path) as file:
            counts[path.split("/")[4]] = int(file.read())
    return counts["lo"], sum(counts.values()) - counts["lo"]
