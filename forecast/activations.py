"""Memory for the activations of a GPT, predicted without a GPU and without its weights.

`predict` runs a micro-step of a small model on fake tensors (PyTorch's FakeTensorMode): they have shapes, dtypes and
lifetimes, but no memory. `LiveBytes` counts the bytes that would be alive. The result for many layers that are alike is
extrapolated from two and three layers. So there is no formula that a change of `model.py` would make wrong.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Self
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distributed.machine import DTYPES, multiplies_in_float32
from forecast.prediction import Activations, Workload
from model import GPT, CausalSelfAttention, SkipInitialization, without_weights

_WITH_MEMORY = (torch.Tensor, nn.Parameter, FakeTensor)  # other classes wrap these, or are placeholders without memory
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations inside of this context create, as long as they are alive.

    Several tensors that share one storage count once, as do storages inside of another one (the parameters in a flat buffer of
    `zero.ShardedOptimizer`). Tensors from before the context count from the first operation that
    returns a view of them, unless they are given to `ignore`.

    If two gradients arrive at one place, autograd adds the second to the first in place, but not in a context like this one,
    nor on fake tensors. There, such a sum counts as in place: its peak does not include both the sum and the first gradient.

    Args:
        on_cpu: the tensors are, or stand for, tensors of this CPU, and the peak includes the scratch memory of matrix products
            there (`machine.multiplies_in_float32`).
    """

    def __init__(self, on_cpu: bool = True) -> None:
        super().__init__()
        self._multiplies_in_float32 = {of: on_cpu and multiplies_in_float32(transposed=of) for of in (False, True)}
        self.now = 0  # bytes
        self._peak = 0
        self._alive: dict[int, int] = {}  # by address of the storage object: bytes
        # the same: the storage, and the start address and end address of its memory, if it is real
        self._spans: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, int]] = {}
        self._sum: tuple[int, int] | None = None  # the last operation added to a gradient: its key, bytes with both

    def ignore(self, tensors: Any) -> None:
        """Do not count the storages of these tensors."""
        for tensor in tensors:
            self._alive[tensor.untyped_storage()._cdata] = 0

    @property
    def peak(self) -> int:
        """Most bytes since the last reset."""
        self._end_sum()
        return self._peak

    def reset_peak(self) -> None:
        """Start a new peak."""
        self._sum = None
        self._peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._end_sum()
        result = func(*args, **(kwargs or {}))
        before = self._peak
        for leaf in tree_leaves(result):
            leaf = getattr(leaf, "_local_tensor", leaf)  # of a DTensor, whose own operations do not come here
            if type(leaf) in _WITH_MEMORY and not leaf.is_meta:
                self._count(leaf.untyped_storage(), is_real=type(leaf) is not FakeTensor)
        if _adds_gradients(func, args):
            self._peak, self._sum = before, (args[0].untyped_storage()._cdata, self.now)
        in_bfloat16 = func in _PRODUCTS and result.dtype == torch.bfloat16
        if in_bfloat16 and self._multiplies_in_float32[args[-2].stride(0) == 1 < args[-2].stride(1)]:
            self._peak = max(self._peak, self.now + result.numel() * torch.float32.itemsize)
        return result

    def __enter__(self) -> Self:
        resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, nbytes: int) -> Any:
            """FSDP2 frees the memory of storages that stay alive, and allocates it again."""
            result = resize(storage, nbytes)
            if (key := storage._cdata) in self._alive:
                self.now += storage.nbytes() - self._alive[key]
                self._alive[key] = storage.nbytes()
                self._peak = max(self._peak, self.now)
            return result

        self._resizes = mock.patch.object(torch.UntypedStorage, "resize_", counted)
        self._resizes.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._resizes.stop()
        super().__exit__(*error)

    def _end_sum(self) -> None:
        """Count both the sum and the gradient that was added to, if that is still alive."""
        if self._sum is not None:
            self._peak = max(self._peak, self._sum[1])
            self._sum = None

    def _count(self, storage: torch.UntypedStorage, is_real: bool) -> None:
        key = storage._cdata
        if key in self._alive:
            return
        start = storage.data_ptr() if is_real else 0
        spans = list(self._spans.values())  # a thread of gloo may free a storage meanwhile
        around = [(other(), begin) for other, begin, end in spans if start and begin <= start < end]
        is_inside = any(other is not None and other.data_ptr() == begin for other, begin in around)
        self._alive[key] = 0 if is_inside else storage.nbytes()
        if start and not is_inside:
            self._spans[key] = weakref.ref(storage), start, start + storage.nbytes()
        self.now += self._alive[key]
        self._peak = max(self._peak, self.now)
        weakref.finalize(storage, self._free, key).atexit = False

    def _free(self, key: int) -> None:
        self.now -= self._alive.pop(key)
        self._spans.pop(key, None)
        if self._sum is not None and self._sum[0] == key:
            self._sum = None


def _adds_gradients(func: Any, args: Any) -> bool:
    """Return whether autograd would add in place if nothing else holds the first tensor (torch/csrc/autograd/input_buffer.cpp).

    A view is added out of place: autograd itself holds its base.
    """
    in_backward = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()
    return in_backward and func is torch.ops.aten.add.Tensor and not args[0]._is_view()


def predict(workload: Workload, param_dtype: str) -> Activations:
    """Predict the activations of a micro-step. Blocks count as not compiled; if they are, they need less.

    `param_dtype`: dtype of the weights, a key of `machine.DTYPES`. A `device_type` other than 'cpu' counts as 'cuda'.
    """
    layers = workload.config.n_layer
    with without_weights():
        blocks = GPT(workload.config).blocks
    kinds = {tuple((param.shape, param.requires_grad) for param in block.parameters()) for block in blocks}
    if layers <= 3 or len(kinds) > 1:  # some may be frozen
        return _measure(workload, layers, param_dtype)
    pairs = zip(_measure(workload, 2, param_dtype), _measure(workload, 3, param_dtype), strict=True)
    return Activations(*(of_three + (layers - 3) * (of_three - of_two) for of_two, of_three in pairs))


def _measure(workload: Workload, layers: int, param_dtype: str) -> Activations:
    on_cpu, config = workload.device_type == "cpu", replace(workload.config, n_layer=layers)
    with FakeTensorMode():
        with SkipInitialization():
            model = GPT(config)
        for param in model.parameters():
            param.data = param.data.to(DTYPES[param_dtype])  # Module.to() would swap the fake tensors, which it cannot
        model.activation_checkpointing, model.loss_chunk = workload.activation_checkpointing, workload.loss_chunk
        if workload.compiled:
            model.mean_loss.forward = _CompiledLoss.apply
        tokens = torch.zeros((workload.batch_size, config.block_size), dtype=torch.int64)
        # float16 takes as many bytes
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=workload.dtype != "float32")
        # all chunks of the loss but the last are alike: two of them, and the last one, have the peak of all
        few_chunks = mock.patch("loss.first_tokens", _some_first_tokens)
        with few_chunks, nullcontext() if on_cpu else _imitation_of_cuda(model):
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
    return Activations(*[saved, *peaks, live.peak, sum(param.nbytes for param in first_layer)])


def _some_first_tokens(tokens: int, chunk: int) -> set[int]:
    every = range(0, tokens, chunk)
    return {*every[:2], *every[-1:]}


@contextmanager
def _imitation_of_cuda(model: GPT) -> Iterator[None]:
    """Make a model on the CPU keep the bytes that it would keep on a GPU.

    Autocast computes LayerNorm in float32 on a GPU, and in the dtype of its input on a CPU. Dropout keeps a mask of one byte
    per element on a GPU, and factors in the dtype of the input on a CPU. Attention keeps no mask for its dropout on a GPU.
    """
    for part in model.modules():
        if isinstance(part, nn.Dropout) and part.p:
            part.forward = partial(_dropout_on_cuda, part)
        elif isinstance(part, CausalSelfAttention):
            part.dropout = 0.0
    with mock.patch.object(nn.LayerNorm, "forward", _layer_norm_on_cuda):  # which the model's own class calls
        yield


class _CompiledLoss(torch.autograd.Function):
    """What lives while a compiled `loss.MeanLoss` runs: it keeps the logits, and computes each log-probability twice."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits)
        return logits.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        return torch.empty_like(ctx.saved_tensors[0]), None


def _layer_norm_on_cuda(norm: nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
    weight, bias = norm.weight, norm.bias
    if torch.is_autocast_enabled("cpu"):
        x, weight, bias = x.float(), weight.float(), None if bias is None else bias.float()
    return F.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)


def _dropout_on_cuda(dropout: nn.Dropout, x: torch.Tensor) -> torch.Tensor:
    return torch.native_dropout(x, dropout.p, True)[0]
