"""Launches of kernels and waits of the host in an iteration of train.py, counted on a pretended GPU.

    $ python -m benchmarks.launches

prints the host's time in zero/ instead: ms in hooks, clipping and step, the minimum over 25 iterations of rank 0 of 8.
"""

import math
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
TIMED: list[tuple[type, str, str]] = [
    (Reducer, hook, "hooks") for hook in ("_on_output_gradient", "on_gradient", "_end_backward")
]
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


def host_ms(name: str) -> dict[str, float]:
    """Return the time of the host in a mode, whose buckets travel as on a GPU; with shard_gradients in a second micro-step."""
    mode, seconds, measured = MODES[name], defaultdict[str, float](float), []

    def timed(owner: Any, function: str, phase: str) -> Any:
        original = getattr(owner, function)

        def call(*args: Any) -> Any:
            begin = time.thread_time()
            result = original(*args)
            seconds[phase] += time.thread_time() - begin
            return result

        return mock.patch.object(owner, function, call)

    bucket_mb = XL_BUCKET_MB / (2 if mode.lowers_weights else 1)
    with ExitStack() as stack:
        stack.enter_context(simulated_world(8))
        stack.enter_context(mock.patch("zero.collectives.is_on_cpu", torch.is_complex))  # of any: no
        for function in TIMED:
            stack.enter_context(timed(*function))
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
