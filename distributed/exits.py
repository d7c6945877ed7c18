"""How the ranks end: together, with one line that says why."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch.distributed as dist

from distributed.launch import launched
from distributed.rendezvous import meet, result_key, store, value_key
from zero.host_comm import LONG_TIMEOUT, gather_objects


def finish(exit_code: int = 0) -> NoReturn:
    """Wait for all ranks, then end this process. Needs to be called on all ranks."""
    if dist.is_initialized():
        # rank 0 may take long to end the wandb run
        dist.barrier(dist.new_group(backend="gloo", timeout=LONG_TIMEOUT))
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
    """End all ranks with exit code 2 if the block raises for wrong input on any of them. Needs to be entered on all ranks.

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

    The first rank of each host prints its message. The others print theirs if the ranks do not end in time.
    """
    launch, ending, end = launched(), 0, time.monotonic() + timeout_s
    if launch.local_rank == 0:
        _print_error(message)
    with contextlib.suppress(RuntimeError):  # the store has ended with rank 0, or the other ranks did not connect
        shared = store() if store.cache_info().currsize else meet(timeout_s)
        for key in map(result_key, range(1, launch.world_size)) if launch.rank == 0 else [value_key(launch.rank)]:
            shared.set(key, json.dumps([None, message]))
        ending = shared.add("ranks about to end", 1)
        while ending < launch.world_size and time.monotonic() < end:
            time.sleep(0.01)
            ending = shared.add("ranks about to end", 0)
    if launch.local_rank > 0 and ending < launch.world_size:
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
