"""Time of a step: the whole, its phases, and the communication that the computation waits for."""

import glob
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contenders import Contender, Setup
from distributed.launch import launched
from forecast.modes import MODES, Mode
from zero.communication import CommunicationMeter

PHASES = ("forward and backward", "optimizer")


def cost(block_sizes: list[int], rounds: int, steps_per_turn: int) -> tuple[int, float]:
    """Return the models of a mode, and its micro-steps in the time of one with the first block size."""
    return len(block_sizes), (rounds + 1) * steps_per_turn * sum(block_sizes) / block_sizes[0]


def time_rows(setup: Setup, modes: list[str], block_sizes: list[int], rounds: int, steps_per_turn: int) -> list[dict[str, Any]]:
    """Return one row per block size and mode. Needs to be called on all ranks."""
    rows = []
    for block_size in block_sizes:
        of_size = replace(setup, config=replace(setup.config, block_size=block_size))
        turns = {mode: partial(TimedContender(of_size, MODES[mode]).turn, steps_per_turn) for mode in modes}
        rows += [{"mode": mode, "block_size": block_size, **figures} for mode, figures in compared(turns, rounds).items()]
    return rows


def compared(turns: Mapping[str, Callable[[], dict[str, float]]], rounds: int) -> dict[str, dict[str, Any]]:
    """Let contenders take turns, and return the medians of their figures, and how long they took.

    On a noisy machine, only measurements that were taken close together can be compared: the ratio is that to the first
    contender in the same round, and its median over the rounds. The milliseconds are medians as well, so on a noisy machine
    they can have another order; the quartiles of the ratios say how certain it is. The first round is not counted.

    Args:
        turns: by name, what measures a turn: "ms per step", and other figures.
    """
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in turns}
    for _ in range(rounds + 1):
        for name, turn in turns.items():
            measured[name].append(turn())
    found, reference = {}, [turn["ms per step"] for turn in measured[next(iter(turns))][1:]]
    for name, (_, *counted) in measured.items():
        times = [turn["ms per step"] for turn in counted]
        ratios = [own / other for own, other in zip(times, reference, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        medians = {column: statistics.median(turn[column] for turn in counted) for column in counted[0]}
        found[name] = {**medians, "ratio": middle, "ratio, quartiles": [low, high], "rounds, ms": times}
    return found


def seconds_of(setup: Setup, mode: str) -> tuple[float, float]:
    """Return how long a model with its first step takes, and a later step. Needs to be called on all ranks."""
    begin = time.perf_counter()
    contender = Contender(setup, MODES[mode]).wrap()
    ends = []
    for _ in range(2):
        contender.step()
        contender.wait()
        ends.append(time.perf_counter())
    return ends[0] - begin, ends[1] - ends[0]


class TimedContender:
    """A contender that is timed. Every method needs to be called on all ranks."""

    def __init__(self, setup: Setup, mode: Mode) -> None:
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
        if self.contender.mode.fully_shard is None:  # FSDP2 does not report how long it waits
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
