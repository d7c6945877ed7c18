"""zero/checkpoint/archive.py: a file that is written piece by piece is one that torch.save has written."""

import zipfile

import pytest
import torch
from checkpoints import VALUES, restore
from ranks import run_ranks
from torch.distributed.optim import ZeroRedundancyOptimizer
from toy import assert_equal, make_toy, train

from zero import checkpoint as ckpt
from zero.checkpoint.archive import write_archive
from zero.tensors import flattened

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.uint16)


def contents():
    """Tensors of every kind and size, tied ones, and plain values around them."""
    torch.manual_seed(0)
    tensors = {str(dtype): (10 * torch.rand(7, 3)).to(dtype) for dtype in DTYPES}
    tensors |= {"nothing": torch.zeros(0, 3), "number": torch.tensor(3.0), "float8": torch.ones(5).to(torch.float8_e4m3fn)}
    tensors |= {"conv": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), "transposed": torch.randn(5, 4).t()}
    tensors |= {"expanded": torch.ones(3, 1).expand(3, 2), "sliced": torch.randn(6, 6)[::2, ::3]}
    tensors |= {
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
    }
    tensors |= {"view of all": tensors["torch.float32"].view(7, 3), "tied": tensors["torch.float32"]}
    return {
        "model": tensors,
        "step": torch.tensor(2.0),
        "lr": [0.1, (1, None, "text")],
        3: {"b": b"bytes", "size": torch.Size([2])},
    }


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
    trainable = [param for param in toy.parameters() if param.requires_grad]
    sharded = ZeroRedundancyOptimizer(trainable, torch.optim.Adafactor, lr=0.01)
    plain = torch.optim.Adafactor([param for param in oracle.parameters() if param.requires_grad], lr=0.01)
    for model, optimizer in ((toy, sharded), (oracle, plain)):
        train(model, optimizer, rank=0, steps=3, decay_lr=False)
    ckpt.save(f"{folder}/ckpt.pt", toy, sharded, **VALUES)
    restore(sharded, f"{folder}/ckpt.pt")
    state = ckpt.consolidate(sharded)
    if state is not None:
        assert_equal(list(state["state"].values()), list(plain.state_dict()["state"].values()))


def test_state_that_is_kept_by_row_and_column(tmp_path):
    run_ranks(rows_and_columns, 2, str(tmp_path))


def test_a_file_without_elements_is_refused(tmp_path):
    torch.save({"model": {"a": torch.empty(3, device="meta")}, "model_args": {}}, tmp_path / "ckpt.pt")
    with pytest.raises(ckpt.CheckpointError, match="without its tensors"):
        ckpt.load(str(tmp_path / "ckpt.pt"))
