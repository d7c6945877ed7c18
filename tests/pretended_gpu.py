"""A pretended GPU: fake tensors on cuda:0 in a CPU build of PyTorch.

The program takes every branch that it takes on a GPU, with CUDA's lists of autocast and autograd's thread of the device. An
operation that mixes devices raises an error. Launches, collectives and waits of the host can be counted. There are no values:
every number that the host reads is 0, and every mask is False.
"""

import ctypes
import os
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import nullcontext
from functools import cache
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _foreach_supported_types as _of_optimizers
from torch.utils._foreach_utils import _foreach_supported_types as _of_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zero
from zero import codecs

DEVICE = torch.device("cuda:0")
_LIBRARY = "pretended_gpu.so"
_ZERO = os.path.dirname(zero.__file__)
_ATEN = torch.ops.aten
_EMPTY = {_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided}
_NO_LAUNCH = {*_EMPTY, _ATEN._unsafe_view, torch.ops.prim.device}
_COPIES = {_ATEN._to_copy.default: 0, _ATEN.copy_.default: 1}  # between devices; where their source is among the arguments
_AT_ONCE = 2**16  # bytes that CUDA copies from pageable memory to the GPU without a wait; it may wait for more


def run_preloaded(*command, cwd=None):
    """What Python prints with these arguments in a process that has the library. Skip if it cannot be built."""
    environment = {**os.environ, "LD_PRELOAD": os.path.join(_built().name, _LIBRARY)}
    process = subprocess.run([sys.executable, *command], env=environment, cwd=cwd, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process.stdout


@cache
def _built():
    """Build the library, which claims the device, in a folder that lasts as long as this process."""
    root = os.path.dirname(torch.__file__)
    compiler = ["c++", "-shared", "-fPIC", "-std=c++20", f"-I{root}/include", f"{os.path.splitext(__file__)[0]}.cpp"]
    compiler += [f"-L{root}/lib", f"-Wl,-rpath,{root}/lib", "-ltorch_cpu", "-lc10"]
    folder = tempfile.TemporaryDirectory()
    try:
        subprocess.run([*compiler, "-o", os.path.join(folder.name, _LIBRARY)], check=True, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("a pretended GPU needs a C++ compiler; install one, as c++")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"a pretended GPU does not fit torch {torch.__version__}: {error.stderr.splitlines()[0]}")
    return folder


class PretendedGPU(TorchDispatchMode):
    """A context in which all tensors are fake, and those on `DEVICE` are counted. The process must have been preloaded.

    Entering it changes PyTorch in this process for good: what cannot work without a GPU, or without values.

    Attributes:
        phase: set it to the name under which to count. What the package zero does in "backward" counts as "hooks".
        launches: operations on tensors of the GPU that launch a kernel, with collectives, by phase and name; a multi-tensor
            operation counts once.
        waits: times that the host waits for the GPU, by phase; for a large copy to it, unless that is non_blocking and from
            pinned memory.
    """

    def __init__(self):
        super().__init__()
        self.phase = ""
        self.reset()

    def reset(self):
        self.launches, self.waits = Counter(), Counter()

    def __enter__(self):
        _pretend(self)
        _FAKE.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        _FAKE.__exit__(*error)

    def wait(self, *_):
        """Count a wait of the host for the GPU."""
        self.waits[self._counted_as()] += 1

    def _counted_as(self):
        return "hooks" if self.phase == "backward" and _is_in_zero() else self.phase

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in (_ATEN._local_scalar_dense.default, _ATEN.nonzero.default):
            if _is_on_gpu(args[0]):
                self.wait()
            if function is _ATEN.nonzero.default:
                return args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
            return 0.0 if args[0].is_floating_point() else 0
        result = function(*args, **kwargs)
        is_view = any(returned.alias_info and not returned.alias_info.is_write for returned in function._schema.returns)
        if is_view or function.overloadpacket in _NO_LAUNCH or not any(map(_is_on_gpu, tree_leaves((args, kwargs, result)))):
            return result
        self.launches[self._counted_as(), str(function)] += 1
        if function in _COPIES and _is_on_gpu(args[_COPIES[function]]) != _is_on_gpu(result):
            is_blocking = not kwargs.get("non_blocking") and args[2:3] != (True,)  # pinned or not, PyTorch waits for the stream
            source = args[_COPIES[function]]
            is_staged = not _is_on_gpu(source) and not hasattr(source, "is_in_pinned_memory") and source.nbytes > _AT_ONCE
            if is_blocking or is_staged:
                self.wait()
        return result


def _is_in_zero():
    """Return whether this thread is in a function of the package zero. Hooks run in a thread of the device."""
    frame = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.startswith(_ZERO):
        frame = frame.f_back
    return frame is not None


def _is_on_gpu(leaf):
    return isinstance(leaf, torch.Tensor) and leaf.device == DEVICE


class _Event:
    def __init__(self, enable_timing=False): ...

    def record(self): ...

    def query(self):
        return True

    def elapsed_time(self, _):
        return 0.0


def _pretend(gpu):
    ctypes.CDLL(os.environ["LD_PRELOAD"]).claim_device()
    replacements = [
        *((torch.cuda, name, lambda _: nullcontext()) for name in ("device", "device_of")),
        (torch.cuda, "current_stream", lambda *_: _STREAM),
        (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        (torch.cuda, "get_device_name", lambda *_: "pretended GPU"),
        (torch.cuda, "is_bf16_supported", lambda *_, **__: True),
        (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        (torch.cuda, "synchronize", gpu.wait),
        (torch.cuda, "Event", _Event),
        (_Event, "synchronize", gpu.wait),
        (torch.nn.functional, "scaled_dot_product_attention", _attention),
        (dist, "all_gather_object", _all_gather_object),
        (DistributedDataParallel, "__new__", lambda _, module, **__: module),  # it cannot hold fake tensors
        (FakeTensor, "data_ptr", _address),
        (FakeTensor, "data", property(_DATA.__get__, _set_data)),
        (torch.nn.Module, "to", _to),
        (torch.Tensor, "pin_memory", _pin_memory),
        (codecs, "_nearest_codes", lambda device: torch.empty(2**18, dtype=torch.uint8, device=device)),
    ]
    for owner, name, value in replacements:
        setattr(owner, name, value)
    for supported in (_of_optimizers, _of_utils):
        supported.append(FakeTensor)  # for multi-tensor operations


_DATA = torch.Tensor.data
_FAKE = FakeTensorMode()  # one for all, because tables of the engine stay in its caches
_STREAM = mock.Mock(device=DEVICE)


def _attention(query, key, value, dropout_p=0.0, is_causal=False):
    """Return a result of one of CUDA's kernels for attention, which a CPU build does not choose."""
    return _ATEN._scaled_dot_product_efficient_attention(query, key, value, None, True, dropout_p, is_causal)[0]


def _all_gather_object(values, value, group=None):
    values[:] = [value] * len(values)


def _address(tensor):
    """Return an address that differs between storages. The real ones are 0."""
    return (tensor.untyped_storage()._cdata << 48) + tensor.storage_offset() * tensor.itemsize


def _set_data(tensor, data):
    _DATA.__set__(tensor, data)
    tensor.fake_device = data.fake_device


def _to(module, target):
    """Do `module.to(target)`, which would replace fake parameters by others."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.to(target)
    return module


def _pin_memory(tensor):
    """Return a copy that says where it is; a view of it does not."""
    pinned = tensor.clone()
    pinned.is_in_pinned_memory = True
    return pinned
