"""The ranks of a run: the device of each, the process group, and values of all of them.

Without a process group, every function works for a single process.
"""

import datetime
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from tqdm import tqdm

from distributed import machine
from distributed.launch import Launch
from zero.host_comm import broadcast_object, gather_objects, is_rank_0, on_all_ranks
from zero.stopwatch import Stopwatch

tqdm.set_lock(threading.RLock())  # only one process draws; the default is a lock between processes

_WAITS = Stopwatch(of_collectives=True)


def start(
    launch: Launch, device: str, backend: str = "auto", timeout: datetime.timedelta = datetime.timedelta(minutes=10)
) -> torch.device:
    """Choose the device of this rank and the backend of the process group. Needs to be called on all ranks, after `connect`.

    `device` is what `machine.resolve` returned. For 'cuda', a rank gets the GPU number `local_rank`, modulo the number of GPUs
    that it sees; on CPUs, its share of the cores. The backend 'auto' is NCCL if every rank has its own GPU, otherwise gloo.
    `timeout`: of collectives. Training has a long one: the watchdog ends ranks that hang, but not ranks that were stopped.

    Raises ValueError if no backend, or not this one, supports the device.
    """
    if not launch.distributed:
        if device.startswith("cuda:"):
            torch.cuda.set_device(device)
        return torch.device(device)
    if device.startswith("mps"):
        raise ValueError(f"device={device} works without torchrun only, because gloo cannot send from it; or use --device=cpu")
    check_backend(backend, device)
    if is_on_gpu := device.startswith("cuda"):
        device = f"cuda:{launch.local_rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    else:
        machine.divide_threads(launch.local_world_size)
    if backend == "gloo" or not is_on_gpu or (backend == "auto" and not _has_each_rank_a_gpu(device)):
        (getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout)(timeout)  # its name before torch 2.14
        return torch.device(device)
    # hybrid sharding has three communicators in flight: NCCL (2.26) keeps their order, which excludes deadlocks
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    store = dist.PrefixStore("nccl", distributed_c10d._get_default_store())
    dist.destroy_process_group()
    how: dict[str, Any] = {"store": store, "rank": launch.rank, "world_size": launch.world_size, "timeout": timeout}
    dist.init_process_group("nccl", device_id=torch.device(device), **how)
    return torch.device(device)


def check_backend(backend: str, device: str) -> None:
    """Raise ValueError if several ranks cannot use the backend on such a device."""
    if backend == "nccl" and not device.startswith("cuda"):
        raise ValueError(f"backend=nccl does not support device={device}; use --backend=gloo")


def print0(*values: Any) -> None:
    """Print on rank 0 only, above the bars of tqdm if there are any, and flush."""
    if is_rank_0():
        with tqdm.external_write_mode():
            print(*values, flush=True)


def on_rank_0(function: Callable[[], Any]) -> Any:
    """Call a function on rank 0 only and return its result on all ranks. Needs to be called on all ranks.

    If the function raises on rank 0, all ranks raise, the others ValueError.
    """
    return broadcast_object(on_all_ranks(lambda: function() if is_rank_0() else None))


def sum_over_ranks(value: torch.Tensor) -> float:
    """Return the sum of a scalar tensor over the ranks, and overwrite the tensor. Needs to be called on all ranks."""
    all_reduce(value)
    return value.item()


def all_reduce(value: torch.Tensor) -> None:
    """Sum a tensor over the ranks, in place. Needs to be called on all ranks. The watchdog names it if it does not end."""
    if dist.is_initialized():
        with _WAITS.measure("all-reduce", value.device):
            dist.all_reduce(value)


def _has_each_rank_a_gpu(device: str) -> bool:
    """Return whether every rank has its own GPU, as NCCL compares them: by host and PCI address, the same for MIG's slices.

    A rank may see all GPUs of its machine, or only its own.
    """
    card: Any = torch.cuda.get_device_properties(device)
    host = socket.gethostname()
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:  # hosts may have the same name
        host += file.read()
    gpus = gather_objects((host, card.pci_domain_id, card.pci_bus_id, card.pci_device_id))
    has = len(set(gpus)) == len(gpus)
    if not has:
        print0("note: ranks share a GPU, which NCCL refuses: they communicate with gloo, which is slower")
    return has
