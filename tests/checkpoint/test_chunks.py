"""The sharded format: what no rank has whole is written in pieces, read in others, and trusted no more than one file."""

import io
import os
import pickle
import random
import resource
import shutil

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from toy import assert_equal, batch, build_toy, make_toy, train, weights

from zero import ShardedOptimizer
from zero import checkpoint as ckpt
from zero.checkpoint.__main__ import main
from zero.checkpoint.chunks import _Unpickler
from zero.checkpoint.files import FileSum, file_sum
from zero.checkpoint.format import read as read_file
from zero.state import local_chunks

VALUES = {"model_args": {"n_layer": 1}, "iter_num": 4, "best_val_loss": 2.0, "config": {"seed": 1}}


def save_both(mode, folder):
    """The same state in both formats; how many elements this rank contributed."""
    model, optimizer = build_toy(mode)
    train(model, optimizer, rank=0, steps=3)
    for format in ckpt.FORMATS:
        writer = ckpt.CheckpointWriter(f"{folder}/{format}", format=format, background=True)
        writer.save(model.module, optimizer, VALUES)
        writer.wait()
        assert not [outcome for outcome in writer.outcomes() if isinstance(outcome, OSError)]
    dist.barrier()
    return sum(piece.elements.numel() for piece in local_chunks(model.module, optimizer)[0])


@pytest.fixture
def folder(tmp_path):
    for format in ckpt.FORMATS:
        (tmp_path / format).mkdir()
    return tmp_path


def same(a, b):
    for key in ("model", "optimizer", "model_args", "iter_num", "config"):
        assert_equal(a[key], b[key], key)


@pytest.mark.parametrize(("mode", "world_size"), [("sharded", 3), ("torch", 2), ("adamw", 2)])
def test_either_format_is_turned_into_the_other(folder, mode, world_size):
    held = run_ranks(save_both, world_size, mode, str(folder))
    one_file = ckpt.load(str(folder / "consolidated" / "ckpt.pt"))
    state = one_file["optimizer"]["state"].values()
    assert sum(held) == sum(param.numel() for param in make_toy().parameters()) + 2 * sum(s["exp_avg"].numel() for s in state)
    if mode == "sharded":
        assert max(held) < 0.5 * sum(held), "rank 0 has the frozen ones besides its third"
    small = folder / "sharded" / "ckpt.pt"
    loaded = ckpt.load(str(small))["model"]
    assert_equal(loaded, one_file["model"])
    assert loaded["head.weight"] is loaded["embedding.weight"]
    ckpt.convert(str(small), str(folder / "joined.pt"))
    same(ckpt.load(str(folder / "joined.pt")), one_file)
    ckpt.convert(str(folder / "consolidated" / "ckpt.pt"), str(folder / "cut.pt"))
    assert (folder / "cut.pt").stat().st_size < (folder / "joined.pt").stat().st_size
    ckpt.convert(str(folder / "cut.pt"), str(folder / "again.pt"))
    same(ckpt.load(str(folder / "again.pt")), one_file)


def restore(optimizer, path):
    checkpoint = ckpt.load(path)
    ckpt.restore(optimizer, checkpoint["optimizer"], ckpt.chunk_reader(path, checkpoint))
    return checkpoint


def rows_and_columns(folder):
    """Adafactor keeps a row and a column per matrix, which belong to no element."""
    toy, oracle = make_toy(), make_toy()
    sharded = ShardedOptimizer(toy.parameters(), torch.optim.Adafactor, partition="parameter", lr=0.01)
    plain = torch.optim.Adafactor([param for param in oracle.parameters() if param.requires_grad], lr=0.01)
    for step in range(3):
        for model, optimizer in ((toy, sharded), (oracle, plain)):
            optimizer.zero_grad()
            model(*batch(step, rank=0)).backward()
            optimizer.step()
    writer = ckpt.CheckpointWriter(folder, format="sharded")
    writer.save(toy, sharded, VALUES)
    if dist.get_rank() == 0:
        ckpt.convert(f"{folder}/ckpt.pt", f"{folder}/joined.pt")
        ckpt.convert(f"{folder}/joined.pt", f"{folder}/cut.pt")
    dist.barrier()
    for file in ("ckpt.pt", "joined.pt", "cut.pt"):
        restore(sharded, f"{folder}/{file}")
        state = ckpt.consolidate(sharded)
        if state is not None:
            assert_equal(list(state["state"].values()), list(plain.state_dict()["state"].values()), file)


def test_state_that_is_kept_by_row_and_column(tmp_path):
    run_ranks(rows_and_columns, 2, str(tmp_path))


# -- what stays on the disk --------------------------------------------------------------------------------------------


def save_alone(folder, iteration, **writer):
    """A checkpoint of one process; its model and optimizer."""
    model = make_toy()
    optimizer = torch.optim.AdamW(model.param_groups(), lr=0.01)
    model(*batch(iteration, rank=0)).backward()
    optimizer.step()
    ckpt.CheckpointWriter(str(folder), format="sharded", **writer).save(model, optimizer, {**VALUES, "iter_num": iteration})
    return model, optimizer


def iterations(folder):
    return sorted(int(name.split("_")[1]) for name in os.listdir(folder) if name.startswith("shards_"))


def test_only_what_a_file_refers_to_is_kept(tmp_path):
    for iteration in (1, 2, 3, 4):
        save_alone(tmp_path, iteration, keep=3)
    assert iterations(tmp_path) == [2, 3, 4]
    shutil.copy(tmp_path / "ckpt.pt", tmp_path / "best.pt")
    for iteration in (5, 6):
        save_alone(tmp_path, iteration)
    assert iterations(tmp_path) == [2, 3, 4, 5, 6], "without `keep` what is kept by iteration stays"
    (tmp_path / "exported.pt").write_bytes(b"of somebody else")
    save_alone(tmp_path, 7, keep=1)
    assert iterations(tmp_path) == [4, 6, 7], "the copy needs the fourth"
    torn, others = tmp_path / f"shards_00000008_{8:08x}.tmp", ["shards_of_my_data", "shards_notes", "shards_00000008.tmp"]
    for folder in (torn.name, *others):
        (tmp_path / folder).mkdir()
    ckpt.CheckpointWriter(str(tmp_path))
    assert not torn.exists()
    assert all((tmp_path / folder).exists() for folder in others)
    for folder in others:
        (tmp_path / folder).rmdir()
    os.rename(tmp_path / "ckpt.pt", tmp_path / "moved.pth")
    save_alone(tmp_path, 9)
    save_alone(tmp_path, 10)
    assert iterations(tmp_path) == [4, 7, 9, 10], "what was moved out of the way is not this run's any more"


def test_shards_of_a_save_that_was_killed_just_before_it_counted_are_swept(tmp_path):
    for iteration in (1, 2, 3):
        save_alone(tmp_path, iteration)
    os.rename(tmp_path / "ckpt.pt", tmp_path / "ckpt.pt.tmp")
    shutil.copyfile(tmp_path / "ckpt_prev.pt", tmp_path / "ckpt.pt")
    os.link(tmp_path / "ckpt.pt", tmp_path / "ckpt_prev.pt.tmp")
    assert iterations(tmp_path) == [2, 3]
    ckpt.CheckpointWriter(str(tmp_path))
    assert iterations(tmp_path) == [2]
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]


def test_shards_whose_removal_was_killed_are_swept(tmp_path, monkeypatch):
    for iteration in (1, 2):
        save_alone(tmp_path, iteration)

    def killed(path):
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(SystemExit):
            save_alone(tmp_path, 3)
    assert iterations(tmp_path) == [1, 2, 3]
    ckpt.CheckpointWriter(str(tmp_path))
    assert iterations(tmp_path) == [2, 3]
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]


def test_what_went_wrong_afterwards_is_told_but_the_checkpoint_is_written(tmp_path, monkeypatch):
    for iteration in (1, 2):
        save_alone(tmp_path, iteration)

    def cannot(path, **_):
        raise PermissionError(f"{path} cannot be removed")

    monkeypatch.setattr(shutil, "rmtree", cannot)
    writer = ckpt.CheckpointWriter(str(tmp_path), format="sharded")
    model = make_toy()
    writer.save(model, torch.optim.AdamW(model.param_groups()), {**VALUES, "iter_num": 3})
    [outcome] = writer.outcomes()
    assert outcome.iter_num == 3
    assert "is written, but" in outcome.warning
    assert ckpt.load(str(tmp_path / "ckpt.pt"))["iter_num"] == 3


def test_a_commit_that_fails_leaves_nothing(tmp_path, monkeypatch):
    save_alone(tmp_path, 1)
    before = sorted(os.listdir(tmp_path))

    def cannot(source, target):
        raise OSError("no more names")

    monkeypatch.setattr(os, "replace", cannot)
    save_alone(tmp_path, 2)
    assert sorted(os.listdir(tmp_path)) == before


def save_where_one_rank_cannot(folder):
    model, optimizer = build_toy("sharded")
    train(model, optimizer, rank=0, steps=1)
    writer = ckpt.CheckpointWriter(folder, format="sharded")
    writer.save(model.module, optimizer, VALUES)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))  # bytes per file
    writer.save(model.module, optimizer, {**VALUES, "iter_num": 8})
    *written, failed = writer.outcomes()
    assert isinstance(failed, OSError)
    assert "rank 1 cannot write" in str(failed)
    assert "File too large" in str(failed)
    return len(written)


def test_when_one_rank_cannot_write_all_go_on_and_the_old_one_stands(tmp_path):
    assert run_ranks(save_where_one_rank_cannot, 2, str(tmp_path)) == [1, 0], "rank 0 reports what was written"
    assert sorted(os.listdir(tmp_path))[0] == "ckpt.pt"
    assert len(os.listdir(tmp_path)) == 2, "what was begun is gone"
    path, warning = ckpt.find(str(tmp_path))
    assert warning is None
    assert ckpt.load(path)["iter_num"] == 4


def save_where_one_rank_has_diverged(folder):
    """What each rank refused: rank 1 alone sees the nan, in the last of its slices."""
    model, optimizer = build_toy("sharded")
    writer = ckpt.CheckpointWriter(folder, format="sharded", background=True)
    for diverged in (False, True):
        if diverged and dist.get_rank() == 1:
            with torch.no_grad():
                optimizer.owned[-1].local.fill_(float("nan"))
        writer.save(model.module, optimizer, VALUES)
        writer.wait()
    return [str(outcome) for outcome in writer.outcomes() if isinstance(outcome, ckpt.DivergedError)]


def test_what_one_rank_finds_not_to_be_finite_all_refuse(tmp_path):
    on_0, on_1 = run_ranks(save_where_one_rank_has_diverged, 2, str(tmp_path))
    assert on_0 == on_1
    assert len(on_0) == 1
    assert on_0[0].endswith(" is not finite")
    assert len(os.listdir(tmp_path)) == 2, "ckpt.pt and its shards; nothing was begun"
    assert all(tensor.isfinite().all() for tensor in ckpt.load(ckpt.find(str(tmp_path))[0])["model"].values())


# -- damage ------------------------------------------------------------------------------------------------------------


def test_damaged_shards(tmp_path, monkeypatch, capsys):
    """Each falls back to the checkpoint before, or is named in one line."""
    save_alone(tmp_path, 1)
    save_alone(tmp_path, 2)
    [shards] = [tmp_path / name for name in os.listdir(tmp_path) if name.startswith("shards_00000002")]
    rng, count = random.Random(0), 0
    assert sorted(os.listdir(shards)) == [".metadata", "__0_0.distcp"]
    before = sorted(set(os.listdir(tmp_path)) - {shards.name})
    for name in os.listdir(shards):
        whole = (shards / name).read_bytes()
        damages = [None, b"", whole + b"more"]
        for _ in range(20):
            position = rng.randrange(len(whole))
            damages.append(whole[:position])
            damages.append(whole[:position] + bytes([whole[position] ^ (1 << rng.randrange(8))]) + whole[position + 1 :])
        for damage in damages:
            os.remove(shards / name) if damage is None else (shards / name).write_bytes(damage)
            path, warning = ckpt.find(str(tmp_path))
            assert ckpt.load(path)["iter_num"] == 1
            assert "\n" not in warning
            assert str(shards / name) in warning
            count += 1
        (shards / name).write_bytes(whole)
    assert count == 86
    assert ckpt.find(str(tmp_path)) == (str(tmp_path / "ckpt.pt"), None)
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", "ckpt.pt"]) == 0
    shown = capsys.readouterr().out
    assert "sharded, format 1" in shown
    assert "files with a checksum each" in shown
    shutil.rmtree(shards)
    for arguments, warning in (
        (["inspect", "ckpt.pt"], "there is no"),
        (["convert", "ckpt.pt", "other.pt"], "there is no"),
        (["convert", "ckpt_prev.pt", "ckpt.pt"], "exists"),
        (["convert", "ckpt_prev.pt", "other"], "does not end in .pt"),
        (["convert", "ckpt_prev.pt", "nowhere/other.pt"], "No such file"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert warning in error
        assert error.count("\n") == 1
    assert sorted(os.listdir()) == before


class Hostile:
    def __reduce__(self):
        return os.system, ("touch hostile-code-ran",)


def with_true_checksums(path, shards):
    """Someone who means harm takes care that checksums hold."""
    checkpoint = torch.load(path, weights_only=True)
    sums = {name: list(file_sum(str(shards / name))) for name in os.listdir(shards)}
    torch.save({**checkpoint, "shards": {"folder": shards.name, "files": sums}}, path)


def test_shards_that_ask_for_code_are_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, optimizer = save_alone(tmp_path, 1)
    path = str(tmp_path / "ckpt.pt")
    [shards] = [tmp_path / name for name in os.listdir(tmp_path) if name.startswith("shards_")]
    contents, checkpoint = (shards / ".metadata").read_bytes(), ckpt.load(path)
    assert FileSum(*read_file(path)["shards"]["files"][".metadata"]) == file_sum(str(shards / ".metadata"))

    (shards / ".metadata").write_bytes(pickle.dumps(Hostile()))
    with_true_checksums(path, shards)
    ckpt.verify(path)
    for attempt in (
        lambda: ckpt.load(path),
        lambda: ckpt.restore(optimizer, checkpoint["optimizer"], ckpt.chunk_reader(path, checkpoint)),
    ):
        with pytest.raises(ckpt.CheckpointError, match=r"asks for posix\.system"):
            attempt()

    (shards / ".metadata").write_bytes(contents)
    torch.save(Hostile(), shards / "__0_0.distcp")
    with_true_checksums(path, shards)
    for attempt in (
        lambda: ckpt.load(path),
        lambda: ckpt.restore(optimizer, checkpoint["optimizer"], ckpt.chunk_reader(path, checkpoint)),
    ):
        with pytest.raises(ckpt.CheckpointError, match=r"shards_00000001.* is damaged|posix\.system"):
            attempt()
    assert not os.path.exists("hostile-code-ran")


class GetAttr:
    def __init__(self, owner, name):
        self.arguments = owner, name

    def __reduce__(self):
        return getattr, self.arguments


def test_memory_formats_are_read_from_every_python(tmp_path):
    """Some pickle an Enum by getattr, which is admitted for that alone."""
    kind = torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING
    for pickled in (kind.TORCH_CHANNELS_LAST, GetAttr(kind, "TORCH_CHANNELS_LAST")):
        assert _Unpickler(io.BytesIO(pickle.dumps(pickled))).load() is kind.TORCH_CHANNELS_LAST
    with pytest.raises(pickle.UnpicklingError, match=r"builtins\.getattr"):
        _Unpickler(io.BytesIO(pickle.dumps(GetAttr(torch.Size, "numel")))).load()
    with pytest.raises(KeyError):
        _Unpickler(io.BytesIO(pickle.dumps(GetAttr(kind, "mro")))).load()


def test_a_file_that_does_not_say_where_its_tensors_are(tmp_path):
    _, optimizer = save_alone(tmp_path, 1)
    path = str(tmp_path / "ckpt.pt")
    whole = torch.load(path, weights_only=True)
    for shards in (
        3,
        {},
        {"folder": 3, "files": {}},
        {"folder": "x", "files": {"y": 3}},
        {"folder": "x", "files": {3: [1, 2]}},
    ):
        torch.save({**whole, "shards": shards}, path)
        with pytest.raises(ckpt.CheckpointError, match="wrong or missing in it: shards"):
            ckpt.load(path)
    torch.save({key: value for key, value in whole.items() if key != "shards"}, path)
    with pytest.raises(ckpt.CheckpointError, match="does not say where its tensors are"):
        ckpt.load(path)
    torch.save({**whole, "model": {"other": torch.empty(3, device="meta")}}, path)
    with pytest.raises(ckpt.CheckpointError, match=r"no tensor model\.other of 3 elements"):
        ckpt.load(path)
    whole["optimizer"]["state"][0]["exp_avg"] = torch.empty(11, 7, device="meta")
    whole["optimizer"]["state"][0]["other"] = torch.empty(11, 7, device="meta")
    torch.save(whole, path)
    with pytest.raises(ckpt.CheckpointError, match=r"no tensor optimizer\.state\.0\.other of 77 elements"):
        restore(optimizer, path)


def test_a_single_process_goes_on(tmp_path):
    model, optimizer = save_alone(tmp_path, 1)
    other = make_toy(seed=9)
    resumed = torch.optim.AdamW(other.param_groups(), lr=0.5)
    other.load_state_dict(restore(resumed, str(tmp_path / "ckpt.pt"))["model"])
    assert_equal(resumed.state_dict(), optimizer.state_dict())
    assert_equal(weights(other), weights(model))
