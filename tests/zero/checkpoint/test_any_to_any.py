"""A checkpoint of any implementation at any world size goes on in any other as if the optimizer had never been interrupted."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from toy import MODES, assert_equal, largest_difference, make_toy, train, weights

from zero import checkpoint as ckpt
from zero.build import build
from zero.flags import Flags

STEPS = 4  # before and after the save
ALL_MODES = {**MODES, "bfloat16": Flags(param_dtype="bfloat16", bucket_mb=0.0002), "hybrid": Flags(bucket_mb=0.0002)}
ALL_MODES["codecs"] = replace(ALL_MODES["bfloat16"], param_dtype="bfloat16_remainder", state_dtype="int8")
PLACES = [(mode, world_size) for world_size in (1, 2, 3, 4) for mode in ALL_MODES]
PLACES_OF_MUON = [(f"muon {mode}", world_size) for mode, world_size in PLACES]


def flags_of(mode):
    groups_of = max(1, dist.get_world_size() // 2)
    return replace(ALL_MODES[mode], shard_size=groups_of) if mode == "hybrid" else ALL_MODES[mode]


def make(mode, seed):
    model = make_toy(seed)
    model.unused.requires_grad_(False)  # DistributedDataParallel refuses parameters without a gradient
    groups = model.param_groups(muon=mode.startswith("muon "))
    return model, *build(model, groups, flags_of(mode.removeprefix("muon ")), lr=0.01, betas=(0.9, 0.95))


def save(mode, folder):
    """Every rank trains on the same batches, so that the world size does not matter; a folder for each format."""
    module, model, optimizer = make(mode, seed=0)
    train(model, optimizer, rank=0, steps=STEPS)
    for format in ckpt.FORMATS:
        writer = ckpt.CheckpointWriter(f"{folder}/{format}", format=format)
        writer.save(module, optimizer, {"model_args": {}, "iter_num": STEPS, "best_val_loss": 0.0, "config": {}})
        assert not [outcome for outcome in writer.outcomes() if isinstance(outcome, OSError)]
    dist.barrier()


def resume(mode, folders):
    """The weights after each of the checkpoints has gone on here, in full precision; on rank 0."""
    after = []
    for folder in (f"{folder}/{format}" for folder in folders for format in ckpt.FORMATS):
        module, model, optimizer = make(mode, seed=99)
        path, _ = ckpt.find(folder)
        checkpoint = ckpt.load(path)
        module.load_state_dict(checkpoint["model"])
        ckpt.restore(optimizer, checkpoint["optimizer"], ckpt.chunk_reader(path, checkpoint))
        train(model, optimizer, rank=0, steps=STEPS, first=STEPS)
        after.append(ckpt.model_state_dict(module, optimizer))
        del module, model, optimizer
    return after


def uninterrupted(mode="adamw"):
    _, model, optimizer = make(mode, seed=0)
    train(model, optimizer, rank=0, steps=2 * STEPS)
    return weights(model)


@pytest.fixture(scope="module")
def reference():
    return run_ranks(uninterrupted, 1)[0]


@pytest.fixture(scope="module")
def reference_of_muon():
    return run_ranks(uninterrupted, 1, "muon adamw")[0]


def check(after, reference, *places):
    """Equal numbers add up exactly on 1, 2 and 4 ranks; on 3 their mean is rounded; bfloat16 differs, and 8 bits."""
    is_muon = places[0][0].startswith("muon ")
    trained = {name for name in reference if not name.startswith(("frozen", "unused"))}
    difference = largest_difference(*({name: each[name] for name in trained} for each in (after, reference)))
    if any(mode.endswith(("bfloat16", "codecs")) for mode, _ in places):
        assert difference < 0.03, places
    else:
        assert difference <= ((1e-5 if is_muon else 1e-6) if 3 in [world_size for _, world_size in places] else 0.0), places


def make_folder(place):
    for format in ckpt.FORMATS:
        (place / format).mkdir()
    return str(place)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("sharded", 2), ("adamw", 1)),
        (("torch", 3), ("sharded", 4)),
        (("gradients", 4), ("torch", 2)),
        (("adamw", 2), ("bfloat16", 3)),
        (("bfloat16", 4), ("gradients", 2)),
        (("bfloat16", 2), ("bfloat16", 1)),
        (("codecs", 2), ("sharded", 4)),
        (("adamw", 1), ("codecs", 3)),
        (("hybrid", 4), ("sharded", 2)),
        (("adamw", 1), ("hybrid", 4)),
    ],
    ids=str,
)
def test_some(source, target, reference, tmp_path):
    one_pair(source, target, reference, tmp_path)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("sharded", 4), ("sharded", 3)),
        (("sharded", 4), ("adamw", 1)),
        (("adamw", 1), ("sharded", 2)),
        (("torch", 2), ("gradients", 4)),
        (("hybrid", 4), ("torch", 3)),
        (("codecs", 2), ("bfloat16", 3)),
    ],
    ids=str,
)
def test_some_with_muon(source, target, reference_of_muon, tmp_path):
    one_pair(*((f"muon {mode}", world_size) for mode, world_size in (source, target)), reference_of_muon, tmp_path)


def one_pair(source, target, reference, tmp_path):
    run_ranks(save, source[1], source[0], make_folder(tmp_path))
    from_one_file, from_shards = run_ranks(resume, target[1], target[0], [str(tmp_path)])[0]
    check(from_one_file, reference, source, target)
    assert_equal(from_shards, from_one_file)


@pytest.mark.slow("all pairs of implementations and world sizes; test_some has some", seconds=600)
def test_all(reference, tmp_path_factory):
    all_pairs(PLACES, reference, tmp_path_factory)


@pytest.mark.slow("all pairs of implementations and world sizes; test_some_with_muon has some", seconds=600)
def test_all_with_muon(reference_of_muon, tmp_path_factory):
    all_pairs(PLACES_OF_MUON, reference_of_muon, tmp_path_factory)


def all_pairs(places, reference, tmp_path_factory):
    folders = []
    for mode, world_size in places:
        folders.append(make_folder(tmp_path_factory.mktemp(f"{mode.replace(' ', '_')}{world_size}")))
        run_ranks(save, world_size, mode, folders[-1])
    for mode, world_size in places:
        after = run_ranks(resume, world_size, mode, folders)[0]
        for source, from_one_file, from_shards in zip(places, after[::2], after[1::2], strict=True):
            check(from_one_file, reference, source, (mode, world_size))
            assert_equal(from_shards, from_one_file)


def test_the_reference_has_learned(reference):
    assert largest_difference(reference, weights(make_toy(0))) > 0.01
    assert all(tensor.dtype == torch.float32 for tensor in reference.values())
