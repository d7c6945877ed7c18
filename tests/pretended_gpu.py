"""A pretended GPU: fake tensors on cuda:0 in a CPU build of PyTorch.

The program takes every branch that it takes on a GPU, with CUDA's lists of autocast and autograd's thread of the device. An
operation that mixes devices raises an error. Launches, collectives and waits of the host can be counted, on any machine with a
C++ compiler. There are no values: every number that the host reads is 0, and every mask is False.
"""

import os
import subprocess
from collections import Counter
from contextlib import nullcontext
from typing import Any, Self

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zero import codecs

DEVICE = torch.device("cuda:0")
_ATEN = torch.ops.aten
_NO_LAUNCH = {
    _ATEN.empty,
    _ATEN.empty_like,
    _ATEN.empty_strided,
    _ATEN.new_empty,
    _ATEN.new_empty_strided,
    torch.ops.prim.device,
}


def preload(folder: str) -> dict[str, str]:
    """Build the library that claims the device, in `folder`, and return the environment for processes that have it.

    Raises:
        RuntimeError: with the reason why it cannot be built.
    """
    root, path = os.path.dirname(torch.__file__), os.path.join(folder, "pretended_gpu.so")
    lib = os.path.join(root, "lib")
    command = ["c++", "-shared", "-fPIC", "-std=c++20", f"-I{root}/include", f"{os.path.splitext(__file__)[0]}.cpp", "-o", path]
    command += [f"-L{lib}", f"-Wl,-rpath,{lib}", "-ltorch_cpu", "-lc10"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise RuntimeError("a pretended GPU needs a C++ compiler, c++") from error
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"no pretended GPU with torch {torch.__version__}: {error.stderr.splitlines()[0]}") from error
    return {**os.environ, "LD_PRELOAD": path}


class PretendedGPU(TorchDispatchMode):
    """A context in which all tensors are fake, and those on `DEVICE` are counted. The process must have been preloaded.

    Entering it changes PyTorch in this process for good: what cannot work without a GPU, or without values.

    Attributes:
        phase: name under which the counters count.
        launches: operations on tensors of the GPU that launch a kernel, with collectives; a multi-tensor operation counts once.
        waits: times that the host waits for the GPU.
        operations: the launches by phase and operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self._fake = FakeTensorMode()
        self.reset()

    def reset(self) -> None:
        """Set all counters to zero."""
        self.launches: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.operations: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> Self:
        _pretend(self)
        self._fake.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._fake.__exit__(*error)

    def wait(self, *_: Any) -> None:
        """Count a wait of the host for the GPU."""
        self.waits[self.phase] += 1

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function.overloadpacket in _NO_LAUNCH or not any(map(_is_on_gpu, tree_leaves((args, kwargs)))):
            return function(*args, **kwargs)
        if function is _ATEN._local_scalar_dense.default:
            self.wait()
            return 0.0 if args[0].is_floating_point() else 0
        if function is _ATEN.nonzero.default:
            self.wait()
            return args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
        result = function(*args, **kwargs)
        if not any(returned.alias_info and not returned.alias_info.is_write for returned in function._schema.returns):
            self.launches[self.phase] += 1
            self.operations[self.phase, str(function)] += 1
        is_blocking = not kwargs.get("non_blocking") and not any(argument is True for argument in args[2:3])
        if is_blocking and any(isinstance(leaf, torch.Tensor) and not _is_on_gpu(leaf) for leaf in tree_leaves(result)):
            self.wait()  # a copy to main memory
        return result


def _is_on_gpu(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device == DEVICE


class _Stream:
    device = DEVICE

    def wait_stream(self, _: Self) -> None: ...


class _Event:
    def __init__(self, enable_timing: bool = False) -> None: ...

    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Self) -> float:
        return 0.0


def _pretend(gpu: PretendedGPU) -> None:
    replacements: list[tuple[Any, str, Any]] = [
        (torch.cuda, "device", lambda _: nullcontext()),
        (torch.cuda, "current_stream", lambda *_: _STREAM),
        (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        (torch.cuda, "synchronize", gpu.wait),
        (torch.cuda, "Event", _Event),
        (_Event, "synchronize", gpu.wait),
        (dist, "all_gather_object", _all_gather_object),
        (FakeTensor, "data_ptr", _address),
        (FakeTensor, "data", property(_DATA.__get__, _set_data)),
        (torch.nn.Module, "to", _to),
        (codecs, "_nearest_codes", lambda device: torch.empty(2**17, dtype=torch.uint8, device=device)),
    ]
    for owner, name, value in replacements:
        setattr(owner, name, value)


_DATA: Any = torch.Tensor.data
_STREAM = _Stream()


def _all_gather_object(values: list[Any], value: Any, group: Any = None) -> None:
    values[:] = [value] * len(values)


def _address(tensor: torch.Tensor) -> int:
    """Return an address that differs between storages. The real ones are 0."""
    return (tensor.untyped_storage()._cdata << 48) + tensor.storage_offset() * tensor.itemsize


def _set_data(tensor: Any, data: Any) -> None:
    _DATA.__set__(tensor, data)
    tensor.fake_device = data.fake_device


def _to(module: torch.nn.Module, target: torch.dtype | torch.device | str) -> torch.nn.Module:
    """Do `module.to(target)`, which would replace fake parameters by others."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.to(target)
    return module
