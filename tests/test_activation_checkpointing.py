"""activation_checkpointing: the same run bit for bit, and blocks that keep little more than their input."""

from functools import partial

import faults
import torch
from scripts import run, torch_load, train
from toy import assert_equal

from forecast.activations import predict
from forecast.prediction import Workload
from model import GPT, GPT2_SIZES, GPTConfig


def gradients(checkpointing):
    """Of a small model with dropout, whose random numbers are drawn again."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=16, vocab_size=29, n_layer=2, n_head=2, n_embd=32, dropout=0.1))
    model.activation_checkpointing = checkpointing
    tokens = torch.arange(16)[None]
    model(tokens, tokens)[1].backward()
    return [param.grad for param in model.parameters()]


def test_gradients_are_the_same_bit_for_bit():
    assert all(map(torch.equal, gradients(checkpointing=False), gradients(checkpointing=True)))


def test_losses_and_weights_of_a_run_are_the_same_bit_for_bit(data, tmp_path):
    flags = "--param_dtype=bfloat16", "--shard_gradients=True", "--max_iters=4", "--eval_interval=4", "--zero_bucket_mb=0.02"
    run_and_print = partial(run, before=faults.print_checkpointed_blocks)
    losses, evaluations, printed = train(tmp_path / "plain", data, *flags, ranks=2, run=run_and_print)
    assert "keeps only its input" not in printed
    again = train(tmp_path / "out", data, "--activation_checkpointing=True", *flags, ranks=2, run=run_and_print)
    assert "keeps only its input" in again[2]
    assert again[:2] == (losses, evaluations)
    assert len(losses) == 5
    plain, other = torch_load(tmp_path / "plain"), torch_load(tmp_path / "out")
    assert plain["iter_num"] == other["iter_num"] == 5
    for part in ("model", "optimizer"):
        assert_equal(other[part], plain[part], part)


def kept_by_a_block(checkpointing):
    """Bytes that one block of GPT-2 124M keeps for backward."""
    sizes = {**GPT2_SIZES["gpt2"], "block_size": 512}
    layers = sizes.pop("n_layer")
    less, more = (
        predict(Workload(GPTConfig(**sizes, n_layer=count), 1, "bfloat16", "cuda", checkpointing), "float32")
        for count in (layers - 1, layers)
    )
    return more.saved - less.saved


def test_the_blocks_of_gpt2_keep_a_quarter_at_most():
    assert 0 < kept_by_a_block(checkpointing=True) <= 0.25 * kept_by_a_block(checkpointing=False)
