"""zero/build.py: which classes the flags choose, which flags are refused, and what the console says."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ranks import run_in_turn, run_ranks
from toy import MODES, assert_equal, batch, build_toy, largest_difference, make_toy, train, weights

from run.memory_meter import describe
from zero import ShardedDataParallel, ShardedOptimizer
from zero.build import build, clip_grad_norm_, move
from zero.checkpoint.state import model_state_dict
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
        names, line = (type(model).__name__, type(optimizer).__name__), describe(optimizer, MODES[mode].use_zero1)
        assert names == CLASSES[mode if dist.get_world_size() > 1 else "adamw"]
        if mode == "adamw":
            assert line == "Using plain AdamW: 0.0 MB of optimizer state on each rank"
        elif dist.get_world_size() == 1:
            assert line.startswith("Using plain AdamW (use_zero1 and its settings need more than one process; start with ")
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


def built_from_rank_0(mode):
    """The weights after a step, of a model that has weights on rank 0 only until it is built."""
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        model = make_toy()
    model.unused.requires_grad_(False)
    params = list(model.parameters())
    wrapped, optimizer = build(model, model.param_groups(), BUILT[mode], device=torch.device("cpu"), lr=0.01)
    assert all(one is other for one, other in zip(params, model.parameters(), strict=True))
    assert model.head.weight is model.embedding.weight
    train(wrapped, optimizer, rank=0, steps=2)
    return model_state_dict(model, optimizer) or weights(model)


BUILT = {**MODES, "codecs": Flags(bucket_mb=0.0002, param_dtype="bfloat16_remainder", state_dtype="int8")}


def test_only_rank_0_needs_weights():
    on_one, on_two = (run_in_turn(world_size, *(partial(built_from_rank_0, mode) for mode in BUILT)) for world_size in (1, 2))
    for mode, (alone,), results in zip(BUILT, on_one, on_two, strict=True):
        for after in results:
            assert largest_difference(after, alone) <= (0.01 if mode == "codecs" else 0.0), mode


def weights_that_rank_0_cannot_send():
    rank, cpu = dist.get_rank(), torch.device("cpu")
    for on_meta, device, frozen in ((0, cpu, False), (1, None, False), (1, cpu, True)):
        with torch.device("meta" if rank == on_meta else "cpu"):
            layers = torch.nn.Linear(2, 3).requires_grad_(not frozen), torch.nn.Linear(3, 2)
        with pytest.raises(ValueError, match="on the meta device; only trainable parameters of ranks other than 0"):
            ShardedOptimizer([param for layer in layers for param in layer.parameters()], torch.optim.AdamW, device=device)


def double(param):
    param.grad.mul_(2)


class Peculiar(torch.nn.Module):
    """Gradient hooks, an RNN with its weak references to weights, and buffers; `spoil` adds what has no place elsewhere."""

    def __init__(self, spoil=lambda module: None):
        super().__init__()
        torch.manual_seed(0)
        self.recurrent, self.head = torch.nn.GRU(5, 6, batch_first=True), torch.nn.Linear(6, 1)
        self.register_buffer("scale", torch.full((5,), 2.0))
        self.register_buffer("offset", torch.arange(5.0), persistent=False)
        first, second = torch.arange(6.0).chunk(2)  # in one storage
        self.register_buffer("first", first)
        self.register_buffer("second", second)
        self.register_buffer("trained", torch.ones(2, requires_grad=True))
        self.head.weight.register_hook(lambda gradient: 3 * gradient)
        self.handle = self.head.bias.register_hook(lambda gradient: 0 * gradient)
        self.recurrent.weight_hh_l0.register_post_accumulate_grad_hook(double)
        spoil(self)

    def forward(self, x):
        return self.head(self.recurrent(x * self.scale + self.offset)[0]).square().mean()


def trained_with_hooks(on_meta, implementation):
    with torch.device("meta" if on_meta and dist.get_rank() else "cpu"):
        module = Peculiar()
    flags = Flags(use_zero1=implementation != "adamw", bucket_mb=0.0002)
    model, optimizer = build(module, [{"params": list(module.parameters())}], flags, device=torch.device("cpu"), lr=0.01)
    for step in range(4):
        if step == 2:
            module.handle.remove()
        model(torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(module)


def hooks_and_recurrent_layers_come_along_from_the_meta_device():
    for implementation in ("adamw", "sharded"):
        assert_equal(*(trained_with_hooks(on_meta, implementation) for on_meta in (True, False)))


SPOILED = {  # what is refused on all ranks, and how it is named
    "mask": (lambda module: setattr(module.head, "mask", torch.ones(3)), r"head\.mask is neither a parameter nor a buffer"),
    "list": (lambda module: setattr(module, "masks", [torch.ones(3)]), "masks is neither a parameter nor a buffer"),
    "view": (
        lambda module: module.register_buffer("part", module.scale[1:]),
        "there are views, results or a gradient of scale, which",
    ),
    "alias": (
        lambda module: module.register_buffer("own", module.head.weight.detach()),
        r"own and head\.weight share memory, which",
    ),
    "graph": (
        lambda module: setattr(module, "norm", module.head.weight.norm().clone),
        r"there are views, results or a gradient of head\.weight, which",
    ),
}


def buffers_that_are_not_broadcast():
    """Buffers of which each rank keeps its own have the values of rank 0 to begin with."""
    with torch.device("meta" if dist.get_rank() else "cpu"):
        module = torch.nn.BatchNorm1d(3)
    if not dist.get_rank():
        module.running_mean.fill_(7)
    move(module, torch.device("cpu"), trainable=False)
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.SGD, device=torch.device("cpu"))
    model = ShardedDataParallel(module, optimizer, broadcast_buffers=False)
    assert model.module.running_mean.tolist() == [7] * 3
    assert module.num_batches_tracked == 0
    with torch.device("meta" if dist.get_rank() else "cpu"):
        module = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"device=\.\.\. says where it will train"):
        build(module, [{"params": list(module.parameters())}], lr=0.1)
    with torch.device("meta"):
        module = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="rank 0 needs its values"):
        build(module, [{"params": list(module.parameters())}], device=torch.device("cpu"), lr=0.1)


def spoiled():
    for spoil, message in SPOILED.values():
        with torch.device("meta" if dist.get_rank() else "cpu"):
            module = Peculiar(spoil)
        with pytest.raises(ValueError, match=f"{message}.*build the model with values on all ranks"):
            build(module, [{"params": list(module.parameters())}], device=torch.device("cpu"), lr=0.01)


def flags_that_do_not_go_together():
    model = make_toy()
    groups = model.param_groups()
    for flags, message in (
        ({"zero1_impl": "other"}, "zero1_impl='other' is not one of sharded, torch"),
        ({"param_dtype": "float8"}, "not one of float32, bfloat16"),
        ({"bucket_mb": 0}, "bucket_mb=0 must be positive"),
        ({"bucket_mb": "large"}, "bucket_mb='large' is neither 'auto' nor a number"),
    ):
        with pytest.raises(ValueError, match=message):
            build(model, groups, Flags(**flags))
    with pytest.raises(ValueError, match="Invalid learning rate"):
        build(model, groups, lr=-1.0)
    for others in ({"use_zero1": False}, {"zero1_impl": "torch"}):
        for flags, message in (
            ({"param_dtype": "bfloat16"}, "param_dtype=bfloat16 needs use_zero1=True"),
            ({"shard_gradients": True}, "shard_gradients=True needs use_zero1=True, zero1_impl='sharded'"),
        ):
            with pytest.raises(ValueError, match=message):
                build(model, groups, Flags(**others, **flags))


def norms_are_alike_in_every_mode():
    """The norm before clipping and the one after it, of one full gradient and of the same in shards."""
    found = {}
    for mode in MODES:
        model, optimizer = build_toy(mode)
        model(*batch(0, dist.get_rank())).backward()
        found[mode] = [clip_grad_norm_(optimizer, limit).total.item() for limit in (math.inf, 0.01, math.inf)]
    reference = found["adamw"]
    assert reference[0] == reference[1] > 0.1
    assert reference[2] == pytest.approx(0.01, rel=1e-3)
    for mode, norms in found.items():
        assert norms == pytest.approx(reference, rel=1e-6), mode


def test_what_is_built():
    run_ranks(the_flags_choose_the_classes, 1)
    run_in_turn(2, the_flags_choose_the_classes, norms_are_alike_in_every_mode, flags_that_do_not_go_together)


def test_models_on_the_meta_device():
    run_in_turn(
        2,
        hooks_and_recurrent_layers_come_along_from_the_meta_device,
        buffers_that_are_not_broadcast,
        weights_that_rank_0_cannot_send,
        spoiled,
    )
