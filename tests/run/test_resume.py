"""train.py --init_from=resume: a run goes on from any checkpoint of ours or nanoGPT's as if it had never stopped."""

import os
import re
import shutil

import pytest
import torch
from conftest import write_meta
from scripts import FEW, SETTINGS, events_of, run, torch_load, train
from toy import assert_equal

from distributed.signals import Action
from run.checkpoints import Checkpoints
from run.rank_checks import check_vocabulary

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


def test_a_damaged_checkpoint_gives_way_to_the_one_before(data, tmp_path):
    few = FEW, "--max_iters=12"
    train(tmp_path, data, *few, "--keep_checkpoints=1", "--async_save=True", ranks=2)
    assert sorted(name for name in os.listdir(tmp_path) if "ckpt" in name) == ["ckpt.pt", "ckpt_00000013.pt", "ckpt_prev.pt"]
    whole = (tmp_path / "ckpt.pt").read_bytes()
    middle = len(whole) // 2
    (tmp_path / "ckpt.pt").write_bytes(whole[:middle] + bytes(64) + whole[middle + 64 :])
    _, _, printed = train(tmp_path, data, *few, "--init_from=resume", "--eval_interval=20", ranks=2)
    assert re.search(r"WARNING: \S+ckpt\.pt is damaged.*; resuming from \S+ckpt_prev\.pt", printed)
    assert "at iteration 10:" in printed
    assert torch_load(tmp_path)["iter_num"] == 13
    assert torch_load(tmp_path, "ckpt_prev.pt")["iter_num"] == 10, "no damaged one has taken its place"


@pytest.mark.parametrize(("ranks", "flags"), [(2, ["--dtype=float32"]), (0, [*SAVING_MEMORY, "--optimizer=muon"])])
def test_the_end_of_a_run_is_saved_and_goes_on_bit_for_bit(data, tmp_path, ranks, flags):
    out, whole = tmp_path / "out", tmp_path / "whole"
    flags = ["--eval_interval=100", FEW, *flags]
    train(out, data, *flags, "--max_iters=3", ranks=ranks)
    assert (torch_load(out)["iter_num"], torch_load(out)["data_position"]) == (4, 4 * 4)
    assert not (out / "ckpt_prev.pt").exists()
    train(out, data, *flags, "--max_iters=6", "--init_from=resume", ranks=ranks)
    train(whole, data, *flags, "--max_iters=6", ranks=ranks)
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
def test_when_the_end_is_saved(tmp_path, always):
    """Without always_save_checkpoint, ckpt.pt is the best one, and the end does not replace it."""
    settings = {"out_dir": str(tmp_path), "keep_checkpoints": 0, "async_save": False}
    checkpoints = Checkpoints(settings | {"always_save_checkpoint": always, "eval_only": False})
    checkpoints.claim()
    assert checkpoints.action_due(5, is_end=False) == Action.CONTINUE
    assert checkpoints.action_due(5, is_end=True) == Action.SAVE, "a run without a checkpoint"
    model = torch.nn.Linear(2, 2)
    checkpoints.save(model, torch.optim.AdamW(model.parameters()), {"iter_num": 5})
    assert checkpoints.action_due(5, is_end=True) == Action.CONTINUE, "just saved"
    assert checkpoints.action_due(6, is_end=True) == (Action.SAVE if always else Action.CONTINUE)


def test_another_dataset_is_named_and_so_are_settings_without_effect(data, runs, out, other):
    """Another batch size is neither: the run goes on where the data was left."""
    assert "note: " not in runs["one"].printed
    assert torch_load(out)["data_position"] == 20 * 12
    flags = "--init_from=resume", "--n_layer=6", "--bias=True", "--beta2=0.5", "--batch_size=4"
    losses, _, printed = train(out, str(other), *flags, "--max_iters=21")
    assert sorted(losses) == list(range(22))
    assert torch_load(out)["data_position"] == 20 * 12 + 2 * 24
    assert (
        f"note: the run goes on with other data: dataset {other}; until the checkpoint it was dataset {data}; "
        "another number of tokens changes their order in the middle of an epoch\n"
    ) in printed
    values = "n_layer=2 (not 6), bias=False (not True), beta2=0.95 (not 0.5)"
    assert f"note: a resumed run uses the checkpoint's values: {values}\n" in printed


def test_another_vocabulary_is_refused(data, other, out):
    write_meta(other, [chr(ord("a") + token) for token in range(29)])
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.name != "run.lock"}
    line = run("train.py", *SETTINGS, f"--dataset={other}", f"--out_dir={out}", "--init_from=resume", ranks=2).refusal()
    assert line.startswith(f"error: dataset {other} has another vocabulary (")
    assert f"use the files of dataset {data} that it was trained on, or start a new run in another --out_dir" in line
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.name != "run.lock"} == before
    with pytest.raises(ValueError, match=rf"dataset {other} has another vocabulary \(GPT-2's\) than the checkpoint"):
        check_vocabulary(torch_load(out), str(other), None)
