"""train.py --init_from=resume: a run goes on from any checkpoint as if it had never stopped; and where none can be written."""

import contextlib
import os
import re
import shutil
import subprocess
from functools import partial

import faults
import pytest
import torch
from checkpoints import VALUES
from conftest import write_meta
from scripts import FEW, events_of, run, torch_load, train, training
from toy import assert_equal

from data.dataset import Dataset
from distributed.signals import Action
from model import GPT, GPTConfig
from run.checkpoint_folder import find
from run.checkpoints import Checkpoints
from run.rank_checks import check_vocabulary
from zero import checkpoint as ckpt
from zero.checkpoint.__main__ import main

SIX_KEYS = {"model", "optimizer", "model_args", "iter_num", "best_val_loss", "config"}
SAVING_MEMORY = ["--param_dtype=bfloat16_remainder", "--state_dtype=int8", "--loss_chunk=8", "--activation_checkpointing=True"]


@pytest.fixture
def out(runs, tmp_path):
    """A copy of the folder of the run "one"."""
    assert runs["one"].losses
    return shutil.copytree(runs.folder / "one", tmp_path / "out")


def test_interrupted_runs_go_on_as_if_nothing_had_happened(data, runs, tmp_path):
    """Saved on 3 ranks by 'sharded' in the background, resumed on 2 by 'torch', then on 1 by AdamW."""
    losses, out = runs["one"].losses, tmp_path / "out"
    flags = ["--dropout=0.0", "--eval_interval=3"]
    train(out, data, *flags, "--max_iters=4", "--async_save=True", ranks=3)
    assert torch_load(out)["iter_num"] == 5
    train(out, data, *flags, "--max_iters=8", "--init_from=resume", "--zero1_impl=torch", ranks=2)
    assert torch_load(out)["iter_num"] == 9
    resumed, _, output = train(out, data, *flags, "--max_iters=12", "--init_from=resume")
    assert "Resuming training from" in output
    assert sorted(resumed) == list(range(13))
    assert max(abs(losses[i] - resumed[i]) for i in resumed) < 1e-4
    assert not any("mfu" in event for event in events_of(out)), "the first five iterations of each start do not count"


def test_flags_that_save_memory_come_and_go(data, runs, tmp_path):
    """Two ranks with weights in bfloat16, then one process without any flag, then one process with all of them."""
    losses, out = runs["one"].losses, tmp_path / "out"
    flags = ["--dropout=0.0", "--eval_interval=100", "--init_from=auto"]
    two_ranks, plain = ["--param_dtype=bfloat16"], ["--dtype=float32"]
    said = {"float32 masters": two_ranks, "Using plain AdamW": plain, "ShardedOptimizer on one rank": SAVING_MEMORY}
    for (text, more), ranks, max_iters in zip(said.items(), (2, 0, 0), (4, 8, 12), strict=True):
        resumed, _, printed = train(out, data, *flags, *more, f"--max_iters={max_iters}", ranks=ranks)
        assert text in printed
        saved = torch_load(out)["model"]["lm_head.weight"]
        assert saved.dtype == torch.float32, "the masters"
        assert not torch.equal(saved, saved.bfloat16().float())
    assert sorted(resumed) == list(range(13))
    assert max(abs(losses[i] - resumed[i]) for i in resumed) < 0.03


def test_a_checkpoint_of_nanogpt_is_resumed_and_sampled(data, runs, tmp_path):
    """best_val_loss is a tensor, the optimizer has another kernel, the names are of a compiled model; no keys of ours."""
    losses_of_one = runs["one"].losses
    checkpoint = {key: value for key, value in torch_load(runs.folder / "one", "ckpt_prev.pt").items() if key in SIX_KEYS}
    checkpoint["best_val_loss"] = torch.tensor(checkpoint["best_val_loss"])
    checkpoint["model"] = {f"_orig_mod.{key}": value for key, value in checkpoint["model"].items()}
    groups = [{**group, "fused": None, "foreach": None} for group in checkpoint["optimizer"]["param_groups"]]
    checkpoint["optimizer"] = {**checkpoint["optimizer"], "param_groups": groups}
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    losses, _, _ = train(tmp_path, data, "--dropout=0.0", "--init_from=resume", ranks=2)
    assert sorted(losses) == [15, 16, 17, 18, 19]
    assert max(abs(losses[i] - losses_of_one[i]) for i in losses) < 1e-5
    assert run("sample.py", f"--out_dir={tmp_path}", "--start=A", "--num_samples=1", "--max_new_tokens=5").returncode == 0
    assert "| time |" not in (tmp_path / "report.md").read_text(), "the wall time of its first part is not known"


@pytest.mark.parametrize(("ranks", "flags"), [(2, ["--dtype=float32"]), (0, [*SAVING_MEMORY, "--optimizer=muon"])])
def test_the_end_of_a_run_is_saved_and_goes_on_bit_for_bit(data, tmp_path, ranks, flags):
    out, whole = tmp_path / "out", tmp_path / "whole"
    flags = ["--eval_interval=100", FEW, *flags]
    train(out, data, *flags, "--max_iters=3", ranks=ranks)
    assert (torch_load(out)["iter_num"], torch_load(out)["data_position"]) == (4, 4 * 4)
    assert not (out / "ckpt_prev.pt").exists()
    train(out, data, *flags, "--max_iters=6", "--init_from=resume", ranks=ranks)
    watched = partial(run, before=faults.print_checkpointed_blocks)
    _, _, printed = train(whole, data, *flags, "--max_iters=6", ranks=ranks, run=watched)
    assert ("keeps only its input" in printed) == ("--activation_checkpointing=True" in flags)
    resumed, expected = torch_load(out), torch_load(whole)
    assert resumed["iter_num"] == expected["iter_num"] == 7
    for key in ("model", "optimizer"):
        assert_equal(resumed[key], expected[key], key)
    if ranks == 0:
        return
    before = [(out / name).read_bytes() for name in ("ckpt.pt", "metrics.jsonl", "report.md")]
    _, _, printed = train(out, data, *flags, "--max_iters=6", "--init_from=resume")
    assert "nothing to train: the checkpoint is at iteration 7, beyond max_iters=6" in printed
    assert [(out / name).read_bytes() for name in ("ckpt.pt", "metrics.jsonl", "report.md")] == before


@pytest.mark.parametrize("always", [True, False])
def test_when_a_checkpoint_is_due_and_which_is_kept(tmp_path, always):
    """Without always_save_checkpoint, the best one stays beside the newest, for samples."""
    settings = {"out_dir": str(tmp_path), "keep_checkpoints": 0, "async_save": False, "save_interval": 4, "eval_only": False}
    checkpoints = Checkpoints(settings | {"always_save_checkpoint": always})
    checkpoints.claim()
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())

    def save(iteration, is_best):
        checkpoints.save(model, optimizer, {**VALUES, "iter_num": iteration}, is_best)
        return [ckpt.load(find(str(tmp_path), best)[0])["iter_num"] for best in (False, True)]

    due = [checkpoints.action_due(iteration, is_end=False) for iteration in (0, 3, 4)]
    assert due == [Action.CONTINUE, Action.CONTINUE, Action.SAVE]
    assert save(4, is_best=False) == [4, 4]
    assert checkpoints.action_due(4, is_end=True) == Action.CONTINUE, "just saved"
    assert checkpoints.action_due(5, is_end=True) == Action.SAVE
    assert save(6, is_best=True) == [6, 6]
    for iteration in (8, 9, 10):
        assert save(iteration, is_best=False) == [iteration, iteration if always else 6]
    assert save(11, is_best=True) == [11, 11]
    assert sorted(os.listdir(tmp_path)) == ["ckpt.pt", "ckpt_prev.pt", "run.lock"]
    assert save(12, is_best=False) == [12, 12 if always else 11]
    checkpoints.always = True  # as in a run that resumes with this
    assert save(13, is_best=False) == [13, 13]
    checkpoints.always = False
    save(14, is_best=True)
    save(15, is_best=False)
    if not always:
        shutil.copy(tmp_path / "ckpt_prev.pt", tmp_path / "ckpt.pt")  # back to the best one
        assert ckpt.load(find(str(tmp_path), best=True)[0])["iter_num"] == 14
        (tmp_path / "ckpt.pt").write_bytes(b"damaged")
        assert save(16, is_best=False)[0] == 16


def test_a_run_begins_with_the_weights_of_another(data, tmp_path):
    train(tmp_path / "first", data)
    unchanged = "--learning_rate=1e-30", "--min_lr=0", "--max_iters=1", f"--init_from={tmp_path / 'first'}"
    losses, _, printed = train(tmp_path / "second", data, *unchanged, ranks=2)
    assert f"Initializing from the weights of the run in {tmp_path / 'first'}, at iteration 20: GPTConfig(" in printed
    assert sorted(losses) == [0, 1]
    first, second = (torch_load(tmp_path / name) for name in ("first", "second"))
    assert second["iter_num"] == 2
    assert_equal(second["model"], first["model"])


def test_another_dataset_is_named_and_so_are_settings_without_effect(data, runs, out, other):
    """Another batch size is neither: the run goes on where the data was left."""
    assert "note: " not in runs["one"].printed
    assert torch_load(out)["data_position"] == 20 * 12
    flags = "--init_from=resume", "--n_layer=6", "--bias=True", "--beta2=0.5", "--batch_size=4"
    losses, _, printed = train(out, str(other), *flags, "--max_iters=21")
    assert sorted(losses) == list(range(22))
    assert torch_load(out)["data_position"] == 20 * 12 + 2 * 24
    told = f"note: the run goes on with other data: dataset {other}; until the checkpoint it was dataset {data}, with train.bin"
    assert re.search(rf"{told} of \d+ tokens with checksum \w+; another number of tokens changes their order in", printed)
    seen = [(of, count, len(Dataset(str(of), 16).tokens["train"])) for of, count in ((data, 240 * 16), (other, 48 * 16))]
    rows = [f"{of}: {count:,} tokens, {count / whole:.2f} epochs" for of, count, whole in seen]
    assert f"| data | {rows[0]}, then {rows[1]} |\n" in (out / "report.md").read_text()
    values = "n_layer=2 (not 6), bias=False (not True), beta2=0.95 (not 0.5)"
    assert f"note: a resumed run uses the checkpoint's values: {values}\n" in printed


def test_another_vocabulary_is_refused(data, other, out):
    write_meta(other, [chr(ord("a") + token) for token in range(29)])
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.name != "run.lock"}
    remedy = f"use the files of dataset {data} that it was trained on, or start from scratch in another --out_dir"
    line = training(out, other, "--init_from=resume")
    run(*line, ranks=2).refusal(f"error: dataset {other} has another vocabulary (", remedy)
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.name != "run.lock"} == before
    with pytest.raises(ValueError, match=rf"dataset {other} has another vocabulary \(GPT-2's\) than the checkpoint"):
        check_vocabulary(torch_load(out), str(other), None)


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
