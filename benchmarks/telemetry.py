"""The time that the metrics of a run cost: steps as in train.py, without them, with them, and with wandb."""

import importlib.util
import itertools
import math
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from functools import partial
from typing import Any

import torch.distributed as dist

from benchmarks.contenders import Contender, Setup
from benchmarks.speed import compared
from distributed.ranks import mean_over_ranks
from forecast.modes import MODES
from run.logger import Logger
from run.memory_meter import MemoryCheck, MemoryMeter
from run.meter import INTERVAL, Meter
from zero.build import clip_grad_norm_

NEVER_ENDS = 10**9  # iterations; a turn has INTERVAL steps, so that it measures what needs a collective once


def cost(rounds: int) -> tuple[int, int]:
    """Return the models and micro-steps of a mode."""
    return 3, 3 * (rounds + 1) * INTERVAL


def telemetry_rows(setup: Setup, modes: list[str], rounds: int) -> list[dict[str, Any]]:
    """Return one row per mode and kind of telemetry, which take turns. Needs to be called on all ranks.

    Each kind has its own model. The ratio is that to the turn without metrics in the same round.
    """
    return [{"mode": mode, "telemetry": kind, **row} for mode in modes for kind, row in _by_kind(setup, mode, rounds).items()]


def _by_kind(setup: Setup, mode: str, rounds: int) -> dict[str, dict[str, Any]]:
    kinds = ["off", "metrics", *(["metrics and wandb"] if importlib.util.find_spec("wandb") else [])]
    contenders = {kind: Contender(setup, MODES[mode]).wrap() for kind in kinds}
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        meters: dict[str, Meter | None] = {"off": None}
        for kind in kinds[1:]:
            meters[kind] = _meter(mode, contenders[kind], os.path.join(folder, kind), wandb_log="wandb" in kind)
        turns = {kind: partial(_turn, contenders[kind], meters[kind], itertools.count()) for kind in kinds}
        figures = compared(turns, rounds)
        for meter in filter(None, meters.values()):
            meter.log.finish()
    return figures


def _meter(mode: str, contender: Contender, folder: str, wandb_log: bool) -> Meter:
    setup, model, optimizer = contender.setup, contender.model, contender.optimizer
    names = {"wandb_project": "telemetry", "wandb_run_name": "telemetry", "out_dir": folder, "implementation": mode}
    before = {name: os.environ.pop(name) for name in ("WANDB_DIR", "WANDB_MODE") if name in os.environ}
    os.environ |= {"WANDB_DIR": folder, "WANDB_MODE": "offline"}  # not the folder of the user's runs
    log = Logger(folder, None, {"wandb_log": wandb_log, **names})
    del os.environ["WANDB_DIR"], os.environ["WANDB_MODE"]
    os.environ.update(before)
    shard_gradients = contender.mode.flags.shard_gradients
    check = MemoryCheck(log, MemoryMeter(model, optimizer), setup.workload(contender.mode), shard_gradients, 1, False)
    tokens = setup.batch_size * setup.config.block_size * dist.get_world_size()
    flops = contender.module.flops_per_token()
    return Meter(check, setup.dtype, tokens, flops, NEVER_ENDS)


def _turn(contender: Contender, meter: Meter | None, iterations: Iterator[int]) -> dict[str, float]:
    dist.barrier()
    if meter is not None:
        meter.restart()
    begin = time.perf_counter()
    for iteration in itertools.islice(iterations, INTERVAL):
        _step(contender, meter, iteration)
    contender.wait()
    return {"ms per step": (time.perf_counter() - begin) * 1000 / INTERVAL}


def _step(contender: Contender, meter: Meter | None, iteration: int) -> None:
    """Run one iteration as in train.py; without a meter, only the loss is read, as in nanoGPT."""

    def phase(name: str) -> AbstractContextManager[None]:
        return nullcontext() if meter is None else meter.phase(name)

    if meter is not None:
        meter.begin_iteration(iteration, is_logged=True)
    with phase("forward"):
        loss = contender.forward()
    with phase("data"):  # train.py prepares a batch here
        pass
    with phase("backward"):
        loss.backward()
    with phase("clip"):
        norms = clip_grad_norm_(contender.optimizer, contender.setup.grad_clip or math.inf)
    if meter is not None:
        meter.measure_memory("before_step")
    with phase("update"):
        contender.optimizer.step()
    contender.optimizer.zero_grad(set_to_none=True)
    if meter is None:
        print(f"iter {iteration}: loss {mean_over_ranks(loss.detach().clone()):.4f}")
    else:
        meter.measure_memory("after_step")
        meter.log_iteration(iteration, loss.detach(), norms.total, 0.0, 0)
