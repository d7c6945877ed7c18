"""forecast/activations.py: what it predicts on fake tensors is what PyTorch's own tracker measures in a real step.

The tracker sees no scratch memory of matrix products, and sums of two gradients out of place, which autograd computes in place.
Neither counts in the peaks that are compared with it. `test_malloc.py` compares both with what malloc gives out.
"""

import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from distributed.machine import DTYPES
from forecast.activations import micro_step, predict
from forecast.live_bytes import LiveBytes
from forecast.prediction import Workload
from loss import first_tokens
from model import GPT, GPTConfig

SIZES = GPTConfig(block_size=64, vocab_size=65, n_layer=5, n_head=4, n_embd=64, dropout=0.1)
WIDE = replace(SIZES, vocab_size=4000, dropout=0.0)  # the tied embedding decides the end of backward
BATCH = 8
PRECISIONS = {  # dtype of the computation, and of the weights
    "float32": ("float32", "float32"),
    "autocast": ("bfloat16", "float32"),
    "bfloat16 weights": ("bfloat16", "bfloat16"),
}
WAYS = {"plain": (False, 0), "checkpointing": (True, 0), "loss_chunk": (False, 100)}
COMBINED = [("float32", "plain"), ("bfloat16 weights", "plain"), ("autocast", "checkpointing"), ("autocast", "loss_chunk")]
SCRATCH = {"none": lambda transposed: False, "AVX2": lambda transposed: transposed, "AVX-512": lambda transposed: True}
SLOW = pytest.mark.slow("other cases have the precision, and others the way", seconds=5)
REST = [pytest.param(*pair, marks=SLOW) for pair in itertools.product(PRECISIONS, WAYS) if pair not in COMBINED]


@pytest.fixture(autouse=True)
def _without_scratch_memory(monkeypatch):
    monkeypatch.setattr("forecast.live_bytes.multiplies_in_float32", SCRATCH["none"])


def work(config, dtype, way=(False, 0), device_type="cpu"):
    return Workload(config, BATCH, dtype, device_type, *way)


def real_step(workload, param_dtype):
    """A model, its forward pass to the loss, and the autocast around that: all that a micro-step on the CPU needs."""
    torch.manual_seed(0)
    model = GPT(workload.config).to(DTYPES[param_dtype])
    model.activation_checkpointing, model.loss_chunk = workload.activation_checkpointing, workload.loss_chunk
    tokens = torch.zeros((workload.batch_size, workload.config.block_size), dtype=torch.int64)
    return model, lambda: model(tokens, tokens)[1], torch.autocast("cpu", torch.bfloat16, enabled=workload.dtype != "float32")


def tracked(workload, param_dtype):
    """Bytes that MemTracker counts after forward, and the most in a micro-step; without parameters and their gradients."""
    model, forward, autocast = real_step(workload, param_dtype)
    tracker = MemTracker()
    tracker.track_external(model)
    parameters = sum(param.nbytes for param in model.parameters())
    with tracker:
        with autocast:
            loss = forward()
        saved = tracker.get_tracker_snapshot("current")[torch.device("cpu")]["Total"]
        for param in model.parameters():  # after forward, because hooks of the tracker read the gradients first
            param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
        loss.backward()
    return saved - parameters, tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"] - parameters


@pytest.mark.parametrize(("precision", "way"), [*COMBINED, *REST])
def test_predictions_for_two_and_three_layers_give_what_five_take(precision, way):
    dtype, param_dtype = PRECISIONS[precision]
    workload = work(SIZES, dtype, WAYS[way])
    predicted, (saved, peak) = predict(workload, param_dtype), tracked(workload, param_dtype)
    assert predicted == micro_step(*real_step(workload, param_dtype))
    assert predicted.saved == pytest.approx(saved, rel=0.01)
    first_layer = GPT(SIZES).transformer.h[0].parameters()
    assert predicted.first_layer_gradients == sum(map(torch.numel, first_layer)) * DTYPES[param_dtype].itemsize
    assert max(predicted[1:5]) == pytest.approx(peak, rel=0.01)


@pytest.mark.parametrize(("chunk", "precision"), zip([30, 64, 200], PRECISIONS, strict=True))
def test_three_chunks_of_the_loss_stand_for_all(chunk, precision):
    dtype, param_dtype = PRECISIONS[precision]
    workload = work(WIDE, dtype, (True, chunk))
    assert BATCH * WIDE.block_size > 2 * chunk
    some = predict(workload, param_dtype)
    with mock.patch("forecast.activations._some_first_tokens", first_tokens):
        assert predict(workload, param_dtype) == some


def test_the_peak_of_many_layers_may_be_elsewhere_than_that_of_three():
    """Three layers have it in the loss, eight at the end of forward, where autocast holds a copy of all weights."""
    workload = work(replace(SIZES, vocab_size=2000, n_layer=8, n_embd=128, dropout=0.0), "bfloat16", (True, 0))
    _, peak = tracked(workload, "float32")
    assert max(predict(workload, "float32")[1:]) == pytest.approx(peak, rel=0.01)


@pytest.mark.parametrize("is_kept", [False, True])
def test_live_bytes_counts_the_sum_of_two_gradients_in_place_unless_the_first_is_kept(is_kept):
    weight, kept = torch.ones(1000, requires_grad=True), []
    with LiveBytes() as live:
        live.ignore([weight])
        first, second = (weight * factor for factor in (2.0, 3.0))
        product = first.sum() + second.sum()
        if is_kept:
            second.grad_fn.register_hook(lambda gradients, _: kept.extend(gradients))
        del first, second
        before = live.now
        live.reset_peak()
        product.backward()
    assert live.peak - before == pytest.approx((3 if is_kept else 2) * 4000, abs=100)
    assert torch.equal(weight.grad, torch.full((1000,), 5.0))


def test_products_take_scratch_memory_on_some_cpus_and_none_on_a_gpu(monkeypatch):
    """With AVX2 those of a transposed factor do, such as the gradient of a weight; with AVX-512 also those that are larger."""
    found = {}
    for device_type, (name, scratch) in itertools.product(("cpu", "cuda"), SCRATCH.items()):
        monkeypatch.setattr("forecast.live_bytes.multiplies_in_float32", scratch)
        found[device_type, name] = predict(work(WIDE, "bfloat16", device_type=device_type), "float32")
    assert len({found["cuda", name] for name in SCRATCH}) == 1
    assert len({found["cpu", name].saved for name in SCRATCH}) == 1
    assert found["cpu", "none"].layers < found["cpu", "AVX2"].layers < found["cpu", "AVX-512"].layers


def test_a_compiled_loss_takes_the_logits_and_their_gradient():
    """As `test_loss.py` finds. Without the compiler it takes float32 log-probabilities, their gradient, and its copies."""
    eager, compiled = (predict(replace(work(WIDE, "bfloat16"), compiled=value), "float32") for value in (False, True))
    logits = 2 * BATCH * WIDE.block_size * WIDE.vocab_size  # bytes
    assert eager.saved - compiled.saved == pytest.approx(logits, rel=0.01)
    assert eager.loss - eager.saved == pytest.approx(4 * logits, rel=0.01)
    assert compiled.loss - compiled.saved == pytest.approx(logits, rel=0.01)
