"""The state of an optimizer that is divided among the ranks, behind the interface of torch.optim."""

import itertools
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from zero.checkpoint.state import CheckpointError, consolidate, restore
from zero.collectives import Communicator
from zero.host_comm import broadcast_object, meet, on_all_ranks, on_any_rank
from zero.sharded_state import DividedOptimizer

ELSEWHERE = "consolidated_on_rank"  # in the state dicts of other ranks
_DIVIDED = "the optimizer state is divided among the ranks"


class DividedState(DividedOptimizer):
    """What a ShardedOptimizer shares with ZeroRedundancyOptimizer: the state is gathered before `state_dict` returns it."""

    comm: Communicator

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the whole state on rank `to` of the process group, where `state_dict` returns it until the next write.

        Needs to be called on all ranks. Raises RuntimeError if one is missing, and as `zero.checkpoint.consolidate` does.
        """
        meet(self.comm.group)
        of_rank_0 = broadcast_object(to, self.comm.group) if self.comm.world_size > 1 else to
        if on_any_rank(to != of_rank_0 or to not in range(self.comm.world_size), self.comm.group):
            raise ValueError(f"to={to} is not the same rank on all ranks, one of 0 to {self.comm.world_size - 1}")
        whole = consolidate(self, to)
        if self.has_state:
            self.consolidated = {ELSEWHERE: to} if whole is None else whole["state"]

    def state_dict(self) -> dict[str, Any]:
        """Return the `state_dict()` of the unsharded optimizer, on the rank that `consolidate_state_dict` has named.

        On other ranks, and before the first step, the groups only. Raises RuntimeError if a step has followed that call.
        """
        if self.has_state and self.consolidated is None:
            raise RuntimeError(
                f"{_DIVIDED}; call optimizer.consolidate_state_dict() on all ranks after the last step, before this"
            )
        whole = self.consolidated or {}
        if ELSEWHERE in whole:
            return {**super().state_dict(), **whole}
        dict.update(self.state, whole)  # where torch and its hooks look for it
        try:
            return super().state_dict()
        finally:
            for number in whole:
                del self.state[number]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load an unsharded optimizer's state on all ranks: each takes its slices. Errors: `zero.checkpoint.restore`."""
        for prepare in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = prepare(self, state_dict) or state_dict
        on_all_ranks(partial(_check_whole, state_dict), self.comm.group)
        in_order = itertools.chain(*(group["params"] for group in state_dict["param_groups"]))
        numbers = {key: number for number, key in enumerate(in_order)}  # a key may also be a name
        saved: dict[Any, Any] = {}
        own: dict[Any, Any] = {}
        for key, value in state_dict["state"].items():
            (saved if key in numbers else own)[numbers.get(key, key)] = value
        restore(self, {**state_dict, "state": saved})
        self.state.update(own)  # what callers keep there
        for finish in self._optimizer_load_state_dict_post_hooks.values():
            finish(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        remedy = "call consolidate_state_dict() on all ranks and save its state_dict()"
        raise TypeError(f"a ShardedOptimizer belongs to a process group and cannot be copied or pickled; {remedy}")


def _check_whole(state_dict: dict[str, Any] | None) -> None:
    if state_dict is None or ELSEWHERE in state_dict:
        raise CheckpointError("this state dict has no state; on all ranks, load that of the rank with the consolidated state")


def _for_callers_keys(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of dict that refuses parameters as keys."""

    def checked(state: Any, key: Any, *args: Any) -> Any:
        if isinstance(key, torch.Tensor):
            slices = "read this rank's slices in optimizer.inner.state"
            raise RuntimeError(f"{_DIVIDED}: {slices}, or all of it in state_dict() after optimizer.consolidate_state_dict()")
        return method(state, key, *args)

    return checked


class CallersState(defaultdict):
    """The `state` of a ShardedOptimizer: what callers keep there under keys of their own. Refuses parameters as keys."""

    __missing__ = _for_callers_keys(defaultdict.__missing__)
    __contains__ = _for_callers_keys(dict.__contains__)
    __setitem__ = _for_callers_keys(dict.__setitem__)
    get = _for_callers_keys(dict.get)
    pop = _for_callers_keys(dict.pop)
    setdefault = _for_callers_keys(dict.setdefault)

    def __bool__(self) -> bool:
        """Return True: `torch.distributed.checkpoint.state_dict` makes a step where `state` looks empty."""
        return True
