"""zero/codecs.py, zero/masters.py: state and masters in fewer bytes. Rounding, bytes, checkpoints, resumed runs."""

import copy
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_in_turn
from torch.nn import functional
from toy import assert_equal, batch, of_rank_0, refused, sharded_toy, train, weights

from zero import Muon, ShardedDataParallel, ShardedOptimizer
from zero import checkpoint as ckpt
from zero.codecs import BLOCK, STATE_CODECS, BFloat16, Encoded, Int8, encoded_nbytes
from zero.masters import Remainders, store_rounded

STEPS = 4
CODECS = {
    "masters": {"param_dtype": "bfloat16"},
    "bfloat16": {"state_dtype": "bfloat16"},
    "int8": {"state_dtype": "int8"},
    "remainder": {"param_dtype": "bfloat16_remainder"},
    "both": {"param_dtype": "bfloat16_remainder", "state_dtype": "int8"},
    # of classes that do not count steps
    "sgd": {"optimizer_cls": torch.optim.SGD, "momentum": 0.9, "state_dtype": "bfloat16"},
    "muon": {"optimizer_cls": Muon, "state_dtype": "bfloat16"},
}


def half_up(values):
    rounded = torch.empty_like(values, dtype=torch.bfloat16)
    store_rounded(values, rounded)
    return rounded


def half_up_by_numpy(values):
    """Apart from the code under test."""
    bits = values.numpy().view(np.uint32)
    return torch.from_numpy(np.asarray((bits + np.uint32(0x8000)) >> 16 << 16).view(np.float32)).bfloat16()


def encode(codec, values, step=0):
    """The encoded parts of values, of which the last block is filled with zeros."""
    padded = functional.pad(values, (0, -len(values) % codec.block))
    encoded = codec.empty(len(padded), values.device)
    codec.encode(padded, lambda: torch.tensor(step), encoded)
    return encoded


# -- arithmetic --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lowest", "codes"), [(0, 128), (-1, 64)])
def test_int8_rounds_to_the_nearest_code_of_the_dynamic_map(lowest, codes):
    exact = torch.empty(BLOCK * 64).uniform_(lowest, 1, generator=torch.Generator().manual_seed(0))
    exact[::BLOCK] = 1.0  # the scale
    error = (Int8().decode(encode(Int8(), exact)) - exact).abs().max()
    assert error < 0.75 * 0.9 / codes + 2**-9  # half a step below the largest code; the ratio is rounded to bfloat16 first


def values(numel, positive):
    """Numbers over ten powers of ten, with zeros."""
    generator = torch.Generator().manual_seed(numel)
    drawn = torch.randn(numel, generator=generator) * 10 ** (10 * torch.rand(numel, generator=generator) - 8)
    drawn[::7] = 0
    return drawn.abs() if positive else drawn


@pytest.mark.parametrize("positive", [True, False])
@pytest.mark.parametrize("numel", [1, 16, BLOCK, BLOCK + 16, 2**17 + 3 * BLOCK + 16])
@pytest.mark.parametrize("codec", [*filter(None, STATE_CODECS.values())])
def test_what_is_decoded_encodes_to_the_same_bytes(codec, numel, positive):
    """A checkpoint has what is decoded: a resumed run must hold the bytes of the run that was saved."""
    encoded = encode(codec, values(numel, positive), step=1)
    assert sum(part.nbytes for part in encoded) == encoded_nbytes(codec, numel)
    again = encode(codec, codec.decode(encoded), step=2)
    assert all(map(torch.equal, encoded, again))


@pytest.mark.parametrize("signs", [1, -1])
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.NAdam])
def test_int8_moves_no_weight_further_than_the_plain_class(cls, signs):
    """Gradients of 1 to 1e-30 share a block: the squares of some underflow, and their means would be larger than they are."""
    gradients = torch.tensor([10.0**-power for power in range(31)]).repeat(BLOCK // 31)
    gradients[::2] *= signs
    moved = []
    for state_dtype in ("float32", "int8"):
        param = torch.nn.Parameter(torch.zeros_like(gradients))
        more = {"momentum": 0.9} if cls is torch.optim.RMSprop else {}
        optimizer = ShardedOptimizer([param], cls, lr=1e-3, state_dtype=state_dtype, **more)
        for _ in range(20):
            param.grad = gradients.clone()
            optimizer.step()
            optimizer.zero_grad()
        moved.append(param.detach().abs())
    plain, rounded = moved
    assert (rounded <= 1.15 * plain).all(), (rounded / plain).max()
    assert (rounded >= 0.9 * plain)[gradients.abs() > 1e-3].all(), "large ones move as far"


def test_second_moments_in_int8_neither_decay_nor_grow_as_they_should():
    """The figures of docs/sharding.md: uniform moments without gradients, and moments whose gradients become larger."""
    beta2, codec = torch.tensor([0.95, 0.99, 0.999])[:, None, None], Int8()
    moments = torch.rand(16, BLOCK, generator=torch.Generator().manual_seed(0)).repeat(3, 1, 1)
    growing, square = torch.full((3, 1, BLOCK), 0.01), torch.full((BLOCK,), 0.09)
    for each in (growing[..., ::2], square[::2]):
        each[:] = 1
    for _ in range(2000):
        moments *= beta2
        moments[..., 0] = 1  # this holds the scale of the block
        both = torch.cat((moments, growing.lerp(square, 1 - beta2)), 1)
        moments, growing = codec.decode(encode(codec, both.view(-1))).view(both.shape).split((16, 1), 1)
    assert moments[..., 1:].mean((1, 2)).tolist() == pytest.approx([0.013, 0.31, 0.50], rel=0.05)
    assert (growing / square)[1:, 0, 1::2].mean(1).tolist() == pytest.approx([0.20, 0.11], rel=0.05)


def test_nan_and_infinity_survive():
    exact = torch.tensor([0x7FFFFFFF, -1, 0x7F800000, -0x800000], dtype=torch.int32).view(torch.float32)  # nan nan inf -inf
    with mock.patch("zero.codecs.rounding_noise", return_value=torch.full((4,), 65535)):
        (up,) = encode(BFloat16(), exact)
    for rounded in (up, half_up(exact)):
        assert rounded.isnan().tolist() == [True, True, False, False]
        assert rounded[2:].tolist() == [float("inf"), -float("inf")]
    assert Int8().decode(encode(Int8(), exact)).isnan().any()


def test_remainders_are_exact():
    """All pairs of a sign, an exponent and the lower 17 bits, in which ties and carries lie."""
    exponents = torch.arange(0, 255, 6, dtype=torch.int32)[:, None] << 23
    bits = (exponents + torch.arange(2**17, dtype=torch.int32)).flatten()
    exact = torch.cat((bits, bits - 2**31)).view(torch.float32)
    shard = half_up(exact)
    remainders = Remainders(shard)
    remainders.write(0, exact)
    assert torch.equal(remainders.read(0, len(exact)).view(torch.int32), exact.view(torch.int32))
    assert torch.equal(shard.view(torch.int16), half_up_by_numpy(exact).view(torch.int16))
    assert (half_up(exact) != exact.bfloat16()).float().mean() < 1e-5, "nearest, except for ties"


@pytest.mark.parametrize("state_dtype", ["bfloat16", "int8"])
def test_a_parameter_without_elements_has_state(state_dtype):
    params = [torch.nn.Parameter(torch.ones(size)) for size in (0, 5)]
    optimizer = ShardedOptimizer(params, torch.optim.AdamW, bucket_mb=1e-6, state_dtype=state_dtype, lr=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert ckpt.consolidate(optimizer)["state"][0]["exp_avg"].shape == (0,)


# -- training ----------------------------------------------------------------------------------------------------------


def masters_of(optimizer):
    return [owned.read().clone() for owned in optimizer.placed.owned]


def save_and_resume(name, **kwargs):
    """A run of 2 * STEPS without and with an interruption. The resumed one begins with other weights.

    If it is fused, a scaler has found an inf in one more update halfway: it changes neither weights nor state.
    """
    rank, kwargs = dist.get_rank(), {**CODECS[name], **kwargs}
    model, optimizer = sharded_toy(**kwargs)
    train(model, optimizer, rank, STEPS)
    encoded = [value for state in optimizer.inner.state.values() for value in state.values() if isinstance(value, Encoded)]
    assert bool(encoded) == ("state_dtype" in kwargs)
    if "fused" in kwargs:
        before, state = weights(model), ckpt.consolidate(optimizer)
        model(*batch(STEPS, rank)).backward()
        optimizer.inner.found_inf, optimizer.inner.grad_scale = torch.tensor(1.0), None
        optimizer.step()
        assert_equal([weights(model), ckpt.consolidate(optimizer)], [before, state])
        del optimizer.inner.found_inf, optimizer.inner.grad_scale
        optimizer.zero_grad()
    saved = of_rank_0([ckpt.model_state_dict(model.module, optimizer), ckpt.consolidate(optimizer)])
    assert {tensor.dtype for state in saved[1]["state"].values() for tensor in state.values()} == {torch.float32}
    later, later_optimizer = sharded_toy(seed=7, **kwargs)
    later.module.load_state_dict(saved[0])
    before = copy.deepcopy(saved[1])
    ckpt.restore(later_optimizer, saved[1])
    assert_equal(saved[1], before)
    ends = []
    for each, its_optimizer in ((model, optimizer), (later, later_optimizer)):
        train(each, its_optimizer, rank, STEPS, first=STEPS)
        ends.append([weights(each), masters_of(its_optimizer), ckpt.consolidate(its_optimizer)])
    assert_equal(*ends)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_resumed_run_is_bit_exact(world_size):
    """Also after an update that was skipped, and of classes without `step`."""
    runs = [("bfloat16", {"shard_gradients": True}), ("both", {})]
    if world_size == 2:
        runs = [("masters", {}), ("int8", {"shard_gradients": True}), ("remainder", {"shard_gradients": True}), ("sgd", {})]
        runs += [(name, {"fused": True}) for name in ("bfloat16", "both", "muon")]
    run_in_turn(world_size, *(partial(save_and_resume, name, **kwargs) for name, kwargs in runs))


def replicas(name):
    model, optimizer = sharded_toy(shard_size=2, **CODECS[name])
    train(model, optimizer, dist.get_rank(), STEPS)
    leaves = [leaf for state in optimizer.inner.state.values() for leaf in state.values()]
    parts = [part for leaf in leaves for part in (leaf.parts if isinstance(leaf, Encoded) else (leaf,))]
    return {"weights": weights(model), "masters": masters_of(optimizer), "state": parts}


def skipped_and_whole(codec):
    """A parameter without a gradient keeps its state, and a class of its own gets its state decoded, for all slices at once."""
    own = type("Own", (torch.optim.AdamW,), {"rounded_state": ("exp_avg", "exp_avg_sq")})
    for optimizer_cls, kwargs in ((torch.optim.SGD, {"momentum": 0.9}), (own, {"elementwise": True})):
        model, optimizer = sharded_toy(optimizer_cls=optimizer_cls, state_dtype=codec, **kwargs)
        for step in range(STEPS):
            loss = model(*batch(step, dist.get_rank()))
            if step < STEPS - 1:
                loss = loss + model.module.unused(torch.ones(3)).square().sum()
            loss.backward()
            before = ckpt.consolidate(optimizer)
            optimizer.step()
            optimizer.zero_grad()
        after = ckpt.consolidate(optimizer)
        if after is not None:
            assert_equal(after["state"][2], before["state"][2])  # in group 0, after the embedding and the hidden layer
            with pytest.raises(AssertionError):
                assert_equal(after["state"][0], before["state"][0])
        assert all(param.isfinite().all() for param in model.parameters())


def test_a_class_whose_state_may_not_be_rounded_is_refused():
    own = [type("Text", (torch.optim.AdamW,), {"rounded_state": "exp_avg"}), type("Own", (torch.optim.AdamW,), {})]
    cases = [(torch.optim.RMSprop, {"centered": True}, "RMSprop with centered=True subtracts one mean")]
    for cls in (torch.optim.Adagrad, torch.optim.ASGD, torch.optim.Rprop, *own):
        cases.append((cls, {"elementwise": cls in own}, f"{cls.__name__} declares no state that may be rounded"))
    for cls, kwargs, text in cases:
        sharded_toy(optimizer_cls=cls, **kwargs)
        refused(ValueError, text, sharded_toy, optimizer_cls=cls, state_dtype="int8", **kwargs)
    model, optimizer = sharded_toy(optimizer_cls=torch.optim.RMSprop, state_dtype="int8")
    optimizer.param_groups[1]["centered"] = True
    model(*batch(0, 0)).backward()
    refused(ValueError, "subtracts one mean from another", optimizer.step)


TIES = 1 + torch.arange(1, 128, 2)[:, None] * 2.0**-8 + torch.zeros(7)  # between two bfloat16 numbers, exact in float16


def rounded_alike(dtype, param_dtype):
    """Ties in the weights of a model, set one by one, and loaded: all elements have the owner's rounding at once."""
    built = torch.nn.ParameterDict({"weight": TIES.to(dtype, copy=True)})
    optimizer = ShardedOptimizer(built.parameters(), torch.optim.AdamW, bucket_mb=0.0002, param_dtype=param_dtype, lr=0.0)
    model = ShardedDataParallel(built, optimizer)

    def check(expected):
        rounded = half_up(expected.float().flatten()).view(expected.shape)
        assert_equal(built.weight.detach(), rounded)
        built.weight.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert_equal(built.weight.detach(), rounded)

    check(TIES)
    optimizer.set_parameter(built.weight, 2 * TIES.to(dtype))
    check(2 * TIES)
    model.module.load_state_dict({"weight": 4 * TIES.to(dtype)})
    check(4 * TIES)


def only_padding():
    """The number of buckets in which this rank owns nothing, after two steps."""
    torch.use_deterministic_algorithms(True)  # torch.empty then fills its memory with nan
    model, optimizer = sharded_toy(**CODECS["both"])
    train(model, optimizer, dist.get_rank(), 2)
    torch.use_deterministic_algorithms(False)
    return sum(not bucket.owned and bucket.shard.numel() > 0 for bucket in optimizer.placed.buckets)


def test_replicas_round_alike_and_padding_changes_nothing():
    *by_codec, padding = run_in_turn(4, *(partial(replicas, name) for name in ("bfloat16", "both")), only_padding)
    for results in by_codec:
        for rank, result in enumerate(results):
            assert_equal(result["weights"], results[0]["weights"])
            assert_equal(result, results[rank % 2])
    assert sum(padding) > 0


def test_other_optimizers_and_dtypes():
    """What is rounded, skipped, and comes from any dtype."""
    assert (half_up(TIES.flatten()) != TIES.flatten().bfloat16()).any(), "the two ways to round differ here"
    other_optimizers = [partial(skipped_and_whole, codec) for codec in ("bfloat16", "int8")]
    dtypes = {"bfloat16": (torch.float16, torch.float64), "bfloat16_remainder": (torch.float16, torch.float32)}
    roundings = [partial(rounded_alike, dtype, kind) for kind in dtypes for dtype in dtypes[kind]]
    run_in_turn(2, *other_optimizers, *roundings)
