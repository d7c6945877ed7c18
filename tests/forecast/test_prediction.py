"""forecast/dry_run.py, baselines.py, optimizer_state.py: predictions are what tensors take in a step and in a save."""

import gc
import itertools
import threading
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import context, run_in_turn, run_ranks
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.contenders import Setup
from benchmarks.memory_profile import MemoryProfile
from forecast.dry_run import dry_run, state_bytes
from forecast.modes import Mode
from forecast.prediction import PURPOSES, Activations, Moment
from forecast.run_memory import gpt_specs, planned_optimizer, predicted, predicted_activations
from model import GPT, GPTConfig
from run import checkpoint_folder
from run.checkpoint_writer import CheckpointWriter
from zero import Muon
from zero.codecs import BLOCK, Int8
from zero.flags import Flags
from zero.held_bytes import held_bytes
from zero.layout import parameter_specs
from zero.optimizer import ShardedOptimizer

SIZES = GPTConfig(block_size=8, vocab_size=65, n_layer=4, n_head=2, n_embd=96, bias=False)
TWO_LAYERS = replace(SIZES, n_layer=2)
LARGER = replace(SIZES, n_layer=6, n_head=6, n_embd=384)  # 10.7M parameters
# a large vocabulary: the gradient of the tied embedding decides the peak; long sequences: activations do
PEAK_SIZES = [replace(SIZES, vocab_size=3000), replace(SIZES, block_size=64)]


def case(bucket_mb=0.1, in_place=False, muon=False, dtype="float32", **flags):
    """The megabytes per bucket, by default for ten buckets, a mode, and the dtype of the computation."""
    return bucket_mb, Mode("", "", Flags(**flags), in_place=in_place, muon=muon, hybrid="shard_size" in flags), dtype


CASES = {
    "adamw": case(use_zero1=False),
    "torch": case(zero1_impl="torch"),
    "adamw, in place": case(use_zero1=False, in_place=True),
    "torch, in place": case(zero1_impl="torch", in_place=True),
    "sharded": case(),
    "automatic": case("auto"),
    "shard_gradients": case(shard_gradients=True),
    "hybrid": case(shard_size=2),
    "hybrid, shard_gradients": case(shard_size=2, shard_gradients=True),
    "autocast": case(dtype="bfloat16"),
    "autocast, shard_gradients": case(dtype="bfloat16", shard_gradients=True),
    "autocast, muon, state in int8": case(muon=True, dtype="bfloat16", state_dtype="int8"),
    "bfloat16": case(param_dtype="bfloat16"),
    "remainders": case(param_dtype="bfloat16_remainder"),
    "bfloat16, shard_gradients": case(param_dtype="bfloat16", shard_gradients=True),
    "state in bfloat16": case(state_dtype="bfloat16"),
    "muon": case(muon=True),
    "muon, replicated": case(muon=True, use_zero1=False),
    "muon, torch": case(muon=True, zero1_impl="torch"),
    "muon, state in bfloat16": case(muon=True, param_dtype="bfloat16", state_dtype="bfloat16"),
    "state in int8, remainders": case(shard_gradients=True, param_dtype="bfloat16_remainder", state_dtype="int8"),
}
ALONE = ("adamw", "adamw, in place", "muon, replicated", "state in bfloat16", "bfloat16", "bfloat16, shard_gradients")
ALONE += ("state in int8, remainders",)  # what a single rank has
CASES_OF_POOL = {  # on a CPU, it keeps
    "buckets": case(6),
    "buckets of the default": case("auto"),
    "buckets, with shard_gradients": case(6, shard_gradients=True),
    "the same, with shard_gradients": case("auto", shard_gradients=True),
    "bfloat16": case(6, param_dtype="bfloat16"),
    "remainders": case(6, param_dtype="bfloat16_remainder", state_dtype="bfloat16"),
    "autocast": case(6, dtype="bfloat16"),
}


def cases_of(world_size, micro_steps=2):
    """The cases that are not the same as others: one rank has nobody to share with, one micro-step nothing to accumulate."""
    names = CASES if world_size > 1 else ALONE
    return {name: CASES[name] for name in names if micro_steps > 1 or not name.endswith(("in place", "shard_gradients"))}


def prepared(bucket_mb, mode, dtype, micro_steps, sizes, with_peak):
    """A setup and its prediction for this rank, with the activations, which only a peak needs."""
    world_size = dist.get_world_size()
    shared = {"activation_checkpointing": False, "seed": 0, "shard_size": 1 if world_size % 4 else 2}
    setup = Setup(sizes, 1, torch.device("cpu"), dtype, bucket_mb, 1.0, **shared)
    activations = predicted_activations if with_peak else lambda *_: Activations()
    rank = dist.get_rank() % (shared["shard_size"] if mode.hybrid else world_size) if mode.flags.use_zero1 else 0
    with mock.patch("benchmarks.contenders.predicted_activations", activations):
        forecast = setup.forecast(mode, world_size, micro_steps, rank)
    return setup, forecast


def prepare_process():
    gc.freeze()  # `MemoryProfile` collects garbage often: not among what torch has imported
    # makes the tables of 8-bit codes, 395 kB, which all optimizers share
    Int8().encode(torch.ones(BLOCK), torch.tensor, Int8().empty(BLOCK, torch.device("cpu")))


def measured(cases, micro_steps, sizes, with_peak=False):
    """By case: the predicted parts, the held parts and all bytes alive by point of a step; bytes sent; peaks of two phases."""
    found = {}
    prepare_process()
    for name, (bucket_mb, mode, dtype) in cases.items():
        setup, prediction = prepared(bucket_mb, mode, dtype, micro_steps, sizes, with_peak)
        profile = MemoryProfile(setup, mode, micro_steps)
        points = profile.measure(can_save=False)
        parts = {
            point: (prediction.at(point), {part: points[point][part] for part in PURPOSES}, points[point]["total"])
            for point in ("after wrapping", "accumulating", "before step", "after step")
            if point in points
        }
        optimizer = profile.contender.optimizer
        sent = optimizer.comm.sent_bytes if isinstance(optimizer, ShardedOptimizer) else {}
        kinds = "reduce-scatter", "all-reduce", "all-to-all", "all-gather"
        per_step = {kind: sent[kind] // 2 for kind in kinds if sent.get(kind)}
        construction = prediction.construction, points["wrapping"]["total"]
        training = prediction.peak_of_training, points["peak"]["total"]
        found[name] = parts, prediction.sent, per_step, (construction, training)
    return found


def check(results, with_peak=False, differ=True):
    """What `measured` returns on one rank. A case that is predicted as another one would not reach what it names."""
    foretold = [
        repr(([expected for expected, *_ in parts.values()], sent, peaks[0][0], peaks[1][0]))
        for parts, sent, _, peaks in results.values()
    ]
    assert not differ or len(set(foretold)) == len(foretold), [*results]
    for name, (parts, predicted_sent, sent, (construction, training)) in results.items():
        for point, (expected, held, alive) in parts.items():
            assert expected == held, (name, point)
            assert sum(expected.values()) == pytest.approx(alive, rel=0.02), (name, point)
        assert not sent or {kind: count for kind, count in predicted_sent.items() if count} == sent, name
        assert construction[0] == pytest.approx(construction[1], rel=0.01), name
        if with_peak:  # the activations of the first layer count until its last gradient, beside gradients that all stay
            room = {"hybrid": 0.04, "autocast": 0.03}.get(name, 0.02)
            assert training[0] == pytest.approx(training[1], rel=room), name


def slow(*values, why, seconds):
    return pytest.param(*values, marks=pytest.mark.slow(why, seconds=seconds))


MORE_RANKS = slow(3, why="between two and four ranks", seconds=17), slow(4, why="four ranks on two cores", seconds=13)


@pytest.mark.parametrize("world_size", [2, *MORE_RANKS])
def test_predictions_are_what_tensors_take(world_size):
    for results in run_ranks(measured, world_size, cases_of(world_size), 2, TWO_LAYERS):
        check(results)


ONE_MICRO_STEP = slow(1, 1, why="one micro-step; the others have three", seconds=10)
TWO_RANKS = [slow(2, micro_steps, why="test_malloc.py has two ranks as well", seconds=30) for micro_steps in (1, 3)]


@pytest.mark.parametrize(("world_size", "micro_steps"), [(1, 3), ONE_MICRO_STEP, *TWO_RANKS])
def test_the_peak_of_training(world_size, micro_steps):
    cases = cases_of(world_size, micro_steps)
    calls = (partial(measured, cases, micro_steps, sizes, with_peak=True) for sizes in PEAK_SIZES)
    for results in itertools.chain.from_iterable(run_in_turn(world_size, *calls)):
        check(results, with_peak=True)


STATES = [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.RMSprop, {"centered": True}), (Muon, {"fused": True})]


@pytest.mark.parametrize(
    ("cls", "how"),
    [(torch.optim.AdamW, {"fused": True}), (torch.optim.AdamW, {"amsgrad": True}), (torch.optim.SGD, {}), *STATES],
)
def test_the_state_of_a_class_is_counted_before_its_first_step(cls, how):
    model = GPT(GPTConfig(block_size=4, vocab_size=5, n_layer=1, n_head=1, n_embd=8))
    optimizer = cls(model.param_groups(0.1, {} if cls is Muon else None), lr=0.1, **how)
    expected = sum(state_bytes(parameter_specs(optimizer.param_groups), (cls, {"lr": 0.1, **how})))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert held_bytes(optimizer)["state"] == expected
    assert (expected > 0) == (how != {} or cls is not torch.optim.SGD)


def test_activations_have_their_last_peak_from_the_first_layer_on():
    specs = gpt_specs(SIZES)
    first_layer = sum(4 * param.numel() for param in GPT(SIZES).transformer.h[0].parameters())
    one = predicted(specs, Flags(bucket_mb=0.1), planned_optimizer(None), world_size=2)
    until = one.gradients[0] - one.gradients[1] - first_layer
    late = replace(one, moments=[Moment(0, "layers", until)])
    for gradients, is_over in ((first_layer, True), (0, False)):
        activations = Activations(layers=9, embedding=5, first_layer_gradients=gradients)
        assert (replace(late, activations=activations).peak_of_training == 5) == is_over


@pytest.mark.parametrize("micro_steps", [2, slow(3, why="between two and four micro-steps", seconds=10)])
def test_predictions_with_tensors_that_the_pool_keeps(micro_steps):
    sizes = replace(LARGER, n_layer=4)  # the pool keeps what has 4 MB
    shards = Flags(bucket_mb=6).plan(gpt_specs(sizes), 2).buffers[0].layout.shards[0]
    for results in run_ranks(measured, 2, CASES_OF_POOL, micro_steps, sizes):
        check(results)
        held = {name: parts["after step"][1]["buckets"] for name, (parts, *_) in results.items()}
        before = results["buckets of the default"][0]["before step"][1]
        assert held["buckets of the default"] == before["buckets"] + before["gradients"]  # the shards are kept as well
        assert held["buckets"] == 2 * 4 * shards[-1].stop
        assert held["bfloat16"] > held["buckets, with shard_gradients"] == 0


SAVED = {"sharded": case(6), "int8": case(6, state_dtype="int8")}  # one bucket of 6 MB: slices are large
SAVED |= {name: CASES_OF_POOL[name] for name in ("autocast", "bfloat16", "remainders")}
SAVED |= {name: CASES[name] for name in ("adamw", "torch")}


def saved(folder, background):
    """By case: the predicted peak while a checkpoint is written, and the real one. In the background, a step runs meanwhile."""
    prepare_process()
    found, may_end, commit = {}, threading.Event(), checkpoint_folder.commit

    def waiting(*arguments):
        assert may_end.wait(60)
        return commit(*arguments)

    cases = {name: case for name, case in SAVED.items() if dist.get_world_size() > 1 or name != "torch"}
    for name, (bucket_mb, mode, dtype) in cases.items():
        setup, prediction = prepared(bucket_mb, mode, dtype, 1, PEAK_SIZES[0], with_peak=True)
        profile = MemoryProfile(setup, mode, 1)
        profile.measure(can_save=False)
        contender = profile.contender
        writer = CheckpointWriter(folder, background=background)
        with profile.live, mock.patch.object(checkpoint_folder, "commit", waiting):
            profile.live.reset_peak()
            if not background:
                may_end.set()
            writer.write(contender.module, contender.optimizer, {"iter_num": 1, "model_args": {}, "config": {}})
            if background:
                contender.step()
                contender.wait()
            peak = profile.live.peak
            may_end.set()
            writer.wait()
        may_end.clear()
        found[name] = replace(prediction, async_save=background).saving_peak, peak
        del writer, contender, profile
        gc.collect()
    return found


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_peak_of_a_save(tmp_path, world_size, background):
    ((found, *_),) = run_in_turn(world_size, partial(saved, str(tmp_path), background))  # of rank 0
    for name, (expected, peak) in found.items():
        assert expected == pytest.approx(peak, rel=0.02), name


def only_rank_0_predicts():
    """What an all-reduce returns after that. One more collective on this rank would meet it, or wait forever."""
    if dist.get_rank() == 0:
        for bucket_mb, mode, _ in CASES.values():
            if mode.flags.is_sharded and not mode.muon:
                flags = replace(mode.flags, bucket_mb=bucket_mb, shard_size=2 if mode.hybrid else 0)
                assert dry_run(gpt_specs(TWO_LAYERS), flags, planned_optimizer(None), (1, 4), 2, True)["sent"]["all-gather"] > 0
    dist.all_reduce(number := torch.tensor(1.0 + dist.get_rank()))
    return number.item()


def test_a_dry_run_talks_to_nobody():
    assert run_in_turn(2, only_rank_0_predicts) == [[3.0, 3.0]]


DEMO = replace(SIZES, vocab_size=97, n_head=4, n_embd=128)  # 0.8M parameters
GPT2 = replace(SIZES, vocab_size=50304, n_layer=12, n_head=12, n_embd=768, block_size=64)


@pytest.mark.parametrize("world_size", [2, 4, 8, 64])
@pytest.mark.parametrize(("sizes", "share"), [(DEMO, 0.5), (LARGER, 0.8), (GPT2, 0.8)])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_the_default_is_predicted_to_save_memory(sizes, share, world_size, on_cpu):
    """By a share of 8P - 8P/N bytes of AdamW state for P parameters."""
    specs = gpt_specs(sizes)
    how = {"world_size": world_size, "on_cpu": on_cpu}
    plain, sharded = (predicted(specs, flags, planned_optimizer(None), **how) for flags in (Flags(use_zero1=False), Flags()))
    expected = share * 8 * sum(spec.numel for spec in specs) * (1 - 1 / world_size)
    for point in ("before step", "after step"):
        assert sum(plain.at(point).values()) - sum(sharded.at(point).values()) >= expected


def simulated(world_size):
    """What the last rank measures."""
    dist.init_process_group("fake", store=FakeStore(), rank=world_size - 1, world_size=world_size)
    return measured(cases_of(world_size), 2, TWO_LAYERS)


LARGE = slow(64, why="a bucket goes to 64 ranks one by one", seconds=13), slow(1024, why="a plan with 1024 ranks", seconds=36)


@pytest.mark.parametrize("world_size", [8, *LARGE])
def test_predictions_for_one_rank_of_a_large_world(world_size):
    with ProcessPoolExecutor(1, context) as pool:
        results = pool.submit(simulated, world_size).result()
    check(results, differ=world_size == 8)  # of 64 ranks, the last one has no whole parameter, whatever the optimizer
