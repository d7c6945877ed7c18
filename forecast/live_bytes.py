"""LiveBytes: the bytes of tensors, as long as they are alive, whether they have memory or only stand for tensors that do."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distributed.machine import allocated, multiplies_in_float32

_WITH_MEMORY = (torch.Tensor, nn.Parameter, FakeTensor)  # other classes wrap these, or are placeholders without memory
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations inside of this context create, as long as they are alive.

    Several tensors that share one storage count once, as do storages inside of another one (the parameters in a flat buffer of
    `zero.ShardedOptimizer`). Tensors from before the context count from the first operation that returns a view of them, unless
    they are given to `ignore`.

    If two gradients arrive at one place, autograd adds the second to the first in place, but not in a context like this one,
    nor on fake tensors. There, such a sum counts as in place: its peak does not include both the sum and the first gradient.

    Args:
        on_cpu: the tensors are, or stand for, tensors of this CPU, and the peak includes the scratch memory of matrix products
            there (`machine.multiplies_in_float32`). Otherwise they stand for those of a GPU, and count as `allocated` says.
    """

    def __init__(self, on_cpu: bool = True) -> None:
        super().__init__()
        self._counted = int if on_cpu else allocated
        self._multiplies_in_float32 = {of: on_cpu and multiplies_in_float32(transposed=of) for of in (False, True)}
        self.now = 0  # bytes
        self._peak = 0
        self._alive: dict[int, int] = {}  # by address of the storage object: bytes
        # the same: the storage, and the start address and end address of its memory, if it is real
        self._spans: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, int]] = {}
        self._sum: tuple[int, int] | None = None  # the last operation added to a gradient: its key, bytes with both

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not count the storages of these tensors."""
        for tensor in tensors:
            self._add(tensor.untyped_storage(), 0)

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
            if self._has_memory(leaf):
                self.count(leaf)
        if _adds_gradients(func, args):
            self._peak, self._sum = before, (args[0].untyped_storage()._cdata, self.now)
        in_bfloat16 = func in _PRODUCTS and result.dtype == torch.bfloat16
        if in_bfloat16 and self._multiplies_in_float32[args[-2].stride(0) == 1 < args[-2].stride(1)]:
            self._peak = max(self._peak, self.now + result.numel() * torch.float32.itemsize)
        return result

    def count(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor, if it does not yet count."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._alive:
            return
        start = 0 if tensor.is_meta or isinstance(tensor, FakeTensor) else storage.data_ptr()
        spans = list(self._spans.values())  # a thread of gloo may free a storage meanwhile
        around = [(other(), begin) for other, begin, end in spans if start and begin <= start < end]
        is_inside = any(other is not None and other.data_ptr() == begin for other, begin in around)
        if start and not is_inside:
            self._spans[storage._cdata] = weakref.ref(storage), start, start + storage.nbytes()
        self._add(storage, 0 if is_inside else self._counted(storage.nbytes()))

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count the bytes that a storage has now, if it counts at all."""
        if storage._cdata in self._alive:
            self._change(storage._cdata, self._counted(storage.nbytes()))

    def _has_memory(self, leaf: Any) -> bool:
        return type(leaf) in _WITH_MEMORY and not leaf.is_meta

    def _add(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        if storage._cdata not in self._alive:
            weakref.finalize(storage, self._free, storage._cdata).atexit = False
        self._change(storage._cdata, nbytes)

    def _change(self, key: int, nbytes: int) -> None:
        self.now += nbytes - self._alive.get(key, 0)
        self._alive[key] = nbytes
        self._peak = max(self._peak, self.now)

    def _free(self, key: int) -> None:
        self.now -= self._alive.pop(key)
        self._spans.pop(key, None)
        if self._sum is not None and self._sum[0] == key:
            self._sum = None

    def _end_sum(self) -> None:
        """Count both the sum and the gradient that was added to, if that is still alive."""
        if self._sum is not None:
            self._peak = max(self._peak, self._sum[1])
            self._sum = None


def _adds_gradients(func: Any, args: Any) -> bool:
    """Return whether autograd would add in place if nothing else holds the first tensor (torch/csrc/autograd/input_buffer.cpp).

    A view is added out of place: autograd itself holds its base.
    """
    in_backward = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()
    return in_backward and func is torch.ops.aten.add.Tensor and not args[0]._is_view()
