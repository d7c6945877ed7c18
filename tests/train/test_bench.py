"""bench.py runs every mode, and counts the bytes on the loopback interface that the arithmetic gives."""

import json
import os
import subprocess
import sys

import pytest
from scripts import run, run_for_real

SIZES = ["--n_layer=2", "--n_head=2", "--n_embd=512", "--vocab_size=65", "--block_size=16", "--device=cpu"]


# runs a command in a network namespace, whose loopback interface carries nothing else
ALONE_ON_THE_NETWORK = """
import fcntl, os, socket, struct, subprocess, sys
SET_FLAGS, UP = 0x8914, 1
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
    fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sh14x", b"lo", UP))
subprocess.run(["mount", "-t", "sysfs", "sysfs", "/sys"], check=True)  # its counters are those of this namespace
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture(scope="module")
def alone():
    """What to put before a command so that nothing else is on its network; nothing where the machine does not allow that."""
    prefix = ["unshare", "-Urnm", sys.executable, "-c", ALONE_ON_THE_NETWORK]
    try:
        allowed = subprocess.run([*prefix, sys.executable, "-c", ""], capture_output=True).returncode == 0
    except FileNotFoundError:
        allowed = False
    return prefix if allowed else []


@pytest.mark.skipif(not os.path.exists("/sys/class/net/lo/statistics/tx_bytes"), reason="no loopback counters on this system")
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_mode_and_its_bytes(ranks, alone):
    modes = ["adamw", "torch", "sharded", "shard_gradients", "bfloat16", "simple", "fsdp2"]
    flags = f"--modes={','.join(modes)}", "--rounds=3", f"--steps_per_turn={4 // ranks}", *SIZES
    process = run_for_real("bench.py", *flags, ranks=ranks, prefix=alone)
    assert process.returncode == 0, process.stderr
    rows = [line.split() for line in process.stdout.splitlines() if line.split()[0] in modes]
    assert [row[0] for row in rows] == modes
    megabytes = {row[0]: float(row[3]) for row in rows}
    parameters = 2 * 12 * 512**2 + 65 * 512 + 16 * 512 + 5 * 512
    one_all_reduce = 2 * (ranks - 1) / ranks * parameters * 4 / 1e6
    assert megabytes["adamw"] == pytest.approx(one_all_reduce, rel=0.02)
    for mode, times in (("torch", 1.5), ("sharded", 1), ("shard_gradients", 1), ("bfloat16", 0.5), ("simple", 1.5)):
        # TCP's headers and acknowledgements vary by a few percent in so small a model; test_data_parallel counts exactly
        assert megabytes[mode] == pytest.approx(times * megabytes["adamw"], rel=0.06), mode
    assert rows[0][2] == "1.000"


def test_mistakes_have_exit_code_2():
    for ranks, argument, message in (
        (0, "--rounds=1", "torchrun"),
        (1, "--modes=adamw,other", "other is not one of adamw, torch, sharded"),
        (1, "--rounds=0", "rounds=0 must be at least 1"),
        (1, "--n_embd=63", "use a multiple of n_head"),
    ):
        process = run("bench.py", argument, ranks=ranks)
        assert message in process.stderr
        assert (process.returncode, process.stderr.count("\n")) == (2, 1)


def test_memory_at_each_point_of_a_step(tmp_path):
    path = tmp_path / "results" / "memory.json"
    modes = ["adamw", "torch", "sharded", "shard_gradients", "bfloat16", "simple"]
    process = run(
        "bench.py", "--what=memory", f"--modes={','.join(modes)}", f"--out={path}", "--zero_bucket_mb=0.1", *SIZES, ranks=2
    )
    assert process.returncode == 0, process.stderr
    rows = {row["mode"]: row for row in json.loads(path.read_text())["rows"]}
    parameters = rows["adamw"]["after init, MB"]
    for mode, copies in (
        ("adamw", 4),
        ("torch", 3),
        ("simple", 3),
        ("sharded", 3),
        ("shard_gradients", 2.5),
        ("bfloat16", 2.5),
    ):
        assert rows[mode]["between micro-steps, MB"] / parameters == pytest.approx(copies, rel=0.1), mode
    assert "between micro-steps" in process.stdout


def test_checkpoints(tmp_path):
    path = tmp_path / "checkpoint.json"
    process = run("bench.py", "--what=checkpoint", "--modes=sharded,torch", f"--out={path}", *SIZES, ranks=2)
    assert process.returncode == 0, process.stderr
    rows = {row["mode"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(rows) == ["sharded", "torch", "consolidate_state_dict"]
    for mode in ("sharded", "torch"):  # no more than a bucket of 75 MB beyond the state, with room for the allocator
        assert rows[mode]["rank 0 extra, MB"] < 75
        assert rows[mode]["others extra, MB"] < 75
        for format in ("consolidated", "sharded"):
            assert rows[mode][f"{format}: MB"] == pytest.approx(3 * 25.5, rel=0.05)
