"""Placeholders for gradients that have been sent."""

from typing import Any

import torch


class SentGradient(torch.Tensor):
    """Placeholder in `param.grad` for a gradient that has been sent. The ranks' shards hold its mean over the ranks.

    It has the shape and dtype of the parameter, but no elements. `zero_()` sets the gradient to zero. `added` holds the sum
    that a further backward adds, until that is sent as well. All other operations raise an error, such as clipping and scaling.
    """

    data = property(lambda sent: sent, lambda sent, _: _refuse("data"))

    def share_memory_(self) -> None:
        _refuse("share_memory_")

    def __reduce_ex__(self, protocol: Any) -> Any:
        _refuse("pickle")

    added: torch.Tensor | None
    zeroed: bool

    @staticmethod
    def __new__(cls, param: torch.Tensor) -> "SentGradient":
        sent = torch.Tensor._make_wrapper_subclass(
            cls, param.shape, strides=param.stride(), dtype=param.dtype, device=param.device
        )
        sent.added, sent.zeroed = None, False
        return sent

    def take_added(self) -> torch.Tensor | None:
        """Return the sum that has been added since the gradient was sent, and reset it to None."""
        added, self.added = self.added, None
        return added

    def take_zeroed(self) -> bool:
        """Return whether the gradient has been zeroed since the last call."""
        zeroed, self.zeroed = self.zeroed, False
        return zeroed

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SentGradient(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as a function
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        ops = torch.ops.aten
        sent = args[0]
        if isinstance(sent, SentGradient):
            if function is ops.detach.default:
                return sent
            if function is ops.zero_.default:
                sent.zeroed, sent.added = True, None
                return sent
            in_backward = torch._C._current_graph_task_id() != -1
            if function in (ops.add.Tensor, ops.add_.Tensor) and in_backward and not kwargs:
                sent.added = args[1].clone() if sent.added is None else sent.added + args[1]
                return sent
        if function is ops._foreach_zero_.default:
            for tensor in sent:
                tensor.zero_()
            return None
        return _refuse(function.overloadpacket.__name__)


def _refuse(function: str) -> None:
    raise RuntimeError(
        "this gradient cannot be read or written: ShardedDataParallel has sent it, and each rank holds only its shards of "
        f"the mean; clip with optimizer.clip_grad_norm_, scale with zero.ShardedGradScaler (the function was {function})"
    )


def local_gradient(param: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient that only this rank holds: `param.grad`, or the sum added to it since it was sent."""
    return param.grad.added if isinstance(param.grad, SentGradient) else param.grad
