"""Where a step gets its gradients: GradientSource, and the one without ShardedDataParallel. Their norms."""

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist

from zero.buckets import Bucket, Placement
from zero.checks import SPARSE
from zero.collectives import Communicator
from zero.host_comm import extremes
from zero.tensors import flattened, name_of, shaped

COMPARED_STEPS = 2  # the first ones
TOLERANCE = 1e-3  # of norms: ranks that add up in different orders, also in bfloat16, differ by less


class GradientSource(ABC):
    """Gives a ShardedOptimizer its gradients, with the same calls on all ranks: a Reducer, or else ParameterGradients."""

    is_whole = False  # whether every rank has all gradients: clipping and unscaling must keep them equal on all ranks

    @abstractmethod
    def check(self) -> None:
        """Raise RuntimeError if no step can be made now. Called when a step begins."""

    @abstractmethod
    def begin_collecting(self) -> None:
        """Start what all buckets need. Raise RuntimeError if gradients were not sent, or dropped in part."""

    @abstractmethod
    def collect(self, bucket: Bucket) -> None:
        """Give each owned slice of a bucket its mean gradient or None, in `OwnedSlice.local.grad`. May be called again."""

    @abstractmethod
    def with_gradient(self) -> list[torch.nn.Parameter]:
        """Return the parameters that have a gradient on any rank. The current step changes these parameters."""

    @abstractmethod
    def zero_grad(self, set_to_none: bool) -> None:
        """Drop the gradients that are not in `param.grad`, or set them to zero."""

    @abstractmethod
    def held_bytes(self) -> dict[str, int]:
        """Return the bytes held in addition to the parameters' gradients: "gradients" and "buckets"."""


class ParameterGradients(GradientSource):
    """The source of gradients without ShardedDataParallel: those of the parameters, which must already be averaged."""

    is_whole = True

    def __init__(self, placed: Placement) -> None:
        self._placed = placed
        self._checked = 0  # steps

    def check(self) -> None:
        """Refuse narrow sums, sparse gradients, gradients on some ranks only, and in the first steps norms that differ."""
        comm, params = self._placed.comm, self._placed.number_of
        if any(buffer.planned.is_of_autocast for buffer in self._placed.buffers):
            raise RuntimeError("`autocast` needs ShardedDataParallel, which adds up gradients in float32; wrap the model in it")
        if any(param.grad is not None and param.grad.is_sparse for param in params):
            raise RuntimeError(SPARSE)
        if comm.world_size == 1:
            return
        self._checked += 1
        norms = [-1.0 if param.grad is None else self._norm(param.grad) for param in params]  # -1: no gradient
        remedy = "average the gradients over all ranks before step, where a rank without one counts as zero"
        for param, (least, largest) in zip(params, extremes(norms, comm.group), strict=True):
            if largest >= 0 and largest - least > TOLERANCE * largest:
                its = f"norm {least:.4g} on one rank, {largest:.4g} on another" if least >= 0 else "values on some ranks only"
                name = name_of(param, self._placed.names)
                raise RuntimeError(f"the gradient of {name} has {its}; {remedy}, or use ShardedDataParallel")

    def _norm(self, gradient: torch.Tensor) -> float:
        """Return the norm in the first steps, for which the host waits, and 0 in later ones."""
        norm = float32_norms([gradient])[0].item() if self._checked <= COMPARED_STEPS else 0.0
        return norm if math.isfinite(norm) else 0.0

    def begin_collecting(self) -> None:
        """Do nothing: the gradients are there."""

    def collect(self, bucket: Bucket) -> None:
        for owned in bucket.owned:
            local, gradient = owned.local, owned.param.grad
            if gradient is None:
                local.grad = None
                continue
            flat = flattened(gradient, owned.param)
            own = shaped(flat[owned.start : owned.stop], local)
            is_view = bucket.masters is None and flat.data_ptr() == gradient.data_ptr()
            local.grad = own if is_view else own.to(local.dtype)

    def with_gradient(self) -> list[torch.nn.Parameter]:
        return [param for param in self._placed.number_of if param.grad is not None]

    def zero_grad(self, set_to_none: bool) -> None:
        """Do nothing: what `collect` converts is `local.grad`, which the optimizer drops."""

    def held_bytes(self) -> dict[str, int]:
        converted = [owned.local.grad for owned in self._placed.owned if owned.masters is not None]
        return {"gradients": sum(gradient.nbytes for gradient in converted if gradient is not None)}


class SentGradient(torch.Tensor):
    """Stands in `param.grad` for a gradient that backward has taken away, until the next `zero_grad`.

    It has the shape, the dtype and the device of the parameter, but no elements: every operation raises RuntimeError.
    """

    @staticmethod
    def __new__(cls, param: torch.Tensor) -> "SentGradient":
        how: Any = {"strides": param.stride(), "dtype": param.dtype, "device": param.device}
        return torch.Tensor._make_wrapper_subclass(cls, param.shape, **how)

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]  # torch declares a function
        _refuse(function.overloadpacket.__name__)

    data = property(lambda sent: _refuse("data"), lambda sent, _: _refuse("data"))

    def share_memory_(self) -> None:
        _refuse("share_memory_")

    def __reduce_ex__(self, protocol: Any) -> Any:
        _refuse("pickle")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SentGradient(shape={tuple(self.shape)}, dtype={self.dtype})"


def _refuse(function: str) -> None:
    if function == "_to_copy":  # also of Module.to
        why = "this gradient cannot be copied, because it has been sent"
        raise RuntimeError(f"{why}; if the model was moved or cast, build ShardedOptimizer after that")
    raise RuntimeError(
        "this gradient cannot be read or written: ShardedDataParallel has sent it, and each rank holds only its shards of the "
        "mean; clip with optimizer.clip_grad_norm_, scale with zero.ShardedGradScaler, zero it with optimizer.zero_grad, and "
        f"call backward on an output of the wrapper (the function was {function})"
    )


def norm_over_ranks(norms: list[torch.Tensor], norm_type: float, comm: Communicator) -> torch.Tensor:
    """Return the norm of all gradients, given those of this rank. Needs to be called on all ranks."""
    is_max = norm_type == math.inf
    total = torch.stack(norms).max() if is_max else torch.stack(norms).pow(norm_type).sum()
    # over all ranks, also if there are replicas: the norm must have the same bits on all of them
    op = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
    comm.wait("all-reduce", comm.all_reduce(total, op), total.device)
    return total if is_max else (total / comm.replicas).pow(1 / norm_type)


def float32_norms(gradients: list[torch.Tensor], norm_type: float = 2.0) -> list[torch.Tensor]:
    """Return the norms of gradients in float32, also if these are float16, whose norm may be larger than float16 can hold."""
    dtype = torch.float32 if any(gradient.dtype.itemsize < 4 for gradient in gradients) else None
    return [norm.float() for norm in torch._foreach_norm(gradients, norm_type, dtype=dtype)]
