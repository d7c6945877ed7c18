"""Launches of kernels and waits of the host in an iteration of train.py, counted on a pretended GPU."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from benchmarks.contenders import Contender, Setup
from benchmarks.memory_profile import simulated_world
from benchmarks.pretended_gpu import DEVICE, PretendedGPU
from forecast.modes import MODES
from run.guard import Guard
from zero import ShardedGradScaler
from zero.build import clip_grad_norm_

PHASES = ("forward", "backward", "hooks", "clip", "update")


def launch_rows(setup: Setup, modes: list[str], world_size: int) -> list[dict[str, Any]]:
    """Return one row per mode: what rank 0 launches in each phase of an iteration with one micro-step, and how often it waits.

    With `shard_gradients`, it is the second micro-step of two. "hooks" are those of zero/ in backward, "clip" has the check
    whether the update is finite. The process must have been preloaded, see `pretended_gpu`. FSDP2 cannot be counted.
    """
    return [{"world_size": world_size, "mode": mode, **_counted(setup, mode, world_size)} for mode in modes]


def _counted(setup: Setup, mode: str, world_size: int) -> dict[str, int]:
    with pretended_world(world_size) as gpu:
        contender = Contender(setup, MODES[mode]).wrap()
        optimizer, scaler = contender.optimizer, ShardedGradScaler(DEVICE.type, enabled=setup.dtype == "float16")
        guard = Guard(optimizer, scaler, limit=1, alert=print)
        tokens = torch.zeros(2, setup.batch_size, setup.config.block_size, dtype=torch.int64, device=DEVICE)
        for _ in range(3):  # the first two make state, buffers and the tables of codecs
            if contender.setup.flags(contender.mode).shard_gradients:
                with contender.accumulating():
                    scaler.scale(contender.forward(tokens)).backward()
            gpu.reset()
            gpu.phase = "forward"
            loss = contender.forward(tokens)
            gpu.phase = "backward"
            scaler.scale(loss).backward()
            gpu.phase = "clip"
            scaler.unscale_(optimizer)
            norm = clip_grad_norm_(optimizer, setup.grad_clip or math.inf)
            guard.check(loss.detach(), norm)
            gpu.phase = "update"
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    launches = dict.fromkeys(PHASES, 0)
    for (phase, _), count in gpu.launches.items():
        launches[phase] += count
    collectives = sum(count for (_, name), count in gpu.launches.items() if name.startswith("c10d."))
    return {**launches, "launches": gpu.launches.total(), "collectives": collectives, "waits": gpu.waits.total()}


class _Absent:
    """In place of DistributedDataParallel: the module itself."""

    def __new__(cls, module: torch.nn.Module, **_: Any) -> Any:
        return module


@contextmanager
def pretended_world(world_size: int) -> Iterator[PretendedGPU]:
    """Be rank 0 of a world on pretended GPUs. Its DistributedDataParallel is absent, because it cannot hold fake tensors."""
    with (
        mock.patch("zero.build.DistributedDataParallel", _Absent),
        mock.patch("benchmarks.contenders.DistributedDataParallel", _Absent),
        simulated_world(world_size),
        PretendedGPU() as gpu,
    ):
        yield gpu
