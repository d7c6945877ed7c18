"""What is predicted is what malloc gives out, below PyTorch: at every point of a step, for every mode, on real ranks.

Inside of PyTorch, a counter changes what it counts (see `live_bytes.LiveBytes`). Therefore, this file runs as a script in a
process of its own, with malloc_counter.c preloaded, which the ranks inherit. All blocks of 1 KiB or more count, also
the scratch memory of oneDNN, which does not pass through PyTorch's allocator.
"""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import ranks
import torch
import torch.distributed as dist
from conftest import ROOT

from benchmarks.contenders import ADAMW, Setup
from benchmarks.memory_profile import MemoryProfile, predicted_totals
from distributed.machine import autocast
from forecast.modes import MODES
from forecast.run_memory import gpt_specs, planned_optimizer, predicted
from model import GPT, GPT2_SIZES, GPTConfig
from zero.build import build, clip_grad_norm_
from zero.flags import Flags

CPU = torch.device("cpu")
WIDE = GPTConfig(block_size=16, vocab_size=20000, n_layer=2, n_head=4, n_embd=64, bias=False)  # the tied embedding decides
DEEP = GPTConfig(block_size=32, vocab_size=300, n_layer=6, n_head=4, n_embd=128, bias=False)  # activations decide
SETUP = Setup(WIDE, 2, CPU, "float32", bucket_mb=1.0, grad_clip=1.0, activation_checkpointing=False, seed=0)
AUTOCAST = replace(SETUP, dtype="bfloat16")
PLANNED = [name for name, mode in MODES.items() if mode.planned and not mode.in_place]
GROUPS = {  # setup, and modes; bfloat16 weights need autocast
    "float32": (SETUP, ["adamw_in_place", *(name for name in PLANNED if not MODES[name].flags.stored_dtype)]),
    "autocast": (AUTOCAST, PLANNED),
    "autocast, many layers": (replace(AUTOCAST, config=DEEP), PLANNED),
    "autocast, checkpointing": (replace(AUTOCAST, activation_checkpointing=True), ["sharded"]),
}
ALL = [*GROUPS]
GPT2 = GPTConfig(block_size=64, vocab_size=50304, **GPT2_SIZES["gpt2"], bias=False)
LEAST = {"batch_size": 1, "activation_checkpointing": True, "bucket_mb": "auto"}
GROUPS["124M, all flags"] = replace(AUTOCAST, config=GPT2, **LEAST), ["codecs"]
# bytes for codecs and for rounding to bfloat16, which work on 131,072 elements at a time; gloo holds what arrives meanwhile
ROOM = {(mode, point): 1_600_000 for mode in ("bfloat16", "remainder") for point in ("wrapping", "peak")}
ROOM[("remainder", "saving")] = 600_000
ABOVE = {("int8", "saving"): 100_000}  # in the prediction, slices that rank 0 decodes follow each other


class MallocBytes(nullcontext):
    """In place of LiveBytes: counts the bytes that malloc gives out in this context, in blocks of 1 KiB or more."""

    def __enter__(self):
        self.counter = ctypes.CDLL(None)  # the process, with what is preloaded
        self.counter.malloc_counter_now.restype = self.counter.malloc_counter_peak.restype = ctypes.c_longlong
        self.before = self.counter.malloc_counter_now()
        self.reset_peak()
        return self

    @property
    def now(self):
        return self.counter.malloc_counter_now() - self.before

    @property
    def peak(self):
        return self.counter.malloc_counter_peak() - self.before

    def reset_peak(self):
        self.counter.malloc_counter_reset_peak()


def modes_of(group, world_size):
    """The modes of a group that are not the same as others: one rank has nobody to share with."""
    return [mode for mode in GROUPS[group][1] if world_size > 1 or mode != "torch"]


def every_mode(group):
    """On each rank: the bytes by mode and point of a step."""
    modes, found = modes_of(group, dist.get_world_size()), {}
    for mode in (modes[0], modes[-1], *modes):  # libraries and tables allocate at their first use
        profile = MemoryProfile(GROUPS[group][0], MODES[mode])
        profile.live = MallocBytes()
        found[mode] = {point: figures["total"] for point, figures in profile.measure().items()}
    return found


def peak_of_one_process(dtype):
    """The peak bytes of a step of plain AdamW, without ranks."""
    with MallocBytes() as live:
        model = GPT(WIDE)
        model, optimizer = build(model, model.param_groups(0.1), Flags(use_zero1=False), **ADAMW)
        for _ in range(3):
            live.reset_peak()
            tokens = torch.randint(WIDE.vocab_size, (2, 1, WIDE.block_size))
            with autocast(CPU, dtype):
                loss = model(*tokens)[1]
            loss.backward()
            del loss
            clip_grad_norm_(optimizer, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return live.peak


@pytest.fixture(scope="module")
def malloc_counter(tmp_path_factory):
    """The path of the preloadable counter."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not sys.platform.startswith("linux") or compiler is None:
        pytest.skip("counting malloc needs Linux and a C compiler (cc, gcc or clang)")
    library = str(tmp_path_factory.mktemp("malloc") / "malloc_counter.so")
    source = os.path.join(os.path.dirname(__file__), "malloc_counter.c")
    subprocess.run([compiler, "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, source], check=True)
    preloaded = {**os.environ, "LD_PRELOAD": library}
    if subprocess.run(["true"], env=preloaded, capture_output=True, check=False).stderr:
        pytest.skip("malloc_counter.c cannot be preloaded here; it needs glibc")
    return library


def counted(library, tmp_path, *arguments):
    """What this file, run as a script, measures for these arguments."""
    result, path = tmp_path / "result.json", os.pathsep.join([ROOT, os.path.join(ROOT, "tests")])
    environment = {**os.environ, "LD_PRELOAD": library, "PYTHONPATH": path}
    environment["TORCH_FR_BUFFER_SIZE"] = "0"  # PyTorch records the last collectives in a table of up to 1 MB
    command = [sys.executable, __file__, str(result), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(result.read_text())


@pytest.mark.slow("test_prediction has two ranks in every mode, test_one_process the peak", seconds=46)
@pytest.mark.parametrize(("world_size", "groups"), [(2, ALL), (1, ALL), (1, ["124M, all flags"]), (4, ALL)])
def test_every_point_of_a_step(malloc_counter, tmp_path, world_size, groups):
    wrong = []
    for group, by_rank in counted(malloc_counter, tmp_path, world_size, *groups).items():
        for mode in modes_of(group, world_size):
            predicted = predicted_totals(GROUPS[group][0], MODES[mode], world_size)
            assert predicted.keys() == by_rank[0][mode].keys()
            for point, expected in predicted.items():
                measured = max(points[mode][point] for points in by_rank)
                least = 0.98 * measured - ROOM.get((mode, point), 0)
                most = 1.03 if point == "saving" else 1.02  # two of the largest messages, which seldom follow each other
                if not least <= expected <= most * measured + ABOVE.get((mode, point), 0):
                    wrong.append(f"{group}, {mode}, {point}: {expected} predicted, {measured} measured")
    assert not wrong, "\n".join(wrong)


def test_one_process(malloc_counter, tmp_path):
    how = {"distributed": False, "on_cpu": True}
    for dtype, found in counted(malloc_counter, tmp_path, 0, "float32", "bfloat16").items():
        how["activations"] = replace(SETUP, dtype=dtype, batch_size=1).forecast(MODES["adamw"], 1, 1).activations
        one = predicted(gpt_specs(WIDE), MODES["adamw"].flags, planned_optimizer(None), **how)
        assert one.peak_of_training == pytest.approx(found, rel=0.02), dtype


if __name__ == "__main__":
    path, world_size, *how = sys.argv[1:]
    if world_size == "0":
        for _ in range(2):  # libraries allocate at their first use
            result = {dtype: peak_of_one_process(dtype) for dtype in how}
    else:
        ranks.TIMEOUT_S = 600  # GPT-2 124M in every mode
        result = {group: ranks.run_ranks(every_mode, int(world_size), group) for group in how}
    with open(path, "w") as file:
        json.dump(result, file)
