"""zero/checkpoint/format.py, files.py, archive.py: a file is as torch.save would have written it; a wrong one is refused."""

import os
import shutil
import zipfile
from functools import partial

import pytest
import torch
import torch.distributed as dist
from checkpoints import CHECKPOINT, VALUES, save_alone
from ranks import run_in_turn
from torch.distributed.optim import ZeroRedundancyOptimizer
from toy import assert_equal, make_toy, refused, train

from zero import checkpoint as ckpt
from zero.checkpoint import format
from zero.checkpoint.archive import write_archive
from zero.checkpoint.files import reading
from zero.tensors import flattened


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
    expected = {"shared": "", "copy": "", "other": "is another file", "nowhere": "there is no checkpoint"}
    expected |= {"damaged": "damaged", "cut": "damaged"}
    calls = [partial(load_where, [str(tmp_path / "shared"), str(tmp_path / name)]) for name in expected]
    calls.append(partial(load_where, [str(tmp_path / "nowhere"), str(tmp_path / "shared")]))
    *said, last = run_in_turn(2, *calls)
    for (name, reason), (first, second) in zip(expected.items(), said, strict=True):
        assert first == (second and f"rank 1: {second}")
        assert reason in second
        assert not reason or (f"{tmp_path}/{name}" in second and "copy the file of rank 0 to every machine" in second)
    assert last == [f"{of}there is no checkpoint {tmp_path}/nowhere/ckpt.pt" for of in ("", "rank 0: ")]


def test_one_line_on_a_damaged_file():
    reasons = {"first line\nsecond line": "first line", "Weights only load failed. Read this\nbad magic": "bad magic"}
    for error, shown in {**{ValueError(text): line for text, line in reasons.items()}, EOFError(): "EOFError"}.items():
        with pytest.raises(ckpt.CheckpointError, match=f"^x is damaged, or not a checkpoint: {shown}$"), reading("x"):
            raise error


def test_what_is_missing_damaged_or_no_checkpoint(tmp_path):
    path = str(tmp_path / "ckpt.pt")
    for read in (ckpt.load, ckpt.verify):
        refused(ckpt.CheckpointError, r"no checkpoint .*ckpt\.pt", read, path)
    torch.save([7], path)
    ckpt.verify(path)  # it looks at the checksums only
    refused(ckpt.CheckpointError, "missing keys: model", ckpt.load, path)
    torch.save(CHECKPOINT, path)
    ckpt.verify(path)
    damage(tmp_path / "ckpt.pt", (tmp_path / "ckpt.pt").read_bytes().index(b"n_layer"))
    refused(ckpt.CheckpointError, "is damaged", ckpt.verify, path)
    torch.save({"model": {"a": torch.empty(3, device="meta")}, "model_args": {}}, path)
    refused(ckpt.CheckpointError, "without its tensors", ckpt.load, path)


# -- what is written ------------------------------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.uint16)


def contents():
    """Tensors of every kind and size, tied ones, and plain values around them."""
    torch.manual_seed(0)
    tensors = {str(dtype): (10 * torch.rand(7, 3)).to(dtype) for dtype in DTYPES}
    tensors |= {"nothing": torch.zeros(0, 3), "number": torch.tensor(3.0), "float8": torch.ones(5).to(torch.float8_e4m3fn)}
    tensors |= {"conv": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), "transposed": torch.randn(5, 4).t()}
    tensors |= {"expanded": torch.ones(3, 1).expand(3, 2), "sliced": torch.randn(6, 6)[::2, ::3]}
    conjugate, other = (torch.randn(3, dtype=torch.complex64).conj() for _ in range(2))
    tensors |= {"conjugate": conjugate, "negative": other.imag}
    tensors |= {"view of all": tensors["torch.float32"].view(7, 3), "tied": tensors["torch.float32"]}
    more = {3: {"b": b"bytes", "size": torch.Size([2])}}
    return {"model": tensors, "step": torch.tensor(2.0), "lr": [0.1, (1, None, "text")], **more}


def split(numels, tree, on_meta):
    """The tree with some tensors on the meta device, and their elements in pieces."""
    outline, pieces = {}, []
    for name, tensor in tree["model"].items():
        if name not in on_meta:
            outline[name] = tensor
            continue
        outline[name] = torch.empty_like(tensor, device="meta")
        pieces += [(outline[name], piece) for piece in flattened(tensor, tensor).split(numels)]
    return {**tree, "model": outline}, pieces


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("numels", [1, 4, 100])
def test_torch_reads_what_it_would_have_written(tmp_path, mmap, numels):
    tree, on_meta = contents(), {"torch.float32", "torch.bool", "torch.uint16", "nothing", "number", "conv", "transposed"}
    torch.save(tree, tmp_path / "torch.pt")
    outline, pieces = split(numels, tree, on_meta)
    outline["model"]["tied"] = outline["model"]["torch.float32"]
    write_archive(outline, str(tmp_path / "ours.pt"), pieces)
    assert zipfile.ZipFile(tmp_path / "ours.pt").testzip() is None
    expected, found = (torch.load(tmp_path / f"{name}.pt", weights_only=True, mmap=mmap) for name in ("torch", "ours"))
    assert_equal(found, expected)
    for name, tensor in found["model"].items():
        dense = torch.ops.aten.is_non_overlapping_and_dense(tree["model"][name])
        assert tensor.stride() == (tree["model"][name] if dense else torch.empty(tensor.shape)).stride(), name
        assert not tensor.numel() or tensor.data_ptr() % 64 == 0 or not mmap, name
    assert found["model"]["tied"].data_ptr() == found["model"]["torch.float32"].data_ptr()


def test_pieces_that_do_not_fill_the_tensors_are_refused(tmp_path):
    outline, pieces = split(4, contents(), {"conv", "transposed"})
    for wrong in (pieces[:-1], [(tensor, piece.double()) for tensor, piece in pieces], []):
        with pytest.raises(ValueError, match="the pieces are not the elements of the tensors"):
            write_archive(outline, str(tmp_path / "ckpt.pt"), wrong)


def test_nothing_of_a_file_depends_on_the_time(tmp_path):
    for name in ("a", "b"):
        outline, pieces = split(3, contents(), {"conv"})
        write_archive(outline, str(tmp_path / name), pieces)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def rows_and_columns(folder):
    """Adafactor keeps a row and a column per matrix, which belong to no element."""
    toy, oracle = make_toy(), make_toy()
    of_toy, of_oracle = ([param for param in model.parameters() if param.requires_grad] for model in (toy, oracle))
    sharded = ZeroRedundancyOptimizer(of_toy, torch.optim.Adafactor, lr=0.01)
    plain = torch.optim.Adafactor(of_oracle, lr=0.01)
    for model, optimizer in ((toy, sharded), (oracle, plain)):
        train(model, optimizer, rank=0, steps=3, decay_lr=False)
    ckpt.save(f"{folder}/ckpt.pt", toy, sharded, **VALUES)
    ckpt.restore(sharded, ckpt.load(f"{folder}/ckpt.pt")["optimizer"])
    state = ckpt.consolidate(sharded)
    if state is not None:
        assert_equal(list(state["state"].values()), list(plain.state_dict()["state"].values()))


def test_state_that_is_rows_and_columns(tmp_path):
    run_in_turn(2, partial(rows_and_columns, str(tmp_path)))
