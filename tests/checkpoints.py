"""Small checkpoints for tests of checkpoints, and models to save."""

import os

import torch
from toy import make_toy, train

from run.checkpoint_writer import CheckpointWriter

CHECKPOINT = {
    "model": {"weight": torch.arange(3000.0), "tied": torch.ones(7)},
    "optimizer": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(3000)}}, "param_groups": [{"params": [0]}]},
    "model_args": {"n_layer": 1},
    "iter_num": 1,
    "best_val_loss": 2.0,
    "config": {"seed": 1},
}


def numbered(iteration):
    return {**CHECKPOINT, "iter_num": iteration}


class Weight(torch.nn.Module):
    """A frozen number and a weight that is the number of the iteration everywhere."""

    def __init__(self, iteration, numel):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((numel,), float(iteration)))
        self.register_buffer("frozen", torch.tensor(5.0))


def write(writer, iteration, numel=3000, **values):
    model = Weight(iteration, numel)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[model.weight] = {"step": torch.tensor(3.0), "exp_avg": torch.ones(numel)}
    writer.write(model, optimizer, {"model_args": {}, "best_val_loss": 2.0, "config": {}, **values, "iter_num": iteration})


VALUES = {"model_args": {"n_layer": 1}, "iter_num": 4, "best_val_loss": 2.0, "config": {"seed": 1}}


def save_alone(folder, *at, **writer):
    """Checkpoints of one process at these iterations; the last model and its optimizer."""
    os.makedirs(folder, exist_ok=True)
    for iteration in at:
        model = make_toy()
        optimizer = torch.optim.AdamW(model.param_groups(), lr=0.01)
        train(model, optimizer, rank=0, steps=1, first=iteration, decay_lr=False)
        own = CheckpointWriter(str(folder), **writer)
        own.write(model, optimizer, {**VALUES, "iter_num": iteration})
    return model, optimizer


def damaged(whole, rng, count):
    """So many times, the bytes of a file that was cut off, and of one in which a bit has changed."""
    for _ in range(count):
        position = rng.randrange(len(whole))
        yield whole[:position]
        yield whole[:position] + bytes([whole[position] ^ (1 << rng.randrange(8))]) + whole[position + 1 :]


class Hostile:
    def __reduce__(self):
        return os.system, ("touch hostile-code-ran",)
