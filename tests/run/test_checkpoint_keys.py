"""run/checkpoint_keys.py: a file is read as if a stranger had written it; wrong contents are refused in one line."""

import copy

import pytest
import torch
from checkpoints import CHECKPOINT, Hostile

from model import GPT, GPTConfig
from run.checkpoint_folder import find
from run.checkpoint_keys import load, load_to_train
from zero import checkpoint as ckpt


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
