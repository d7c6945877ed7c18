"""Small messages between ranks: Python objects, from main memory, also where the collectives run on GPUs."""

from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

LONG_TIMEOUT = timedelta(days=1)  # for waits on a disk, which may take longer than any step


@cache
def cpu_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return a process group of the same ranks that sends from main memory.

    This is `group` itself if its backend is gloo or fake; otherwise a new gloo group. The first call must be on all ranks.
    """
    if dist.get_backend(group) in ("gloo", "fake"):
        return group
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    return dist.new_group(ranks, timeout=LONG_TIMEOUT, backend="gloo", use_local_synchronization=True)


def is_rank_0() -> bool:
    """Return whether this process is rank 0 of all ranks, or alone."""
    return not dist.is_initialized() or dist.get_rank() == 0


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather the values of all ranks, in rank order. Call it on all ranks; without torch.distributed, there is one."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast_object(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Return the value of rank 0. Call it on all ranks; without torch.distributed, there is one."""
    if not dist.is_initialized() or dist.get_backend(group) == "fake":  # there, nobody sends
        return value
    values = [value]
    dist.broadcast_object_list(values, group_src=0, group=group)
    return values[0]
