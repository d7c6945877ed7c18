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
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

import hardware
from interface import choose_interface
from zero.collectives import LONG_TIMEOUT, broadcast_object, cpu_group, gather_objects, is_rank_0

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
    check_backend(backend, device)
    _raise_limit_of_open_files()
    if device.startswith("cuda"):
        device = f"cuda:{launch.local_rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
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


def check_backend(backend: str, device: str) -> None:
    """Raise ValueError if several ranks cannot use the backend on such a device."""
    if backend == "nccl" and not device.startswith("cuda"):
        raise ValueError(f"backend=nccl does not support device={device}; use --backend=gloo")


def agree(launch: Launch, value: Any, rule: Callable[[list[Any]], Any]) -> Any:
    """Returns on all ranks what `rule` returns on rank 0 for the values of all ranks. Needs to be called on all ranks.

    This works before the process group has started. `value` and the result must be what JSON can hold. A key is deleted
    when it has been read, so that the next call does not find it.

    Raises:
        ValueError: on all ranks, if one of them ends with `exit_with_error` before it calls this function.
    """
    if not launch.distributed:
        return rule([value])
    _store().set(_value_key(launch.rank), json.dumps([value, None]))
    if launch.rank == 0:
        values, errors = zip(*(_take(_value_key(rank)) for rank in range(launch.world_size)), strict=True)
        error = "; ".join(dict.fromkeys(filter(None, errors)))
        result = json.dumps([None if error else rule(list(values)), error])
        for rank in range(launch.world_size):
            _store().set(_result_key(rank), result)
    result, error = _take(_result_key(launch.rank))
    if error:
        raise ValueError(error)
    return result


def without_old_keys(store: dist.Store, rank: int, world_size: int, timeout_s: float = _MEETING_S) -> dist.Store:
    """Returns a part of the store without keys from before a restart. Needs to be called on all ranks.

    torchrun may keep its store when it restarts the ranks, and they would connect to addresses of ranks that have ended
    (https://github.com/pytorch/pytorch/issues/135712). So the part is named by an ID of every process of this start. A rank may
    read the old ID of another rank at first. It has the right IDs when all ranks have the same: the others know its new ID.

    Raises:
        RuntimeError: if not all ranks call this function within `timeout_s`, or if another process has taken this rank.
    """
    ids, names = ([f"{key} of rank {number}" for number in range(world_size)] for key in ("id", "name"))
    own = uuid.uuid4().hex
    store.set(ids[rank], own)
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if late := [number for number in range(world_size) if not store.check([ids[number]])]:
            time.sleep(0.1)
            continue
        found = store.multi_get(ids)
        if found[rank].decode() != own:
            raise RuntimeError(f"another process is rank {rank} now; this one is left from an earlier start")
        name = hashlib.sha256(b"".join(found)).hexdigest()
        store.set(names[rank], name)
        if {text.decode() for text in store.multi_get(names)} == {name}:
            return dist.PrefixStore(name, store)
        late = list(range(world_size))
        time.sleep(0.1)
    missing = f"rank {late[0]}" if len(late) == 1 else f"{len(late)} of {world_size} ranks"
    raise RuntimeError(f"{missing} did not start within {timeout_s:.0f} s")


def finish(exit_code: int = 0, last_line: str = "") -> NoReturn:
    """Wait for all ranks, then end this process. Needs to be called on all ranks.

    If torchrun has received a signal, it prints a traceback below everything that its ranks have printed. So under torchrun, on
    Linux, another process prints the last line of the run again when torchrun has ended.

    Args:
        last_line: printed on rank 0 if the exit code is 0.
    """
    if dist.is_initialized():
        # rank 0 may take long to end the run of wandb
        dist.barrier(dist.new_group(backend="gloo", timeout=LONG_TIMEOUT))
    if last_line and not exit_code:
        print0(last_line)
        if is_rank_0() and "TORCHELASTIC_RUN_ID" in os.environ:
            _print_after(os.getppid(), last_line)
    _exit(exit_code)


def exit_with_error(message: str) -> NoReturn:
    """End this process because the user's input is wrong: one line on stderr, exit code 2, no traceback.

    Before the process group has started, the ranks end together: the first rank of each host prints the line, and ranks that
    call `agree` get the message there. When it has started, this rank prints its line, and torchrun ends the others; if every
    rank could have the message, use `exit_on_wrong_input`.
    """
    if _is_one_of_several() and not dist.is_initialized():
        _end_with_other_ranks(message)
    else:
        _print_error(message)
    _exit(2)


@contextmanager
def exit_on_wrong_input() -> Iterator[None]:
    """If the block raises for wrong input on any rank, all ranks end with exit code 2. Needs to be entered on all ranks.

    The first rank of each host prints the error of the first rank that has one.
    """
    message = None
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        message = str(error)
    message = next(filter(None, gather_objects(message)), None)
    if message is None:
        return
    if not dist.is_initialized():
        exit_with_error(message)
    if launched().local_rank == 0:
        _print_error(message)
    dist.barrier()  # torchrun kills the others when one of its ranks has ended
    _exit(2)


def gather_numbers(values: Sequence[float]) -> list[list[float]]:
    """Gather as many numbers from every rank, as `gather_objects` does, without a wait for a GPU."""
    if not dist.is_initialized():
        return [list(values)]
    own = torch.tensor(values, dtype=torch.float64)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own, group=cpu_group(None))
    return [numbers.tolist() for numbers in gathered]


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


def _end_with_other_ranks(message: str, timeout_s: float = 30.0) -> None:
    """Print why this rank ends, and wait until the others end too: torchrun kills them when the first rank ends.

    The first rank of each host prints its message. Rank 0 also prints the messages of the others that it does not have itself.
    A rank prints its own if rank 0 has not come to do that.
    """
    launch, came = launched(), False
    if launch.local_rank == 0:
        _print_error(message)
    with contextlib.suppress(RuntimeError):  # the store has ended with rank 0, or the other ranks did not connect
        store = _store() if _store.cache_info().currsize else _meet(timeout_s)
        others, end = range(1, launch.world_size), time.monotonic() + timeout_s

        def wait_for(count: int) -> bool:
            while not (enough := store.add("ranks about to end", 0) >= count) and time.monotonic() < end:
                time.sleep(0.01)
            return enough

        if launch.rank == 0:
            for rank in others:
                store.set(_result_key(rank), json.dumps([None, message]))
            wait_for(len(others))
            told = [json.loads(store.get(key))[1] for key in map(_value_key, others) if store.check([key])]
            for other in dict.fromkeys(text for text in told if text and text != message):
                _print_error(other)
        else:
            store.set(_value_key(launch.rank), json.dumps([None, message]))
        store.add("ranks about to end", 1)
        came = wait_for(launch.world_size)
    if launch.local_rank > 0 and not came:
        _print_error(message)


def _print_error(message: str) -> None:
    """Print one line on stderr, and write it to the file from which torchrun takes the root cause for its report."""
    line = f"error: {' '.join(message.split())}"
    sys.stdout.flush()
    sys.stderr.write(f"{line}\n")  # one write: the lines of two ranks do not mix
    sys.stderr.flush()
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # The root cause is the first failure, in whole seconds. Ranks without a file fail when torchrun finds that they have
        # ended. The keys are those of torch.distributed.elastic.multiprocessing.errors.
        details = {"py_callstack": line, "timestamp": str(int(time.time()) - 1)}
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump({"message": {"message": line, "extraInfo": details}}, file)


def _print_after(pid: int, line: str) -> None:
    """Start a process that prints a line on stdout when the process `pid` has ended. Only Linux can do that."""
    with contextlib.suppress(AttributeError, OSError):  # without pidfd_open
        ended = os.pidfd_open(pid)
        script = "import select, sys; select.select([int(sys.argv[1])], [], []); print(sys.argv[2])"
        subprocess.Popen([sys.executable, "-IS", "-c", script, str(ended), line], pass_fds=[ended], start_new_session=True)


def _raise_limit_of_open_files() -> None:
    """Raise it as far as this process may: gloo aborts when connections of strangers use it up."""
    limit, largest = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = 2**16 if largest == resource.RLIM_INFINITY else min(largest, 2**16)
    if limit != resource.RLIM_INFINITY and limit < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, largest))


def _end_with_torchrun() -> None:
    """On Linux, let the kernel kill a rank of torchrun when torchrun ends; if it has ended, end now.

    Otherwise the rank would go on alone, keep its GPU and the output folder, and meet the ranks of the next torchrun.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or sys.platform != "linux":
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL), 0, 0, 0)
    # process 1 takes over the children of a process that has ended; in a container, it may be torchrun itself
    if os.getppid() == 1 and "python" not in os.path.basename(os.path.realpath("/proc/1/exe")):
        sys.stderr.write("error: torchrun has ended\n")
        os._exit(1)


@cache
def _store() -> dist.Store:
    """Returns the store through which the ranks meet. Needs to be called on all ranks.

    This process keeps it, because rank 0 may be the one that holds it for all.
    """
    return _meet(_MEETING_S)


def _meet(timeout_s: float) -> dist.Store:
    _end_with_torchrun()
    store, rank, world_size = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=timeout_s)))
    return without_old_keys(store, rank, world_size, timeout_s)


def _value_key(rank: int) -> str:
    return f"value of rank {rank}"


def _result_key(rank: int) -> str:
    return f"result for rank {rank}"


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
