"""train.py: what it trains on one process and on several, with either optimizer, what it prints, and what it saves."""

import re

import faults
import numpy as np
import pytest
import torch
from scripts import FEW, events_of, run, torch_load, train, training
from toy import assert_equal


def test_one_curve_whatever_the_ranks_and_the_implementation(runs):
    losses, evaluations = runs["adamw"].losses, runs["adamw"].evaluations
    assert (sorted(losses), sorted(evaluations)) == (list(range(20)), [0, 5, 10, 15])
    assert losses[19] < losses[0] - 0.3
    for name in ("one", "sharded3"):
        other, other_evaluations = runs[name].losses, runs[name].evaluations
        assert max(abs(losses[i] - other[i]) for i in losses) < 1e-5, name
        assert np.abs(np.subtract(list(evaluations.values()), list(other_evaluations.values()))).max() < 1e-5, name


def test_an_evaluation_depends_neither_on_the_ranks_nor_on_the_batch_size(data, runs):
    """And so neither on how the last batch of a rank is filled up."""
    assert runs["one"].losses
    printed = []
    for ranks, batch_size in ((0, 2), (3, 5)):
        line = training(runs.folder / "one", data, "--init_from=resume", "--eval_only=True", f"--batch_size={batch_size}")
        (losses,) = re.findall(r"^step \d+: train loss (\S+), val loss (\S+)", run(*line, ranks=ranks).succeeded().stdout, re.M)
        printed.append([float(loss) for loss in losses])
    assert printed[1] == pytest.approx(printed[0], abs=1.1e-4)


def test_two_ranks_give_the_same_weights_bit_for_bit(runs):
    """Without clipping, because a norm that is added up shard by shard is rounded in another way."""
    reference, clipped = (runs[name].checkpoint for name in ("adamw unclipped", "adamw"))
    assert not torch.equal(reference["model"]["lm_head.weight"], clipped["model"]["lm_head.weight"]), "it must clip"
    for name in ("torch unclipped", "sharded unclipped", "hybrid unclipped"):
        assert_equal(runs[name].checkpoint["model"], reference["model"], name)
        assert_equal(runs[name].checkpoint["optimizer"]["state"], reference["optimizer"]["state"], name)


def test_the_console_says_what_runs(runs):
    for name, cls in (("sharded", "ShardedOptimizer"), ("torch", "ZeroRedundancyOptimizer")):
        line = f"\nUsing ZeRO-1 optimizer state sharding: zero1_impl='{name}' ({cls}) over 2 ranks: AdamW\n"
        assert line in runs[f"{name} unclipped"].printed
    assert "(ShardedOptimizer) over 1 rank in each of 2 groups: " in runs["hybrid unclipped"].printed
    idle = "; without effect on one rank: use_zero1=True"
    assert re.search(rf"^Using plain AdamW{idle}$", runs["one"].printed, re.M)
    assert re.search(r"^Using plain AdamW$", runs["adamw"].printed, re.M)
    for name in runs.HOW:
        _, _, printed, _ = runs[name]
        for iteration, loss in runs[name].losses.items():
            assert f"iter {iteration}: loss {loss:.4f}, time " in printed, name
        for iteration, (train_loss, val_loss) in runs[name].evaluations.items():
            assert f"step {iteration}: train loss {train_loss:.4f}, val loss {val_loss:.4f}" in printed, name


def test_the_checkpoint_is_nanogpts(runs):
    checkpoint = runs["sharded unclipped"].checkpoint
    assert set(checkpoint) >= {"model", "optimizer", "model_args", "iter_num", "best_val_loss", "config"}
    assert checkpoint["model_args"] == {
        "n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16, "bias": False, "vocab_size": 29, "dropout": 0.0,
    }  # fmt: skip
    assert (checkpoint["iter_num"], checkpoint["config"]["batch_size"]) == (20, 2)
    assert [len(group["params"]) for group in checkpoint["optimizer"]["param_groups"]] == [10, 5]
    assert all(tensor.device.type == "cpu" for tensor in checkpoint["model"].values())


def test_float16_trains_with_a_scaler(data, tmp_path):
    train(tmp_path, data, "--max_iters=2")
    losses, _, _ = train(tmp_path, data, "--dtype=float16", "--init_from=resume", "--max_iters=15", ranks=2)
    assert losses[15] < losses[0] - 0.3
    assert torch_load(tmp_path)["scaler"]["scale"] > 0


@pytest.mark.slow("compiles on two ranks; test_gpt has compiled blocks", seconds=62)
def test_compiled_blocks_train_and_leave_no_trace_in_the_file(data, runs, tmp_path):
    losses, _, _ = train(tmp_path, data, "--compile=True", "--dropout=0.0", "--max_iters=5", ranks=2)
    assert len(losses) == 6
    assert max(abs(losses[i] - runs["adamw"].losses[i]) for i in losses) < 1e-4
    assert not any("_orig_mod" in key for key in torch_load(tmp_path)["model"])


MUON = ["--optimizer=muon", "--dropout=0.0", "--grad_clip=0.0", "--max_iters=11"]


@pytest.fixture(scope="module")
def of_ddp(data, tmp_path_factory):
    """A run under DistributedDataParallel, whose every rank has the whole state: its losses, and its checkpoint."""
    out = tmp_path_factory.mktemp("ddp")
    losses, _, printed = train(out, data, *MUON, "--use_zero1=False", ranks=2)
    assert "Using plain Muon\n" in printed
    return losses, torch_load(out)


@pytest.mark.parametrize(
    ("flag", "printed"),
    [("--zero1_impl=torch", "zero1_impl='torch' (ZeroRedundancyOptimizer)"), ("--bucket_mb=0.02", "(ShardedOptimizer)")],
)
def test_two_ranks_with_muon_give_the_same_weights_bit_for_bit(data, tmp_path, of_ddp, flag, printed):
    losses, _, output = train(tmp_path, data, *MUON, flag, ranks=2)
    assert printed in output
    assert "; plain Muon would hold " in output
    assert "WARNING" not in output
    checkpoint = torch_load(tmp_path)
    assert losses[11] < losses[0] - 0.3
    for part in ("model", "optimizer"):
        assert_equal(checkpoint[part], of_ddp[1][part], part)


def test_the_state_in_a_checkpoint_is_that_of_torchs_muon_and_adamw(of_ddp):
    """As docs/sharding.md says: groups without matrices first, each state as the class of torch.optim has it."""
    _, checkpoint = of_ddp
    groups, state = checkpoint["optimizer"]["param_groups"], checkpoint["optimizer"]["state"]
    assert [group["matrices"] for group in groups] == [0, 0, 1, 3]
    for group in groups:
        kind = {"momentum_buffer"} if group["matrices"] else {"step", "exp_avg", "exp_avg_sq"}
        assert all(state[number].keys() == kind for number in group["params"])
    params = [torch.nn.Parameter(torch.zeros_like(state[number]["momentum_buffer"])) for number in groups[2]["params"]]
    of_torch = torch.optim.Muon(params, adjust_lr_fn="match_rms_adamw")
    of_group = {place: state[number] for place, number in enumerate(groups[2]["params"])}
    of_torch.load_state_dict({"state": of_group, "param_groups": of_torch.state_dict()["param_groups"]})
    assert all(of_torch.state[param]["momentum_buffer"].any() for param in params)


def test_a_run_goes_on_on_other_ranks_and_logs_what_it_sends(data, tmp_path, of_ddp):
    flags = [*MUON, "--log_interval=1"]
    train(tmp_path, data, *flags, "--max_iters=3", ranks=3)
    train(tmp_path, data, *flags, "--max_iters=7", "--init_from=resume", ranks=2)
    keys = "comm/sent_all_to_all_mb_per_step", "comm/exposed_all_to_all_ms"
    of_matrices = [event[key] for event in events_of(tmp_path) if "comm/sent_mb_per_step" in event for key in keys]
    losses, _, printed = train(tmp_path, data, *flags, "--init_from=resume", "--muon_momentum=0.9")
    assert "note: a resumed run uses the checkpoint's values: muon_momentum=0.95 (not 0.9)" in printed
    assert max(abs(losses[i] - of_ddp[0][i]) for i in losses) < 1e-3  # bfloat16 Newton-Schulz of other roundings
    assert min(of_matrices) > 0
    refused = run(*training(tmp_path, data, "--init_from=resume"))
    refused.refusal("the checkpoint is of optimizer=muon; use --optimizer=muon, or another")


def rates(out):
    return {event["iter"]: event["lr"] for event in events_of(out) if "iter/loss" in event}


def test_wsd_is_constant_then_decays_and_goes_on_from_its_stable_part(data, tmp_path):
    wsd = ["--schedule=wsd", "--min_lr=1e-4", "--warmup_iters=2", "--decay_fraction=0.25", "--eval_interval=9"]
    train(tmp_path, data, *wsd, "--max_iters=12", "--lr_decay_iters=12")
    found = rates(tmp_path)
    assert [found[i] for i in range(2, 10)] == [1e-2] * 8
    assert found[1] < 1e-2
    assert [found[i] for i in (10, 11, 12)] == pytest.approx([1e-4 + (1 - part / 3) * 99e-4 for part in (1, 2, 3)])
    (tmp_path / "ckpt.pt").unlink()  # so that ckpt_prev.pt, of iteration 9, is the newest
    train(tmp_path, data, *wsd, "--max_iters=16", "--lr_decay_iters=16", "--init_from=resume")
    assert [rates(tmp_path)[i] for i in (9, 10, 11, 12)] == [1e-2] * 4
    assert rates(tmp_path)[16] == 1e-4


def test_dropout_depends_on_the_iteration_and_the_rank(data, tmp_path):
    printed = run(*training(tmp_path, data, FEW, "--max_iters=2"), ranks=2, before=faults.print_seeds).succeeded()
    seeds = [re.findall(rf"rank {rank} draws from (\d+)", printed.stdout) for rank in range(2)]
    first = {of_rank.pop(0) for of_rank in seeds}  # of the weights
    assert len(first) == 1
    assert len({*seeds[0], *seeds[1]}) == 6, "three iterations of two ranks"
