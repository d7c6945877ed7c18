"""The command line as users run it: train.py under python and torchrun, resuming, sampling, and every wrong input."""

import json
import os
import pickle
import random
import re
import resource
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from conftest import ROOT

from lock import Lock
from zero import checkpoint as ckpt
from zero.checkpoint.__main__ import main

SIZES = ["--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=16", "--batch_size=2", "--gradient_accumulation_steps=6"]
SETTINGS = [
    *("--device=cpu", "--compile=False", *SIZES, "--max_iters=19", "--eval_interval=5", "--eval_iters=3"),
    *("--learning_rate=1e-2", "--warmup_iters=2", "--lr_decay_iters=20", "--dropout=0.1", "--grad_clip=0.5"),
]


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A small dataset with a pattern in it: 3 * t modulo 29, and some noise."""
    folder = tmp_path_factory.mktemp("data")
    generator = np.random.default_rng(0)
    for split, length in (("train", 4000), ("val", 1000)):
        tokens = (3 * np.arange(length) + generator.integers(3, size=length)) % 29
        tokens.astype(np.uint16).tofile(folder / f"{split}.bin")
    letters = [chr(ord("A") + token) for token in range(29)]
    meta = {"vocab_size": 29, "stoi": {c: t for t, c in enumerate(letters)}, "itos": dict(enumerate(letters))}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return str(folder)


def run(script, *arguments, ranks=0, cwd=ROOT):
    """A finished process; `ranks` > 0 starts it with torchrun."""
    launcher = [sys.executable]
    if ranks:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return subprocess.run(
        [*launcher, os.path.join(ROOT, script), *arguments],
        cwd=cwd, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


def train(out, data, *arguments, ranks=0):
    """Losses of a run from its metrics.jsonl, {iter: (train loss, val loss) or loss}, and its console output."""
    process = run("train.py", *SETTINGS, f"--dataset={data}", f"--out_dir={out}", *arguments, ranks=ranks)
    assert process.returncode == 0, process.stderr
    with open(os.path.join(out, "metrics.jsonl")) as file:
        events = [json.loads(line) for line in file]
    losses = {event["iter"]: event["iter/loss"] for event in events if "iter/loss" in event}
    evaluations = {event["iter"]: (event["train/loss"], event["val/loss"]) for event in events if "val/loss" in event}
    return losses, evaluations, process.stdout


@pytest.fixture(scope="session")
def runs(data, tmp_path_factory):
    """The same run by every implementation, without dropout, which draws from the rank too."""
    folder = tmp_path_factory.mktemp("runs")
    flags = {
        "one": (0, []),
        "adamw": (2, ["--use_zero1=False"]),
        "torch": (2, ["--zero1_impl=torch"]),
        "sharded": (2, []),
        "sharded3": (3, []),
        "gradients": (2, ["--shard_gradients=True"]),
        "adamw unclipped": (2, ["--use_zero1=False", "--grad_clip=0.0"]),
        "torch unclipped": (2, ["--zero1_impl=torch", "--grad_clip=0.0"]),
        "sharded unclipped": (2, ["--grad_clip=0.0"]),
    }
    return {
        name: (*train(folder / name, data, "--dropout=0.0", *arguments, ranks=ranks), torch_load(folder / name))
        for name, (ranks, arguments) in flags.items()
    }


def torch_load(folder):
    return torch.load(os.path.join(folder, "ckpt.pt"), weights_only=True)


def test_one_curve_whatever_the_ranks_and_the_implementation(runs):
    losses, evaluations, _, _ = runs["adamw"]
    assert sorted(losses) == list(range(20))
    assert sorted(evaluations) == [0, 5, 10, 15]
    assert losses[19] < losses[0] - 0.3
    for name in ("one", "torch", "sharded", "sharded3", "gradients"):
        other, other_evaluations, _, _ = runs[name]
        assert max(abs(losses[i] - other[i]) for i in losses) < 1e-5, name
        assert np.abs(np.subtract(list(evaluations.values()), list(other_evaluations.values()))).max() < 1e-5, name


def test_two_ranks_give_the_same_weights_bit_for_bit(runs):
    """Without clipping: a norm that is added up shard by shard is rounded otherwise."""
    reference = runs["adamw unclipped"][3]
    assert not torch.equal(reference["model"]["lm_head.weight"], runs["adamw"][3]["model"]["lm_head.weight"]), "it must clip"
    for name in ("torch unclipped", "sharded unclipped"):
        for key, tensor in runs[name][3]["model"].items():
            assert torch.equal(tensor, reference["model"][key]), (name, key)
        for index, state in runs[name][3]["optimizer"]["state"].items():
            for key, tensor in state.items():
                assert torch.equal(tensor, reference["optimizer"]["state"][index][key]), (name, index, key)


def test_the_console_says_what_runs(runs):
    assert "Using ZeRO-1 optimizer state sharding: zero1_impl='sharded'" in runs["sharded"][2]
    assert "Using ZeRO-1 optimizer state sharding: zero1_impl='torch'" in runs["torch"][2]
    assert "Using plain AdamW (use_zero1 needs more than one process" in runs["one"][2]
    assert "Using plain AdamW: " in runs["adamw"][2]
    for name, (losses, evaluations, output, _) in runs.items():
        for iteration, loss in losses.items():
            assert f"iter {iteration}: loss {loss:.4f}, time " in output, name
        for iteration, (train_loss, val_loss) in evaluations.items():
            assert f"step {iteration}: train loss {train_loss:.4f}, val loss {val_loss:.4f}" in output, name


def test_the_checkpoint_is_nanogpts(runs):
    checkpoint = runs["sharded"][3]
    assert set(checkpoint) >= {"model", "optimizer", "model_args", "iter_num", "best_val_loss", "config"}
    assert checkpoint["model_args"] == {
        "n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16, "bias": False, "vocab_size": 29, "dropout": 0.0,
    }  # fmt: skip
    assert checkpoint["iter_num"] == 15
    assert checkpoint["config"]["batch_size"] == 2
    assert [len(group["params"]) for group in checkpoint["optimizer"]["param_groups"]] == [10, 5]
    assert all(tensor.device.type == "cpu" for tensor in checkpoint["model"].values())


def test_interrupted_runs_go_on_as_if_nothing_had_happened(data, runs, tmp_path):
    """Saved on 3 ranks by 'sharded' in one format, resumed on 2 by 'torch', saved in the other, then on 1 by AdamW."""
    losses = runs["one"][0]
    out = tmp_path / "out"
    flags = ["--dropout=0.0", "--eval_interval=3"]
    train(out, data, *flags, "--max_iters=6", "--checkpoint_format=sharded", "--async_save=True", ranks=3)
    assert torch_load(out)["iter_num"] == 6
    assert torch_load(out)["model"]["lm_head.weight"].is_meta
    assert len([name for name in os.listdir(out) if name.startswith("shards_")]) == 2, "of ckpt.pt and ckpt_prev.pt"
    train(out, data, *flags, "--max_iters=12", "--init_from=resume", "--zero1_impl=torch", ranks=2)
    assert torch_load(out)["iter_num"] == 12
    assert not torch_load(out)["model"]["lm_head.weight"].is_meta
    resumed, _, output = train(out, data, *flags, "--init_from=resume")
    assert "Resuming training from" in output
    assert sorted(resumed) == list(range(20))
    assert max(abs(losses[i] - resumed[i]) for i in losses) < 1e-4


def test_resuming_repeats_the_dropout_of_the_uninterrupted_run(data, tmp_path):
    flags = ["--eval_interval=4", "--dtype=bfloat16"]
    train(tmp_path / "a", data, *flags, "--max_iters=8", ranks=2)
    train(tmp_path / "b", data, *flags, "--max_iters=4", ranks=2)
    train(tmp_path / "b", data, *flags, "--max_iters=8", "--init_from=resume", ranks=2)
    whole, resumed = torch_load(tmp_path / "a"), torch_load(tmp_path / "b")
    assert whole["iter_num"] == resumed["iter_num"] == 8
    assert all(torch.equal(tensor, resumed["model"][key]) for key, tensor in whole["model"].items())


def test_float16_trains_with_a_scaler(data, tmp_path):
    out = tmp_path / "out"
    train(out, data, "--max_iters=5")
    losses, _, _ = train(out, data, "--dtype=float16", "--init_from=resume", "--max_iters=15", ranks=2)
    assert losses[15] < losses[0] - 0.3
    assert torch_load(out)["scaler"]["scale"] > 0


def test_another_batch_size_goes_on_where_the_data_was_left(data, runs, tmp_path):
    torch.save(runs["one"][3], tmp_path / "ckpt.pt")
    assert runs["one"][3]["data_position"] == 15 * 12
    train(tmp_path, data, "--init_from=resume", "--batch_size=4", "--max_iters=20")
    assert torch_load(tmp_path)["data_position"] == 15 * 12 + 5 * 24


def test_bfloat16_weights(data, runs, tmp_path):
    """Two ranks in bfloat16, then one in float32: the curve stays near float32's, the file holds float32 masters."""
    low = "--param_dtype=bfloat16", "--dropout=0.0"
    losses, _, output = train(tmp_path, data, *low, "--max_iters=10", ranks=2)
    assert "master weights" in output
    checkpoint = torch_load(tmp_path)
    assert {tensor.dtype for tensor in checkpoint["model"].values()} == {torch.float32}
    assert any((tensor != tensor.to(torch.bfloat16)).any() for tensor in checkpoint["model"].values())
    later, _, _ = train(tmp_path, data, "--init_from=resume", "--dropout=0.0")
    again, _, _ = train(tmp_path, data, "--init_from=resume", *low, "--max_iters=24", ranks=3)
    reference = runs["adamw"][0]
    for other in (losses, later):
        assert max(abs(other[i] - reference[i]) for i in other if i in reference) < 0.05
    assert max(again) == 24


def test_compiled_blocks_train_and_leave_no_trace_in_the_file(data, tmp_path):
    flags = ["--dropout=0.0", "--max_iters=5"]
    losses, _, _ = train(tmp_path / "out", data, "--compile=True", *flags, ranks=2)
    plain, _, _ = train(tmp_path / "plain", data, *flags, ranks=2)
    assert max(abs(losses[i] - plain[i]) for i in losses) < 1e-4
    assert not any("_orig_mod" in key for key in torch_load(tmp_path / "out")["model"])


def started(out, data, *arguments, limit=resource.RLIM_INFINITY):
    """Two ranks in training, once iteration 8 has been logged; their process, their ids, and what they have printed.

    They can write files of at most `limit` bytes.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", os.path.join(ROOT, "train.py"),
         *SETTINGS, f"--dataset={data}", f"--out_dir={out}", "--max_iters=100000", "--eval_interval=100000", *arguments],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )  # fmt: skip
    printed = []
    for line in process.stdout:
        printed.append(line)
        if line.startswith("iter 8:"):
            break
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True).stdout
    return process, [int(child) for child in children.split()], printed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_rank_saves_and_ends_all(data, tmp_path, number):
    """And the run goes on bit by bit as if there had been none, dropout and all."""
    process, ranks, printed = started(tmp_path, data)
    os.kill(ranks[-1], number)
    rest, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    printed = "".join([*printed, rest])
    stopped = int(re.search(r"stopped by a signal before iteration (\d+)", printed)[1])
    assert torch_load(tmp_path)["iter_num"] == stopped
    end = f"--max_iters={stopped + 6}"
    schedule = end, "--eval_interval=7", "--lr_decay_iters=20"
    resumed, _, _ = train(tmp_path, data, "--init_from=resume", *schedule, "--dtype=float32", ranks=2)
    whole, _, _ = train(tmp_path / "whole", data, *schedule, ranks=2)
    assert [resumed[i] for i in range(stopped, stopped + 7)] == [whole[i] for i in range(stopped, stopped + 7)]


def test_sigusr1_saves_and_goes_on_and_a_second_sigint_ends_at_once(data, tmp_path):
    process, ranks, _ = started(tmp_path, data)
    os.kill(ranks[0], signal.SIGUSR1)
    for line in process.stdout:
        if line.startswith("saving checkpoint"):
            break
    assert process.stdout.readline().startswith("iter "), "it goes on"
    os.kill(ranks[0], signal.SIGSTOP)  # rank 1 hangs in a collective
    os.kill(ranks[1], signal.SIGINT)
    time.sleep(1.5)
    os.kill(ranks[1], signal.SIGINT)
    time.sleep(1)
    os.kill(ranks[0], signal.SIGCONT)
    _, errors = process.communicate(timeout=120)
    assert re.search(r"rank +: 1 .*\n +exitcode +: 130 ", errors), errors
    assert torch_load(tmp_path)["iter_num"] > 8


def test_a_damaged_checkpoint_gives_way_to_the_one_before(data, tmp_path):
    train(tmp_path, data, "--max_iters=12", "--keep_checkpoints=1", "--async_save=True", ranks=2)
    assert sorted(name for name in os.listdir(tmp_path) if "ckpt" in name) == ["ckpt.pt", "ckpt_00000010.pt", "ckpt_prev.pt"]
    whole = (tmp_path / "ckpt.pt").read_bytes()
    middle = len(whole) // 2
    (tmp_path / "ckpt.pt").write_bytes(whole[:middle] + bytes(64) + whole[middle + 64 :])
    _, _, printed = train(tmp_path, data, "--max_iters=12", "--init_from=resume", "--eval_interval=11", ranks=2)
    assert re.search(r"WARNING: \S+ckpt\.pt is damaged.*; resuming from \S+ckpt_prev\.pt", printed)
    assert "at iteration 5:" in printed
    assert torch_load(tmp_path)["iter_num"] == 11
    assert torch.load(tmp_path / "ckpt_prev.pt", weights_only=True)["iter_num"] == 5, "no damaged one has taken its place"
    for name in ("ckpt.pt", "ckpt_prev.pt"):
        (tmp_path / name).write_bytes(b"")
    process = run("train.py", *SETTINGS, f"--dataset={data}", f"--out_dir={tmp_path}", "--init_from=resume")
    assert (process.returncode, process.stderr.count("\n")) == (2, 1)
    assert "ckpt_prev.pt is damaged" in process.stderr


@pytest.mark.parametrize(("on_error", "code"), [("continue", 0), ("stop", 1)])
def test_a_checkpoint_that_cannot_be_written(data, tmp_path, on_error, code):
    """'stop' does so as soon as the background has failed, not at the next save, which would be that of iteration 4000."""
    train(tmp_path, data, "--max_iters=6")
    torch.save({**torch_load(tmp_path), "iter_num": 1996}, tmp_path / "ckpt.pt")
    last = 2014 if code == 0 else 3999
    process = subprocess.run(
        [sys.executable, os.path.join(ROOT, "train.py"), *SETTINGS, f"--dataset={data}", f"--out_dir={tmp_path}",
         "--init_from=resume", f"--on_save_error={on_error}", f"--async_save={code == 1}", f"--max_iters={last}",
         "--eval_interval=2000"],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),  # bytes per file
    )  # fmt: skip
    assert process.returncode == code, process.stderr
    assert "WARNING: the checkpoint was not written" in process.stdout
    assert "files from before are unchanged" in process.stdout
    assert (f"iter {last}:" in process.stdout) == (code == 0)
    assert torch_load(tmp_path)["iter_num"] == 1996


def test_a_signal_whose_checkpoint_cannot_be_written(data, tmp_path):
    """It promises nothing, and is no success; the ranks end in order."""
    process, ranks, _ = started(tmp_path, data, limit=100_000)
    os.kill(ranks[-1], signal.SIGTERM)
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert set(re.findall(r"exitcode +: (-?\d+)", errors)) == {"1"}, errors
    assert "SIGTERM: saving and stopping at the next step boundary" in printed
    assert "WARNING: the checkpoint was not written" in printed
    assert "stopped by a signal" not in printed
    assert "the run ends without its last checkpoint" in errors


@pytest.mark.parametrize("format", ["consolidated", "sharded"])
def test_a_tmpfs_too_small_for_a_second_save(data, runs, tmp_path, format):
    """The first one stands and is resumed from; a full disk ends no run."""
    if subprocess.run(["unshare", "-Urm", "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)], check=False).returncode:
        pytest.skip("this machine lets nobody mount a tmpfs in a namespace of their own")
    size = 3 * sum(tensor.nbytes for tensor in runs["one"][3]["model"].values())  # of a checkpoint: weights and two moments
    train_py = [sys.executable, "train.py", *SETTINGS, f"--dataset={data}", f"--out_dir={tmp_path}"]
    train_py += ["--max_iters=12", f"--checkpoint_format={format}"]
    script = f"""
        set -e
        mount -t tmpfs -o size={int(1.8 * size)} tmpfs {tmp_path}
        {shlex.join(train_py)}
        head -c 10M /dev/zero > {tmp_path}/fill || true
        echo =====
        {shlex.join(train_py)} --init_from=resume --max_iters=35
        rm {tmp_path}/fill
        ls {tmp_path}
        {sys.executable} -m zero.checkpoint inspect {tmp_path}/ckpt.pt
    """
    process = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert process.returncode == 0, process.stderr
    first, second = process.stdout.split("=====\n")
    assert first.count("WARNING: the checkpoint was not written") == 1, first
    assert "WARNING: figures are missing" not in first
    assert "at iteration 5: " in second
    assert second.count("WARNING: the checkpoint was not written") == 6, "at iterations 10 to 35, not at 5, where it resumes"
    assert second.count("WARNING: figures are missing") == 1
    assert "iter 12: " in first
    assert "iter 35: " in second
    assert "ckpt_prev" not in second
    assert len(re.findall(r"^shards_", second, re.MULTILINE)) == (format == "sharded"), "what was begun is gone"
    assert "iteration 5, " in second
    assert "all checksums hold" in second


def test_eval_only_changes_nothing(data, tmp_path):
    """Not even in a folder that cannot be written to, where another run is under way."""
    out = tmp_path / "out"
    _, evaluations, _ = train(out, data, "--max_iters=5")
    (out / "ckpt.pt.tmp").write_bytes(b"being written")
    lock = Lock(str(out))

    def state():
        return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in sorted(out.iterdir())}

    before = state()
    out.chmod(0o500)
    process = run(
        "train.py", *SETTINGS, f"--dataset={data}", f"--out_dir={out}", "--init_from=resume", "--eval_only=True", ranks=2
    )
    assert process.returncode == 0, process.stderr
    assert "step 5: train loss {:.4f}, val loss {:.4f}".format(*evaluations[5]) in process.stdout
    assert "iter 5" not in process.stdout
    sampled = run("sample.py", f"--out_dir={out}", "--start=A", "--num_samples=1", "--max_new_tokens=1")
    assert sampled.returncode == 0, sampled.stderr
    assert main(["inspect", str(out / "ckpt.pt")]) == 0
    out.chmod(0o700)
    assert state() == before
    lock.release()


def test_world_size_alone_divides_nothing(data, runs, tmp_path, monkeypatch):
    """As SLURM and containers set it."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    losses, _, _ = train(tmp_path, data, "--dropout=0.0", "--max_iters=1")
    assert losses == {i: runs["one"][0][i] for i in (0, 1)}


# -- one run per folder ------------------------------------------------------------------------------------------------


def test_a_run_in_a_folder_that_is_in_use_is_refused_on_all_ranks(data, tmp_path):
    names = ["ckpt.pt.tmp", "metrics.jsonl", "shards_00000001_00000000.tmp"]
    for name in names:
        (tmp_path / name).write_text("of the run that is there")
    lock = Lock(str(tmp_path))
    process = run("train.py", *SETTINGS, f"--dataset={data}", f"--out_dir={tmp_path}", ranks=2)
    lock.release()
    errors = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 2, process.stderr
    assert all(f"out_dir={tmp_path} is in use by another run: process {os.getpid()} on " in line for line in errors)
    assert re.findall(r"exitcode  : (-?\d+)", process.stderr) == ["2", "2"], process.stderr
    assert all((tmp_path / name).read_text() == "of the run that is there" for name in names)


def collide(out, data, seed):
    """Two runs resume in one folder, one a random while after the other; the one that goes on is killed."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    command = [sys.executable, os.path.join(ROOT, "train.py"), *SETTINGS, f"--dataset={data}", f"--out_dir={out}"]
    command += ["--init_from=resume", "--max_iters=100000", "--eval_interval=5", "--keep_checkpoints=1000000"]
    before = {path.name for path in out.iterdir()}
    processes = []
    for _ in range(2):
        processes.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
        time.sleep(rng.choice((0, rng.random(), 5 * rng.random())))
    end = time.monotonic() + 60
    while all(process.poll() is None for process in processes) and time.monotonic() < end:
        time.sleep(0.05)
    [refused] = [process for process in processes if process.poll() is not None]
    [other] = [process for process in processes if process is not refused]
    error = refused.communicate()[1]
    assert refused.returncode == 2, error
    assert error.count("\n") == 1
    assert f"is in use by another run: process {other.pid} on " in error
    newest = torch_load(out)["iter_num"]
    while torch_load(out)["iter_num"] < newest + 10:
        assert other.poll() is None, other.communicate()[1]
        time.sleep(0.05)
    other.kill()
    other.communicate()
    lost = before - {path.name for path in out.iterdir()}
    assert all(name.endswith(".tmp") for name in lost), "but for what a killed run has left, which is swept"


def collisions(out, data, trials):
    train(out, data, "--max_iters=5")
    for seed in range(trials):
        collide(out, data, seed)
    end = torch_load(out)["iter_num"] + 7
    train(out, data, "--init_from=resume", f"--max_iters={end}")
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [event["iter"] for event in events if "iter/loss" in event] == list(range(end + 1)), "every iteration once"
    assert [event["iter"] for event in events if "val/loss" in event] == list(range(0, end + 1, 5))


def test_two_runs_in_one_folder_2_times(data, tmp_path):
    collisions(tmp_path, data, 2)


@pytest.mark.slow
def test_two_runs_in_one_folder_20_times(data, tmp_path):
    collisions(tmp_path, data, 20)


# -- runs that diverge -------------------------------------------------------------------------------------------------

DIVERGING = [  # the learning rate from iteration 8 on, ranks, flags
    ("1e30", 0, ["--log_interval=4"]),
    ("1e4", 2, ["--dtype=bfloat16", "--checkpoint_format=sharded"]),
    ("1e30", 2, ["--use_zero1=False", "--checkpoint_format=sharded"]),
    ("1e6", 2, ["--zero1_impl=torch", "--dtype=float16"]),
    ("1e38", 2, ["--zero1_impl=torch", "--checkpoint_format=sharded", "--grad_clip=0.0"]),
    ("1e10", 2, ["--dtype=float16", "--async_save=True"]),
    ("1e300", 2, ["--param_dtype=bfloat16", "--checkpoint_format=sharded"]),
    ("1e4", 0, ["--dtype=float16", "--grad_clip=0.0"]),
    ("1e10", 2, ["--shard_gradients=True", "--on_nonfinite=skip", "--max_nonfinite=3"]),
    ("1e6", 2, ["--use_zero1=False", "--dtype=bfloat16", "--on_nonfinite=skip", "--grad_clip=0.0"]),
]


def diverge(out, data, learning_rate, ranks, flags):
    flags = [f"--dataset={data}", f"--out_dir={out}", *flags]
    schedule = ["--warmup_iters=8", "--lr_decay_iters=7", f"--min_lr={learning_rate}", "--max_iters=1000"]
    process = run("train.py", *SETTINGS, *schedule, *flags, ranks=ranks)
    assert process.returncode == 1, process.stdout + process.stderr
    if ranks:
        assert re.findall(r"exitcode  : (-?\d+)", process.stderr) == ["1"] * ranks, process.stderr
    [message] = [line for line in process.stderr.splitlines() if line.startswith("the run ends at iteration ")]
    assert re.search(r"not finite since iteration \d+: .*(loss of rank \d|gradient norm) is .*first in .* on rank \d", message)
    assert "lower --learning_rate" in message
    assert "--init_from=resume goes on from there" in process.stderr
    checkpoint = ckpt.load(ckpt.find(str(out))[0])
    assert all(tensor.isfinite().all() for tensor in checkpoint["model"].values())
    end = checkpoint["iter_num"] + 4
    losses, _, _ = train(out, data, *flags, "--init_from=resume", "--lr_decay_iters=2000", f"--max_iters={end}", ranks=ranks)
    assert max(losses) > checkpoint["iter_num"]
    assert None not in losses.values()


@pytest.mark.parametrize(("learning_rate", "ranks", "flags"), DIVERGING[:2])
def test_a_run_that_diverges_keeps_its_checkpoint(data, tmp_path, learning_rate, ranks, flags):
    diverge(tmp_path, data, learning_rate, ranks, flags)


@pytest.mark.slow
@pytest.mark.parametrize(("learning_rate", "ranks", "flags"), DIVERGING[2:])
def test_more_runs_that_diverge_keep_their_checkpoints(data, tmp_path, learning_rate, ranks, flags):
    diverge(tmp_path, data, learning_rate, ranks, flags)


def test_nothing_is_saved_while_updates_are_skipped(data, tmp_path):
    """Weights whose loss is finite and whose gradients are not do not take the place of what can be trained."""
    process = run_patched(
        """
import guard, torch
watch = guard.Guard.watch
guard.Guard.watch = lambda self, loss, norms: watch(self, loss, norms._replace(total=norms.total * torch.inf))
""",
        *(f"--dataset={data}", f"--out_dir={tmp_path}", "--max_iters=5", "--on_nonfinite=skip"),
    )
    assert process.returncode == 0, process.stderr
    assert "by iteration 4, 1 more update was skipped (5 in a row so far): the gradient norm is inf" in process.stdout
    assert "WARNING: not saved" in process.stdout
    assert sorted(os.listdir(tmp_path)) == ["metrics.jsonl", "run.lock"]


def run_patched(patch, *arguments):
    """train.py in one process, after `patch`."""
    return subprocess.run(
        [sys.executable, "-c", f"import runpy\n{patch}\nrunpy.run_path('train.py')", *SETTINGS, *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_a_checkpoint_that_is_refused_ends_the_run(data, tmp_path):
    """Although a disk that is full would not."""
    patch = "import zero.checkpoint.writer; zero.checkpoint.writer._first_nonfinite = lambda tensors: 'transformer.wte.weight'"
    process = run_patched(patch, f"--dataset={data}", f"--out_dir={tmp_path}")
    assert process.returncode == 1, process.stderr
    assert "WARNING: the checkpoint was not written: transformer.wte.weight is not finite" in process.stdout
    assert "iter 5:" in process.stdout
    assert "iter 6:" not in process.stdout
    assert sorted(os.listdir(tmp_path)) == ["metrics.jsonl", "run.lock"]


def test_a_gpt2_folder_is_finetuned_with_a_smaller_block(data, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=29, n_positions=64, n_embd=32, n_layer=2, n_head=2)).save_pretrained(tmp_path / "hf")
    losses, _, output = train(tmp_path / "out", data, f"--init_from={tmp_path / 'hf'}")
    assert "Initializing from GPT-2 weights" in output
    assert losses[19] < losses[0] - 0.3
    assert torch_load(tmp_path / "out")["model_args"]["block_size"] == 16


def test_wandb_records_offline_without_login_or_network(data, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # no ~/.netrc
    arguments = [*SETTINGS, f"--dataset={data}", "--wandb_log=True", "--max_iters=5", f"--out_dir={tmp_path / 'out'}"]
    folders = []
    for init_from in ("scratch", "resume"):
        process = run("train.py", *arguments, f"--init_from={init_from}", cwd=tmp_path)
        assert process.returncode == 0, process.stderr
        assert "wandb records offline; to upload later: wandb login && wandb sync " in process.stdout
        folders.append(process.stdout.split("wandb sync ")[1].split()[0])
    assert all(os.path.isdir(folder) for folder in folders)
    run_id = torch_load(tmp_path / "out")["wandb_run_id"]
    assert [folder.rsplit("-", 1)[1] for folder in folders] == [run_id, run_id], "the resumed run is the same run"


def test_wandb_records_offline_with_a_login_but_no_network(data, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "2")
    arguments = [*SETTINGS, f"--dataset={data}", "--wandb_log=True", "--max_iters=1", f"--out_dir={tmp_path / 'out'}"]
    process = run("train.py", *arguments, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert "wandb cannot be reached" in process.stdout
    assert "wandb records offline; to upload later" in process.stdout


def test_a_checkpoint_of_nanogpt_is_resumed_and_sampled(data, runs, tmp_path):
    """Its best_val_loss is a tensor, its optimizer another kernel's, its names a compiled model's; no keys of ours."""
    checkpoint = {key: value for key, value in runs["one"][3].items() if key != "scaler"}
    checkpoint["best_val_loss"] = torch.tensor(checkpoint["best_val_loss"])
    checkpoint["model"] = {f"_orig_mod.{key}": value for key, value in checkpoint["model"].items()}
    groups = [{**group, "fused": None, "foreach": None} for group in checkpoint["optimizer"]["param_groups"]]
    checkpoint["optimizer"] = {**checkpoint["optimizer"], "param_groups": groups}
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    losses, _, _ = train(tmp_path, data, "--dropout=0.0", "--init_from=resume", ranks=2)
    assert sorted(losses) == [15, 16, 17, 18, 19]
    assert max(abs(losses[i] - runs["one"][0][i]) for i in losses) < 1e-5
    assert run("sample.py", f"--out_dir={tmp_path}", "--start=A", "--num_samples=1", "--max_new_tokens=5").returncode == 0


def test_sample_stays_within_the_vocabulary(runs, tmp_path):
    """The model's vocabulary may be padded; it may not be smaller than the one at hand."""
    config = {**runs["one"][3]["config"], "dataset": str(tmp_path)}
    torch.save({**runs["one"][3], "config": config}, tmp_path / "ckpt.pt")
    command = [f"--out_dir={tmp_path}", "--start=A", "--num_samples=1", "--max_new_tokens=300", "--temperature=50.0"]
    for size, code in ((5, 0), (29, 0), (30, 2)):
        letters = [chr(ord("A") + token) for token in range(size)]
        meta = {"vocab_size": size, "stoi": {c: t for t, c in enumerate(letters)}, "itos": dict(enumerate(letters))}
        (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
        process = run("sample.py", *command)
        assert process.returncode == code, process.stderr
        if code == 0:
            assert set(process.stdout.splitlines()[-2]) == set(letters)
        else:
            assert "the model knows 29 tokens, the vocabulary at hand has 30" in process.stderr


def test_sample(data, tmp_path):
    _, _, printed = train(tmp_path, data, "--max_iters=5")
    assert "WARNING" not in printed
    command = [f"--out_dir={tmp_path}", "--start=ADGJ", "--num_samples=2", "--max_new_tokens=30", "--device=cpu"]
    process = run("sample.py", *command)
    assert process.returncode == 0, process.stderr
    samples = process.stdout.split("---------------\n")
    assert len(samples) == 3
    for text in samples[:2]:
        assert "ADGJ" in text
        assert set(text.splitlines()[-1]) <= {chr(ord("A") + token) for token in range(29)}
    assert run("sample.py", *command).stdout == process.stdout
    (tmp_path / "prompt.txt").write_text("BEH")
    prompted = run("sample.py", f"--out_dir={tmp_path}", f"--start=FILE:{tmp_path / 'prompt.txt'}", "--num_samples=1")
    assert "BEH" in prompted.stdout
    whole = (tmp_path / "ckpt.pt").read_bytes()
    (tmp_path / "ckpt.pt").write_bytes(whole[:9000] + bytes([whole[9000] ^ 1]) + whole[9001:])
    damaged = run("sample.py", *command)
    assert (damaged.returncode, damaged.stderr.count("\n")) == (2, 1)
    assert "is damaged" in damaged.stderr
    (tmp_path / "ckpt_prev.pt").write_bytes(whole)
    before = run("sample.py", *command)
    assert before.stdout == process.stdout
    assert "WARNING: " in before.stderr
    _, _, printed = train(tmp_path, data, "--max_iters=0")
    assert f"WARNING: out_dir={tmp_path} holds another run, which this one replaces" in printed


MISTAKES = {
    "unknown key": (["--use_zero=True"], "did you mean 'use_zero1'?"),
    "missing checkpoint": (["--init_from=resume"], "ckpt.pt; to resume, check --out_dir"),
    "indivisible": (["--gradient_accumulation_steps=5"], "cannot be split over 2 ranks; use --gradient_accumulation_steps=6"),
    "shards of no one": (["--shard_gradients=True", "--use_zero1=False"], "needs use_zero1=True, zero1_impl='sharded'"),
    "masters of no one": (["--param_dtype=bfloat16", "--zero1_impl=torch"], "needs the master weights"),
    "found by rank 0 alone": (["--out_dir=/dev/null/out"], "cannot write to out_dir=/dev/null/out"),
    "found by one rank alone": (["--dataset=SPOILT"], "holds token 60000, but the model's vocabulary has 50304"),
}
MORE_MISTAKES = {  # that are found where those above are
    "--batch_size=abc": "takes an integer",
    "--dataset=nowhere": "nowhere/train.bin is missing",
    "--n_embd=33": "use a multiple of n_head",
    "--zero1_impl=other": "sharded, torch",
    "--dtype=int8": "float32, bfloat16, float16",
    "--init_from=gtp2": "neither scratch",
    "--block_size=2000": "too few for one sequence",
    "--device=cuda:7": "use for example --device=cpu",
    "--backend=mpi": "nccl, gloo",
    "--param_dtype=float8": "param_dtype=float8 is not one of float32, bfloat16",
    "--param_dtype=bfloat16 --dtype=float16": "use --dtype=bfloat16",
    "--weight_decay=-0.1": "weight_decay=-0.1 must not be negative",
    "--max_iters=-1": "max_iters=-1 must not be negative",
    "--checkpoint_format=zip": "consolidated, sharded",
    "--on_save_error=cry": "continue, stop",
    "--on_nonfinite=cry": "stop, skip",
    "--max_nonfinite=0": "max_nonfinite=0 must be at least 1",
    "--seed=18446744073709551616": "seed in --seed=18446744073709551616 is too large",
    f"--seed={2**63}": "integers go up to 9223372036854775807",
    f"--batch_size={'9' * 400}": "is too large",
    f"--min_lr={'9' * 400}": "is too large",
    "--beta1=2.0": "beta",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_end_at_once_on_all_ranks(data, tmp_path, mistake):
    arguments, message = MISTAKES[mistake]
    for split in ("train", "val"):
        tokens = np.zeros(2000, dtype=np.uint16)
        tokens[-1] = 60000  # which the last rank reads
        tokens.tofile(tmp_path / f"{split}.bin")
    arguments = [argument.replace("SPOILT", str(tmp_path)) for argument in arguments]
    process = run("train.py", *SETTINGS, f"--dataset={data}", f"--out_dir={tmp_path}", *arguments, ranks=2)
    assert process.returncode != 0
    errors = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 2, process.stderr
    assert all(message in line for line in errors)
    assert re.findall(r"exitcode  : (-?\d+)", process.stderr) == ["2", "2"], process.stderr
    assert not re.search(rf'File "{ROOT}/[^.]', process.stderr), "no traceback but torchrun's own, which may lie in ROOT/.venv"


def test_mistakes_of_one_process_have_exit_code_2(data, tmp_path):
    all_of_them = """
import runpy, sys
_, settings, mistakes = sys.argv
for mistake in mistakes.splitlines():
    sys.argv[1:] = [*settings.split(), *mistake.split()]
    try:
        runpy.run_path("train.py")
    except SystemExit as end:
        print("exit code", end.code, file=sys.stderr)
"""
    settings = [*SETTINGS, f"--dataset={data}", f"--out_dir={tmp_path}"]
    process = subprocess.run(
        [sys.executable, "-c", all_of_them, " ".join(settings), "\n".join(MORE_MISTAKES)],
        cwd=ROOT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    errors = process.stderr.splitlines()
    assert errors[1::2] == ["exit code 2"] * len(MORE_MISTAKES), process.stderr
    for error, message in zip(errors[::2], MORE_MISTAKES.values(), strict=True):
        assert error.startswith("error: ")
        assert message in error
    assert not os.listdir(tmp_path)
    (tmp_path / "ckpt.pt").write_bytes(b"damaged")
    for script in ("train.py", "sample.py"):
        extra = [*SETTINGS, f"--dataset={data}"] if script == "train.py" else []
        process = run(script, *extra, "--init_from=resume", f"--out_dir={tmp_path}")
        assert process.returncode == 2
        assert "ckpt.pt is damaged, or not a checkpoint" in process.stderr
        assert process.stderr.count("\n") == 1
