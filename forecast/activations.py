"""Memory for the activations of a GPT, predicted without a GPU and without its weights.

`predict` runs a micro-step of a small model on fake tensors (PyTorch's FakeTensorMode): they have shapes, dtypes and
lifetimes, but no memory. `LiveBytes` counts the bytes that would be alive. The result for many layers that are alike is
extrapolated from two and three layers. So there is no formula that a change of `model.py` would make wrong.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from distributed.machine import DTYPES
from forecast.live_bytes import LiveBytes
from forecast.prediction import Activations, Workload
from model import GPT, CausalSelfAttention, LayerNorm, SkipInitialization, without_weights
from zero.autocast import autocast_parameters


def predict(workload: Workload, weights: str) -> Activations:
    """Predict the activations of a micro-step. Blocks count as not compiled; if they are, they need less.

    `weights`: see `zero.layout.Plan`. A `device_type` other than 'cpu' counts as 'cuda'.
    """
    layers = workload.config.n_layer
    with without_weights():
        blocks = GPT(workload.config).blocks
    kinds = {tuple((param.shape, param.requires_grad) for param in block.parameters()) for block in blocks}
    if layers <= 3 or len(kinds) > 1:  # some may be frozen
        return _measure(workload, layers, weights)
    pairs = zip(_measure(workload, 2, weights), _measure(workload, 3, weights), strict=True)
    return Activations(*(of_three + (layers - 3) * (of_three - of_two) for of_two, of_three in pairs))


def _measure(workload: Workload, layers: int, weights: str) -> Activations:
    on_cpu, config = workload.device_type == "cpu", replace(workload.config, n_layer=layers)
    with FakeTensorMode():
        with SkipInitialization():
            model = GPT(config)
        casts = weights == "autocast"  # float16 takes as many bytes; the sums of these gradients are float32
        dtypes = autocast_parameters(model, torch.bfloat16) if casts else dict.fromkeys(model.parameters(), DTYPES[weights])
        for param, dtype in dtypes.items():
            param.data = param.data.to(dtype)  # Module.to() would swap the fake tensors, which it cannot
            param.grad_dtype = None if casts else dtype
        model.activation_checkpointing, model.loss_chunk = workload.activation_checkpointing, workload.loss_chunk
        if workload.compiled:
            model.mean_loss.forward = _CompiledLoss.apply
        tokens = torch.zeros((workload.batch_size, config.block_size), dtype=torch.int64)
        # a compiled block casts its weights itself, and a checkpointed one keeps no cast for backward
        keeps_casts = not (workload.compiled and workload.activation_checkpointing)
        autocast = torch.autocast("cpu", torch.bfloat16, workload.dtype != "float32", keeps_casts)
        if not on_cpu:
            _imitate_cuda(model)
        # all chunks of the loss but the last are alike: two of them, and the last one, have the peak of all
        with mock.patch("loss.first_tokens", _some_first_tokens):
            return micro_step(model, lambda: model(tokens, tokens)[1], autocast, on_cpu)


def micro_step(model: GPT, forward: Callable[[], torch.Tensor], autocast: Any, on_cpu: bool = True) -> Activations:
    """Run forward and backward on the CPU and measure the activations. From now on, gradients are dropped as they arrive.

    `on_cpu` is that of `LiveBytes`.
    """
    live = LiveBytes(on_cpu)
    live.ignore({*model.parameters(), *model.buffers()})
    first_layer = set(model.transformer.h[0].parameters())
    peaks: list[int] = []  # of forward, loss and layers

    def end_phase() -> None:
        peaks.append(live.peak)
        live.reset_peak()

    def drop(param: torch.nn.Parameter) -> None:
        param.grad = None
        if len(peaks) == 1:
            end_phase()
        if len(peaks) == 2 and param in first_layer:
            end_phase()

    for param in model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(drop)
    with live:
        with autocast:
            loss = forward()
        saved = live.now
        end_phase()
        loss.backward()
    peaks += [live.peak] * (3 - len(peaks))  # the first layer may be frozen
    gradients = sum(param.numel() * (param.grad_dtype or torch.float32).itemsize for param in first_layer)
    return Activations(*[saved, *peaks, live.peak, gradients])


def _some_first_tokens(tokens: int, chunk: int) -> set[int]:
    every = range(0, tokens, chunk)
    return {*every[:2], *every[-1:]}


class _NormOnCuda(nn.LayerNorm):
    """PyTorch's LayerNorm with autocast as on a GPU: in float32, where a CPU computes in the dtype of the input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        if torch.is_autocast_enabled("cpu"):
            x, weight, bias = x.float(), weight.float(), None if bias is None else bias.float()
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class _LayerNormOnCuda(LayerNorm, _NormOnCuda):
    """That of the model, which calls PyTorch's."""


def _imitate_cuda(model: GPT) -> None:
    """Make a model on the CPU keep the bytes that it would keep on a GPU.

    Dropout keeps a mask of one byte per element on a GPU, and factors in the dtype of the input on a CPU. Attention keeps no
    mask for its dropout on a GPU.
    """
    for part in model.modules():
        if isinstance(part, nn.Dropout) and part.p:
            part.forward = partial(_dropout_on_cuda, part)
        elif isinstance(part, CausalSelfAttention):
            part.dropout = 0.0
        elif isinstance(part, LayerNorm):
            part.__class__ = _LayerNormOnCuda


class _CompiledLoss(torch.autograd.Function):
    """What lives while a compiled `loss.MeanLoss` runs: it keeps the logits, and computes each log-probability twice."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits)
        return logits.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        return torch.empty_like(ctx.saved_tensors[0]), None


def _dropout_on_cuda(dropout: nn.Dropout, x: torch.Tensor) -> torch.Tensor:
    return torch.native_dropout(x, dropout.p, True)[0]
