"""The state of an optimizer that is divided among the ranks, behind the interface of torch.optim."""

import itertools
from collections.abc import Iterator, MutableMapping
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from zero.checkpoint.state import CheckpointError, consolidate, named, restore
from zero.checks import refuse_join
from zero.collectives import Communicator
from zero.host_comm import check_same_on_all_ranks, meet, on_all_ranks
from zero.sharded_state import DividedOptimizer, first_state, hyperparameters, parameters

ELSEWHERE = "consolidated_on_rank"  # in the state dicts of other ranks
_DIVIDED = "the optimizer state is divided among the ranks"


class DividedEntries(MutableMapping[Any, Any]):
    """The `state` of a ShardedOptimizer: that of this rank's slices, and what callers keep there under keys of their own.

    A write to it or to its values changes the state of this rank only, and so does `clear()`. Refuses parameters as keys.
    """

    def __init__(self, optimizer: "DividedState") -> None:
        self._optimizer = optimizer
        self.of_callers: dict[Any, Any] = {}

    def _home(self, key: Any) -> dict[Any, Any]:
        """Return the dict that has a key, or would have it."""
        inner = self._optimizer.inner
        if isinstance(key, torch.Tensor) and all(key is not slice_ for slice_ in parameters(inner)):
            slices = "iterate over optimizer.state to see this rank's slices"
            raise RuntimeError(f"{_DIVIDED}: {slices}, or call optimizer.consolidate_state_dict() and read state_dict()")
        return inner.state if isinstance(key, torch.Tensor) else self.of_callers

    def __getitem__(self, key: Any) -> Any:
        return self._home(key).setdefault(key, {})

    def __setitem__(self, key: Any, value: Any) -> None:
        self._home(key)[key], self._optimizer.consolidated = value, None

    def __delitem__(self, key: Any) -> None:
        self.pop(key)

    def __contains__(self, key: Any) -> bool:
        return key in self._home(key)

    def get(self, key: Any, default: Any = None) -> Any:
        return self._home(key).get(key, default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        return self._home(key).setdefault(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        self._optimizer.consolidated = None
        return self._home(key).pop(key, *default)

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain(self._optimizer.inner.state, self.of_callers)

    def __len__(self) -> int:
        return len(self._optimizer.inner.state) + len(self.of_callers)

    def __bool__(self) -> bool:
        """Return True: `torch.distributed.checkpoint.state_dict` makes a step where `state` looks empty."""
        return True


class DividedState(DividedOptimizer):
    """What a ShardedOptimizer shares with ZeroRedundancyOptimizer: the state is gathered before `state_dict` returns it."""

    comm: Communicator
    make_inner: partial[torch.optim.Optimizer]  # from groups
    inner: torch.optim.Optimizer  # of this rank's slices
    entries: DividedEntries
    shown: dict[Any, Any] | None = None  # while torch reads it: what stands in place of `entries`

    @property
    def state(self) -> Any:  # type: ignore[override]  # torch has an attribute
        """See `DividedEntries`. To reset all state, call `state.clear()`, or assign an empty dict, on all ranks."""
        return self.entries if self.shown is None else self.shown

    @state.setter
    def state(self, value: Any) -> None:
        if "entries" in vars(self):  # not in torch's constructor
            new = dict(value)
            for key in new:
                self.entries.get(key)  # refuses parameters before anything is lost
            self.entries.clear()
            self.entries.update(new)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the whole state on rank `to` of the process group, where `state_dict` returns it until the next write.

        Needs to be called on all ranks. Raises RuntimeError if one is missing, and as `zero.checkpoint.consolidate` does.
        """
        meet(self.comm.group)
        check_same_on_all_ranks({"to": repr(to)}, self.comm.group, "name one rank on all ranks")
        if to not in range(self.comm.world_size):
            raise ValueError(f"to={to} is not one of the ranks 0 to {self.comm.world_size - 1}")
        whole = consolidate(self, to)
        if self.has_state:
            self.consolidated = {ELSEWHERE: to} if whole is None else whole["state"]

    def allocate_state(self) -> None:
        """Before the first step, let `state_dict` return zeros in place of state, on all ranks, until `load_state_dict`.

        For `torch.distributed.checkpoint`, which asks a new optimizer for its keys, and then fills its tensors from a file.
        """
        if self.has_state:
            raise RuntimeError("allocate_state() is for an optimizer that has made no step, and has loaded no state")
        self.consolidated = self._zeros()

    def _zeros(self) -> dict[Any, Any]:
        """Return the state after a first step, with zeros."""
        state = first_state(self.make_inner, self.param_groups, self.partition().plan.update_dtypes)
        return tree_map_only(torch.Tensor, partial(torch.zeros_like, device="cpu"), state)

    def state_dict(self) -> dict[str, Any]:
        """Return the `state_dict()` of the unsharded optimizer, on the rank that `consolidate_state_dict` has named.

        On other ranks, and before the first step, the groups only. Raises RuntimeError if a step has followed that call.
        """
        if self.has_state and self.consolidated is None:
            raise RuntimeError(
                f"{_DIVIDED}; call optimizer.consolidate_state_dict() on all ranks after the last step, before this"
            )
        whole = self.consolidated or {}
        elsewhere = {ELSEWHERE: whole[ELSEWHERE]} if ELSEWHERE in whole else {}
        self.shown = self.entries.of_callers | ({} if elsewhere else whole)  # where torch and its hooks look for it
        try:
            return super().state_dict() | elsewhere
        finally:
            self.shown = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load an unsharded optimizer's state, the same on all ranks: each takes its slices.

        Raises ValueError if it differs between the ranks, and the errors of `zero.checkpoint.restore`.
        """
        for prepare in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = prepare(self, state_dict) or state_dict
        on_all_ranks(partial(self._check_whole, state_dict), self.comm.group)
        outline = on_all_ranks(partial(_outline, state_dict), self.comm.group)
        check_same_on_all_ranks(outline, self.comm.group, "load the same state dict on all ranks")
        in_order = itertools.chain(*(group["params"] for group in state_dict["param_groups"]))
        numbers = {key: number for number, key in enumerate(in_order)}  # a key may also be a name
        saved: dict[Any, Any] = {}
        own: dict[Any, Any] = {}
        for key, value in state_dict["state"].items():
            (saved if key in numbers else own)[numbers.get(key, key)] = value
        restore(self, {**state_dict, "state": saved})
        self.entries.of_callers.update(own)
        for finish in self._optimizer_load_state_dict_post_hooks.values():
            finish(self)

    def _check_whole(self, state_dict: dict[str, Any] | None) -> None:
        if state_dict is None or ELSEWHERE in state_dict:
            remedy = "on all ranks, load that of the rank with the consolidated state"
            raise CheckpointError(f"this state dict has no state; {remedy}")
        is_named = any(isinstance(key, str) for group in state_dict["param_groups"] for key in group["params"])
        if is_named and not state_dict["state"] and self._zeros():
            asked = "torch.distributed.checkpoint has found none in this optimizer"
            raise CheckpointError(f"this state dict has no state: {asked}; call allocate_state() on all ranks before it loads")

    join_hook = refuse_join

    def __reduce_ex__(self, protocol: Any) -> Any:
        remedy = "call consolidate_state_dict() on all ranks and save its state_dict()"
        raise TypeError(f"a ShardedOptimizer belongs to a process group and cannot be copied or pickled; {remedy}")

    def __setstate__(self, state: Any) -> None:
        raise TypeError(f"{_DIVIDED}, and cannot be set; on all ranks, call load_state_dict, or state.clear() to reset it")


def _outline(state_dict: dict[str, Any]) -> dict[str, str]:
    """Return what is the same on all ranks that load the same state: numbers, shapes and dtypes, and hyperparameters."""

    def text(leaf: Any) -> str:
        if isinstance(leaf, torch.Tensor):
            return repr(leaf.item()) if leaf.numel() == 1 and not leaf.is_meta else f"{tuple(leaf.shape)} {leaf.dtype}"
        return repr(leaf) if isinstance(leaf, int | float | str | None) else type(leaf).__name__

    groups = [hyperparameters(group) for group in state_dict["param_groups"]]
    return {name: text(leaf) for name, leaf in named({"state": state_dict["state"], "param_groups": groups}).items()}
