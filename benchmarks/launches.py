"""Launches of kernels and waits of the host in an iteration of train.py, counted on a pretended GPU.

    $ python -m benchmarks.launches

prints the host's time in zero/ instead: ms in hooks, clipping and step, the minimum over 25 iterations of rank 0 of 8.
"""

import math
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch

from benchmarks.contenders import Contender, Setup
from benchmarks.memory_profile import simulated_world
from benchmarks.pretended_gpu import DEVICE, PretendedGPU
from forecast.modes import MODES
from model import GPTConfig
from run.guard import Guard
from zero import ShardedGradScaler, ShardedOptimizer
from zero.build import clip_grad_norm_
from zero.reducer import Reducer

XL = GPTConfig(block_size=20, vocab_size=1048, n_layer=48, n_head=1, n_embd=32, bias=False)  # a fiftieth of its widths
XL_BUCKET_MB = 0.0629  # in float32; 40 buckets, as XL has
HOOKS = "_on_output_gradient", "on_gradient", "_end_backward"
TIMED: list[tuple[type, str, str]] = [(Reducer, hook, "hooks") for hook in HOOKS]
TIMED += [(ShardedOptimizer, "clip_grad_norm_", "clip"), (ShardedOptimizer, "step", "step")]
PHASES = ("forward", "backward", "hooks", "clip", "update")


def launch_rows(setup: Setup, modes: list[str], world_size: int) -> Iterator[dict[str, Any]]:
    """Yield one row per mode: what rank 0 launches in each phase of an iteration with one micro-step, and how often it waits.

    With `shard_gradients`, it is the second micro-step of two. "hooks" are those of zero/ in backward, "clip" has the check
    whether the update is finite. The process must have been preloaded, see `pretended_gpu`. FSDP2 cannot be counted.
    """
    for mode in modes:
        yield {"world_size": world_size, "mode": mode, **_counted(setup, mode, world_size)}


def _counted(setup: Setup, mode: str, world_size: int) -> dict[str, int]:
    with simulated_world(world_size), PretendedGPU() as gpu:
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
    launches = {of: sum(count for (phase, _), count in gpu.launches.items() if phase == of) for of in PHASES}
    collectives = sum(count for (_, name), count in gpu.launches.items() if name.startswith("c10d."))
    return {**launches, "launches": gpu.launches.total(), "collectives": collectives, "waits": gpu.waits.total()}


def host_ms(name: str) -> dict[str, float]:
    """Return the time of the host in a mode, whose buckets travel as on a GPU; with shard_gradients in a second micro-step."""
    mode, seconds, measured = MODES[name], defaultdict[str, float](float), []

    def timed(original: Any, phase: str) -> Any:
        def call(*args: Any) -> Any:
            begin = time.thread_time()
            result = original(*args)
            seconds[phase] += time.thread_time() - begin
            return result

        return call

    bucket_mb = XL_BUCKET_MB / (2 if mode.lowers_weights else 1)
    # no bucket is on a CPU, as nothing is complex
    with simulated_world(8), mock.patch("zero.collectives.is_on_cpu", torch.is_complex), ExitStack() as stack:
        for owner, function, phase in TIMED:
            stack.enter_context(mock.patch.object(owner, function, timed(getattr(owner, function), phase)))
        contender = Contender(Setup(XL, 1, torch.device("cpu"), "float32", bucket_mb, 1.0, False, 0), mode).wrap()
        for _ in range(25):
            if mode.flags.shard_gradients:
                with contender.accumulating():
                    contender.forward().backward()
            seconds.clear()
            contender.step()
            measured.append(dict(seconds))
    return {phase: 1000 * min(each[phase] for each in measured) for phase in measured[0]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in ("sharded", "shard_gradients", "bfloat16", "codecs"):
        print(f"{name:15}", *(f"  {phase} {ms:5.1f}" for phase, ms in host_ms(name).items()))
