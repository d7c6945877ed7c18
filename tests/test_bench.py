"""bench.py runs every mode, and the bytes it counts on the loopback interface are those that the arithmetic says."""

import json
import os

import pytest
from test_train import run

SIZES = ["--n_layer=2", "--n_head=2", "--n_embd=256", "--vocab_size=65", "--block_size=16", "--device=cpu"]


@pytest.mark.skipif(not os.path.exists("/sys/class/net/lo/statistics/tx_bytes"), reason="no loopback counters on this system")
def test_every_mode_and_its_bytes():
    modes = ["adamw", "torch", "sharded", "shard_gradients", "simple", "fsdp2"]
    process = run("bench.py", f"--modes={','.join(modes)}", "--rounds=3", "--steps_per_turn=2", *SIZES, ranks=2)
    assert process.returncode == 0, process.stderr
    rows = [line.split() for line in process.stdout.splitlines() if line.split()[0] in modes]
    assert [row[0] for row in rows] == modes
    megabytes = {row[0]: float(row[3]) for row in rows}
    parameters = 2 * 12 * 256**2 + 65 * 256 + 16 * 256 + 5 * 256
    one_all_reduce = parameters * 4 / 1e6  # 2 (N - 1) / N = 1 at two ranks
    for mode, times in (("adamw", 1.0), ("torch", 1.5), ("sharded", 1.0), ("shard_gradients", 1.0), ("simple", 1.5)):
        assert megabytes[mode] == pytest.approx(times * one_all_reduce, rel=0.03), mode
    assert rows[0][2] == "1.000"


def test_mistakes_have_exit_code_2():
    assert "torchrun" in run("bench.py").stderr
    process = run("bench.py", "--modes=adamw,other", ranks=1)
    assert "other is not one of adamw, torch, sharded" in process.stderr


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
