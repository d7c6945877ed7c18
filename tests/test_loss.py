"""The loss: float32, compiled or not; with loss_chunk the same up to rounding, in every precision."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from loss import LossInChunks
from model import GPT, GPTConfig

SIZES = GPTConfig(block_size=32, vocab_size=61, n_layer=2, n_head=2, n_embd=32)
AUTOCAST = {dtype: torch.autocast("cpu", dtype) for dtype in (torch.bfloat16, torch.float16)}


def loss_and_gradients(chunk, dtype=torch.float32, autocast=None, scale=1.0):
    """Of two sequences, with ignored targets in the first, as float32."""
    torch.manual_seed(0)
    model = GPT(SIZES).to(dtype)
    model.loss_chunk = chunk
    x, y = torch.randint(SIZES.vocab_size, (2, 2, SIZES.block_size))
    y[0, :5] = -1
    with autocast or nullcontext():
        logits, loss = model(x, y)
    assert (logits is None) == (chunk > 0)
    assert loss.dtype == torch.promote_types(dtype, torch.float32), "that of the logits is narrower, perhaps"
    (loss * scale).backward()
    return loss.item(), {name: param.grad.float() for name, param in model.named_parameters()}


def largest_difference(found, expected):
    """Of the gradients, relative to the largest element of each."""
    return max(((found[name] - grad).abs().max() / grad.abs().max()).item() for name, grad in expected.items())


@pytest.mark.parametrize("chunk", [1, 7, 32, 64, 1000])
def test_loss_and_gradients_are_those_of_cross_entropy(chunk):
    loss, expected = loss_and_gradients(0)
    chunked, found = loss_and_gradients(chunk)
    assert chunked == pytest.approx(loss, abs=1e-6)
    assert largest_difference(found, expected) < 1e-5


@pytest.mark.parametrize(
    ("dtype", "autocast", "scale"),
    [
        (torch.bfloat16, None, 1.0),
        (torch.float32, AUTOCAST[torch.bfloat16], 1.0),
        (torch.bfloat16, AUTOCAST[torch.bfloat16], 1.0),
        (torch.float32, AUTOCAST[torch.float16], 1.0),
        (torch.float32, AUTOCAST[torch.float16], 2.0**16),
    ],
    ids=["bfloat16 weights", "autocast", "both", "float16", "float16 with a scale"],
)
def test_lower_precision_is_about_as_near_to_float32_as_without_chunks(dtype, autocast, scale):
    loss, exact = loss_and_gradients(0, scale=scale)
    _, plain = loss_and_gradients(0, dtype, autocast, scale)
    chunked, found = loss_and_gradients(7, dtype, autocast, scale)
    assert chunked == pytest.approx(loss, rel=0.01)
    assert largest_difference(found, exact) < 2 * largest_difference(plain, exact)


def gradients_of_a_head(x, weight, targets, chunk, scale=1.0):
    """The gradient of the weight: by cross-entropy in float32, by cross-entropy in float16, and in chunks in float16."""
    found = []
    for in_chunks, autocast in ((False, nullcontext()), (False, AUTOCAST[torch.float16]), (True, AUTOCAST[torch.float16])):
        with autocast:
            logits = F.linear(x, weight)
            loss = LossInChunks.apply(x, weight, targets, chunk, True) if in_chunks else F.cross_entropy(logits, targets)
        found += torch.autograd.grad(scale * loss, weight)
    return found


def test_gradients_too_small_for_float16_do_not_become_zero_and_sums_over_a_chunk_do_not_overflow():
    torch.manual_seed(0)
    x, weight = torch.randn(10, 8), torch.randn(50, 8, requires_grad=True)
    exact, plain, chunked = gradients_of_a_head(x, weight, torch.randint(50, (10,)), 3, scale=1e-9)
    assert not torch.count_nonzero(plain), "plain cross-entropy needs a scaler"
    assert (chunked - exact).norm() < 0.01 * exact.norm()
    x, weight = torch.randn(4096, 8) + 60, (torch.randn(50, 8) / 100).requires_grad_()
    exact, _, chunked = gradients_of_a_head(x, weight, torch.zeros(4096, dtype=torch.int64), 4096)
    assert (chunked - exact).norm() < 0.01 * exact.norm()


def test_without_targets_the_gradients_are_zero():
    weight = torch.randn(50, 8, requires_grad=True)
    loss = LossInChunks.apply(torch.randn(10, 8), weight, torch.full((10,), -1), 3, True)
    assert loss.isnan(), "as plain cross-entropy"
    loss.backward()
    assert not torch.count_nonzero(weight.grad)


def test_an_evaluation_computes_no_gradients_and_a_second_backward_is_refused():
    model = GPT(SIZES)
    model.loss_chunk = 7
    tokens = torch.zeros((1, 8), dtype=torch.int64)
    with torch.no_grad():
        assert not model(tokens, tokens)[1].requires_grad
    loss = model(tokens, tokens)[1]
    loss.backward(retain_graph=True)
    once = "one backward, without create_graph; use loss_chunk=0"
    with pytest.raises(RuntimeError, match=once):
        loss.backward()
    with pytest.raises(RuntimeError, match=once):  # for a gradient penalty
        torch.autograd.grad(model(tokens, tokens)[1], model.transformer.wpe.weight, create_graph=True)
    loss_of = torch.func.grad(lambda weights: torch.func.functional_call(model, weights, (tokens, tokens))[1])
    with pytest.raises(ValueError, match=r"loss_chunk has no gradients for torch.func \(grad, vmap, ...\); use loss_chunk=0"):
        loss_of(dict(model.named_parameters()))
    assert model(tokens)[0].shape == (1, 1, SIZES.vocab_size), "sampling needs logits"


@pytest.mark.parametrize("autocast", [None, AUTOCAST[torch.bfloat16]])
def test_a_model_in_float64_stays_so(autocast):
    loss, expected = loss_and_gradients(0, torch.float64, autocast)
    chunked, found = loss_and_gradients(7, torch.float64, autocast)
    assert chunked == pytest.approx(loss, abs=1e-14)
    assert largest_difference(found, expected) < 1e-6  # as float32


@pytest.mark.parametrize(
    "change",
    [
        lambda head: setattr(head, "bias", torch.nn.Parameter(torch.ones(SIZES.vocab_size))),
        lambda head: setattr(head, "forward", torch.relu),
        lambda head: head.register_forward_hook(print),
        lambda head: head.register_forward_pre_hook(print),
        lambda head: head.register_full_backward_hook(print),
        torch.nn.utils.parametrizations.weight_norm,
    ],
)
def test_what_it_would_leave_out_is_refused(change):
    model = GPT(SIZES)
    model.loss_chunk = 7
    change(model.lm_head)
    with pytest.raises(ValueError, match="loss_chunk needs an lm_head that is"):
        model(*torch.zeros((2, 1, 8), dtype=torch.int64))


def test_compiled_it_is_the_same_and_keeps_the_logits_alone():
    torch.manual_seed(0)
    model = GPT(SIZES)
    logits = torch.randn(2, 32, 61, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(61, (2, 32))
    targets[0, :5] = -1

    def loss_and_gradient():
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor)
        with AUTOCAST[torch.bfloat16], hooks:
            loss = model.mean_loss(logits, targets)
        return loss, torch.autograd.grad(loss, logits)[0]

    kept = []
    eager, gradient = loss_and_gradient()
    assert torch.equal(eager, F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-1))
    model.compile_blocks()
    kept.clear()
    loss, compiled_gradient = loss_and_gradient()
    assert (loss.dtype, compiled_gradient.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(loss, eager)
    torch.testing.assert_close(compiled_gradient, gradient)
    assert [tensor.dtype for tensor in kept if tensor.shape == logits.shape] == [torch.bfloat16]
