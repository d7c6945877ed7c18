"""train.py when a checkpoint cannot be written: the old one stays, the run goes on, and its exit code is 1."""

import contextlib
import os
import re
import subprocess
from functools import partial

import faults
import pytest
import torch
from scripts import FEW, events_of, run, torch_load, train, training

from model import GPT, GPTConfig
from zero.checkpoint.__main__ import main

MODEL_BYTES = sum(tensor.nbytes for tensor in GPT(GPTConfig(16, 29, 2, 2, 32, 0.0, False)).state_dict().values())
NOT_WRITTEN = "the run ends without its last checkpoint, which was not written"


def test_a_checkpoint_that_cannot_be_written_in_the_background(data, tmp_path):
    train(tmp_path, data, "--max_iters=0")
    torch.save({**torch_load(tmp_path), "iter_num": 1996}, tmp_path / "ckpt.pt")
    flags = "--init_from=resume", "--eval_interval=2000", "--async_save=True", "--max_iters=2014", FEW
    printed = run(*training(tmp_path, data, *flags), limit=100_000).failed(NOT_WRITTEN).stdout
    assert re.search(r"WARNING: the checkpoint was not written.*files from before are unchanged", printed)
    assert re.search(r"^checkpoints .*; the last save failed: \[Errno 27\] File too large$", printed, re.M)
    assert "iter 2014:" in printed, "the failed save of iteration 2000 does not end it"
    assert torch_load(tmp_path)["iter_num"] == 1996


@pytest.fixture
def small_disk(tmp_path):
    """A process in whose namespaces `tmp_path` is a disk with room for 1.8 checkpoints: its ID."""
    mount = f"mount -t tmpfs -o size={int(1.8 * 3 * MODEL_BYTES)} tmpfs {tmp_path} && echo mounted && exec cat"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(["unshare", "-Urm", "sh", "-c", mount], **pipes) as process:
        if process.stdout.readline() != b"mounted\n":
            pytest.skip("this machine lets nobody mount a tmpfs in a namespace of their own")
        yield process.pid


def test_a_tmpfs_too_small_for_a_second_save(data, tmp_path, small_disk, capsys):
    """The first one stands and is resumed from; a full disk ends no run before its end, and the exit code is 1 then."""
    folder = f"/proc/{small_disk}/root{tmp_path}"

    def trained(*more):
        line = training(tmp_path, data, "--gradient_accumulation_steps=1", *more)
        return run(*line, before=partial(faults.enter_namespaces, small_disk, "user", "mnt")).failed(NOT_WRITTEN).stdout

    first = trained("--max_iters=12")
    with contextlib.suppress(OSError), open(f"{folder}/fill", "wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    second = trained("--init_from=resume", "--max_iters=35")
    os.remove(f"{folder}/fill")
    assert first.count("WARNING: the checkpoint was not written") == 2, first
    assert "WARNING: figures are missing" not in first
    assert "at iteration 5: " in second
    assert second.count("WARNING: the checkpoint was not written") == 7, "at iterations 10 to 36, not at 5, where it resumes"
    lost = 36 - 5 - len([event for event in events_of(folder) if event["iter"] >= 5 and "iter/loss" in event])
    # not for each line; again after a shorter one that has still found a place in the last page of the file
    assert 1 <= second.count("WARNING: figures are missing") < lost
    assert "iter 12: " in first
    assert "iter 35: " in second
    assert "ckpt_prev.pt" not in os.listdir(folder)
    assert main(["inspect", f"{folder}/ckpt.pt"]) == 0
    assert re.search(r"all checksums match.*\niter_num 5\n", capsys.readouterr().out, re.S)


def test_a_checkpoint_that_is_refused_ends_the_run(data, tmp_path):
    """A full disk would not end it."""
    printed = run(*training(tmp_path, data), before=faults.nan_while_it_saves).failed().stdout
    assert "WARNING: the checkpoint was not written: transformer.wte.weight is not finite" in printed
    assert re.findall(r"^iter (\d+):", printed, re.M) == ["0", "1", "2", "3", "4", "5"]
    assert sorted(os.listdir(tmp_path)) == ["metrics.jsonl", "report.md", "run.json", "run.lock"]
