"""zero/checkpoint/sending.py: ranks that do not see rank 0's checkpoint get the state of their slices from rank 0."""

import os
import shutil
from functools import partial

import faults
import pytest
import torch
import torch.distributed as dist
from contents import VALUES
from ranks import run_in_turn, run_ranks
from scripts import run, torch_load, train
from test_any_to_any import ALL_MODES, flags_of
from toy import assert_equal, make_toy, weights
from toy import train as train_toy

from zero import checkpoint as ckpt
from zero import host_comm
from zero.build import build
from zero.checkpoint import sending
from zero.codecs import decoded
from zero.sharded_state import partition

SMALL_MESSAGE = 100  # bytes


def make(mode, seed, state_dict=None):
    """The toy with a buffer. `state_dict` is loaded before the model is wrapped, as train.py does."""
    module = make_toy(seed)
    module.register_buffer("count", torch.full((3,), float(seed)))
    module.unused.requires_grad_(False)  # DistributedDataParallel refuses parameters without a gradient
    if state_dict is not None:
        module.load_state_dict(state_dict)
    return module, *build(module, module.param_groups(), flags_of(mode), lr=0.01, betas=(0.9, 0.95))


def save(mode, folder, format, seed=0, iteration=4):
    os.makedirs(folder, exist_ok=True)
    module, model, optimizer = make(mode, seed)
    train_toy(model, optimizer, rank=dist.get_rank(), steps=2)
    ckpt.CheckpointWriter(folder, format=format).write(module, optimizer, {**VALUES, "iter_num": iteration})
    dist.barrier()


def resume(mode, folder):
    """Load from a folder, which may be another on each rank; all that this rank holds after it, and what `load` returned."""
    checkpoint, read_chunks = ckpt.load_on_all_ranks(f"{folder}/ckpt.pt")
    module, _, optimizer = make(mode, 50 + dist.get_rank(), checkpoint["model"])
    ckpt.restore(optimizer, checkpoint["optimizer"], read_chunks)
    part = partition(optimizer)
    held = {
        "weights": weights(module),
        "states": [decoded(*held) for held in zip(part.locals, part.states, strict=True)],
        "locals": [local.detach() for local in part.locals],
    }
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


def slices_bytes(part):
    """The AdamW state of this rank's slices that is sent. A tensor without dimensions is a plain value in the file."""
    return sum(2 * 4 * slice_.numel for slice_ in part.slices[part.rank] if part.params[slice_.param].dim())


def every_folder(mode, root):
    """With the file on all ranks, on rank 0 only, and on all but the last, in both formats: all hold the same after it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for format in ckpt.FORMATS:
        folder = f"{root}/{format}"
        save(mode, folder, format)
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(sending, "verify", None)  # a shared file is not read once more
            monkeypatch.setattr(dist, "isend", None)
            expected, checkpoint, part = resume(mode, folder)
        assert is_seen(checkpoint)
        for seeing, message_bytes in ((1, SMALL_MESSAGE), (world_size - 1, sending.MESSAGE_BYTES)):
            with pytest.MonkeyPatch.context() as monkeypatch:
                for module in (sending, host_comm):
                    monkeypatch.setattr(module, "MESSAGE_BYTES", message_bytes)
                sent = count_sends(monkeypatch)
                held, checkpoint, _ = resume(mode, folder if rank < seeing else f"{root}/none")
            assert is_seen(checkpoint) == (rank < seeing)
            assert checkpoint["iter_num"] == 4
            assert_equal(held, expected)
            needed = [None] * world_size
            dist.all_gather_object(needed, slices_bytes(part))
            assert sum(sent) == (sum(needed[seeing:]) if rank == 0 else 0)
            assert max(sent, default=0) <= message_bytes
            if mode != "adamw":
                assert max(needed) < sum(needed), "no rank needs the whole state"


@pytest.mark.parametrize(
    "world_size",
    [
        pytest.param(2, marks=pytest.mark.slow("four ranks have every case of two", seconds=60)),
        pytest.param(3, marks=pytest.mark.slow("four ranks have every case of three", seconds=60)),
        4,
    ],
)
def test_resumed_without_the_file(world_size, tmp_path):
    run_in_turn(world_size, *(partial(every_folder, mode, f"{tmp_path}/{mode}") for mode in ALL_MODES))


def make_folders(mode, root):
    """One checkpoint, and those of other runs with the same iteration and with another one, in both formats."""
    for format in ckpt.FORMATS:
        save(mode, f"{root}/{format}", format)
        save(mode, f"{root}/{format} of another run", format, seed=1)
        save(mode, f"{root}/{format} of another iteration", format, seed=1, iteration=3)


def in_other_folders(mode, root, folders):
    """Rank 1 looks into each folder, rank 0 into `root`. Returns for each folder whether this rank has read its file."""
    expected, _, _ = resume(mode, root)
    seen = []
    for folder in folders:
        held, checkpoint, _ = resume(mode, folder if dist.get_rank() else root)
        assert_equal(held, expected, folder)
        assert checkpoint["iter_num"] == 4
        seen.append(is_seen(checkpoint))
    return seen


def damage(path, place):
    """Change a bit of a file. Its size, and that of an archive in it, stay."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_only_the_same_file_is_used(tmp_path):
    run_ranks(make_folders, 2, "sharded", str(tmp_path))
    one_file, shards = (tmp_path / format for format in ckpt.FORMATS)
    for folder in (one_file, shards):
        shutil.copytree(folder, f"{folder} copied")
    shutil.copytree(shards, f"{shards} damaged")
    [shard] = (tmp_path / "sharded damaged").glob("shards_*/__0_0.distcp")
    damage(shard, shard.stat().st_size // 2)
    content = (one_file / "ckpt.pt").read_bytes()
    weight = torch.load(one_file / "ckpt.pt")["model"]["hidden.weight"].numpy().tobytes()
    for name in ("damaged", "cut", "of text", "absent", "a folder"):
        (tmp_path / f"consolidated {name}").mkdir()
    (tmp_path / "consolidated damaged" / "ckpt.pt").write_bytes(content)
    damage(tmp_path / "consolidated damaged" / "ckpt.pt", content.index(weight))
    (tmp_path / "consolidated cut" / "ckpt.pt").write_bytes(content[:-100])
    (tmp_path / "consolidated of text" / "ckpt.pt").write_text("no checkpoint")
    (tmp_path / "consolidated a folder" / "ckpt.pt").mkdir()
    (tmp_path / "sharded without shards").mkdir()
    shutil.copy(shards / "ckpt.pt", tmp_path / "sharded without shards" / "ckpt.pt")
    sizes = {os.path.getsize(tmp_path / name / "ckpt.pt") for name in ("consolidated", "consolidated of another run")}
    assert len(sizes) == 1
    found = {
        folder: sorted(str(path) for path in tmp_path.iterdir() if path.name.startswith(folder.name))
        for folder in (one_file, shards)
    }
    calls = (partial(in_other_folders, "sharded", str(folder), folders) for folder, folders in found.items())
    for (folder, folders), (_, seen) in zip(found.items(), run_in_turn(2, *calls), strict=True):
        used = [path for path, is_used in zip(folders, seen, strict=True) if is_used]
        assert used == [str(folder), f"{folder} copied"], "a copy needs no network"
        assert len(folders) >= 6


def test_nanogpts_file_is_told_from_another_one(tmp_path):
    """It has no manifest."""
    run_ranks(save, 1, "adamw", str(tmp_path / "ours"), "consolidated")
    checkpoint = torch.load(tmp_path / "ours" / "ckpt.pt")
    keys = ("model", "optimizer", "model_args", "iter_num", "best_val_loss", "config")
    folders = []
    for name in ("its", "another"):
        (tmp_path / name).mkdir()
        torch.save({key: checkpoint[key] for key in keys}, tmp_path / name / "ckpt.pt")
        folders.append(str(tmp_path / name))
        checkpoint["optimizer"]["state"][0]["exp_avg"] += 1
    assert run_ranks(in_other_folders, 2, "sharded", folders[0], folders)[1] == [True, False]


def shards_vanish(root):
    """Rank 0 cannot read what it should send."""
    save("sharded", f"{root}/out", "sharded")
    checkpoint, read_chunks = ckpt.load_on_all_ranks(f"{root}/{'none' if dist.get_rank() else 'out'}/ckpt.pt")
    _, _, optimizer = make("sharded", 0, checkpoint["model"])
    if dist.get_rank() == 0:
        shutil.rmtree(f"{root}/out")
    with pytest.raises(ckpt.CheckpointError, match="is damaged, or not a checkpoint"):
        ckpt.restore(optimizer, checkpoint["optimizer"], read_chunks)
    with pytest.raises(ckpt.CheckpointError, match=r"there is no checkpoint .*none/ckpt\.pt"):
        ckpt.load_on_all_ranks(f"{root}/none/ckpt.pt")


def test_all_ranks_raise_what_rank_0_cannot_read(tmp_path):
    run_ranks(shards_vanish, 3, str(tmp_path))


def test_a_single_process_reads_its_file(tmp_path):
    module = make_toy()
    optimizer = torch.optim.AdamW(module.param_groups())
    ckpt.CheckpointWriter(str(tmp_path)).write(module, optimizer, VALUES)
    checkpoint, read_chunks = ckpt.load_on_all_ranks(str(tmp_path / "ckpt.pt"))
    assert_equal(checkpoint["model"], weights(module))
    assert read_chunks is None


def test_train_goes_on_where_only_rank_0_has_the_checkpoint(data, tmp_path):
    """Rank 1 has another out_dir with the checkpoint of another seed. The losses are those of a common out_dir."""
    flags = ["--eval_interval=4", "--max_iters=4"]
    train(tmp_path / "common", data, *flags, "--checkpoint_format=sharded", ranks=2)
    train(tmp_path / "other", data, *flags, "--seed=1", ranks=2)
    shutil.copytree(tmp_path / "common", tmp_path / "own")
    at_rank_1 = partial(faults.add_arguments_by_rank, {1: [f"--out_dir={tmp_path / 'other'}"]})
    before = torch_load(tmp_path / "other")
    flags = ["--eval_interval=4", "--max_iters=8", "--init_from=resume"]
    expected = train(tmp_path / "common", data, *flags, ranks=2)
    resumed = train(tmp_path / "own", data, *flags, ranks=2, run=partial(run, before=at_rank_1))
    assert sorted(resumed[0]) == list(range(9))
    assert resumed[:2] == expected[:2]
    for key in ("model", "optimizer"):
        assert_equal(torch_load(tmp_path / "own")[key], torch_load(tmp_path / "common")[key])
    assert_equal(torch_load(tmp_path / "other"), before)
