"""run/shadow.py: plain AdamW beside the run proves parity on the user's own model and data, and leaves the run as it is."""

import contextlib
import re
import weakref
from functools import partial

import faults
import pytest
import torch
from ranks import run_ranks
from scripts import FEW, run, torch_load, train
from toy import assert_equal

from model import GPT, GPTConfig
from run.shadow import Shadow
from zero import ShardedGradScaler
from zero.build import build

SIZES = GPTConfig(block_size=16, vocab_size=29, n_layer=1, n_head=2, n_embd=32)
UNCLIPPED = ["--grad_clip=0.0", "--max_iters=4", "--eval_interval=4", "--gradient_accumulation_steps=4"]
EXACT = "bit-identical to plain AdamW"


def verdict(printed):
    """The line with the result."""
    [line] = [line for line in printed.splitlines() if line.startswith("shadow check: ")]
    return line


@pytest.mark.parametrize(
    ("ranks", "flags", "compare"),
    [
        (2, ["--bucket_mb=0.02", "--activation_checkpointing=True"], True),
        (2, ["--zero1_impl=torch"], False),
        (0, ["--grad_clip=0.5"], False),
    ],
    ids=str,
)
def test_the_shadow_of_an_exact_run_is_bit_identical_and_leaves_no_trace(data, tmp_path, ranks, flags, compare):
    """With dropout. The losses, weights and state of the run are those without a shadow."""
    flags = [*UNCLIPPED, *flags]
    losses, _, printed = train(tmp_path / "checked", data, *flags, "--shadow_check=3", ranks=ranks)
    assert verdict(printed) == f"shadow check: after 3 iterations, all 15 parameters are {EXACT}"
    compared = printed.index("memory of tensors: ")  # when the copy is gone
    assert printed.index("iter 2: ") < printed.index("shadow check: ") < compared
    assert "WARNING" not in printed
    if compare:
        alone, _, _ = train(tmp_path / "alone", data, *flags, ranks=ranks)
        assert losses == alone
        for key in ("model", "optimizer", "scaler"):
            assert_equal(torch_load(tmp_path / "checked")[key], torch_load(tmp_path / "alone")[key], key)


def test_clipping_rounds(data, tmp_path):
    line = verdict(train(tmp_path, data, "--max_iters=4", "--shadow_check=4", "--gradient_accumulation_steps=3", ranks=3)[2])
    assert 0 < float(re.search(r"the largest difference from plain AdamW is (\S+), in transformer\.\S+$", line)[1]) < 1e-5


@pytest.mark.parametrize(("where", "flags"), [("weight", []), ("master", ["--param_dtype=bfloat16"])])
def test_a_wrong_value_on_one_rank_is_found(data, tmp_path, where, flags):
    disturbed = partial(run, before=partial(faults.wrong_value_on_rank_1, where))
    _, _, printed = train(tmp_path, data, *UNCLIPPED, FEW, *flags, "--shadow_check=1", ranks=2, run=disturbed)
    difference, name = re.search(r"largest difference from plain AdamW is (\S+), in ([\w.]+)", verdict(printed)).groups()
    assert name == re.search("disturbed: (.*)", printed)[1]
    assert float(difference) == pytest.approx(0.25, abs=0.02)
    assert ("; differences are expected" if flags else "; two ranks without clipping must find the same") in verdict(printed)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_shadow_skips_the_updates_that_the_run_skips(data, tmp_path, dtype):
    """Each decides for itself."""
    flags = *UNCLIPPED, "--gradient_accumulation_steps=6", "--max_nonfinite=10", f"--dtype={dtype}", "--shadow_check=4"
    _, _, printed = train(tmp_path, data, *flags, ranks=2, run=partial(run, before=faults.nan_loss_on_rank_0))
    assert "by iteration 1, 1 more update was skipped (1 consecutive so far): the loss of rank 0 is nan" in printed
    assert EXACT in verdict(printed)


def test_a_resumed_run_and_its_shadow_begin_at_the_same_checkpoint(data, tmp_path):
    """The run ends before the check does."""
    flags = "--grad_clip=0.0", FEW
    train(tmp_path, data, *flags, "--max_iters=1", ranks=2)
    resumed = train(tmp_path, data, *flags, "--max_iters=3", "--init_from=resume", "--shadow_check=100", ranks=2)
    assert verdict(resumed[2]) == f"shadow check: after 2 iterations, all 15 parameters are {EXACT}"


def alive_with_a_shadow():
    """By iteration: what `update` returns, and how many parameters of the copy are alive after it."""
    torch.manual_seed(0)
    model = GPT(SIZES)
    groups = model.param_groups(0.1)
    shadow = Shadow(2, model, groups, None, None, torch.device("cpu"))
    wrapped, optimizer = build(model, groups, lr=0.01)
    shadow.follow(optimizer, ShardedGradScaler("cpu", enabled=False), 1, contextlib.nullcontext(), 1, 0.0)
    copied = [weakref.ref(param) for param in shadow._raw.parameters()]
    result = []
    for _ in range(2):
        tokens = torch.randint(29, (2, 16))
        shadow.micro_step(tokens, tokens)
        wrapped(tokens, tokens)[1].backward()
        optimizer.step()
        optimizer.zero_grad()
        result.append([shadow.update(), sum(param() is not None for param in copied)])
    return result


def test_after_the_last_iteration_the_memory_of_the_copy_is_free():
    number = len(list(GPT(SIZES).parameters()))
    for alive in run_ranks(alive_with_a_shadow, 2):
        assert alive == [[False, number], [True, 0]]


def test_the_copy_of_a_compiled_model_is_compiled():
    model = GPT(SIZES)
    model.transformer.h[0].compile(backend="eager")
    shadow = Shadow(1, model, model.param_groups(0.1), None, None, torch.device("cpu"))
    assert [name for name, part in shadow._raw.named_modules() if part._compiled_call_impl is not None] == ["transformer.h.0"]


def test_a_device_whose_random_numbers_cannot_be_repeated_is_refused():
    model = GPT(SIZES)
    with pytest.raises(ValueError, match="shadow_check=5 does not support device=mps; use --shadow_check=0"):
        Shadow(5, model, model.param_groups(0.1), None, None, torch.device("mps"))
