"""zero/checkpoint/chunks.py: tensors are written in pieces and read in other pieces; damaged or hostile files are refused."""

import enum
import os
import pickle
import random

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from contents import VALUES, Hostile, restore, save_alone
from ranks import run_ranks
from toy import assert_equal, batch, make_toy, weights

from zero import ShardedOptimizer
from zero import checkpoint as ckpt
from zero.checkpoint.chunks import read, write
from zero.checkpoint.files import FileSum, file_sum
from zero.checkpoint.format import read as read_file
from zero.checkpoint.state import TensorChunk


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


def test_a_single_process_goes_on(tmp_path):
    model, optimizer = save_alone(tmp_path, 1)
    other = make_toy(seed=9)
    resumed = torch.optim.AdamW(other.param_groups(), lr=0.5)
    other.load_state_dict(restore(resumed, str(tmp_path / "ckpt.pt"))["model"])
    assert_equal(resumed.state_dict(), optimizer.state_dict())
    assert_equal(weights(other), weights(model))


def test_only_one_file_holds_parameters_with_any_strides(tmp_path):
    def build(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last), torch.nn.Linear(3, 5))
        model[1].weight.data = model[1].weight.data.t().contiguous().t()
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    model, optimizer = build(1)
    model(torch.randn(2, 3, 4, 4)).square().sum().backward()
    optimizer.step()
    with pytest.raises(ckpt.CheckpointError, match="shards hold contiguous parameters, consolidated files hold any"):
        ckpt.CheckpointWriter(str(tmp_path), format="sharded").save(model, optimizer, VALUES)
    ckpt.CheckpointWriter(str(tmp_path)).save(model, optimizer, VALUES)
    other, resumed = build(2)
    other.load_state_dict(restore(resumed, str(tmp_path / "ckpt.pt"))["model"])
    assert_equal(resumed.state_dict(), optimizer.state_dict())
    assert_equal(weights(other), weights(model))
    strides = [[state["exp_avg"].stride() for state in each.state.values()] for each in (optimizer, resumed)]
    assert strides[0] == strides[1] == [param.stride() for param in model.parameters()]


def test_damaged_shards(tmp_path):
    """Each falls back to the checkpoint before, and is named in one line."""
    save_alone(tmp_path, 1)
    save_alone(tmp_path, 2)
    [shards] = [tmp_path / name for name in os.listdir(tmp_path) if name.startswith("shards_00000002")]
    rng, count = random.Random(0), 0
    assert sorted(os.listdir(shards)) == [".metadata", "__0_0.distcp"]
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


def with_true_checksums(path, shards):
    """An attacker would see to it that the checksums hold."""
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


class ByGetattr(pickle.Pickler):
    """Pickles an Enum by getattr, as Python 3.11 does before 3.11.4, with `name` in place of the member's if it is given."""

    def __init__(self, file, kind=None, name=None):
        super().__init__(file)
        self.kind, self.name = kind, name

    def reducer_override(self, value):
        if not isinstance(value, enum.Enum):
            return NotImplemented
        return getattr, (self.kind or type(value), self.name or value.name)


def test_memory_formats_are_read_from_every_python(tmp_path, monkeypatch):
    """getattr is admitted in a table of contents for this alone."""
    pieces = [TensorChunk.of_whole("weight", torch.arange(6.0))]
    write(pieces, str(tmp_path), None)
    contents = tmp_path / ".metadata"
    table = pickle.loads(contents.read_bytes())
    table.state_dict_metadata["weight"].properties.memory_format = torch.channels_last
    found = []
    load = dcp.load

    def noted(state_dict, storage_reader, **how):
        found.append(storage_reader.read_metadata().state_dict_metadata["weight"].properties.memory_format)
        load(state_dict, storage_reader=storage_reader, **how)

    monkeypatch.setattr(dcp, "load", noted)

    def read_after(pickler, **kwargs):
        with open(contents, "wb") as file:
            pickler(file, **kwargs).dump(table)
        target = torch.zeros(6)
        read(str(tmp_path), [TensorChunk.of_whole("weight", target)])
        assert torch.equal(target, torch.arange(6.0))

    read_after(pickle.Pickler)
    read_after(ByGetattr)
    assert found == [torch.channels_last] * 2
    with pytest.raises(ckpt.CheckpointError, match=r"asks for builtins\.getattr"):
        read_after(ByGetattr, kind=torch.Size, name="numel")
    with pytest.raises(ckpt.CheckpointError, match="is damaged, or not a checkpoint: 'mro'"):
        read_after(ByGetattr, name="mro")
    assert len(found) == 2


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
