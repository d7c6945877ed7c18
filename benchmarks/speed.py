"""Time of a step: the whole, its phases, and the communication that the computation waits for."""

import glob
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contenders import Contender, Setup
from distributed.launch import launched
from forecast.modes import MODES, Mode
from run.communication import CommunicationMeter

EXPOSED = "exposed communication"
PARTS = ("forward and backward", "optimizer", EXPOSED)  # of a step; the first two are phases, without what they wait


def time_rows(
    setup: Setup, modes: list[str], block_sizes: list[int], rounds: int, steps_per_turn: int
) -> Iterator[dict[str, Any]]:
    """After each round, yield one row per mode for a block size, with medians over the rounds. Call it on all ranks.

    On a noisy machine, only measurements that were taken close together can be compared: the modes take turns, and the ratio
    is that to the first mode in the same round. The milliseconds are medians as well, so on a noisy machine they can have
    another order; the quartiles of the ratios say how certain it is. The first round is not counted.
    """
    for block_size in block_sizes:
        of_size = replace(setup, config=replace(setup.config, block_size=block_size))
        contenders = {mode: TimedContender(of_size, MODES[mode]) for mode in modes}
        counted: list[dict[str, dict[str, float]]] = []
        for number in range(rounds + 1):
            turns = {mode: contender.turn(steps_per_turn) for mode, contender in contenders.items()}
            if number == 0:
                continue
            counted.append(turns)
            reference = [turns[modes[0]]["ms per step"] for turns in counted]
            for mode in contenders:
                own = [turns[mode] for turns in counted]
                times = [turn["ms per step"] for turn in own]
                ratios = [ms / other for ms, other in zip(times, reference, strict=True)]
                low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
                medians = {column: statistics.median(turn[column] for turn in own) for column in own[0]}
                figures = {**medians, "ratio": middle, "ratio, quartiles": [low, high], "rounds, ms": times}
                yield {"mode": mode, "block_size": block_size, **figures}


class TimedContender:
    """A contender that is timed. Every method needs to be called on all ranks."""

    def __init__(self, setup: Setup, mode: Mode) -> None:
        self.contender = Contender(setup, mode).wrap()
        self.on_gpu = setup.device.type == "cuda"
        self.communication = CommunicationMeter(self.contender.model, self.contender.optimizer)
        self._seconds: dict[str, float] = {}  # by part

    def turn(self, steps: int) -> dict[str, float]:
        """Run a few steps and return milliseconds per step and megabytes sent per rank and step, counted on this machine.

        A turn ends when every all-gather has ended. So once per turn, the time includes an all-gather that would normally
        overlap with the next forward. On a GPU, the phases are timed in one more step, which waits for the device between
        them.
        """
        dist.barrier()
        self._seconds = dict.fromkeys(PARTS, 0.0)
        before, begin = sent_bytes(), time.perf_counter()
        step: Callable[[], Any] = self.contender.step if self.on_gpu else self._step
        for _ in range(steps):
            step()
        waited = self._waited()
        self.contender.wait()
        self._seconds[EXPOSED] += self._waited() - waited
        figures = {"ms per step": 1000 * (time.perf_counter() - begin) / steps}
        dist.barrier()
        local, remote = (now - earlier for now, earlier in zip(sent_bytes(), before, strict=True))
        if self.on_gpu:
            self._seconds = dict.fromkeys(PARTS, 0.0)
            self._step()
        if self.contender.mode.fully_shard is not None:  # FSDP2 does not report how long it waits
            del self._seconds[EXPOSED]
        timed_steps = 1 if self.on_gpu else steps
        figures |= {f"{part}, ms": 1000 * seconds / timed_steps for part, seconds in self._seconds.items()}
        if dist.get_backend() == "gloo":
            launch = launched()
            on_several = launch.local_world_size < launch.world_size
            share = steps * launch.local_world_size * 1e6
            figures["MB sent"] = (local + on_several * remote) / share
            if on_several:
                figures["MB to other machines"] = remote / share
        return figures

    def _step(self) -> None:
        with self._phase("forward and backward"):
            self.contender.forward().backward()
        with self._phase("optimizer"):
            self.contender.clip()
            self.contender.update()

    @contextmanager
    def _phase(self, phase: str) -> Iterator[None]:
        waited, begin = self._waited(), time.perf_counter()
        yield
        if self.on_gpu:
            torch.cuda.synchronize()
        whole = time.perf_counter() - begin
        exposed = self._waited() - waited
        self._seconds[phase] += whole - exposed
        self._seconds[EXPOSED] += exposed

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
