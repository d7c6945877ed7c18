"""The time that the metrics of a run cost: steps as in train.py, without them, with them, and with wandb."""

import importlib.util
import math
import os
import statistics
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contenders import Contender, Setup
from benchmarks.speed import ratio_to
from distributed.ranks import mean_over_ranks
from forecast.run_memory import Extras
from run.logger import Logger
from run.memory_meter import MemoryCheck, MemoryMeter
from run.meter import INTERVAL, Meter
from zero.build import clip_grad_norm_

NEVER_ENDS = 10**9  # iterations; a turn has INTERVAL steps, so that it measures what needs a collective once


class NoMeter:
    """What `Meter` offers, without metrics: only the loss is read, as in nanoGPT."""

    def begin_iteration(self, iteration: int, is_logged: bool) -> None:
        pass

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def measure_memory(self, point: str) -> None:
        pass

    def log_iteration(self, iteration: int, loss: torch.Tensor, *_: Any) -> None:
        print(f"iter {iteration}: loss {mean_over_ranks(loss.clone()):.4f}")

    def restart(self) -> None:
        pass


def telemetry_rows(setup: Setup, modes: list[str], rounds: int) -> list[dict[str, Any]]:
    """Return one row per mode and kind of telemetry. Needs to be called on all ranks.

    Each kind has its own model, and the kinds of a mode take turns of a few steps. The ratio is that to the turn without
    metrics in the same round, and its median over the rounds. The first round is not counted.
    """
    return [row for mode in modes for row in _rows_of(setup, mode, rounds)]


def _rows_of(setup: Setup, mode: str, rounds: int) -> list[dict[str, Any]]:
    kinds = ["off", "metrics", *(["metrics and wandb"] if importlib.util.find_spec("wandb") else [])]
    contenders = {kind: Contender(setup, mode).wrap() for kind in kinds}
    turns: dict[str, list[float]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        meters: dict[str, NoMeter | Meter] = {"off": NoMeter()}
        for kind in kinds[1:]:
            meters[kind] = _meter(contenders[kind], os.path.join(folder, kind), wandb_log="wandb" in kind)
        for turn in range(rounds + 1):
            for kind, meter in meters.items():
                turns[kind].append(_turn(contenders[kind], meter, turn * INTERVAL))
        for meter in meters.values():
            if isinstance(meter, Meter):
                meter.log.finish()
    reference = turns["off"][1:]
    return [
        {
            "mode": mode,
            "telemetry": kind,
            "ms per step": statistics.median(times[1:]),
            **ratio_to(times[1:], reference),
        }
        for kind, times in turns.items()
    ]


def _meter(contender: Contender, folder: str, wandb_log: bool) -> Meter:
    setup, model, optimizer = contender.setup, contender.model, contender.optimizer
    names = {"wandb_project": "telemetry", "wandb_run_name": "telemetry", "out_dir": folder, "implementation": contender.mode}
    before = {name: os.environ.pop(name) for name in ("WANDB_DIR", "WANDB_MODE") if name in os.environ}
    os.environ |= {"WANDB_DIR": folder, "WANDB_MODE": "offline"}  # not the folder of the user's runs
    log = Logger(folder, None, {"wandb_log": wandb_log, **names})
    del os.environ["WANDB_DIR"], os.environ["WANDB_MODE"]
    os.environ.update(before)
    shard_gradients = contender.mode == "shard_gradients"
    memory = MemoryMeter(model, optimizer)
    check = MemoryCheck(log, model, optimizer, memory, setup.workload(contender.mode), shard_gradients, 1, False, Extras())
    tokens = setup.batch_size * setup.config.block_size * dist.get_world_size()
    flops = contender.module.flops_per_token()
    return Meter(log, model, optimizer, memory, check, setup.dtype, tokens, flops, NEVER_ENDS)


def _turn(contender: Contender, meter: Meter | NoMeter, first: int) -> float:
    """Return the milliseconds of a step."""
    dist.barrier()
    meter.restart()
    begin = time.perf_counter()
    for iteration in range(first, first + INTERVAL):
        _step(contender, meter, iteration)
    contender.wait()
    return (time.perf_counter() - begin) * 1000 / INTERVAL


def _step(contender: Contender, meter: Meter | NoMeter, iteration: int) -> None:
    """Run one iteration as in train.py."""
    meter.begin_iteration(iteration, is_logged=True)
    with meter.phase("forward"):
        loss = contender.forward()
    with meter.phase("data"):  # train.py prepares a batch here
        pass
    with meter.phase("backward"):
        loss.backward()
    with meter.phase("clip"):
        norms = clip_grad_norm_(contender.optimizer, contender.setup.grad_clip or math.inf)
    meter.measure_memory("before_step")
    with meter.phase("update"):
        contender.optimizer.step()
    contender.optimizer.zero_grad(set_to_none=True)
    meter.measure_memory("after_step")
    meter.log_iteration(iteration, loss.detach(), norms.total, 0.0, 0)
