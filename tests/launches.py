"""Launches of kernels and waits of the host in an iteration of train.py, counted on a pretended GPU (needs a C++ compiler).

    $ python tests/launches.py gpt2-12x1024-launches gpt2-xl-12x1024-launches     # counts again what results/ has
    $ python tests/launches.py

prints the host's time in zero/ instead: ms in hooks, clipping and step, the minimum over 25 iterations of rank 0 of 8.
"""

import datetime
import json
import os
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from unittest import mock

import torch
from conftest import ROOT  # which also makes the program importable
from pretended_gpu import DEVICE, PretendedGPU, run_preloaded

from benchmarks.contenders import Contender, Setup
from benchmarks.memory_profile import simulated_world
from benchmarks.results import Results
from forecast.modes import MODES
from model import GPT2_SIZES, GPTConfig
from run.guard import Guard
from zero import ShardedGradScaler, ShardedOptimizer
from zero.build import clip_grad_norm_
from zero.collectives import Communicator
from zero.reducer import Reducer

COMMITTED = {f"{model}-12x1024-launches": model for model in ("gpt2", "gpt2-xl")}  # folders in results/
TITLE = "Launches and waits of rank 0 in an iteration; DistributedDataParallel is left out where it belongs to the mode"
PHASES = "forward", "backward", "hooks", "clip", "update"
XL = GPTConfig(block_size=20, vocab_size=1048, n_layer=48, n_head=1, n_embd=32, bias=False)  # a fiftieth of its widths
XL_BUCKET_MB = 0.0629  # in float32; 40 buckets, as XL has
TIMED = [(Reducer, hook, "hooks") for hook in ("_on_output_gradient", "on_gradient", "_end_backward")]
TIMED += [(ShardedOptimizer, "clip_grad_norm_", "clip"), (ShardedOptimizer, "step", "step")]


def counted(config, batch_size, mode, bucket_mb="auto", dtype="bfloat16", world_size=8):
    """What rank 0 launches in each phase of an iteration with one micro-step, and how often it waits, in a preloaded process.

    With shard_gradients, it is the second micro-step of two. Hybrid: in groups of four ranks. "hooks" are those of zero/ in
    backward, "clip" has the check whether the update is finite. A launch is an operation that starts a kernel, or a collective.
    """
    setup = Setup(config, batch_size, DEVICE, dtype, bucket_mb, 1.0, activation_checkpointing=False, seed=1337, shard_size=4)
    with simulated_world(world_size), PretendedGPU() as gpu:
        contender = Contender(setup, MODES[mode]).wrap()
        optimizer, scaler = contender.optimizer, ShardedGradScaler(DEVICE.type, enabled=dtype == "float16")
        guard = Guard(optimizer, scaler, limit=1, alert=print)
        tokens = torch.zeros(2, batch_size, config.block_size, dtype=torch.int64, device=DEVICE)
        for _ in range(3):  # the first two make state, buffers and the tables of codecs
            if MODES[mode].flags.shard_gradients:
                with contender.accumulating():
                    scaler.scale(contender.forward(tokens)).backward()
            gpu.reset()
            gpu.phase = "forward"
            loss = contender.forward(tokens)
            gpu.phase = "backward"
            scaler.scale(loss).backward()
            gpu.phase = "clip"
            scaler.unscale_(optimizer)
            guard.check(loss.detach(), clip_grad_norm_(optimizer, setup.grad_clip))
            gpu.phase = "update"
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    launches = {of: sum(count for (phase, _), count in gpu.launches.items() if phase == of) for of in PHASES}
    collectives = sum(count for (_, name), count in gpu.launches.items() if name.startswith("c10d."))
    return {**launches, "launches": gpu.launches.total(), "collectives": collectives, "waits": gpu.waits.total()}


def committed_rows(folder):
    """The rows of a folder of `COMMITTED`: GPT-2 on 12 sequences of 1024 tokens, rank 0 of 8."""
    config = GPTConfig(block_size=1024, vocab_size=50304, bias=False, **GPT2_SIZES[COMMITTED[folder]])
    modes = [name for name, mode in MODES.items() if not mode.in_place and mode.fully_shard is None]
    return [{"world_size": 8, "mode": mode, **counted(config, 12, mode)} for mode in modes]


def host_ms(name):
    """The time of the host in a mode, whose buckets travel as on a GPU; with shard_gradients in a second micro-step."""
    mode, seconds, measured = MODES[name], defaultdict(float), []

    def timed(original, phase):
        def call(*args):
            begin = time.thread_time()
            result = original(*args)
            seconds[phase] += time.thread_time() - begin
            return result

        return call

    bucket_mb = XL_BUCKET_MB / (2 if mode.flags.stored_dtype else 1)
    with simulated_world(8), mock.patch.object(Communicator, "is_on_cpu", return_value=False), ExitStack() as stack:
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
    folders = [argument for argument in sys.argv[1:] if argument != "--preloaded"]
    if unknown := [folder for folder in folders if folder not in COMMITTED]:
        sys.exit(f"error: {unknown[0]} is not one of {', '.join(COMMITTED)}")
    if "--preloaded" in sys.argv:  # below: this file starts itself
        print(json.dumps(committed_rows(*folders)))
    elif folders:
        for folder in folders:
            facts = {"command": f"tests/launches.py {folder}", "date": datetime.date.today().isoformat()}
            facts["machine"] = f"pretended GPU, torch {torch.__version__}"
            facts["setup"] = "rank 0 of 8, bfloat16, 12 x 1024 tokens per rank and micro-step"
            rows = json.loads(run_preloaded(__file__, "--preloaded", folder))
            print(Results(os.path.join(ROOT, "results", folder), facts).add("launches", TITLE, rows))
    else:
        for name in ("sharded", "shard_gradients", "bfloat16", "codecs"):
            print(f"{name:15}", *(f"  {phase} {ms:5.1f}" for phase, ms in host_ms(name).items()))
