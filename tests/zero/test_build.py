"""zero/build.py: which classes the flags choose, with several ranks and without torch.distributed; which flags are refused."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_in_turn
from toy import MODES, assert_equal, build_toy, make_toy, refused, train, weights

from forecast.modes import without_effect
from run.memory_meter import describe
from zero import checkpoint as ckpt
from zero.build import build
from zero.flags import Flags
from zero.held_bytes import held_bytes
from zero.tensors import from_dlpack

CLASSES = {
    "adamw": ("DistributedDataParallel", "AdamW"),
    "torch": ("DistributedDataParallel", "ZeroRedundancyOptimizer"),
    "sharded": ("ShardedDataParallel", "ShardedOptimizer"),
    "gradients": ("ShardedDataParallel", "ShardedOptimizer"),
}


def the_flags_choose_the_classes():
    for mode in MODES:
        model, optimizer = build_toy(mode)
        names = type(model).__name__, type(optimizer).__name__
        line = describe(optimizer, without_effect(MODES[mode], dist.get_world_size()))
        assert names == CLASSES[mode if dist.get_world_size() > 1 else "adamw"]
        if mode == "adamw" or dist.get_world_size() == 1:
            assert line.startswith("Using plain AdamW: 0.0 MB of optimizer state on each rank")
        else:
            name = "torch" if mode == "torch" else "sharded"
            assert line.startswith(f"Using ZeRO-1 optimizer state sharding: zero1_impl='{name}' ({names[1]}) over 2 ranks, ")
            assert line.endswith("; plain AdamW would hold 0.0 MB on each")


def flags_that_do_not_go_together():
    model = make_toy()
    groups, mps = model.param_groups(), torch.device("mps")
    dtypes = "auto, float32, bfloat16, bfloat16_remainder"
    refused(ValueError, "zero1_impl='other' is not one of sharded, torch", Flags, zero1_impl="other")
    refused(ValueError, f"param_dtype='float8' is not one of {dtypes}", Flags, param_dtype="float8")
    refused(ValueError, "bucket_mb=0 must be 'auto' or a positive number", Flags, bucket_mb=0)
    refused(ValueError, "bucket_mb='large' must be 'auto' or a positive number", Flags, bucket_mb="large")
    message = "param_dtype and state_dtype do not support device=mps"
    refused(ValueError, message, build, model, groups, Flags(state_dtype="int8"), device=mps)
    refused(ValueError, "Invalid learning rate", build, model, groups, lr=-1.0)
    for others in ({"use_zero1": False}, {"zero1_impl": "torch"}):
        for name, value in (("param_dtype", "bfloat16"), ("state_dtype", "int8"), ("shard_gradients", True), ("shard_size", 2)):
            message = f"{name}={value} needs use_zero1=True, zero1_impl='sharded'"
            refused(ValueError, message, build, model, groups, Flags(**others, **{name: value}))


def test_what_is_built():
    run_in_turn(1, the_flags_choose_the_classes)
    run_in_turn(2, the_flags_choose_the_classes, flags_that_do_not_go_together)


# -- without torch.distributed ------------------------------------------------------------------------------------------


def test_without_a_process_group_there_is_no_wrapper():
    model = make_toy()
    built, optimizer = build(model, model.param_groups(), lr=0.01)
    assert built is model
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults["fused"]


def built(muon=False, **flags):
    assert not dist.is_initialized()
    return build_toy(Flags(bucket_mb=0.0002, **flags), muon=muon, freeze=False, overlap=["hidden"])


@pytest.mark.parametrize(
    ("flags", "implementation", "idle"),
    [
        ({}, "adamw", ["use_zero1=True"]),
        ({"use_zero1": False}, "adamw", []),
        ({"zero1_impl": "torch"}, "adamw", ["use_zero1=True", "zero1_impl=torch"]),
        ({"shard_gradients": True, "shard_size": 8}, "adamw", ["shard_size=8", "use_zero1=True", "shard_gradients=True"]),
        ({"param_dtype": "bfloat16", "shard_gradients": True}, "sharded", []),
        ({"state_dtype": "int8", "shard_gradients": True, "bucket_mb": 1.0}, "sharded", ["shard_gradients=True"]),
        ({"param_dtype": "bfloat16_remainder", "state_dtype": "int8", "shard_size": 8}, "sharded", ["shard_size=8"]),
    ],
)
def test_which_flags_act(flags, implementation, idle):
    assert Flags(**flags).implementation(1) == implementation
    assert without_effect(Flags(**flags), 1) == idle
    assert without_effect(Flags(**flags), 2) == []


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("muon", [False, True])
def test_remainders_are_float32_masters(muon):
    """Bit for bit, in half the bytes."""
    ends, held = [], []
    for param_dtype in ("bfloat16", "bfloat16_remainder"):
        model, optimizer = built(muon, param_dtype=param_dtype)
        train(model, optimizer, 0, steps=20, clip=0.01)
        ends.append([weights(model), ckpt.model_state_dict(model.module, optimizer), ckpt.consolidate(optimizer)])
        held.append(held_bytes(optimizer)["master"])
    assert held[0] == 2 * held[1] > 0
    assert_equal(*ends)
    assert {tensor.dtype for name, tensor in ends[0][0].items()} == {torch.bfloat16}


def test_parameters_move_while_their_gpu_is_the_current_one(monkeypatch):
    """DLPack refuses to export the memory of another one."""
    calls = mock.MagicMock(**{"export.side_effect": from_dlpack})
    monkeypatch.setattr(torch.cuda, "device_of", calls.device_of)
    monkeypatch.setattr("zero.tensors.from_dlpack", calls.export)
    _, optimizer = built(param_dtype="bfloat16")
    each = ["device_of", "device_of().__enter__", "export", "device_of().__exit__"]
    assert [name for name, *_ in calls.mock_calls] == each * len(optimizer.placed.number_of)
    assert calls.device_of.call_args_list == calls.export.call_args_list, "of the same tensor"
