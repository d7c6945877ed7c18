"""zero/checkpoint/format.py, files.py: what is missing, damaged or another file is refused in one line, on all ranks."""

import os
import shutil
from functools import partial

import pytest
import torch
import torch.distributed as dist
from checkpoints import CHECKPOINT, save_alone
from ranks import run_in_turn
from toy import assert_equal

from zero import checkpoint as ckpt
from zero.checkpoint import format
from zero.checkpoint.files import reading


def load_where(own):
    """What this rank says of the folder `own[rank]`: an error, or '' if it has what rank 0 has."""
    path = f"{own[dist.get_rank()]}/ckpt.pt"
    with pytest.MonkeyPatch.context() as patch:
        if len(set(own)) == 1:
            patch.setattr(format, "verify", None)  # a shared file is not read once more
        try:
            checkpoint = ckpt.load_on_all_ranks(path)
        except ckpt.CheckpointError as error:
            return str(error)
    assert_equal(checkpoint["model"], ckpt.load(f"{own[0]}/ckpt.pt")["model"])
    return ""


def damage(path, place):
    """Change a bit of a file. Its size, and that of an archive in it, stay."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_every_rank_needs_the_file_of_rank_0(tmp_path):
    """It or a copy. Otherwise all ranks say which rank lacks it, and why."""
    for name, iteration in (("shared", 1), ("other", 2)):
        save_alone(tmp_path / name, iteration)
    for name in ("copy", "damaged", "cut"):
        shutil.copytree(tmp_path / "shared", tmp_path / name)
    damage(tmp_path / "damaged" / "ckpt.pt", (tmp_path / "shared" / "ckpt.pt").read_bytes().index(b"best_val_loss"))
    os.truncate(tmp_path / "cut" / "ckpt.pt", 1000)
    expected = {
        **{"shared": "", "copy": "", "other": "is another file", "nowhere": "there is no checkpoint"},
        **{"damaged": "damaged", "cut": "damaged"},
    }
    calls = [partial(load_where, [str(tmp_path / "shared"), str(tmp_path / name)]) for name in expected]
    calls.append(partial(load_where, [str(tmp_path / "nowhere"), str(tmp_path / "shared")]))
    *said, last = run_in_turn(2, *calls)
    for (name, reason), (first, second) in zip(expected.items(), said, strict=True):
        assert first == second
        assert first.startswith("rank 1 does not see the checkpoint of rank 0: ") == bool(reason), first
        assert reason in first
        assert not reason or (f"{tmp_path}/{name}" in first and "copy the file to every machine" in first)
    assert last == [f"there is no checkpoint {tmp_path}/nowhere/ckpt.pt"] * 2


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("first line\nsecond line"), "x is damaged, or not a checkpoint: first line"),
        (ValueError("Weights only load failed. Read this\nbad magic"), "x is damaged, or not a checkpoint: bad magic"),
        (EOFError(), "x is damaged, or not a checkpoint: EOFError"),
    ],
)
def test_one_line_on_a_damaged_file(error, expected):
    with pytest.raises(ckpt.CheckpointError, match=f"^{expected}$"), reading("x"):
        raise error


def test_what_is_missing_damaged_or_no_checkpoint(tmp_path):
    path = str(tmp_path / "ckpt.pt")
    for read in (ckpt.load, ckpt.verify):
        with pytest.raises(ckpt.CheckpointError, match=r"no checkpoint .*ckpt\.pt"):
            read(path)
    torch.save([7], path)
    ckpt.verify(path)  # it looks at the checksums only
    with pytest.raises(ckpt.CheckpointError, match="missing keys: model"):
        ckpt.load(path)
    torch.save(CHECKPOINT, path)
    ckpt.verify(path)
    damage(tmp_path / "ckpt.pt", (tmp_path / "ckpt.pt").read_bytes().index(b"n_layer"))
    with pytest.raises(ckpt.CheckpointError, match="is damaged"):
        ckpt.verify(path)
