"""Messages between ranks from main memory, also where the collectives run on GPUs: Python objects, and tensors."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

TAG = 0x2E60  # of messages between two ranks, so that a receive in user code never takes one
MESSAGE_BYTES = 25_000_000  # largest message; longer tensors are sent in several
LONG_TIMEOUT = timedelta(days=1)  # for waits on a disk, which may take longer than any step
ALONE: Any = object()  # in place of a process group: there is no other rank to talk to, whatever torch.distributed has


def _is_alone(group: Any) -> bool:
    return group is ALONE or not dist.is_initialized() or dist.get_world_size(group) == 1


def cpu_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return a process group of the same ranks that sends from main memory.

    This is `group` itself if it has one rank, or gloo or fake as its backend, otherwise a new one. First call it on all ranks.
    """
    return group if _is_alone(group) or dist.get_backend(group) in ("gloo", "fake") else _gloo_group(group or dist.group.WORLD)


@cache
def _gloo_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, timeout=LONG_TIMEOUT, backend="gloo", use_local_synchronization=True)


def timeout_of(group: dist.ProcessGroup | None) -> timedelta | None:
    """Return the timeout of a process group; None: its backend has none."""
    whole: Any = group or dist.group.WORLD
    return getattr(getattr(whole._get_backend(whole._device_types[-1]), "options", None), "_timeout", None)


def meet(group: dist.ProcessGroup | None) -> None:
    """Wait for all ranks of the group. Raise RuntimeError after its timeout, at most 10 minutes; rank 0 names the missing."""
    if _is_alone(group) or dist.get_backend(group) == "fake":
        return
    timeout = min(timeout_of(group) or LONG_TIMEOUT, timedelta(minutes=10))
    try:
        dist.monitored_barrier(cpu_group(group), timeout, wait_all_ranks=True)
    except RuntimeError as error:
        remedy = "gathering or restoring state and adding groups need a call on all ranks, outside of `if rank == 0`"
        raise RuntimeError(f"not all ranks are here: {remedy} ({str(error).split(' in ')[0]})") from None


def is_rank_0() -> bool:
    """Return whether this process is rank 0 of all ranks, or alone."""
    return not dist.is_initialized() or dist.get_rank() == 0


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather the values of all ranks, in rank order. Call it on all ranks; without torch.distributed, there is one.

    It does not wait for a GPU.
    """
    if _is_alone(group):
        return [value]
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=cpu_group(group))
    return values


def broadcast_object(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Return the value of rank 0. Call it on all ranks; without torch.distributed, there is one."""
    if _is_alone(group) or dist.get_backend(group) == "fake":  # where no rank sends
        return value
    values = [value]
    dist.broadcast_object_list(values, group_src=0, group=cpu_group(group))
    return values[0]


def on_all_ranks(make: Callable[[], Any], group: dist.ProcessGroup | None = None, kind: type[ValueError] = ValueError) -> Any:
    """Return the result of `make`. If it raises on any rank, raise on all ranks, so that no rank waits forever.

    `kind`: what ranks raise for an error of another rank.
    """
    error, made = None, None
    try:
        made = make()
    except Exception as raised:
        error = raised
    errors = gather_objects(error and (str(error) or repr(error)), group)
    if error is not None:
        raise error
    if any(errors):
        rank = next(rank for rank, message in enumerate(errors) if message)
        raise kind(f"rank {rank}: {errors[rank]}")
    return made


def check_same_on_all_ranks(
    facts: dict[str, Any], group: dist.ProcessGroup | None = None, remedy: str = "build the same model on all ranks"
) -> None:
    """Raise ValueError on all ranks, with the remedy, if the texts of a rank's facts differ from those of rank 0."""
    expected = broadcast_object(facts, group)

    def compare() -> None:
        values = {name: (str(facts.get(name, "absent")), str(expected.get(name, "absent"))) for name in expected | facts}
        differ = [f"{name} is {own}, but {its} on rank 0" for name, (own, its) in values.items() if own != its]
        if differ:
            shown, more = differ[:3], differ[3:]
            raise ValueError("; ".join([*shown, *([f"{len(more)} more differ"] if more else []), remedy]))

    on_all_ranks(compare, group)


def extremes(values: list[float], group: dist.ProcessGroup | None) -> list[tuple[float, float]]:
    """Return the smallest and the largest of each number over all ranks, exact up to 2**53. Needs to be called on all ranks."""
    both = torch.tensor([values, [-value for value in values]], dtype=torch.float64, device="cpu")
    if values and not _is_alone(group):
        dist.all_reduce(both, dist.ReduceOp.MAX, group=cpu_group(group))
    return [(-less, largest) for largest, less in both.T.tolist()]


def send(tensor: torch.Tensor, to: int, group: dist.ProcessGroup | None) -> None:
    """Send a flat tensor to a rank, which calls `received`. Ranks are numbered as those of all processes."""
    for message in _messages(tensor):
        dist.send(message, to, group=group, tag=TAG)


def received(like: torch.Tensor, rank: int, group: dist.ProcessGroup | None) -> Iterator[torch.Tensor]:
    """Yield in pieces what a rank sends: a flat tensor with as many elements as `like`, and of its dtype."""
    for message in _messages(like):
        piece = torch.empty_like(message, device="cpu")
        dist.recv(piece, rank, group=group, tag=TAG)
        yield piece


def _messages(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tensor.split(MESSAGE_BYTES // tensor.itemsize)
