"""zero/prediction.py: what it predicts is what tensors take, at every point of a step, for every mode and any world size."""

import pytest
import torch
import torch.distributed as dist
from ranks import context, run_ranks
from torch.testing._internal.distributed.fake_pg import FakeStore

from activations import LiveBytes
from model import GPT, GPTConfig
from zero.build import build, clip_grad_norm_
from zero.flags import Flags
from zero.layout import parameter_specs
from zero.memory import held_bytes
from zero.prediction import Prediction

SIZES = GPTConfig(block_size=8, vocab_size=65, n_layer=4, n_head=2, n_embd=96, bias=False)
BUCKET_MB = 0.1  # 18 buckets
MODES = {
    "adamw": Flags(use_zero1=False),
    "torch": Flags(zero1_impl="torch"),
    "sharded": Flags(bucket_mb=BUCKET_MB),
    "one bucket": Flags(),
    "shard_gradients": Flags(bucket_mb=BUCKET_MB, shard_gradients=True),
    "bfloat16": Flags(bucket_mb=BUCKET_MB, param_dtype="bfloat16"),
    "bfloat16, shard_gradients": Flags(bucket_mb=BUCKET_MB, param_dtype="bfloat16", shard_gradients=True),
}


def without_communication(_, bucket):
    """Hook for DistributedDataParallel: the fake process group returns no result."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def predicted_and_measured(mode):
    """By point of a step: the bytes predicted from a model on the meta device, the bytes held, and all bytes alive."""
    flags, world_size, rank = MODES[mode], dist.get_world_size(), dist.get_rank()
    with torch.device("meta"):
        model = GPT(SIZES)
    plan = flags.plan(parameter_specs(model.param_groups(0.1), model.parameters()), world_size)
    sharded = flags.implementation(world_size) == "sharded"
    prediction = Prediction(
        plan,
        rank if plan.world_size > 1 else 0,
        "ShardedDataParallel" if sharded else "DistributedDataParallel",
        world_size,
        micro_steps=2,
        shard_gradients=sharded and flags.shard_gradients,
        on_cpu=True,
    )
    points = {}
    with LiveBytes() as live:
        module = GPT(SIZES)
        model, optimizer = build(module, module.param_groups(0.1), lr=0.01, **vars(flags))
        if dist.get_backend() == "fake" and not sharded:
            model.register_comm_hook(None, without_communication)
        tokens = torch.randint(65, (2, 1, 8))

        def measure(point):
            dist.barrier()  # gloo holds the tensors of the last collective until its thread takes the next one
            points[point] = prediction.at(point), held_bytes(optimizer, model), live.now

        def micro_step(sync):
            model.require_backward_grad_sync = sync
            with torch.autocast("cpu", enabled=flags.param_dtype == "bfloat16"):
                loss = model(*tokens)[1]
            loss.backward()

        measure("wrapped")
        for step in range(2):
            micro_step(sync=False)
            if step:
                measure("accumulating")
            micro_step(sync=True)
            clip_grad_norm_(optimizer, 1.0)
            if step:
                measure("before step")
            optimizer.step()
            optimizer.zero_grad()
            if sharded:
                optimizer.synchronize()
        measure("after step")
        sent = optimizer.comm.sent_bytes if sharded else {}
        per_step = {kind: sent[kind] // 2 for kind in ("reduce-scatter", "all-gather") if kind in sent}
    return points, prediction.sent(), per_step


def check(mode, result):
    points, predicted_sent, sent = result
    assert list(points) == ["wrapped", "accumulating", "before step", "after step"]
    for point, (predicted, held, alive) in points.items():
        assert predicted == held, (mode, point)
        assert sum(predicted.values()) == pytest.approx(alive, rel=0.02), (mode, point)
    if sent:
        assert predicted_sent == sent, mode


def every_mode():
    return {mode: predicted_and_measured(mode) for mode in MODES}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_predictions_are_what_tensors_take(world_size):
    for results in run_ranks(every_mode, world_size):
        for mode, result in results.items():
            check(mode, result)


def _simulated(world_size, rank, results):
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    results.put(every_mode())


@pytest.mark.parametrize(("world_size", "rank"), [(8, 0), (64, 63), (1024, 0), (1024, 1023)])
def test_predictions_for_one_rank_of_a_large_world(world_size, rank):
    results = context.SimpleQueue()
    process = context.Process(target=_simulated, args=(world_size, rank, results))
    process.start()
    for mode, result in results.get().items():
        check(mode, result)
    process.join()
