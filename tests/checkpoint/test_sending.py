"""zero/checkpoint/sending.py: ranks that do not see rank 0's checkpoint get the state of their slices from rank 0."""

import os
import shutil
from functools import partial

import pytest
import torch
import torch.distributed as dist
from contents import VALUES
from ranks import run_ranks
from scripts import run, train
from test_any_to_any import ALL_MODES
from toy import assert_equal, make_toy, weights
from toy import train as train_toy

from zero import checkpoint as ckpt
from zero.build import build
from zero.checkpoint import sending
from zero.partition import partition

SMALL_MESSAGE = 100  # bytes


def make(mode, seed, state_dict=None):
    """The toy with a buffer. `state_dict` is loaded before the model is wrapped, as train.py does."""
    module = make_toy(seed)
    module.register_buffer("count", torch.full((3,), float(seed)))
    module.unused.requires_grad_(False)  # DistributedDataParallel refuses parameters without a gradient
    if state_dict is not None:
        module.load_state_dict(state_dict)
    return module, *build(module, module.param_groups(), **ALL_MODES[mode], lr=0.01, betas=(0.9, 0.95))


def save(mode, folder, format, seed=0, iteration=4):
    if dist.get_rank() == 0:
        os.makedirs(folder)
    module, model, optimizer = make(mode, seed)
    train_toy(model, optimizer, rank=dist.get_rank(), steps=2)
    ckpt.CheckpointWriter(folder, format=format).save(module, optimizer, {**VALUES, "iter_num": iteration})
    dist.barrier()


def resume(mode, folder):
    """Load from a folder, which may be another on each rank; all that this rank holds after it, and what `load` returned."""
    checkpoint, read_chunks = ckpt.load_on_all_ranks(f"{folder}/ckpt.pt")
    module, _, optimizer = make(mode, 50 + dist.get_rank(), checkpoint["model"])
    ckpt.restore(optimizer, checkpoint["optimizer"], read_chunks)
    part = partition(optimizer)
    held = {"weights": weights(module), "states": part.states, "locals": [local.detach() for local in part.locals]}
    return {**held, "groups": part.inner.state_dict()["param_groups"]}, checkpoint, part


def is_seen(checkpoint):
    """Whether this rank has read the file: otherwise its weights are zero."""
    return bool(checkpoint["model"]["hidden.weight"].any())


def count_sends(monkeypatch):
    """A list to which the size of each message from this rank is added."""
    sent, isend = [], dist.isend

    def counted(tensor, *args, **kwargs):
        sent.append(tensor.nbytes)
        return isend(tensor, *args, **kwargs)

    monkeypatch.setattr(dist, "isend", counted)
    return sent


def slices_bytes(part, format):
    """The AdamW state of this rank's slices that is sent. In one file, a tensor without dimensions is a plain value."""
    sent = [slice_ for slice_ in part.slices[part.rank] if part.params[slice_.param].dim() or format == "sharded"]
    return sum(2 * 4 * slice_.numel for slice_ in sent)


def every_folder(mode, root):
    """With the file on all ranks, on rank 0 only, and on all but the last, in both formats: all hold the same after it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for format in ckpt.FORMATS:
        folder = f"{root}/{format}"
        save(mode, folder, format)
        expected, checkpoint, part = resume(mode, folder)
        assert is_seen(checkpoint)
        for seeing, message_bytes in ((1, sending.MESSAGE_BYTES), (1, SMALL_MESSAGE), (world_size - 1, SMALL_MESSAGE)):
            with pytest.MonkeyPatch.context() as monkeypatch:
                monkeypatch.setattr(sending, "MESSAGE_BYTES", message_bytes)
                sent = count_sends(monkeypatch)
                held, checkpoint, _ = resume(mode, folder if rank < seeing else f"{root}/none")
            assert is_seen(checkpoint) == (rank < seeing)
            assert checkpoint["iter_num"] == 4
            assert_equal(held, expected)
            needed = [None] * world_size
            dist.all_gather_object(needed, slices_bytes(part, format))
            assert sum(sent) == (sum(needed[seeing:]) if rank == 0 else 0)
            assert max(sent, default=0) <= message_bytes
            if mode != "adamw":
                assert max(needed) < sum(needed), "no rank needs the whole state"
    return True


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("mode", ALL_MODES)
def test_resumed_without_the_file(mode, world_size, tmp_path):
    assert all(run_ranks(every_folder, world_size, mode, str(tmp_path)))
