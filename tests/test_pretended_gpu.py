"""Everything takes the way of a GPU, on a pretended one: what an iteration launches, and when the host waits for it."""

import json
import os
import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import launches
import pretended_gpu
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from pretended_gpu import DEVICE, PretendedGPU, run_preloaded
from torch._subclasses import fake_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from toy import make_toy

from benchmarks import gpu
from benchmarks.alone import shard_alone
from benchmarks.memory_profile import simulated_world
from distributed.machine import DTYPES
from forecast.activations import micro_step, predict
from forecast.prediction import Workload
from model import GPT, GPTConfig, SkipInitialization
from run import hooks
from zero import ShardedGradScaler, ShardedOptimizer
from zero.build import build, clip_grad_norm_
from zero.checkpoint import restore
from zero.checkpoint.state import snapshot
from zero.flags import Flags
from zero.optimizer import _wait_for_gathers

SIZES = GPTConfig(n_layer=2, n_head=2, n_embd=64, vocab_size=512, block_size=64, bias=False)
COUNTED = {  # forward, backward, hooks, clip, update, collectives, waits of rank 0 of 8, in buckets of 0.1 MB
    "adamw": (43, 61, 0, 32, 6, 1, 0),
    "sharded": (35, 53, 27, 43, 17, 17, 0),  # without casts of weights, and of their gradients
    "float32": (43, 61, 28, 42, 12, 15, 0),
    "codecs": (29, 43, 24, 40, 90, 9, 0),
    "loss_chunk": (54, 50, 27, 43, 17, 17, 0),
    "hybrid": (35, 53, 33, 44, 17, 24, 0),
    "muon": (35, 53, 27, 43, 62, 19, 1),
}
ALL_FLAGS = {
    "sharded": Flags(),
    "shard_gradients": Flags(shard_gradients=True),
    "bfloat16": Flags(param_dtype="bfloat16"),
    "remainder": Flags(param_dtype="bfloat16_remainder"),
    "state in bfloat16": Flags(state_dtype="bfloat16"),
    "int8": Flags(state_dtype="int8"),
    "everything": Flags(shard_gradients=True, param_dtype="bfloat16_remainder", state_dtype="int8"),
}


# -- in a process of its own: a pretended GPU changes PyTorch for good -----------------------------------------------------


def what_it_notices():
    """The error of an operation on two devices, and the number of waits in what waits."""
    with PretendedGPU() as gpu:
        here, there = torch.ones(2, device=DEVICE), torch.ones(2)
        with pytest.raises(RuntimeError) as error:
            here + there
        assert here.sum().item() == 0
        here.cpu()
        there.copy_(here)
        there.to(DEVICE)
        for copied in (there, torch.ones(2**15), torch.ones(2**15).pin_memory()):  # the second one is large and not pinned
            copied.to(DEVICE, non_blocking=True)
        assert len(here.nonzero()) == 0
        here.sum() + torch.ones(())
    return str(error.value), gpu.waits.total()


def train(flags, muon, saved=None):
    """Iterations of rank 0 of 8 with frozen, tied and unused parameters, scaled for float16: waits of the last, the state."""
    with simulated_world(8), PretendedGPU() as gpu:
        with DEVICE:
            module = make_toy()
        model, optimizer = build(module, module.param_groups(muon), flags, device=DEVICE, overlap=[module.hidden], lr=0.01)
        if saved is not None:
            restore(optimizer, saved["optimizer"])
        scaler = ShardedGradScaler("cuda")
        tokens = torch.zeros(2, 4, 6, dtype=torch.int64, device=DEVICE)
        dtype = torch.float16 if flags.param_dtype == "float32" else torch.bfloat16
        for set_to_none in (True, False, True):
            gpu.reset()
            for is_last in (False, True):
                model.require_backward_grad_sync = is_last
                with torch.autocast("cuda", dtype):
                    loss = model(*tokens)
                gpu.phase = "backward"
                scaler.scale(loss).backward()
                gpu.phase = ""
            scaler.unscale_(optimizer)
            clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none)
        # there, a group of one rank has all of the state, and nobody sends it a part
        return dict(gpu.waits), snapshot(optimizer, module).in_memory() if flags.shard_size == 1 else None


def every_flag():
    """The waits of an iteration in groups of 1, whose state is then restored in groups of 8 or, with Muon, of 4."""
    found = []
    for number, (name, flags) in enumerate(ALL_FLAGS.items()):
        muon = number % 2 == 0
        waits, saved = train(replace(flags, shard_size=1), muon)
        found.append((name, muon, waits, train(replace(flags, shard_size=4 * muon), muon, saved)[0]))
    return found


class Stream:
    """A stream, as the works that it has been given and those that it has waited for."""

    def __init__(self):
        self.works = set()

    def wait_stream(self, other):
        self.works |= other.works

    def do(self, work, function, *args):
        """Call a function while this is the current stream, and return for which works the stream waits by then."""
        before = {*self.works}
        self.works.add(work)
        torch.cuda.current_stream = lambda *_: self
        function(*args)
        return sorted(self.works - before - {work})


def several_streams():
    """What streams wait for if gradients arrive on several, and waits of the host at the end."""
    first, second, third, fourth = streams = [Stream() for _ in range(4)]
    with simulated_world(2), PretendedGPU() as gpu:
        first.do("what had the memory before", torch.ones, 1)
        with DEVICE:
            module = make_toy()
            tokens = torch.zeros(2, 4, 6, dtype=torch.int64)
        flags, overlap = Flags(bucket_mb=1), [module.hidden]
        model, optimizer = build(module, module.param_groups(False), flags, device=DEVICE, overlap=overlap, lr=0.01)
        (gradients,) = model.reducer._gradients
        values = torch.ones(gradients.bucket.data.numel(), device=DEVICE)
        of_one, of_other, *_ = gradients.bucket.members
        first.do("a gradient", gradients.accumulate, values, of_one)
        waited = [second.do("another gradient", gradients.accumulate, values, of_other)]
        waited.append(third.do("reduce-scatter", gradients.start_reduce_scatter))
        waited.append(fourth.do("sum", gradients.finish_reduce_scatter))
        is_followed = ["sum" in stream.works for stream in streams]
        model.reducer._reset()
        first.do("step", lambda: (model(*tokens).backward(), optimizer.step()))
        gpu.reset()
        _wait_for_gathers(optimizer.placed.buckets)
        return waited, is_followed, gpu.waits.total()


def waits_of_rounding():
    """Waits of the host in an update whose steps are counted on the CPU, and whose state is rounded at random."""
    with simulated_world(8), PretendedGPU() as gpu:
        params = [torch.nn.Parameter(torch.ones(70, device=DEVICE))]
        optimizer = ShardedOptimizer(params, torch.optim.RMSprop, lr=0.01, state_dtype="bfloat16")
        for _ in range(3):  # the first two compare gradients
            gpu.reset()
            params[0].grad = torch.ones_like(params[0])
            optimizer.step()
        assert {state["step"].device.type for state in optimizer.inner.state.values()} == {"cpu"}
        return gpu.waits.total()


def small_launches():
    """What an iteration of each mode launches, and its waits in float16."""
    found = {mode: launches.counted(SIZES, 1, mode, bucket_mb=0.1) for mode in COUNTED}
    for counts in found.values():
        del counts["launches"]  # the sum
    in_float16 = launches.counted(SIZES, 1, "sharded", dtype="float16")
    return [{mode: list(counts.values()) for mode, counts in found.items()}, in_float16["waits"]]


def micro_steps_on_gpu():
    """The bytes that live in some micro-steps, and those that are predicted."""
    found = []
    for chunk, param_dtype, dropout in ((0, "float32", 0.0), (300, "float32", 0.1), (0, "bfloat16", 0.0)):
        config = GPTConfig(block_size=256, vocab_size=5000, n_layer=4, n_head=4, n_embd=256, dropout=dropout, bias=False)
        with PretendedGPU():
            with DEVICE, SkipInitialization():
                model = GPT(config).to(DTYPES[param_dtype])
            model.loss_chunk = chunk
            tokens = torch.zeros((4, 256), dtype=torch.int64, device=DEVICE)
            autocast = torch.autocast("cuda", torch.bfloat16)
            live = micro_step(model, lambda: model(tokens, tokens)[1], autocast, on_cpu=False)  # noqa: B023 - called at once
        found.append((live, predict(Workload(config, 4, "bfloat16", "cuda", loss_chunk=chunk), param_dtype)))
    return found


def run_part(name):
    """Run a part of bench-gpu with a small model and few iterations, as rank 0 of 1 that shards its optimizer all the same."""
    part = next(part for part in gpu.parts(1, "pretended") if part.name == name)
    card = SimpleNamespace(name="pretended GPU", total_memory=80 * 10**9, major=9, minor=0, multi_processor_count=132)
    card.pci_domain_id = card.pci_bus_id = card.pci_device_id = 0
    numbers = {"memory_allocated": 0, "memory_reserved": 0, "max_memory_reserved": 0, "mem_get_info": (6 * 10**10, 8 * 10**10)}
    numbers |= {"is_available": True, "device_count": 1, "set_device": None, "is_current_stream_capturing": False}
    for key, value in (numbers | {"get_device_properties": card}).items():
        setattr(torch.cuda, key, lambda *_, value=value: value)
    peak = {"bytes": 10**12}  # of what is computed before the run begins
    torch.cuda.max_memory_allocated = lambda *_: peak["bytes"]
    torch.cuda.reset_peak_memory_stats = lambda *_: peak.update(bytes=0)
    sys.modules[torch.optim.Adam.__module__]._get_value = lambda _: 1.0
    fake_tensor.init_gpu_context = lambda *_: None  # a build for CUDA would ask the driver
    begin, new_group = dist.init_process_group, dist.new_group
    dist.init_process_group = lambda _, world_size=1, **__: begin("fake", store=FakeStore(), rank=0, world_size=world_size)
    dist.new_group = lambda *args, backend=None, **options: new_group(*args, backend="fake", **options)
    if part.ranks:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(40000 + os.getpid() % 20000)}
    # the check compares values; a batch is too large for a copy without a wait from memory that is not pinned, and
    # 100 MB less than predicted would be a warning
    own = ["--max_iters=6", "--log_interval=2", "--batch_size=65", "--n_layer=2", "--compile=False"]
    if "bench.py" in part.command:
        sizes = [f"--{key}={getattr(SIZES, key)}" for key in ("n_layer", "n_head", "n_embd", "vocab_size", "block_size")]
        own = ["--model=", *sizes, "--bucket_mb=0.1", "--rounds=2", "--steps_per_turn=1", "--compile=False"]
    elif part.name.startswith(("gpt2", "xl")):
        gpu.write_tokens()
        own += ["--batch_size=1", "--block_size=64", "--n_head=2", "--n_embd=32"]
    command = part.command[2 * (part.command[0] == "-m") :]  # fake tensors have no nan
    if "benchmarks.alone" in part.command:
        shard_alone()
    sys.argv = [*(argument.removesuffix(",fsdp2") for argument in command), *own, "--device=cuda"]
    with PretendedGPU() as counted:
        pretended_gpu._Event.elapsed_time = lambda *_: 1.0
        phase, read, finish = hooks.Run.phase, hooks.Run.read_figures, hooks.finish

        def read_figures(run):
            counted.phase = "backward" if counted.phase == "data" else counted.phase  # which begins next
            read(run)

        hooks.Run.read_figures = read_figures
        hooks.Run.phase = lambda run, name: (setattr(counted, "phase", name), phase(run, name))[1]  # until the next one begins
        hooks.finish = lambda code: (print("the host waits in", sorted(counted.waits), flush=True), finish(code))
        runpy.run_path(sys.argv[0], run_name="__main__")


# -- the tests -------------------------------------------------------------------------------------------------------------


def preloaded(*functions):
    """What functions of this file return in a preloaded process."""
    names = ", ".join(function.__name__ for function in functions)
    script = f"import json, sys; sys.path[:0] = {sys.path}; from test_pretended_gpu import {names}"
    return json.loads(run_preloaded("-c", f"{script}; print(json.dumps([function() for function in ({names},)]))", cwd=ROOT))


@pytest.fixture(scope="module")
def printed():
    return preloaded(what_it_notices, several_streams, waits_of_rounding, micro_steps_on_gpu, small_launches)


def test_it_notices_two_devices_in_an_operation_and_every_wait(printed):
    (error, waits), *_ = printed
    assert re.search("found (at least )?two (different )?devices,? cuda:0", error), error
    assert waits == 6, "a number, four copies, a size"


def test_several_streams_follow_each_other(printed):
    """The host waits at the end, where the process would abort what is in flight."""
    _, (waited, is_followed, waits), *_ = printed
    expected = ["a gradient", "what had the memory before"]
    both = sorted([*expected, "another gradient"])
    assert waited == [expected, both, sorted([*both, "reduce-scatter"])]
    assert is_followed == [True] * 4, "what gets the memory of the bucket follows the sum"
    assert waits == 1


@pytest.mark.slow("trains 14 times; the launches of six modes have their operations by day", seconds=20)
def test_every_flag_trains_saves_and_restores():
    """No operation mixes devices. The host waits for the scaler, and for parameters without a gradient."""
    (found,) = preloaded(every_flag)
    assert len(found) == len(ALL_FLAGS)
    for name, muon, *of_groups in found:
        assert of_groups == [{"hooks": (2 if ALL_FLAGS[name].shard_gradients else 1), "": 1}] * 2, (name, muon)


def test_launches_and_waits_of_an_iteration(printed):
    _, _, waits_of_rounding, _, (counted, waits_in_float16) = printed
    assert {mode: tuple(counts) for mode, counts in counted.items()} == COUNTED
    assert (waits_in_float16, waits_of_rounding) == (1, 0), "the host does not wait for a seed"


def test_activations_take_what_is_predicted(printed):
    """And so the loss is computed in float32: CUDA's autocast leaves cross_entropy in bfloat16, which takes half."""
    *_, found, _ = printed
    for live, predicted in found:
        assert live == pytest.approx(predicted, rel=1e-3)


@pytest.mark.slow("counts all modes of 124M and XL", seconds=400)
@pytest.mark.parametrize("name", launches.COMMITTED)
def test_the_committed_counts(name):
    rows = json.loads(Path(ROOT, "results", name, "results.json").read_text())["launches"]["rows"]
    assert json.loads(run_preloaded(launches.__file__, "--preloaded", name)) == rows
    assert all(row["clip"] + row["update"] <= 2000 for row in rows if row["mode"] != "plain_muon")


PARTS = (
    *("train-codecs", "train-float32", "train-muon", "train-float16", "gpt2-eager"),
    *("xl-all-flags", "xl-bfloat16", "xl-shard-gradients"),
    *("memory-xl", "memory-gpt2", "memory-2-ranks", "time-1-nccl-rank"),
)


@pytest.mark.slow("trains and measures as a GPU would; test_gpu.py has the parts on a CPU", seconds=120)
@pytest.mark.parametrize("name", PARTS)
def test_parts_of_bench_gpu_that_need_no_values(tmp_path, name):
    """The others read a checkpoint, or ask CUDA for a trace. None compiles here."""
    script = f"import sys; sys.path[:0] = {[ROOT, *sys.path]}; from test_pretended_gpu import run_part; run_part('{name}')"
    for name_of_file in ("train.py", "bench.py", "data"):
        (tmp_path / name_of_file).symlink_to(os.path.join(ROOT, name_of_file))
    printed = run_preloaded("-c", script, cwd=tmp_path)
    measure = name.partition("-")[0]
    if measure in ("memory", "time"):
        folder = tmp_path / "results" / "pretended" / name.removesuffix("-1-nccl-rank")
        rows = json.loads((folder / "results.json").read_text())[measure]["rows"]
        assert {row["mode"] for row in rows} >= {"sharded", "codecs"}
        assert name != "memory-2-ranks" or "saving" in {row["point"] for row in rows}
    else:
        assert "on 1 rank, cuda: pretended GPU" in printed
        assert "iter 6: loss" in printed
        (phases,) = re.findall("the host waits in (.*)", printed)
        assert "update" in phases, "or after it"
        assert "forward" not in phases
        assert "data" not in phases, "a batch is copied from pinned memory"
        # a fake process group agrees on no save, and fake weights have values that are not finite
        expected = "is not finite; files from before are unchanged", "WARNING: there is no checkpoint: "
        assert printed.count("WARNING") == sum(map(printed.count, expected))
