"""The ranks of a run: the launch variables, the device of each rank, the process group, and the end of all ranks.

Without a process group, every function works for a single process.
"""

import contextlib
import ctypes
import datetime
import hashlib
import json
import os
import resource
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

import hardware
from interface import choose_interface
from zero.collectives import broadcast_object, gather_objects, is_rank_0

_REMEDY = "start with torchrun, or unset RANK to start a single process"
_MEETING_S = 600.0  # in which all ranks must have started
_BACKSTOP_S = 60.0  # collectives time out later than the watchdog, which knows more


class Launch(NamedTuple):
    """The place of this process among the ranks of a run."""

    distributed: bool = False  # False: a single process without torchrun
    rank: int = 0
    local_rank: int = 0  # rank among the processes of this machine
    world_size: int = 1
    local_world_size: int = 1


def launched() -> Launch:
    """Returns the launch variables that torchrun sets.

    Without RANK, the run is a single process. In that case the other variables are ignored, because a cluster or a container
    may set WORLD_SIZE and others.

    Raises:
        ValueError: if RANK is set without the other variables, or if a variable has an impossible value.
    """
    if "RANK" not in os.environ:
        return Launch()
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ValueError(f"RANK is set without {', '.join(missing)}; {_REMEDY}")
    rank, world_size, port = _integer("RANK"), _integer("WORLD_SIZE"), _integer("MASTER_PORT")
    local_rank, local_world_size = _integer("LOCAL_RANK", 0), _integer("LOCAL_WORLD_SIZE", 1)
    if not 0 <= rank < world_size:
        raise ValueError(f"RANK={rank} is not one of the ranks 0 to WORLD_SIZE-1={world_size - 1}; {_REMEDY}")
    if not 0 < port < 2**16:
        raise ValueError(f"MASTER_PORT={port} is not a port, 1 to 65535; {_REMEDY}")
    if local_rank < 0 or local_world_size < 1:
        raise ValueError(f"LOCAL_RANK={local_rank} and LOCAL_WORLD_SIZE={local_world_size} cannot be valid; {_REMEDY}")
    return Launch(True, rank, local_rank, world_size, local_world_size)


def start(launch: Launch, device: str, backend: str = "auto", timeout_s: float = 600.0) -> torch.device:
    """Start torch.distributed, unless the run is a single process. Needs to be called on all ranks.

    On Linux, a rank of torchrun is killed when torchrun ends. It would go on alone, and keep its GPU and the output folder.

    Args:
        launch: what `launched` returned.
        device: what `hardware.resolve` returned. On CPUs, each rank gets its share of the cores of the machine.
        backend: 'nccl', 'gloo' or 'auto'; 'auto' is NCCL if every rank has its own GPU, otherwise gloo.
        timeout_s: see `watchdog.Watchdog`. Collectives have a minute more, also those before there is a watchdog.

    Returns:
        The device of this rank. For 'cuda' it is the GPU number `local_rank`, modulo the number of visible GPUs.

    Raises:
        ValueError: if the backend does not support the device.
    """
    if not launch.distributed:
        return torch.device(device)
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        _end_with_parent()
    with contextlib.suppress(ValueError):  # the largest number of open files: gloo aborts when strangers' connections use it up
        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    if device.startswith("cuda"):
        device = f"cuda:{launch.local_rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    elif backend == "nccl":
        raise ValueError(f"backend=nccl does not support device={device}; use --backend=gloo")
    elif device == "cpu":
        hardware.divide_threads(launch.local_world_size)
    choose_interface(_store(), launch.rank, launch.world_size, is_one_machine=launch.local_world_size == launch.world_size)
    timeout = datetime.timedelta(seconds=timeout_s + _BACKSTOP_S)
    if backend == "auto":
        backend = "nccl" if device.startswith("cuda") and _has_each_rank_a_gpu(device, launch) else "gloo"
    device_id = torch.device(device) if backend == "nccl" else None
    dist.init_process_group(
        backend, store=_store(), rank=launch.rank, world_size=launch.world_size, timeout=timeout, device_id=device_id
    )
    return torch.device(device)


def agree(launch: Launch, value: Any, rule: Callable[[list[Any]], Any]) -> Any:
    """Returns on all ranks what `rule` returns on rank 0 for the values of all ranks. Needs to be called on all ranks.

    This works before the process group has started. `value` and the result must be what JSON can hold. A key is deleted
    when it has been read, so that the next call does not find it.
    """
    if not launch.distributed:
        return rule([value])
    _store().set(f"value of rank {launch.rank}", json.dumps(value))
    if launch.rank == 0:
        result = json.dumps(rule([_take(f"value of rank {rank}") for rank in range(launch.world_size)]))
        for rank in range(launch.world_size):
            _store().set(f"result for rank {rank}", result)
    return _take(f"result for rank {launch.rank}")


def without_old_keys(store: dist.Store, rank: int, world_size: int) -> dist.Store:
    """Returns a part of the store without keys from before a restart. Needs to be called on all ranks.

    torchrun may keep its store when it restarts the ranks, and they would connect to addresses of ranks that have ended
    (https://github.com/pytorch/pytorch/issues/135712). So the part is named by an ID of every process of this start. A rank may
    read the old ID of another rank at first. It has the right IDs when all ranks have the same: the others know its new ID.
    """
    ids, names = ([f"{key} of rank {number}" for number in range(world_size)] for key in ("id", "name"))
    store.set(ids[rank], uuid.uuid4().hex)
    end = time.monotonic() + _MEETING_S
    while time.monotonic() < end:
        name = hashlib.sha256(b"".join(store.multi_get(ids))).hexdigest()
        store.set(names[rank], name)
        if {found.decode() for found in store.multi_get(names)} == {name}:
            return dist.PrefixStore(name, store)
        time.sleep(0.1)
    raise RuntimeError(f"not all of the {world_size} ranks have started within {_MEETING_S:.0f} s")


def finish(exit_code: int = 0) -> NoReturn:
    """Wait for all ranks, then end this process. Needs to be called on all ranks."""
    if dist.is_initialized():
        dist.barrier()
    _exit(exit_code)


def exit_with_error(message: str) -> NoReturn:
    """End this process because the user's input is wrong: one line on stderr, exit code 2, no traceback.

    Under torchrun, every rank needs to call this function, and every rank prints the line.
    """
    sys.stderr.write(f"error: {' '.join(message.split())}\n")  # one write: the lines of two ranks do not mix
    sys.stdout.flush()
    sys.stderr.flush()
    if _is_one_of_several() and not dist.is_initialized():
        _wait_for_other_ranks()
    _exit(2)


@contextmanager
def exit_on_wrong_input() -> Iterator[None]:
    """If the block raises for wrong input on any rank, all ranks print the error and end. Needs to be entered on all ranks."""
    message = None
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        message = str(error)
    message = next(filter(None, gather_objects(message)), None)
    if message is not None:
        exit_with_error(message)


def print0(*values: Any) -> None:
    """Print on rank 0 only, at once."""
    if is_rank_0():
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
    """Returns the mean of a scalar tensor over the ranks and overwrites the tensor. Needs to be called on all ranks."""
    if not dist.is_initialized():
        return value.item()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def _exit(code: int) -> NoReturn:
    """End this process. Under torchrun, skip Python's shutdown.

    The threads of gloo can abort the shutdown (https://github.com/pytorch/pytorch/pull/179291).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if _is_one_of_several():
        os._exit(code)
    sys.exit(code)


def _is_one_of_several() -> bool:
    try:
        return launched().distributed
    except ValueError:  # the caller already reports this error
        return False


def _wait_for_other_ranks(timeout_s: float = 5.0) -> None:
    """Wait until all ranks are about to end, because torchrun kills the other ranks when the first rank ends."""
    with contextlib.suppress(RuntimeError):  # the store has ended with rank 0, or the other ranks did not connect
        store, _, world_size = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=timeout_s)))
        end = time.monotonic() + timeout_s
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun may keep the store over a restart
        ready = store.add(f"ranks about to end {attempt}", 1)
        while ready < world_size and time.monotonic() < end:
            time.sleep(0.01)
            ready = store.add(f"ranks about to end {attempt}", 0)


def _end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL), 0, 0, 0)


@cache
def _store() -> dist.Store:
    """Returns the store through which the ranks meet. Needs to be called on all ranks.

    This process keeps it, because rank 0 may be the one that holds it for all.
    """
    store, rank, world_size = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=_MEETING_S)))
    return without_old_keys(store, rank, world_size)


def _take(key: str) -> Any:
    """Wait until a rank has set the key, delete it and return its value."""
    value = json.loads(_store().get(key))
    _store().delete_key(key)
    return value


def _has_each_rank_a_gpu(device: str, launch: Launch) -> bool:
    """Returns whether every rank has its own GPU. A rank may see all GPUs of its machine, or only its own."""
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    return agree(launch, gpu, lambda gpus: len(set(gpus)) == len(gpus))


def _integer(name: str, default: int | None = None) -> int:
    if name not in os.environ and default is not None:
        return default
    text = os.environ[name]
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(f"{name}={text[:40]} is not an integer; {_REMEDY}") from error
