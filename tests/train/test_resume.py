"""train.py --init_from=resume: a run goes on from any checkpoint of ours or nanoGPT's as if it had never stopped."""

import os
import re

import torch
from scripts import SETTINGS, run, torch_load, train


def test_interrupted_runs_go_on_as_if_nothing_had_happened(data, runs, tmp_path):
    """Saved on 3 ranks by 'sharded' in one format, resumed on 2 by 'torch', saved in the other, then on 1 by AdamW."""
    losses = runs["one"].losses
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


def test_another_batch_size_goes_on_where_the_data_was_left(data, runs, tmp_path):
    torch.save(runs["one"].checkpoint, tmp_path / "ckpt.pt")
    assert runs["one"].checkpoint["data_position"] == 15 * 12
    train(tmp_path, data, "--init_from=resume", "--batch_size=4", "--max_iters=20")
    assert torch_load(tmp_path)["data_position"] == 15 * 12 + 5 * 24


def test_a_checkpoint_of_nanogpt_is_resumed_and_sampled(data, runs, tmp_path):
    """best_val_loss is a tensor, the optimizer has another kernel, the names are of a compiled model; no keys of ours."""
    checkpoint = {key: value for key, value in runs["one"].checkpoint.items() if key != "scaler"}
    checkpoint["best_val_loss"] = torch.tensor(checkpoint["best_val_loss"])
    checkpoint["model"] = {f"_orig_mod.{key}": value for key, value in checkpoint["model"].items()}
    groups = [{**group, "fused": None, "foreach": None} for group in checkpoint["optimizer"]["param_groups"]]
    checkpoint["optimizer"] = {**checkpoint["optimizer"], "param_groups": groups}
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    losses, _, _ = train(tmp_path, data, "--dropout=0.0", "--init_from=resume", ranks=2)
    assert sorted(losses) == [15, 16, 17, 18, 19]
    assert max(abs(losses[i] - runs["one"].losses[i]) for i in losses) < 1e-5
    assert run("sample.py", f"--out_dir={tmp_path}", "--start=A", "--num_samples=1", "--max_new_tokens=5").returncode == 0


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
    assert torch_load(tmp_path, "ckpt_prev.pt")["iter_num"] == 5, "no damaged one has taken its place"
    for name in ("ckpt.pt", "ckpt_prev.pt"):
        (tmp_path / name).write_bytes(b"")
    process = run("train.py", *SETTINGS, f"--dataset={data}", f"--out_dir={tmp_path}", "--init_from=resume")
    assert (process.returncode, process.stderr.count("\n")) == (2, 1)
    for name in ("ckpt.pt", "ckpt_prev.pt"):
        assert f"{name} is damaged, or not a checkpoint" in process.stderr
