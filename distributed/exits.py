"""How the ranks end: together, with one line that says why."""

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch.distributed as dist

from zero.host_comm import LONG_TIMEOUT, gather_objects


def finish(exit_code: int = 0) -> NoReturn:
    """Wait for all ranks, then end this process. Needs to be called on all ranks.

    With other ranks, it skips Python's shutdown, which the threads of gloo can abort
    (https://github.com/pytorch/pytorch/pull/179291).
    """
    if dist.is_initialized():  # rank 0 may take long to end the wandb run, and torchrun kills the others when one has ended
        dist.barrier(dist.new_group(backend="gloo", timeout=LONG_TIMEOUT))
    sys.stdout.flush()
    sys.stderr.flush()
    if dist.is_initialized():
        os._exit(exit_code)
    sys.exit(exit_code)


class _Output:
    """A text stream that may be lost, as on a full disk or with a closed terminal. The other one of the two tells it, once."""

    def __init__(self, stream: Any, other: Any, goes_on: bool) -> None:
        self._stream, self._other, self._goes_on = stream, other, goes_on

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, write: Callable[..., Any], *text: str) -> None:
        try:
            write(*text)
        except (OSError, ValueError) as error:
            if not self._goes_on and isinstance(error, BrokenPipeError):
                if dist.is_initialized():  # the other ranks wait for this one
                    return
                os._exit(0)
            if not self._goes_on:
                raise
            other, self._other = self._other, None
            if other is not None:
                with contextlib.suppress(OSError, ValueError):
                    print(f"WARNING: {self._stream.name} cannot be written: {error}; the run goes on", file=other, flush=True)


def guard_output(goes_on: bool) -> None:
    """Escape what the encoding of the output lacks. If nobody reads it, this process `goes_on`, or ends without an error."""
    out, err = (stream or io.TextIOWrapper(io.BytesIO()) for stream in (sys.stdout, sys.stderr))  # None: closed by the shell
    for stream in (out, err):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # typed as TextIO
    sys.stdout, sys.stderr = _Output(out, err, goes_on), _Output(err, out, goes_on)  # type: ignore[assignment]


@contextmanager
def exit_on_wrong_input() -> Iterator[None]:
    """End all ranks with exit code 2 if the block raises for wrong input on any of them. Needs to be entered on all ranks.

    The first rank of each host prints the error of the first rank that has one, in one line on stderr, without a traceback.
    """
    message = None
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        message = str(error)
    if found := [(rank, text) for rank, text in enumerate(gather_objects(message)) if text]:
        rank, text = found[0]
        message = f"rank {rank}: {text}" if rank else text
        if os.environ.get("LOCAL_RANK", "0") == "0" or not dist.is_initialized():
            print_error(message, is_root_cause=True)
        finish(2)


def print_error(message: str, is_root_cause: bool = False) -> None:
    """Print one line on stderr. A root cause also goes to the file from which torchrun takes it for its report."""
    line = f"error: {' '.join(message.split())}"
    if is_root_cause:  # other threads call this, too, and must not wait for a main thread that hangs in a print
        sys.stdout.flush()
    sys.stderr.write(f"{line}\n")  # one write: the lines of two ranks do not mix
    sys.stderr.flush()
    if is_root_cause and (path := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        # The root cause is the first failure, in whole seconds. Ranks without a file fail when torchrun finds that they have
        # ended. The keys are those of torch.distributed.elastic.multiprocessing.errors.
        details = {"py_callstack": line, "timestamp": str(int(time.time()) - 1)}
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump({"message": {"message": line, "extraInfo": details}}, file)
