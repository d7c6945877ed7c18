"""forecast/advice.py, step_time.py: what is recommended fits, and what it costs. What FSDP2 sends."""

import json
import re
from collections import Counter
from dataclasses import replace

import pytest
import test_plan_script
import torch
from ranks import run_in_turn
from scripts import SIZES
from test_plan_script import plan
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.contenders import Contender, Setup
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
        rounds = choice.flags.stored_dtype is not None or choice.flags.state_dtype == "int8"
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
    rounded = advice.cheapest(limited, 2, lambda choice: choice.flags.stored_dtype is not None)
    assert (exact.flags.param_dtype, rounded.flags.param_dtype) == ("auto", "bfloat16_remainder")
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
    assert advice.largest_model(planner(gpu_memory_gb=1e-6), "adamw", 2) is None
    assert advice.fewest_ranks(planner(), "adamw") == 1
    at_8 = planner().forecast(planner().chosen(8), 8)
    limited = planner(gpu_memory_gb=1.31 * max(at_8.peak, at_8.saving_peak) / 1e9)
    ranks = advice.fewest_ranks(limited, "these settings")
    assert 1 < ranks <= 8
    assert not limited.fits(limited.forecast(limited.chosen(ranks // 2), ranks // 2))


def test_communication_that_computation_cannot_hide():
    """8 ranks on two machines: a ring crosses to the other machine from one of four ranks."""
    small = planner(bucket_mb=0.1)
    prediction = small.prediction(small.chosen(8), 8)
    (buffer,) = prediction.plan.buffers
    share = prediction.plan.params[0].numel / sum(buffer.layout.numels.values())  # of the embedding, which is registered first
    assert share > 2 / len(buffer.layout.shards), "it fills several buckets"
    sent = prediction.sent
    network = Network(inside=8.0, across=2.0, ranks_per_machine=4)
    assert network.across_machines(prediction) == {kind: count / 4 for kind, count in sent.items()}
    took = network.seconds(prediction)
    assert took == {kind: pytest.approx((0.75 * count / 8 + 4 * 0.25 * count / 2) * 8 / 1e9) for kind, count in sent.items()}
    for seconds, exposed in ((1e9, share), (0, 1)):  # of computation, and which part of the communication it leaves
        found = network.exposed(prediction, seconds, seconds)
        for kind, ms in took.items():
            assert found.get(kind, 0) == pytest.approx(ms * exposed, rel=0.01), "weights have padding"
    halved = planner(bucket_mb=0.1, dtype="bfloat16")
    narrow = halved.prediction(halved.chosen(8), 8)
    linear = sum(spec.numel for spec in narrow.plan.params if spec.autocast)
    gradients, last_gradient = prediction.gradients
    of_weights = last_gradient / (gradients - 2 * linear)
    assert narrow.exposed_weights == pytest.approx(of_weights, rel=0.01)
    assert narrow.exposed_share == pytest.approx(share, rel=0.01)
    assert network._replace(ranks_per_machine=8).across_machines(prediction) == dict.fromkeys(sent, 0.0)
    torch_impl = planner(zero1_impl="torch")
    broadcasts = torch_impl.prediction(torch_impl.chosen(8), 8)
    assert network.exposed(broadcasts, 1e9, 1e9)["broadcast"] == network.seconds(broadcasts)["broadcast"]


def test_the_time_of_matrix_products():
    """On an A100 with 156 TFLOP/s, at an MFU of 50 %."""
    one = planner(device="cuda", gpu="A100", mfu=50.0, gradient_accumulation_steps=16, **NOTHING_FITS)
    alone, checkpointing = (one.figures("", choice, 1)["seconds"] for choice in (one.chosen(1), one.everything(1)))
    assert alone == pytest.approx(8 * 16 * 64 * GPT(CONFIG).flops_per_token() / 156e12)
    assert checkpointing == pytest.approx(4 / 3 * alone), "the forward once more"


def test_plan_says_what_to_do(data):
    small = f"--dataset={data}", *SIZES
    lines = plan(*small, "--world_size=2", "--gpu_memory_gb=0.00035", "--device=cuda")
    assert "does not fit in 0.00035 GB" in lines
    for said in (
        r"^ +the fastest that fits with the least rounding, as predicted: --.*\n"
        r" +peak .* MB \(\d+% to spare\), up to --batch_size=\d+; about ",
        r"; about [\d,]+k tokens/s and [\d.]+ \w+ for 600,000 iterations, [\d.,]+ [MB] tokens, on A100 at 33 % MFU$",
        r"^ +--batch_size=1 --gradient_accumulation_steps=12: the same global batch; ",
    ):
        assert re.search(said, lines, re.M)
    nothing = plan(*small, "--world_size=1,8", "--gpu_memory_gb=0.00001", "--device=cuda")
    assert "nothing fits in one process: use larger GPUs or a smaller model" in nothing
    assert "nothing fits, because every rank holds all weights: use FSDP2 (fully_shard), which divides them; or " in nothing
    found = plan(*small, "--world_size=2", "--find=batch", "--gpu_memory_gb=0.001").splitlines()
    assert [line.split("  ")[3].strip() for line in found[-4:]] == ["adamw", "these settings", "same losses", "all flags"]


SIZES_OF_FSDP = GPTConfig(block_size=64, vocab_size=5300, n_layer=4, n_head=4, n_embd=256, bias=False)


class Sent(TorchDispatchMode):
    """Counts the bytes that a rank sends in rings of two ranks: half of what is gathered and of what is reduced."""

    def __init__(self):
        super().__init__()
        self.bytes, self.calls = 0, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._opname in ("_allgather_base_", "_reduce_scatter_base_"):
            self.bytes += max(tensor.nbytes for tensor in args[:2]) // 2
            self.calls[func._opname] += 1
        return func(*args, **(kwargs or {}))


def fully_sharded_sent():
    """Of three micro-steps by the defaults, and with weights and gradients whole until the last one: bytes, and collectives."""
    found, how = [], {"bucket_mb": "auto", "grad_clip": 1.0, "activation_checkpointing": False, "seed": 0}
    for mode in ("fsdp2_reshard", "fsdp2"):
        contender = Contender(Setup(SIZES_OF_FSDP, 1, torch.device("cpu"), "float32", **how), MODES[mode]).wrap()
        contender.step()  # makes the state
        with Sent() as sent:
            contender.step([None] * 3)
        found.append((sent.bytes, dict(sent.calls)))
    return found


def test_what_fsdp2_sends():
    """By default, blocks are gathered twice in a micro-step. At its best, each unit is gathered and sent once an iteration.

    These are formulas of docs/accounting.md, where R is what lies outside of the blocks.
    """
    model = GPT(SIZES_OF_FSDP)
    params, blocks = (4 * sum(map(torch.numel, part.parameters())) for part in (model, model.transformer.h))
    units = SIZES_OF_FSDP.n_layer + 1
    for by_default, at_best in run_in_turn(2, fully_sharded_sent)[0]:
        assert by_default[0] == 3 * (3 * params - (params - blocks)) // 2
        assert at_best == (params, {"_allgather_base_": units, "_reduce_scatter_base_": units})
