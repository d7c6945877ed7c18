"""zero/checkpoint/chunks.py: tensors are written in pieces and read in other pieces; damaged or hostile files are refused."""

import enum
import os
import pickle
import random
import re
import zlib

import pytest
import torch
import torch.distributed as dist
from contents import VALUES, Hostile, damaged, restore, save_alone
from ranks import run_ranks
from torch.distributed.optim import ZeroRedundancyOptimizer
from toy import assert_equal, make_toy, train

from zero import checkpoint as ckpt
from zero.checkpoint.chunks import read_chunks, write_chunks
from zero.checkpoint.files import file_sum
from zero.checkpoint.format import read_file
from zero.checkpoint.state import TensorChunk


def rows_and_columns(folder):
    """Adafactor keeps a row and a column per matrix, which belong to no element."""
    toy, oracle = make_toy(), make_toy()
    trainable = [param for param in toy.parameters() if param.requires_grad]
    sharded = ZeroRedundancyOptimizer(trainable, torch.optim.Adafactor, lr=0.01)
    plain = torch.optim.Adafactor([param for param in oracle.parameters() if param.requires_grad], lr=0.01)
    for model, optimizer in ((toy, sharded), (oracle, plain)):
        train(model, optimizer, rank=0, steps=3, decay_lr=False)
    writer = ckpt.CheckpointWriter(folder, format="sharded")
    writer.write(toy, sharded, VALUES)
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


def test_damaged_shards(tmp_path):
    """Each falls back to the checkpoint before, and is named in one line."""
    save_alone(tmp_path, 1, 2)
    [shards] = [tmp_path / name for name in os.listdir(tmp_path) if name.startswith("shards_00000002")]
    rng, count = random.Random(0), 0
    assert sorted(os.listdir(shards)) == [".metadata", "__0_0.distcp"]
    for name in os.listdir(shards):
        whole = (shards / name).read_bytes()
        for damage in [None, b"", whole + b"more", *damaged(whole, rng, 20)]:
            os.remove(shards / name) if damage is None else (shards / name).write_bytes(damage)
            path, warning = ckpt.find(str(tmp_path))
            assert ckpt.load(path)["iter_num"] == 1
            assert "\n" not in warning
            place, count = re.escape(str(shards / name)), count + 1
            assert re.search(
                rf"there is no {place}|{place} has \d+ bytes instead of {len(whole)}|checksum of {place} does", warning
            )
        (shards / name).write_bytes(whole)
    assert count == 86
    assert ckpt.find(str(tmp_path)) == (str(tmp_path / "ckpt.pt"), None)


def with_true_checksums(path, shards):
    """An attacker would see to it that the checksums match."""
    checkpoint = torch.load(path, weights_only=True)
    sums = {name: list(file_sum(str(shards / name))) for name in os.listdir(shards)}
    torch.save({**checkpoint, "shards": {"folder": shards.name, "files": sums}}, path)


def test_shards_that_ask_for_code_are_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, optimizer = save_alone(tmp_path, 1)
    path = str(tmp_path / "ckpt.pt")
    [shards] = [tmp_path / name for name in os.listdir(tmp_path) if name.startswith("shards_")]
    contents, checkpoint = (shards / ".metadata").read_bytes(), ckpt.load(path)
    assert read_file(path)["shards"]["files"][".metadata"] == [len(contents), zlib.crc32(contents)]

    def is_refused(message):
        with_true_checksums(path, shards)
        ckpt.verify(path)
        with pytest.raises(ckpt.CheckpointError, match=message):
            ckpt.load(path)
        with pytest.raises(ckpt.CheckpointError, match=message):
            ckpt.restore(optimizer, checkpoint["optimizer"], ckpt.chunk_reader(path, checkpoint))

    (shards / ".metadata").write_bytes(pickle.dumps(Hostile()))
    is_refused(r"asks for posix\.system")
    (shards / ".metadata").write_bytes(contents)
    torch.save(Hostile(), shards / "__0_0.distcp")
    is_refused(r"shards_00000001.* is damaged|posix\.system")
    assert not os.path.exists("hostile-code-ran")


class ByGetattr(pickle.Pickler):
    """Pickles an Enum by getattr, as Python 3.11 does before 3.11.4: `kind` and `name` stand in place of the member's."""

    kind = name = None

    def reducer_override(self, value):
        return (
            (getattr, (self.kind or type(value), self.name or value.name)) if isinstance(value, enum.Enum) else NotImplemented
        )


def test_memory_formats_are_read_from_every_python(tmp_path):
    """getattr is admitted in a table of contents for this alone."""
    write_chunks([TensorChunk.of_whole("weight", torch.arange(6.0))], str(tmp_path), None)
    table = pickle.loads((tmp_path / ".metadata").read_bytes())
    table.state_dict_metadata["weight"].properties.memory_format = torch.channels_last

    def read_after(**changed):
        with open(tmp_path / ".metadata", "wb") as file:
            pickler = ByGetattr(file)
            vars(pickler).update(changed)
            pickler.dump(table)
        found = torch.zeros(6)
        read_chunks(str(tmp_path), [TensorChunk.of_whole("weight", found)])
        return found

    assert torch.equal(read_after(), torch.arange(6.0))
    with pytest.raises(ckpt.CheckpointError, match=r"asks for builtins\.getattr"):
        read_after(kind=torch.Size, name="numel")
    with pytest.raises(ckpt.CheckpointError, match="is damaged, or not a checkpoint: 'mro'"):
        read_after(name="mro")


def test_a_file_that_does_not_say_where_its_tensors_are(tmp_path):
    _, optimizer = save_alone(tmp_path, 1)
    path = str(tmp_path / "ckpt.pt")
    whole = torch.load(path, weights_only=True)
    wrong = 3, {}, {"folder": 3, "files": {}}, {"folder": "x", "files": {"y": 3}}, {"folder": "x", "files": {3: [1, 2]}}
    cases = [({**whole, "shards": shards}, "wrong or missing keys: shards") for shards in wrong]
    cases += [
        ({key: value for key, value in whole.items() if key != "shards"}, "does not say where its tensors are"),
        ({**whole, "model": {"other": torch.empty(3, device="meta")}}, r"no tensor model\.other of 3 elements"),
    ]
    for contents, message in cases:
        torch.save(contents, path)
        with pytest.raises(ckpt.CheckpointError, match=message):
            ckpt.load(path)
    whole["optimizer"]["state"][0]["exp_avg"] = torch.empty(11, 7, device="meta")
    whole["optimizer"]["state"][0]["other"] = torch.empty(11, 7, device="meta")
    torch.save(whole, path)
    with pytest.raises(ckpt.CheckpointError, match=r"no tensor optimizer\.state\.0\.other of 77 elements"):
        restore(optimizer, path)
