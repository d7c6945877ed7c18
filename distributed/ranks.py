"""The ranks of a run: the device of each, the process group, and values of all of them.

Without a process group, every function works for a single process.
"""

import datetime
import math
import os
import resource
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from distributed import machine
from distributed.launch import Launch
from distributed.rendezvous import agree, choose_interface, store
from zero.host_comm import broadcast_object, cpu_group, is_rank_0
from zero.stopwatch import Stopwatch

tqdm.set_lock(threading.RLock())  # only one process draws; the default is a lock between processes

_WAITS = Stopwatch(of_collectives=True)
_BACKSTOP_S = 60.0  # collectives time out later than the watchdog, whose message says more


def divided_batch(batch_size: int, steps: int, world_size: int) -> tuple[int, int]:
    """Return a batch_size and gradient_accumulation_steps that the ranks can share, for the same sequences per iteration.

    The batch size is the largest one that is possible, up to the given one. If the number of sequences is no multiple of the
    number of ranks, it grows to the next one.
    """
    each = math.ceil(batch_size * steps / world_size)  # sequences of a rank
    size = next(size for size in range(batch_size, 0, -1) if each % size == 0)
    return size, each // size * world_size


def batch_in_words(sequences: int, before: int) -> str:
    """Return whether an iteration with other settings has as many sequences as `before`."""
    if sequences == before:
        return "the same global batch"
    return f"a global batch of {sequences} sequences in place of {before}, {sequences / before - 1:.1%} more"


def start(launch: Launch, device: str, backend: str = "auto", timeout_s: float = 600.0) -> torch.device:
    """Start torch.distributed, unless the run is a single process. Needs to be called on all ranks.

    Args:
        launch: what `launched` returned.
        device: what `machine.resolve` returned. On CPUs, each rank gets its share of the cores of the machine.
        backend: 'nccl', 'gloo' or 'auto'; 'auto' is NCCL if every rank has its own GPU, otherwise gloo.
        timeout_s: see `watchdog.Watchdog`. Collectives have a minute more, including those before the watchdog starts.

    Returns:
        The device of this rank. For 'cuda' it is the GPU number `local_rank`, modulo the number of visible GPUs.

    Raises:
        ValueError: if no backend, or not this one, supports the device.
    """
    if not launch.distributed:
        if device.startswith("cuda:"):
            torch.cuda.set_device(device)
        return torch.device(device)
    if device.startswith("mps"):
        raise ValueError(f"device={device} works without torchrun only, because gloo cannot send from it; or use --device=cpu")
    check_backend(backend, device)
    _raise_limit_of_open_files()
    if device.startswith("cuda"):
        device = f"cuda:{launch.local_rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    elif device == "cpu":
        machine.divide_threads(launch.local_world_size)
    choose_interface(store(), launch.rank, launch.world_size, is_one_machine=launch.local_world_size == launch.world_size)
    timeout = datetime.timedelta(seconds=timeout_s + _BACKSTOP_S)
    if backend == "auto":
        backend = "nccl" if device.startswith("cuda") and _has_each_rank_a_gpu(device, launch) else "gloo"
    device_id = torch.device(device) if backend == "nccl" else None
    # hybrid sharding has three communicators in flight: NCCL (2.26) keeps their order, which excludes deadlocks
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    dist.init_process_group(
        backend, store=store(), rank=launch.rank, world_size=launch.world_size, timeout=timeout, device_id=device_id
    )
    return torch.device(device)


def check_backend(backend: str, device: str) -> None:
    """Raise ValueError if several ranks cannot use the backend on such a device."""
    if backend == "nccl" and not device.startswith("cuda"):
        raise ValueError(f"backend=nccl does not support device={device}; use --backend=gloo")


def gather_numbers(values: Sequence[float]) -> list[list[float]]:
    """Gather the same number of values from every rank, like `gather_objects`, without a wait for a GPU."""
    if not dist.is_initialized():
        return [list(values)]
    own = torch.tensor(values, dtype=torch.float64)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own, group=cpu_group(None))
    return [numbers.tolist() for numbers in gathered]


def print0(*values: Any) -> None:
    """Print on rank 0 only, above the bars of tqdm if there are any, and flush."""
    if is_rank_0():
        with tqdm.external_write_mode():
            print(*values, flush=True)


def on_rank_0(function: Callable[[], Any]) -> Any:
    """Call a function on rank 0 only and return its result on all ranks. Needs to be called on all ranks.

    Raises:
        ValueError, OSError: on all ranks, if the function raised it on rank 0.
    """
    result = error = None
    if is_rank_0():
        try:
            result = function()
        except (ValueError, OSError) as raised:
            error = raised
    result, error = broadcast_object((result, error))
    if error is not None:
        raise error
    return result


def mean_over_ranks(value: torch.Tensor) -> float:
    """Return the mean of a scalar tensor over the ranks, and overwrite the tensor. Needs to be called on all ranks."""
    all_reduce(value)
    return value.item() / (dist.get_world_size() if dist.is_initialized() else 1)


def all_reduce(value: torch.Tensor) -> None:
    """Sum a tensor over the ranks, in place. Needs to be called on all ranks. The watchdog names it if it does not end."""
    if dist.is_initialized():
        with _WAITS.measure("all-reduce", value.device):
            dist.all_reduce(value)


def _raise_limit_of_open_files() -> None:
    """Raise it to the hard limit, at most 65,536: gloo aborts when connections from other programs use it up."""
    limit, largest = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = 2**16 if largest == resource.RLIM_INFINITY else min(largest, 2**16)
    if limit != resource.RLIM_INFINITY and limit < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, largest))


def _has_each_rank_a_gpu(device: str, launch: Launch) -> bool:
    """Return whether every rank has its own GPU. A rank may see all GPUs of its machine, or only its own."""
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    return agree(launch, gpu, lambda gpus: len(set(gpus)) == len(gpus))
