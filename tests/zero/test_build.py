"""zero/build.py: which classes the flags choose, which flags are refused, and what the console says."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_in_turn
from toy import MODES, build_toy, make_toy

from forecast.modes import without_effect
from run.memory_meter import describe
from zero.build import build
from zero.flags import Flags

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


def test_without_a_process_group_there_is_no_wrapper():
    model = make_toy()
    built, optimizer = build(model, model.param_groups(), lr=0.01)
    assert built is model
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults["fused"]


def flags_that_do_not_go_together():
    model = make_toy()
    groups = model.param_groups()
    for flags, message in (
        ({"zero1_impl": "other"}, "zero1_impl='other' is not one of sharded, torch"),
        ({"param_dtype": "float8"}, "param_dtype='float8' is not one of float32, bfloat16, bfloat16_remainder"),
        ({"bucket_mb": 0}, "bucket_mb=0 must be 'auto' or a positive number"),
        ({"bucket_mb": "large"}, "bucket_mb='large' must be 'auto' or a positive number"),
    ):
        with pytest.raises(ValueError, match=message):
            build(model, groups, Flags(**flags))
    with pytest.raises(ValueError, match="Invalid learning rate"):
        build(model, groups, lr=-1.0)
    for others in ({"use_zero1": False}, {"zero1_impl": "torch"}):
        for name, value in (("param_dtype", "bfloat16"), ("state_dtype", "int8"), ("shard_gradients", True), ("shard_size", 2)):
            with pytest.raises(ValueError, match=f"{name}={value} needs use_zero1=True, zero1_impl='sharded'"):
                build(model, groups, Flags(**others, **{name: value}))


def test_what_is_built():
    run_in_turn(1, the_flags_choose_the_classes)
    run_in_turn(2, the_flags_choose_the_classes, flags_that_do_not_go_together)
