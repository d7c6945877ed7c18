"""run/checkpoint_folder.py and checkpoint_keys.py: what a folder keeps and finds; a file is read as if a stranger wrote it."""

import copy
import os
import random
import re
from unittest import mock

import pytest
import torch
from checkpoints import CHECKPOINT, VALUES, Hostile, damaged, numbered, save_alone
from toy import assert_equal, make_toy

from model import GPT, GPTConfig
from run.checkpoint_folder import commit, find
from run.checkpoint_keys import load, load_to_train
from run.checkpoint_writer import CheckpointWriter
from zero import checkpoint as ckpt


@pytest.mark.parametrize("links", [True, False])
def test_the_file_before_is_kept_and_so_are_the_last_few(tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr(os, "link", mock.Mock(side_effect=OSError("a file cannot have two names on this file system")))
    (tmp_path / "ckpt_3_best.pt").write_bytes(b"of the user")
    for iteration in (1, 2, 30, 4):
        report = commit(numbered(iteration), str(tmp_path), keep=2)
        assert (report.iter_num, report.nbytes) == (iteration, os.path.getsize(tmp_path / "ckpt.pt"))
    files = ["ckpt.pt", "ckpt_00000002.pt", "ckpt_00000004.pt", "ckpt_00000030.pt", "ckpt_3_best.pt", "ckpt_prev.pt"]
    assert sorted(os.listdir(tmp_path)) == files
    assert ckpt.load(tmp_path / "ckpt.pt")["iter_num"] == 4
    assert ckpt.load(tmp_path / "ckpt_prev.pt")["iter_num"] == 30
    assert find(str(tmp_path)) == (str(tmp_path / "ckpt.pt"), None)


def test_the_last_few_are_those_of_the_largest_iterations(tmp_path):
    """The times of the files do not count. Files of later iterations than the newest are of a run that went back, and stay."""
    for iteration in (10, 20, 30, 40):
        commit(numbered(iteration), str(tmp_path), keep=9)
    for age, iteration in enumerate((40, 10, 30, 20)):
        os.utime(tmp_path / f"ckpt_{iteration:08d}.pt", (2e9 - age, 2e9 - age))

    def kept():
        return [int(name[5:-3]) for name in sorted(os.listdir(tmp_path)) if re.fullmatch(r"ckpt_\d+\.pt", name)]

    commit(numbered(25), str(tmp_path), keep=2)
    assert kept() == [20, 25, 30, 40]
    commit(numbered(35), str(tmp_path), keep=1)
    assert kept() == [35, 40]
    commit(numbered(100_000_000), str(tmp_path), keep=2)
    assert sorted(kept()) == [40, 100_000_000]


def test_what_overwrites_the_newest_file_in_place_leaves_the_kept_ones(tmp_path):
    """A user does that with `cp` to go back to one of them, and nanoGPT when it resumes there."""
    for iteration in (1, 2, 3):
        commit(numbered(iteration), str(tmp_path), keep=2)
    (tmp_path / "ckpt.pt").write_bytes((tmp_path / "ckpt_00000002.pt").read_bytes())
    (tmp_path / "ckpt_prev.pt").write_bytes(b"")
    assert [ckpt.load(tmp_path / f"{name}.pt")["iter_num"] for name in ("ckpt", "ckpt_00000002", "ckpt_00000003")] == [2, 2, 3]


def test_a_missing_file_is_mentioned(tmp_path):
    with pytest.raises(ckpt.CheckpointError, match=r"there is no checkpoint .*ckpt\.pt$"):
        find(str(tmp_path))
    commit(numbered(1), str(tmp_path))
    os.rename(tmp_path / "ckpt.pt", tmp_path / "ckpt_prev.pt")
    assert find(str(tmp_path)) == (str(tmp_path / "ckpt_prev.pt"), f"there is no checkpoint {tmp_path / 'ckpt.pt'}")


def damages(whole, tmp_path):
    """200 damaged files, by name, as bytes; where the damage lies in the padding between entries the file may be whole."""
    rng = random.Random(0)
    yield "empty", b""
    yield "no zip", b"no zip at all"
    yield "torn head", b"PK\x03\x04 torn"
    yield "only the end", whole[-100:]
    yield "twice", whole[: len(whole) // 2] * 2
    for number, changed in enumerate(damaged(whole, rng, 80)):
        yield f"{'flipped' if len(changed) == len(whole) else 'truncated'} {number}", changed
    for number in range(20):
        position = rng.randrange(len(whole) - 512)
        yield f"zeroed {number}", whole[:position] + bytes(512) + whole[position + 512 :]
    contents = [{**CHECKPOINT, "config": Hostile()}, Hostile(), 7, [], {}, {"model": {}}]
    contents += [{key: value for key, value in CHECKPOINT.items() if key != missing} for missing in ("model", "model_args")]
    contents += [{**CHECKPOINT, "optimizer": {"state": 3}}, {**CHECKPOINT, "iter_num": "1"}, {**CHECKPOINT, "format": 99}]
    for number, content in enumerate(contents):
        torch.save(content, tmp_path / "content.pt")
        yield f"content {number}", (tmp_path / "content.pt").read_bytes()


def test_two_hundred_damaged_files(tmp_path, monkeypatch):
    """Each falls back to the file before; without one, one line names it. No code of the file runs."""
    monkeypatch.chdir(tmp_path)
    folder, alone = tmp_path / "run", tmp_path / "alone"
    alone.mkdir()
    for iteration in (1, 2):
        commit(numbered(iteration), str(folder))
    whole = (folder / "ckpt.pt").read_bytes()
    count = unharmed = 0
    for name, contents in damages(whole, tmp_path):
        count += 1
        for place in (folder, alone):
            (place / "ckpt.pt").write_bytes(contents)
        path, warning = find(str(folder))
        checkpoint = load(path)
        for key in ("model", "optimizer"):
            assert_equal(checkpoint[key], CHECKPOINT[key], f"{name}: {key}")
        if warning is None:
            assert name.startswith(("flipped", "zeroed")), f"{name} was not noticed"
            assert checkpoint["iter_num"] == 2
            unharmed += 1
            continue
        assert checkpoint["iter_num"] == 1
        assert str(folder / "ckpt.pt") in warning
        with pytest.raises(ckpt.CheckpointError, match=r"^.*ckpt\.pt.*\Z"):  # one line
            find(str(alone))
    assert count == 196
    assert unharmed < 25, "damage in the padding only"
    assert not os.path.exists("hostile-code-ran")


def test_what_went_wrong_afterwards_is_told_but_the_checkpoint_is_written(tmp_path, monkeypatch):
    save_alone(tmp_path, 1, 2, keep=2)
    monkeypatch.setattr(os, "remove", mock.Mock(side_effect=PermissionError("it cannot be removed")))
    writer = CheckpointWriter(str(tmp_path), keep=1)
    model = make_toy()
    writer.write(model, torch.optim.AdamW(model.param_groups()), {**VALUES, "iter_num": 3})
    [outcome] = writer.outcomes()
    assert outcome.iter_num == ckpt.load(str(tmp_path / "ckpt.pt"))["iter_num"] == 3
    assert "is written, but" in outcome.warning


def gpt_checkpoint(**sizes):
    """The checkpoint of a small GPT after a step, as train.py writes it."""
    model = GPT(GPTConfig(**{"block_size": 4, "vocab_size": 5, "n_layer": 1, "n_head": 1, "n_embd": 8, **sizes}))
    optimizer = torch.optim.AdamW(model.param_groups(0.1))
    model(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long))[1].backward()
    optimizer.step()
    values = {"iter_num": 1, "best_val_loss": 2.0, "config": {}, "scaler": {}, "data_position": 3, "wandb_run_id": None}
    held = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "model_args": vars(model.config)}
    return copy.deepcopy(held | values)


def resume(folder):
    """What train.py does with a checkpoint, as far as the file is concerned, and a step."""
    checkpoint = load_to_train(find(folder)[0])
    model = GPT.from_checkpoint(checkpoint)
    optimizer = torch.optim.AdamW(model.param_groups(0.1), fused=True)
    ckpt.restore(optimizer, checkpoint["optimizer"])
    model(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long))[1].backward()
    optimizer.step()


WRONG_SHAPES_AND_KEYS = {
    "exp_avg_sq is missing": lambda c: c["optimizer"]["state"][0].pop("exp_avg_sq"),
    "exp_avg is a number": lambda c: c["optimizer"]["state"][0].update(exp_avg=5),
    "exp_avg has no dimensions": lambda c: c["optimizer"]["state"][0].update(exp_avg=torch.tensor(1.0)),
    "exp_avg has other dimensions": lambda c: c["optimizer"]["state"][0].update(exp_avg=torch.ones(3, 3)),
    "exp_avg is of one row": lambda c: c["optimizer"]["state"][1].update(exp_avg=torch.ones(3)),
    "step is a vector": lambda c: c["optimizer"]["state"][0].update(step=torch.ones(3)),
    "state of a parameter too many": lambda c: c["optimizer"]["state"].update({99: c["optimizer"]["state"][0]}),
    "state of a parameter by name": lambda c: c["optimizer"]["state"].update({"a": c["optimizer"]["state"][0]}),
    "state is a list": lambda c: c["optimizer"].update(state=[1]),
    "state is of numbers": lambda c: c["optimizer"]["state"].update({0: 3}),
    "a group without parameters": lambda c: c["optimizer"]["param_groups"][0].pop("params"),
    "a group too few": lambda c: c["optimizer"]["param_groups"].pop(),
    "groups are a number": lambda c: c["optimizer"].update(param_groups=3),
    "betas are a word": lambda c: c["optimizer"]["param_groups"][0].update(betas="ab"),
    "betas are three": lambda c: c["optimizer"]["param_groups"][0].update(betas=(0.9, 0.9, 0.9)),
    "a weight is a number": lambda c: c["model"].update({"lm_head.weight": 3}),
    "a weight has a number for a name": lambda c: c["model"].update({3: torch.ones(3)}),
    "a weight has another shape": lambda c: c["model"].update({"lm_head.weight": torch.ones(3, 3)}),
    "a weight is missing": lambda c: c["model"].pop("transformer.wpe.weight"),
    "a weight is on the meta device": lambda c: c["model"].update({"lm_head.weight": torch.ones(5, 8, device="meta")}),
    "the model has other sizes": lambda c: c["model_args"].update(n_embd=16),
    "the model has other layers": lambda c: c["model_args"].update(n_layer=2),
    "layers in words": lambda c: c["model_args"].update(n_layer="two"),
    "no layers": lambda c: c["model_args"].update(n_layer=-1),
    "a different model": lambda c: c.update(model=gpt_checkpoint(n_embd=16)["model"]),
    "a different model's optimizer": lambda c: c.update(optimizer=gpt_checkpoint(n_embd=16)["optimizer"]),
    "a deeper model's optimizer": lambda c: c.update(optimizer=gpt_checkpoint(n_layer=2)["optimizer"]),
    "three best losses": lambda c: c.update(best_val_loss=torch.ones(3)),
    "a negative iteration": lambda c: c.update(iter_num=-3),
    "a position in words": lambda c: c.update(data_position="x"),
    "a negative position": lambda c: c.update(data_position=-1000),
    "a scaler in words": lambda c: c.update(scaler={"scale": "x"}),
    "a scaler without a scale": lambda c: c.update(scaler={"growth_factor": 2.0}),
    "a run id that is none": lambda c: c.update(wandb_run_id=3),
}


def error_of(checkpoint, folder):
    """What is wrong with a checkpoint, in the kind of error that the scripts turn into a line and exit code 2."""
    torch.save(checkpoint, folder / "ckpt.pt")
    try:
        resume(str(folder))
    except ValueError as error:
        return str(error)
    return ""


def test_wrong_shapes_and_keys(tmp_path):
    sound = gpt_checkpoint()
    assert not error_of(sound, tmp_path)
    for name, spoil in WRONG_SHAPES_AND_KEYS.items():
        checkpoint = copy.deepcopy(sound)
        spoil(checkpoint)
        error = error_of(checkpoint, tmp_path)
        assert "checkpoint" in error or "saved" in error, (name, error)


def test_hostile_and_incomplete_files_say_what_is_wrong(tmp_path):
    for content, message in (
        ({**CHECKPOINT, "config": 3, "model_args": 3}, "missing keys: model_args, config"),
        ({**CHECKPOINT, "optimizer": {"state": {}}}, r"missing keys: optimizer"),
        ({**CHECKPOINT, "config": {"dataset": 5}}, r"missing keys: config"),
        ({**CHECKPOINT, "config": Hostile()}, "system"),
        ({**CHECKPOINT, "format": 99}, "has format 99"),
        ({**CHECKPOINT, "format": torch.ones(2)}, "has format tensor"),
        (7, "missing keys: model"),
        ({"model": CHECKPOINT["model"]}, "missing keys: model_args"),
    ):
        torch.save(content, tmp_path / "ckpt.pt")
        with pytest.raises(ckpt.CheckpointError, match=message):
            load(str(tmp_path / "ckpt.pt"))
