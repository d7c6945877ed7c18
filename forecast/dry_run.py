"""A dry run of `zero` itself: as one rank of any number, on the meta device, where tensors have sizes but no memory.

The parameters have the sizes of a model's, and their gradients arrive in its order, but nothing computes with them. What the
optimizer, its wrapper and their communication allocate is counted, so a change of `zero` needs no change here.
"""

import weakref
from collections.abc import Sequence
from dataclasses import fields
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from forecast.prediction import Moment, Optimizer, Point
from zero import codecs
from zero.data_parallel import ShardedDataParallel
from zero.flags import Flags
from zero.held_bytes import held_bytes
from zero.host_comm import SimulatedGroup
from zero.layout import ParameterSpec
from zero.optimizer import ShardedOptimizer
from zero.options import Options
from zero.tensors import piece_numel


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages of new tensors, as long as they are alive. What only writes to memory is not run."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # by address of the storage object

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            written = kwargs.get("out", args[0])
            if (written[0] if isinstance(written, list) else written).is_meta:  # nothing to write to
                return written if func._schema.returns else None
        result = func(*args, **kwargs)
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                self.count(tensor)
        return result

    def count(self, tensor: torch.Tensor, is_elsewhere: bool = False) -> None:
        """Count a tensor, unless it is in other memory."""
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, 0 if is_elsewhere else storage.nbytes()

        def free(_: Any) -> None:
            del self._alive[key]
            self.now -= nbytes

        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, free)
            self.now += nbytes
            self.peak = max(self.peak, self.now)


class _Model(nn.Module):
    """Parameters, in the order of their registration."""

    def __init__(self, specs: Sequence[ParameterSpec]) -> None:
        super().__init__()
        numbered = [nn.Parameter(torch.empty(spec.shape, dtype=spec.dtype, device="meta")) for spec in specs]
        pairs = list(zip(specs, numbered, strict=True))
        self.params = nn.ParameterList(param for _, param in sorted(pairs, key=lambda pair: pair[0].position))
        self.groups: list[dict[str, Any]] = [{"params": []} for _ in {spec.group for spec in specs}]
        for spec, param in pairs:
            self.groups[spec.group]["params"].append(param)
            if spec.matrices:
                ns_dtype = str(spec.matrix_dtype).removeprefix("torch.")
                self.groups[spec.group] |= {"matrices": spec.matrices, "ns_dtype": ns_dtype}

    def forward(self, backward: Any) -> torch.Tensor:
        return _Backward.apply(self.params[0], backward)


class _Backward(torch.autograd.Function):
    """Its backward calls `backward`, which makes all gradients arrive but that of the first parameter, which it returns."""

    @staticmethod
    def forward(ctx: Any, first: nn.Parameter, backward: Any) -> torch.Tensor:
        ctx.run = backward
        return torch.empty(0, device="meta")

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        return ctx.run(), None


class _Rank:
    """Runs iterations, and notes what is alive."""

    def __init__(
        self, specs: Sequence[ParameterSpec], flags: Flags, optimizer: Optimizer, group: SimulatedGroup, on_cpu: bool
    ) -> None:
        self.live = _LiveBytes()
        if flags.state_dtype == "int8":
            codecs._nearest_codes(torch.device("meta"))  # tables that all optimizers share
        model = _Model(specs)
        for param in model.params:  # rank 0 has the weights in main memory
            self.live.count(param.data, is_elsewhere=not on_cpu)
        cls, arguments = optimizer
        how: dict[str, Any] = {name: name == "fused" or value for name, value in arguments.items()}
        how |= {option.name: getattr(flags, option.name) for option in fields(Options)}
        with self.live:
            self.optimizer = ShardedOptimizer(model.groups, cls, group, registration_order=model.params, **how)
            self.wrapper = ShardedDataParallel(model, self.optimizer, flags.shard_gradients)
        self.construction, self.largest_buckets, self._arrived, self._before = self.live.peak, 0, 0, 0
        self.points: dict[Point, dict[str, int]] = {"after wrapping": held_bytes(self.optimizer, self.wrapper)}
        self.moments: list[Moment] = []
        self._params = list(model.params)
        self._new = {param: torch.empty_like(param) for param in self._params}  # new gradients, which count as activations
        for gradient in self._new.values():
            self.live.count(gradient, is_elsewhere=True)

    def iteration(self, micro_steps: int) -> None:
        self.moments, self.live.peak, self._before = [Moment(0)], self.live.now, self.live.now
        for left in reversed(range(micro_steps)):
            self.wrapper.require_backward_grad_sync = left == 0
            self._arrived, output = 0, self.wrapper(self._backward)
            self._note("forward")
            output.backward(output.detach())
            self._note("")
            if left > 0:
                self.points["accumulating"] = held_bytes(self.optimizer, self.wrapper)
        self.optimizer.clip_grad_norm_(1.0)
        self.points["before step"] = held_bytes(self.optimizer, self.wrapper)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._note("")
        self.points["after step"] = held_bytes(self.optimizer, self.wrapper)

    def _backward(self) -> torch.Tensor:
        for phase in ("saved", "loss", "layers"):
            self._note(phase)
        sends = self.wrapper.require_backward_grad_sync or self.wrapper.shard_gradients
        first, *others = self._params
        for param in reversed(others):
            if param.grad is None:  # otherwise, autograd adds to it in place
                param.grad = self._new[param] if sends else torch.empty_like(param)
            self._arrived += param.nbytes
            for hook in param._post_accumulate_grad_hooks.values():
                hook(param)
            self._note("layers")
        self._note("embedding")
        return torch.empty_like(first)

    def _note(self, beside: str) -> None:
        """Note the peak since the last call, beside activations, unless there was more beside as many or more of them."""
        if self.live.peak > self._before or beside != self.moments[-1].beside:
            self.moments.append(Moment(self.live.peak, beside, self._arrived))
            buckets = self.optimizer.source.held_bytes()["buckets"] - self.optimizer.comm.pool.nbytes
            self.largest_buckets = max(self.largest_buckets, buckets)
        self._before = self.live.peak = self.live.now


def dry_run(
    specs: Sequence[ParameterSpec],
    flags: Flags,
    optimizer: Optimizer,
    group: SimulatedGroup,
    micro_steps: int,
    on_cpu: bool,
) -> dict[str, Any]:
    """Return what a rank takes in its second iteration, by field of `Prediction`; what it sends, per backward that sends.

    Three micro-steps are like more: all between the first and the last are alike.
    """
    with (
        mock.patch("zero.collectives.is_on_cpu", _always(on_cpu)),
        mock.patch("zero.tensors.piece_numel", _always(piece_numel(on_cpu))),
        mock.patch("torch.optim.optimizer._get_fused_kernels_supported_devices", _always(["meta"])),
    ):
        rank = _Rank(specs, flags, optimizer, group, on_cpu)
        with rank.live:
            rank.iteration(1)
            sent = dict(rank.optimizer.comm.sent_bytes)
            rank.iteration(micro_steps)
    exchange, own = rank.optimizer._update.exchange, rank.optimizer.comm.shard_rank
    matrices = exchange.matrices if exchange else []
    return {
        "points": rank.points,
        "moments": rank.moments,
        "construction": rank.construction,
        "sent": sent,
        "largest_buckets": rank.largest_buckets,
        "least_exposed": 1 / len(rank.optimizer.placed.buckets),
        "newton_schulz": sum(matrix.cost for matrix in matrices if matrix.owner == own),
        "matrix_rounds": max((matrix.round for matrix in matrices), default=-1) + 1,
    }


def _always(result: Any) -> Any:
    """Return a function of this result. Not a Mock, which keeps its arguments alive."""
    return lambda *_: result
