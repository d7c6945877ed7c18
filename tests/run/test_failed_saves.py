"""train.py when a checkpoint cannot be written: the old one stays, the run goes on, and its exit code is 1."""

import os
import re
import subprocess
import sys

import faults
import pytest
import scripts
import torch
from scripts import ROOT, SETTINGS, environment, run, torch_load, train

from model import GPT, GPTConfig

MODEL_BYTES = sum(tensor.nbytes for tensor in GPT(GPTConfig(16, 29, 2, 2, 32, 0.0, False)).state_dict().values())


@pytest.mark.parametrize("in_background", [False, True])
def test_a_checkpoint_that_cannot_be_written(data, tmp_path, in_background):
    train(tmp_path, data, "--max_iters=6")
    torch.save({**torch_load(tmp_path), "iter_num": 1996}, tmp_path / "ckpt.pt")
    process = run(
        *("train.py", *SETTINGS, f"--dataset={data}", f"--out_dir={tmp_path}", "--init_from=resume", "--eval_interval=2000"),
        *(f"--async_save={in_background}", "--max_iters=2014"),
        limit=100_000,
    )
    assert process.returncode == 1, process.stderr
    assert "the run ends without its last checkpoint, which was not written" in process.stderr
    assert "WARNING: the checkpoint was not written" in process.stdout
    assert "files from before are unchanged" in process.stdout
    assert re.search(r"^checkpoints .*; the last save failed: \[Errno 27\] File too large$", process.stdout, re.M)
    assert "iter 2014:" in process.stdout, "the failed save of iteration 2000 does not end it"
    assert torch_load(tmp_path)["iter_num"] == 1996


# in a namespace of its own: a run on a disk with room for 1.8 checkpoints, then one on the full disk
ON_A_SMALL_DISK = f"""
import os, subprocess, sys
sys.path[:0] = [{os.path.dirname(scripts.__file__)!r}, {ROOT!r}]
from scripts import run
from zero.checkpoint.__main__ import main
folder, *arguments = sys.argv[1:]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size={int(1.8 * 3 * MODEL_BYTES)}", "tmpfs", folder], check=True)

def train(*more):
    finished = run(*arguments, *more)
    print(finished.stdout, flush=True)
    assert finished.returncode == 1, finished.stderr
    assert "the run ends without its last checkpoint, which was not written" in finished.stderr

if __name__ == "__main__":
    train()
    fill = os.path.join(folder, "fill")
    subprocess.run(f"head -c 10M /dev/zero > {{fill}}", shell=True)
    print("=====")
    train("--init_from=resume", "--max_iters=35")
    os.remove(fill)
    print(*os.listdir(folder), sep="\\n")
    sys.exit(main(["inspect", os.path.join(folder, "ckpt.pt")]))
"""


@pytest.mark.parametrize(
    "format", ["consolidated", pytest.param("sharded", marks=pytest.mark.slow("the default has the other format", seconds=50))]
)
def test_a_tmpfs_too_small_for_a_second_save(data, tmp_path, format):
    """The first one stands and is resumed from; a full disk ends no run before its end, and the exit code is 1 then."""
    if subprocess.run(["unshare", "-Urm", "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)], check=False).returncode:
        pytest.skip("this machine lets nobody mount a tmpfs in a namespace of their own")
    arguments = ["train.py", *SETTINGS, f"--dataset={data}", f"--out_dir={tmp_path}", "--max_iters=12"]
    process = subprocess.run(
        ["unshare", "-Urm", sys.executable, "-c", ON_A_SMALL_DISK, str(tmp_path), *arguments, f"--checkpoint_format={format}"],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    first, second = process.stdout.split("=====\n")
    assert first.count("WARNING: the checkpoint was not written") == 2, first
    assert "WARNING: figures are missing" not in first
    assert "at iteration 5: " in second
    assert second.count("WARNING: the checkpoint was not written") == 7, "at iterations 10 to 36, not at 5, where it resumes"
    # once, and again if a shorter line has still found a place in the last page of the file
    assert 1 <= second.count("WARNING: figures are missing") <= 3
    assert "iter 12: " in first
    assert "iter 35: " in second
    assert "ckpt_prev" not in second
    assert len(re.findall(r"^shards_", second, re.MULTILINE)) == (format == "sharded"), "what was begun is gone"
    assert "iteration 5, " in second
    assert "all checksums hold" in second


def test_a_checkpoint_that_is_refused_ends_the_run(data, tmp_path):
    """A full disk would not end it."""
    process = run("train.py", *SETTINGS, f"--dataset={data}", f"--out_dir={tmp_path}", before=faults.nan_while_it_saves)
    assert process.returncode == 1, process.stderr
    assert "WARNING: the checkpoint was not written: transformer.wte.weight is not finite" in process.stdout
    assert "iter 5:" in process.stdout
    assert "iter 6:" not in process.stdout
    assert sorted(os.listdir(tmp_path)) == ["metrics.jsonl", "report.md", "run.json", "run.lock"]
