"""Reads of parameters in flight, with overlapped all-gathers: they wait, or are refused."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Set
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zero.tensors import has_memory, memory_span


class WaitingDict(dict):
    """A dict whose values may still be in flight: each read calls `wait(value)` first. A copy or pickle of it is a plain dict.

    It replaces a module's `_parameters` while all-gathers are in flight: `nn.Module` looks up `module.weight` there, and so
    do `parameters()`, `state_dict()`, `to()` and similar methods. It also replaces an optimizer's parameter group.
    """

    def __init__(self, values: dict[str, Any], wait: Callable[[Any], None]) -> None:
        super().__init__(values)
        self._wait = wait

    def plain(self) -> dict[str, Any]:
        """Return a plain dict of the same values, without a wait."""
        return {name: super(WaitingDict, self).__getitem__(name) for name in self}

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        self._wait(value)
        return value

    def __iter__(self) -> Iterator[str]:  # defined so that dict(self) and {**self} call __getitem__
        return super().__iter__()

    # these call __getitem__
    get, items, values = Mapping.get, Mapping.items, Mapping.values  # type: ignore[assignment]
    setdefault = MutableMapping.setdefault  # type: ignore[assignment]

    def pop(self, name: str, *default: Any) -> Any:
        value = super().pop(name, *default)
        self._wait(value)
        return value

    def popitem(self) -> tuple[str, Any]:
        name, value = super().popitem()
        self._wait(value)
        return name, value

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.copy(),)


class Readers:
    """The modules of a model, as readers of its parameters. While all-gathers are in flight, each read waits.

    Args:
        params: the parameters that can be in flight.
        wait: called with every value that is read from a module's parameters. It must not keep the wrapper alive.
        undo: receives functions that remove from the module what is installed there.
    """

    def __init__(self, params: Set[nn.Parameter], wait: Callable[[Any], None], undo: list[Callable[[], None]]) -> None:
        self.params = params
        self.wait = torch.compiler.disable(wait)
        self.undo = undo
        self.owners: list[nn.Module] = []  # modules that have parameters of `params`
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules that `find` has seen
        self.is_compiled = False  # whether a module is compiled

    def begin(self) -> None:
        """Make reads wait in the modules that the last `find` has found."""
        inside = {param for part in self.owners for param in part._parameters.values()}
        for param in self.params - inside:  # for example those of a loss: nothing else waits for them
            self.wait(param)
        for part in self.owners:
            part.__dict__["_parameters"] = WaitingDict(part._parameters, self.wait)

    def end(self) -> None:
        """Restore the plain dictionaries: everything has arrived."""
        _restore_plain_dicts(self.owners)

    def find(self, parts: list[nn.Module]) -> None:
        """Find the modules that have parameters. Make those that bypass the dictionaries wait for all their parameters."""
        self.owners = [part for part in parts if not self.params.isdisjoint(part._parameters.values())]
        for part in parts:
            call = part._compiled_call_impl
            self.is_compiled |= call is not None or isinstance(part, torch._dynamo.OptimizedModule)
            if call is not None and not isinstance(call, _WaitingCall):  # a hook would be compiled too
                waiting: Any = _WaitingCall(WeakHook(self.wait_for_module), part, call)
                part._compiled_call_impl = waiting
                self.undo.append(partial(setattr, part, "_compiled_call_impl", call))
            if part in self._known:
                continue
            self._known.add(part)
            if isinstance(part, torch.jit.ScriptModule):
                raise ValueError("parameter reads by a ScriptModule cannot be detected; wrap the module it was made from")
            if isinstance(part, nn.RNNBase | torch._dynamo.OptimizedModule):  # RNNs read a list of their parameters
                self.undo.append(part.register_forward_pre_hook(WeakHook(self.wait_for_module), prepend=True).remove)

    def wait_for_module(self, module: nn.Module, *_: Any) -> None:
        """Wait for everything that a module can read, and restore its plain dictionaries, as compiled code expects."""
        for param in module.parameters():
            self.wait(param)
        _restore_plain_dicts(module.modules())


class ReadCheck(TorchDispatchMode):
    """Raises RuntimeError if an operation inside of this context uses memory in flight, with the name of the parameter.

    Args:
        in_flight: returns the memory that is in flight.
        names: names of the parameters.
    """

    supports_higher_order_operators = True  # such as torch.cond

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile in this context: flex_attention does so by itself."""
        return True

    def __init__(self, in_flight: Callable[[], list[torch.Tensor]], names: dict[nn.Parameter, str]) -> None:
        super().__init__()
        self.in_flight = in_flight
        self.names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        spans = [memory_span(data) for data in self.in_flight()]
        for leaf in tree_leaves((args, kwargs)) if spans else ():
            if isinstance(leaf, torch.Tensor) and has_memory(leaf):
                start, stop = memory_span(leaf)
                if any(start < end and begin < stop for begin, end in spans):
                    self._refuse(func, start, stop)
        return func(*args, **(kwargs or {}))

    def _refuse(self, func: Any, start: int, stop: int) -> None:
        spans = {name: memory_span(param) for param, name in self.names.items()}
        names = [name for name, (begin, end) in spans.items() if start < end and begin < stop]
        raise RuntimeError(
            f"{func} uses {', '.join(names) or 'a parameter'} before its all-gather has ended, because "
            "it was not read from its module (but from a list, a view, or a variable); read it from its module, call "
            "optimizer.synchronize() after step(), or use overlap=False"
        )


class _WaitingCall(NamedTuple):
    """The function that a compiled module calls in place of its compiled code: it waits first."""

    wait: Callable[[nn.Module], None]
    module: nn.Module
    compiled: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.wait(self.module)
        return self.compiled(*args, **kwargs)


class WeakHook:
    """A hook that calls a method as long as its owner lives: the garbage collector cannot see the hooks of a tensor.

    A copy of the hook, made with its tensor or module, does nothing.
    """

    def __init__(self, method: Callable[..., None] | None) -> None:
        self._method = (lambda: None) if method is None else weakref.WeakMethod(method)

    def __call__(self, *args: Any) -> None:
        alive = self._method()
        if alive is not None:
            (torch.compiler.disable(alive) if torch.compiler.is_compiling() else alive)(*args)

    def __reduce__(self) -> Any:
        return WeakHook, (None,)


def _restore_plain_dicts(parts: Iterable[nn.Module]) -> None:
    for part in parts:
        if isinstance(part._parameters, WaitingDict):
            part.__dict__["_parameters"] = part._parameters.plain()
