"""What stands in a module in place of what is elsewhere: parameters that are arriving, gradients that have been sent."""

import gc
from collections.abc import Callable, Container, Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn


class WaitingDict(dict):
    """A dict of what may still be arriving: whoever reads a value waits for it first.

    It stands for a module's `_parameters` while all-gathers are in flight (`nn.Module` looks up `module.weight` there, and
    so do `parameters()`, `state_dict()`, `to()` and their like), and for an optimizer's parameter group. A copy and a pickle
    are plain dicts.

    Args:
        values: by name.
        wait: called with whatever is about to be handed out.
    """

    def __init__(self, values: dict[str, Any], wait: Callable[[Any], None]) -> None:
        super().__init__(values)
        self._wait = wait

    def plain(self) -> dict[str, Any]:
        """A dict of the same values that waits for nothing."""
        return {name: super(WaitingDict, self).__getitem__(name) for name in self}

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        self._wait(value)
        return value

    def get(self, name: str, default: Any = None) -> Any:
        value = super().get(name, default)
        self._wait(value)
        return value

    def __iter__(self) -> Iterator[str]:  # defined, so that dict(self) and {**self} go through __getitem__
        return super().__iter__()

    def values(self) -> Any:
        return [self[name] for name in self]

    def items(self) -> Any:
        return [(name, self[name]) for name in self]

    def pop(self, name: str, *default: Any) -> Any:
        value = super().pop(name, *default)
        self._wait(value)
        return value

    def popitem(self) -> tuple[str, Any]:
        name, value = super().popitem()
        self._wait(value)
        return name, value

    def setdefault(self, name: str, default: Any = None) -> Any:
        value = super().setdefault(name, default)
        self._wait(value)
        return value

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.copy(),)


class SentGradient(torch.Tensor):
    """Stands in `param.grad` for a gradient that has been sent: its mean over the ranks lies in their shards.

    It has the shape and dtype of the parameter and no elements. Setting `param.grad` to None drops the gradient, `zero_()`
    makes it zero, and what a further backward adds is kept in `added` until it is sent, too. Anything else, clipping and
    scaling by functions that do not know of shards above all, is an error.
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
        """What has been added since the gradient was sent; nothing from then on."""
        added, self.added = self.added, None
        return added

    def take_zeroed(self) -> bool:
        """Whether it has been zeroed since the last call."""
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
        "this gradient cannot be read or written: ShardedDataParallel has sent it, and each rank has the mean of its shards "
        f"only; clip with optimizer.clip_grad_norm_, scale with zero.ShardedGradScaler (the function was {function})"
    )


def local_gradient(param: torch.Tensor) -> torch.Tensor | None:
    """The gradient that this rank alone holds: `param.grad`, or what has been added to it since it was sent."""
    return param.grad.added if isinstance(param.grad, SentGradient) else param.grad


def find_hidden_tensors(module: nn.Module, waiting: Container[nn.Module]) -> list[torch.Tensor]:
    """The tensors that a module can reach past its dictionaries, as LSTM can its parameters through a list of its own.

    Looks into whatever its attributes hold: containers, objects, functions, and modules that are not among `waiting`.
    """
    found, seen = [], set()
    pending = [value for name, value in vars(module).items() if name not in _WAITING]
    while pending:
        value = pending.pop()
        if id(value) in seen or isinstance(value, _NO_WAY_ON):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, nn.Module):
            if value not in waiting:
                pending.append(vars(value))
        elif isinstance(value, FunctionType):  # not its globals, from which everything can be reached
            pending += [value.__closure__, value.__defaults__]
        else:
            pending += gc.get_referents(value)
    return found


_WAITING = ("_parameters", "_modules", "_buffers", "_compiled_call_impl")  # taken care of otherwise, or of no interest
_NO_WAY_ON = (type(None), bool, int, float, str, bytes, type, ModuleType, torch.optim.Optimizer)
