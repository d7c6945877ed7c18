"""Every mode takes the way of a GPU, on a pretended one: what an iteration launches, and when the host waits for it."""

import json
import subprocess
import sys

import pytest
from pretended_gpu import preload
from scripts import ROOT

PHASES = ("forward", "backward", "clip", "update")
COUNT = """
import json, sys
sys.path[:0] = [{tests!r}]
import torch
from benchmarks.contenders import Contender, Setup
from benchmarks.memory_profile import simulated_world
from forecast.modes import MODES
from model import GPTConfig
from pretended_gpu import DEVICE, PretendedGPU

def count(mode):
    config = GPTConfig(block_size=64, vocab_size=512, n_layer=2, n_head=2, n_embd=64)
    setup = Setup(config, 1, DEVICE, "bfloat16", "auto", 1.0, False, seed=0, shard_size=2)
    with simulated_world(8), PretendedGPU() as gpu:
        contender = Contender(setup, mode).wrap()
        tokens = torch.zeros(2, 1, 64, dtype=torch.int64, device=DEVICE)
        for _ in range(2):  # the first one makes state and buffers
            gpu.reset()
            gpu.phase = "forward"
            loss = contender.forward(tokens)
            gpu.phase = "backward"
            loss.backward()
            gpu.phase = "clip"
            contender.clip()
            gpu.phase = "update"
            contender.update()
    return [[gpu.launches[phase], gpu.waits[phase]] for phase in {phases!r}]

def what_it_notices():
    with PretendedGPU() as gpu:
        here, there = torch.ones(2, device=DEVICE), torch.ones(2)
        try:
            here + there
        except RuntimeError as error:
            print(error)
        here.sum().item()
        here.cpu()
        there.copy_(here)
        there.to(DEVICE)
        here.nonzero()
    return gpu.waits[""]

# not those with DistributedDataParallel, which cannot hold fake tensors
sharded = {{name: mode for name, mode in MODES.items() if mode.is_built and mode.flags.implementation(8) == "sharded"}}
print(what_it_notices())
print(json.dumps({{name: count(mode) for name, mode in sharded.items()}}))
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    try:
        environment = preload(str(tmp_path_factory.mktemp("library")))
    except RuntimeError as error:
        pytest.skip(str(error))
    script = COUNT.format(tests=f"{ROOT}/tests", phases=PHASES)
    process = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()


@pytest.fixture(scope="module")
def counted(printed):
    """By mode: launches and waits of each phase of an iteration of rank 0 of 8."""
    return json.loads(printed[-1])


def test_it_notices_two_devices_in_an_operation_and_every_wait(printed):
    *_, error, waits, _ = printed
    assert "found at least two devices, cuda:0 and cpu" in error
    assert waits == "4", "a number, two copies, a size"


def test_the_host_waits_for_the_gpu_only_to_check_remainders(counted):
    waits = {name: sum(waits for _, waits in phases) for name, phases in counted.items()}
    assert waits == {name: int(name == "remainder") for name in counted}


def test_launches_of_an_update(counted):
    """Two groups of parameters in one bucket: for each, AdamW's kernel and its count of steps; then the all-gather."""
    update = {name: phases[PHASES.index("update")][0] for name, phases in counted.items()}
    plain = dict.fromkeys(("sharded", "shard_gradients", "loss_chunk", "hybrid", "no_overlap"), 2 * 2 + 1)
    assert update == {**plain, "bfloat16": 15, "remainder": 25, "muon": 36, "int8": 342}
