"""Run a function on several gloo ranks of this machine, each a process, which meet through a file."""

import contextlib
import faulthandler
import gc
import io
import math
import multiprocessing
import os
import pathlib
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

context = multiprocessing.get_context("forkserver")
PRELOADED = [
    *("torch", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.checkpoint", "torch.distributed.fsdp"),
    *("torch.distributed.optim", "numpy", "pytest", "tests.compiled"),
]
context.set_forkserver_preload(PRELOADED)  # imported once, then forked

TIMEOUT_S = 150  # of a call; those of the tests take some 20 s


class Ranks:
    """The processes of a group of `world_size` ranks. They answer one call after the other; one that fails has ended."""

    def __init__(self, world_size: int):
        self.folder = tempfile.TemporaryDirectory()
        self.connections, theirs = zip(*(context.Pipe() for _ in range(world_size)), strict=True)
        self.processes = [
            context.Process(target=_serve, args=(rank, pipe, world_size, self.folder.name), daemon=True)
            for rank, pipe in enumerate(theirs)
        ]
        for process in self.processes:
            process.start()
        for pipe in theirs:
            pipe.close()

    def call(
        self, function: Callable[..., Any], *args: Any, timeout_s: float | None = None, grace_s: float = math.inf
    ) -> list[tuple[str, Any]]:
        """What each rank says: "returned" and a value, "raised" and a traceback, "died" or "hangs" and what it has printed.

        `grace_s`: how long the others may take once one has answered.
        """
        for connection in self.connections:
            with contextlib.suppress(BrokenPipeError):
                connection.send((function, args))
        said: dict[Any, tuple[str, Any]] = {}
        deadline = time.monotonic() + (TIMEOUT_S if timeout_s is None else timeout_s)
        while len(said) < len(self.connections) and (left := deadline - time.monotonic()) > 0:
            for connection in wait([each for each in self.connections if each not in said], left):
                try:
                    said[connection] = torch.load(io.BytesIO(connection.recv_bytes()), weights_only=True)
                except (EOFError, ConnectionResetError):
                    said[connection] = "died", self._printed(self.connections.index(connection))
                deadline = min(deadline, time.monotonic() + grace_s)
        return [said.get(each) or ("hangs", self._printed(rank)) for rank, each in enumerate(self.connections)]

    def results(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What the function returns, by rank. An error on any rank is raised here, with its traceback."""
        said = self.call(function, *args)
        errors = [f"rank {rank} {kind}:\n{what}" for rank, (kind, what) in enumerate(said) if kind != "returned"]
        if errors:
            errors.insert(0, f"in {function!s:.200}")
            raise RuntimeError("\n".join(errors))
        return [value for _, value in said]

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()

    def _printed(self, rank: int) -> str:
        """The end of what a rank has written to stderr, with its stack if it is alive, and its exit code otherwise."""
        process = self.processes[rank]
        process.join(0.1)
        if process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)  # type: ignore[arg-type]  # for the stack
            time.sleep(0.3)
        log = pathlib.Path(self.folder.name, f"{rank}.log")  # is absent if the rank has ended before it could run
        return f"{log.read_text()[-3000:] if log.exists() else ''}\nexit code {process.exitcode}"


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """`function(*args)` on every rank of a new process group of `world_size`; what each returned, by rank.

    Results must be what `torch.load(weights_only=True)` admits.
    """
    ranks = Ranks(world_size)
    try:
        return ranks.results(function, *args)
    finally:
        ranks.stop()


living: dict[tuple[str, int], Ranks] = {}  # by the file of the tests and their number


def run_in_turn(world_size: int, *calls: Callable[[], Any]) -> list[list[Any]]:
    """Each of `calls` on the same ranks, one after the other: by call, what `run_ranks` returns.

    The ranks live until another file calls this: a call leaves the process as it has found it.
    """
    file = os.environ["PYTEST_CURRENT_TEST"].partition("::")[0]
    if not all(of == file for of, _ in living):
        stop_living()
    if (file, world_size) not in living:
        living[file, world_size] = Ranks(world_size)
    try:
        return [living[file, world_size].results(call) for call in calls]
    except BaseException:
        stop_living()
        raise


def stop_living() -> None:
    for ranks in living.values():
        ranks.stop()
    living.clear()


def travel_as_on_gpu() -> None:
    """Let gloo take the ways of NCCL in this process: its own reduce-scatter, all-gather and all-to-all, and no pool."""
    from zero import update
    from zero.collectives import Communicator

    update.TOGETHER = 70  # elements: of several small buckets, two or three share a call of the optimizer
    Communicator.is_on_cpu = lambda comm, tensor: False  # type: ignore[method-assign]
    Communicator._is_native = lambda comm, bucket: True  # type: ignore[method-assign]


def _serve(rank: int, connection: Connection, world_size: int, folder: str) -> None:
    """In the new process: answer calls until the other end of the connection is closed."""
    gc.freeze()  # otherwise each collection looks at all of torch
    log = os.open(f"{folder}/{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 2)
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, log)
    try:
        if "ZERO1_TEST_AS_ON_GPU" in os.environ:  # see conftest.py
            travel_as_on_gpu()
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
        while True:
            function, args = connection.recv()
            _send(connection, "returned", function(*args))
            del function, args
            gc.collect()
    except BaseException:
        with contextlib.suppress(BrokenPipeError):  # nobody listens any more
            _send(connection, "raised", traceback.format_exc())
    finally:
        os._exit(0)  # the interpreter does not clean up, which gloo's threads can turn into an abort


def _send(connection: Connection, kind: str, what: Any) -> None:
    torch.save((kind, what), packed := io.BytesIO())
    connection.send_bytes(packed.getvalue())
