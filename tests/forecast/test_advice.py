"""forecast/advice.py, step_time.py: what is recommended fits, what it costs, and what FSDP2 would take."""

import json
import re
from dataclasses import replace

import pytest
import test_plan_script
import torch
from ranks import run_in_turn
from scripts import SIZES
from test_plan_script import plan
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.contenders import Contender, Setup
from benchmarks.memory_profile import MemoryProfile
from forecast import advice
from forecast.modes import MODES
from forecast.step_time import Network
from model import GPT, GPTConfig

CONFIG = GPTConfig(block_size=64, vocab_size=997, n_layer=2, n_head=2, n_embd=128, bias=False)
NOTHING_FITS = {"gpu_memory_gb": 1e-6}  # then few batch sizes are predicted


def planner(config=CONFIG, **changes):
    return test_plan_script.planner(config, **{"batch_size": 8, "bucket_mb": "auto", **changes})


def arguments(text):
    """The settings of an argument of the command line."""
    values = dict(argument.removeprefix("--").split("=") for argument in text.split())
    return {key: json.loads(value.lower()) if value[0] in "TF0123456789" else value for key, value in values.items()}


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow("the default has four ranks", seconds=14)), 4])
def test_the_recommended_settings_fit(world_size):
    """From much memory to little, what is recommended costs more and more, and its prediction is that of the settings."""
    previous, found = (False, ()), set()
    bucket_mb = 0.1 if world_size == 1 else "auto"  # one bucket of everything would take what the flags save on one rank
    for power in range(100):
        limited = {"gpu_memory_gb": 0.1 * 0.9**power, "bucket_mb": bucket_mb}
        before = planner(**limited)
        if (choice := advice.cheapest(before, world_size)) is None:
            break
        prices = advice.prices(before, world_size, choice)
        again = planner(**limited, **{key: value for text in prices for key, value in arguments(text).items()})
        result = again.forecast(again.chosen(world_size), world_size)
        assert result.peak == before.forecast(choice, world_size).peak
        assert again.fits(result)
        rounds = choice.flags.param_dtype != "float32" or choice.flags.state_dtype == "int8"
        cost = rounds, again.cost(choice, world_size)
        assert cost >= previous
        previous = cost
        found |= {key for text in prices for key in arguments(text)}
    assert {"loss_chunk", "batch_size", "activation_checkpointing", "state_dtype", "param_dtype"} <= found
    assert ("shard_gradients" in found) == (world_size > 1)
    assert choice is None, "everything fits, so this shows less than it should"


def test_rounding_is_recommended_where_it_saves_computation():
    """Here, float32 weights need checkpointing and bfloat16 weights do not."""
    limited = planner(gpu_memory_gb=0.0134)
    exact = advice.cheapest(limited, 2)
    rounded = advice.cheapest(limited, 2, lambda choice: choice.flags.param_dtype != "float32")
    assert (exact.flags.param_dtype, rounded.flags.param_dtype) == ("float32", "bfloat16_remainder")
    assert limited.cost(rounded, 2) < limited.cost(exact, 2)
    assert advice.prices(planner(), 2, advice.cheapest(planner(), 2)) == {}, "nothing is recommended where the settings fit"


def test_the_fastest_is_recommended_if_the_speed_is_known():
    """Between two slow machines, the forward a second time costs less than bytes to send for each of many micro-steps."""
    slow = {"device": "cuda", "between_gbit": 0.01, "ranks_per_machine": 1, "gradient_accumulation_steps": 16}
    chosen = planner(**slow).chosen(2)
    limit = planner(**slow).forecast(replace(chosen, activation_checkpointing=True, loss_chunk=64, batch_size=4), 2)
    found = advice.cheapest(planner(**slow, gpu_memory_gb=limit.peak / 1e9), 2)
    assert not found.flags.shard_gradients


def test_the_answers_of_find_are_the_largest_that_fit():
    small = planner(gpu_memory_gb=0.03)
    for name, choice in [*advice.candidates(small, 2).items()][::3]:  # the first and the last, with all flags
        larger = advice.largest_model(small, name, 2)
        assert larger.fits(larger.forecast(advice.candidates(larger, 2)[name], 2))
        assert larger.config.n_embd == 64 * larger.config.n_head
        largest, dividing, steps = advice.batch_of_the_run(small, choice, 2)
        assert 0 < dividing <= largest
        assert dividing * steps == 8 * 2
    assert advice.largest_model(planner(gpu_memory_gb=1e-6), "plain AdamW", 2) is None
    assert advice.fewest_ranks(planner(), "plain AdamW") == 1
    at_8 = planner().forecast(planner().chosen(8), 8)
    limited = planner(gpu_memory_gb=1.31 * max(at_8.peak, at_8.saving_peak) / 1e9)
    ranks = advice.fewest_ranks(limited, "these settings")
    assert 1 < ranks <= 8
    assert not limited.fits(limited.forecast(limited.chosen(ranks // 2), ranks // 2))


def test_communication_that_computation_cannot_hide():
    """8 ranks on two machines: a ring crosses to the other machine from one of four ranks."""
    small = planner(bucket_mb=0.1)
    prediction = small.forecast(small.chosen(8), 8).prediction
    (buffer,) = prediction.plan.buffers
    share = prediction.plan.params[0].numel / sum(buffer.layout.numels)  # of the embedding, which is registered first
    assert share > 2 / len(buffer.layout.shards), "it fills several buckets"
    sent = prediction.sent
    network = Network(inside=8.0, across=2.0, ranks_per_machine=4)
    assert network.across_machines(prediction) == {kind: count / 4 for kind, count in sent.items()}
    took = network.seconds(prediction)
    assert took == {kind: pytest.approx((0.75 * count / 8 + 4 * 0.25 * count / 2) * 8 / 1e9) for kind, count in sent.items()}
    for seconds, exposed in ((1e9, share), (0, 1)):  # of computation, and which part of the communication it leaves
        found = network.exposed(prediction, seconds, seconds)
        assert {kind: found.get(kind, 0) for kind in took} == {kind: pytest.approx(ms * exposed) for kind, ms in took.items()}
    assert network._replace(ranks_per_machine=8).across_machines(prediction) == dict.fromkeys(sent, 0.0)
    torch_impl = planner(zero1_impl="torch")
    broadcasts = torch_impl.forecast(torch_impl.chosen(8), 8).prediction
    assert network.exposed(broadcasts, 1e9, 1e9)["broadcast"] == network.seconds(broadcasts)["broadcast"]


def test_the_parts_of_a_step():
    """On an A100, with 2039 GB/s: what moves through its memory, beside the products of matrices at 156 TFLOP/s."""
    one = planner(device="cuda", gpu="A100", mfu=50.0, gradient_accumulation_steps=16, **NOTHING_FITS)
    rows = {row["mode"]: row for row in one.rows(8)}
    params, kept = sum(spec.numel for spec in one.specs), 2039e6  # bytes in a ms
    sharded, bfloat16, plain = (rows[mode]["parts_ms"] for mode in ("sharded", "bfloat16", "adamw"))
    assert sharded["autocast"] == pytest.approx(2 * 2 * 6 * params / kept), "two micro-steps: weights and gradients"
    assert bfloat16["autocast"] == 0
    assert sharded["gradients"] == pytest.approx((3 + 2) * 4 * params / kept), "a sum of two, and a copy"
    assert bfloat16["gradients"] == pytest.approx((3 + 3) * 2 * params / kept), "and a read of what arrives from each rank"
    assert plain["clip"] == pytest.approx(12 * params / kept)
    assert sharded["clip"] == pytest.approx(plain["clip"] / 8, rel=0.02)
    assert plain["update"] == pytest.approx(28 * params / kept)
    assert sharded["update"] == pytest.approx(plain["update"] / 8, rel=0.02)
    assert sum(sharded.values()) > 1e3 * rows["sharded"]["seconds"] > sharded["matrices"]
    alone, checkpointing = (one.figures("", choice, 1)["seconds"] for choice in (one.chosen(1), one.everything(1)))
    assert alone == pytest.approx(8 * 16 * 64 * GPT(CONFIG).flops_per_token() / 156e12)
    assert checkpointing == pytest.approx(4 / 3 * alone), "the forward once more"


def test_plan_says_what_to_do(data):
    small = f"--dataset={data}", *SIZES
    lines = plan(*small, "--world_size=2", "--gpu_memory_gb=0.00035", "--device=cuda")
    assert "does not fit in 0.00035 GB" in lines
    assert re.search(
        r"^ +the fastest that fits without more rounding, as predicted: --.*\n"
        r" +peak .* MB \(\d+% to spare\), up to --batch_size=\d+; about ",
        lines,
        re.M,
    )
    assert re.search(r"; about [\d,]+k tokens/s and \d+ min on A100 at 30 % MFU$", lines, re.M)
    assert re.search(r"^ +--batch_size=1 --gradient_accumulation_steps=12: the same global batch; ", lines, re.M)
    nothing = plan(*small, "--world_size=1,8", "--gpu_memory_gb=0.00001", "--device=cuda")
    assert "nothing fits in one process: use larger GPUs or a smaller model" in nothing
    assert "nothing fits, and FSDP2 would not either" in nothing
    found = plan(*small, "--world_size=2", "--find=batch", "--gpu_memory_gb=0.001").splitlines()
    assert [line.split("  ")[3].strip() for line in found[-4:]] == ["plain AdamW", "these settings", "same losses", "all flags"]


SIZES_OF_FSDP = [
    GPTConfig(block_size=64, vocab_size=vocab, n_layer=4, n_head=4, n_embd=256, bias=False) for vocab in (65, 5300)
]


def setup_of(sizes):
    return Setup(sizes, 1, torch.device("cpu"), "float32", "auto", 1.0, activation_checkpointing=False, seed=0)


def fully_sharded_bytes():
    """Of a step with two micro-steps: live bytes after it, before the update, and the peak."""
    profiles = [MemoryProfile(setup_of(sizes), MODES["fsdp2_reshard"]).measure(can_save=False) for sizes in SIZES_OF_FSDP]
    return [[points[point]["total"] for point in ("after step", "before step", "peak")] for points in profiles]


class Sent(TorchDispatchMode):
    """Counts the bytes that a rank sends in rings of two ranks: half of what is gathered and of what is reduced."""

    def __init__(self):
        super().__init__()
        self.bytes, self.calls = (dict.fromkeys(("all-gather", "reduce-scatter"), 0) for _ in range(2))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kind = {"_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter"}.get(func._opname)
        if kind:
            self.bytes[kind] += max(tensor.nbytes for tensor in args[:2]) // 2
            self.calls[kind] += 1
        return func(*args, **(kwargs or {}))


def fully_sharded_sent():
    """Of three micro-steps by the defaults, and with weights and gradients whole until the last one: bytes, and collectives."""
    found = []
    for mode in ("fsdp2_reshard", "fsdp2"):
        contender = Contender(setup_of(SIZES_OF_FSDP[1]), MODES[mode]).wrap()
        contender.step()  # makes the state
        with Sent() as sent:
            contender.step([None] * 3)
        found.append((sum(sent.bytes.values()), sent.calls))
    return found


def test_what_fsdp2_sends_and_takes():
    """By default, blocks are gathered twice in a micro-step. At its best, each unit is gathered and sent once an iteration.

    It takes what is predicted of weights, gradients and state exactly; the peak is an estimate.
    """
    sends, takes = run_in_turn(2, fully_sharded_sent, fully_sharded_bytes)
    of_run = planner(SIZES_OF_FSDP[1], gradient_accumulation_steps=6, **NOTHING_FITS)
    row = of_run.figures("", of_run.fully_sharded(of_run.chosen(2)), 2)
    plain = of_run.prediction(replace(of_run.chosen(2), flags=MODES["adamw"].flags), 2)
    units = SIZES_OF_FSDP[1].n_layer + 1
    for by_default, at_best in sends:
        assert by_default[0] == row["sent"]
        assert at_best == (plain.sent["all-reduce"], {"all-gather": units, "reduce-scatter": units})
    for sizes, *of_ranks in zip(SIZES_OF_FSDP, *takes, strict=True):
        after, before, peak = map(min, zip(*of_ranks, strict=True))  # on busy cores, a thread of gloo may free a tensor late
        of_run = planner(sizes, batch_size=1, gradient_accumulation_steps=4, **NOTHING_FITS)
        row = of_run.figures("", of_run.fully_sharded(of_run.chosen(2)), 2)
        assert row["parameters"] + row["state"] == pytest.approx(after, rel=0.02)
        assert row["parameters"] + row["state"] + row["gradients"] == pytest.approx(before, rel=0.02)
        assert 0.98 * peak <= row["peak"] <= 1.02 * peak
