"""The loss of a GPT, and the same loss for a chunk of the tokens at a time, in less memory."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class MeanLoss(nn.Module):
    """The mean cross-entropy in nats, computed in float32, or in float64 of such logits.

    Autocast alone would compute `F.cross_entropy` in float32 on a CPU, but in the dtype of the logits on a GPU. There, eager
    nanoGPT rounds each log-probability to bfloat16 (by up to 0.2 %). Compiled nanoGPT rounds none, as here.
    """

    reduction = "mean"  # "none": the loss of each token, (batch * time,), 0 where the target is -1

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction=self.reduction)


def first_tokens(tokens: int, chunk: int) -> Iterable[int]:
    """Return the number of the first token of each chunk."""
    return range(0, tokens, chunk)


class LossInChunks(torch.autograd.Function):
    """The output head and the mean cross-entropy, for a chunk of the tokens at a time: the logits of all never exist.

    Forward computes the gradients too, those of the sum over the tokens. Backward divides them by the number of tokens and
    multiplies them by the incoming gradient, so float16 does not underflow. As in `F.linear` and `F.cross_entropy`, autocast
    computes products in its dtype, and the rest in float32 (in float64, if the model is). There is no second derivative.

    Args of `apply`:
        x: inputs of the head, (tokens, n_embd).
        weight: weight of the head, (vocab_size, n_embd).
        targets: (tokens,) int64; -1 is ignored.
        chunk: tokens at a time.
        needs_grad: whether there will be a backward. `forward` cannot know: autograd is always off in it.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunk: int, needs_grad: bool
    ) -> torch.Tensor:
        device = x.device.type
        casts = torch.is_autocast_enabled(device) and x.dtype != torch.float64  # autocast leaves float64 as it is
        dtype = torch.get_autocast_dtype(device) if casts else x.dtype
        wide = torch.promote_types(dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=x.device)
        grad_x = torch.empty_like(x) if needs_grad else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_grad else None

        def add(first: int) -> None:  # a function, so that its tensors are gone before those of the next chunk
            rows = slice(first, first + chunk)
            inputs, wanted = x[rows].to(dtype), targets[rows]
            log_p = (inputs @ head.t()).to(wide).log_softmax(dim=-1)  # (chunk, vocab_size)
            total.add_(F.nll_loss(log_p, wanted, ignore_index=-1, reduction="sum"))
            if grad_x is None or grad_weight is None:
                return
            ones = log_p.new_ones((len(wanted), 1))
            grad = log_p.exp_().scatter_add_(1, wanted.clamp(min=0)[:, None], -ones).mul_(wanted.ne(-1)[:, None]).to(dtype)
            grad_x[rows] = grad @ head
            if dtype == wide:
                grad_weight.addmm_(grad.t(), inputs)
            else:  # the mean over the chunk, because the sum could be too large for float16
                grad_weight.add_(grad.t() @ (inputs / chunk), alpha=chunk)

        with torch.autocast(device, enabled=False):
            head = weight.to(dtype) if casts else weight
            for first in first_tokens(len(x), chunk):
                add(first)
        count = targets.ne(-1).sum()
        if grad_weight is not None:
            ctx.found = grad_x, grad_weight.to(weight.dtype), count
        return total / count

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.found is None or torch.is_grad_enabled():  # with create_graph=True, the gradients would count as constants
            raise RuntimeError("the loss in chunks has one backward, without create_graph; use loss_chunk=0 for a second one")
        (grad_x, grad_weight, count), ctx.found = ctx.found, None  # they are changed in place
        scale = grad / count.clamp(min=1)
        return grad_x.mul_(scale), grad_weight.mul_(scale), None, None, None
