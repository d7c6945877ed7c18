"""Run a function on several gloo ranks of this machine, each a process, which meet through a file."""

import gc
import multiprocessing
import os
import pathlib
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

context = multiprocessing.get_context("forkserver")
PRELOADED = [
    *("torch", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.checkpoint", "torch.distributed.fsdp"),
    *("torch.distributed.optim", "numpy", "pytest", "tests.compiled"),
]
context.set_forkserver_preload(PRELOADED)  # imported once, then forked

TIMEOUT_S = 600
travels = {"as on a GPU": False}  # whether the ranks that start next send buckets in main memory as NCCL does


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """`function(*args)` on every rank of a process group of `world_size`; what each returned, by rank.

    Results must be what `torch.load(weights_only=True)` admits. An error on any rank is raised here, with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank_main, args=(function, rank, world_size, folder, travels["as on a GPU"], args))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        end = time.monotonic() + TIMEOUT_S
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        stuck = [rank for rank, process in enumerate(processes) if process.is_alive()]
        killed = [f"rank {rank} was killed: {process.exitcode}" for rank, process in enumerate(processes) if process.exitcode]
        for process in processes:
            process.kill()
        errors = [path.read_text() for path in sorted(pathlib.Path(folder).glob("*.error"))]
        if errors or killed or stuck:
            raise RuntimeError("\n".join([*errors, *killed, f"ranks {stuck} did not end" if stuck else ""]))
        return [torch.load(f"{folder}/{rank}.pt", weights_only=True) for rank in range(world_size)]


def run_in_turn(world_size: int, *calls: Callable[[], Any]) -> list[list[Any]]:
    """Each of `calls` on the same ranks, one after the other: by call, what `run_ranks` returns. It starts ranks only once.

    A call leaves the process as it has found it.
    """
    return [list(results) for results in zip(*run_ranks(_in_turn, world_size, calls), strict=True)]


def _in_turn(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    results = []
    for call in calls:
        try:
            results.append(call())
        except BaseException as error:
            error.add_note(f"in {call}")
            raise
        gc.collect()
    return results


def travel_as_on_gpu() -> None:
    """Let gloo take the ways of NCCL in this process: its own reduce-scatter, all-gather and all-to-all, and no pool."""
    from zero import collectives, update

    update.TOGETHER = 70  # elements: of several small buckets, two or three share a call of the optimizer
    collectives.is_on_cpu = lambda tensor: False
    collectives.Communicator._is_native = lambda comm, bucket: True  # type: ignore[method-assign]


def _rank_main(
    function: Callable[..., Any], rank: int, world_size: int, folder: str, as_on_gpu: bool, args: tuple[Any, ...]
) -> None:
    gc.freeze()  # otherwise each collection looks at all of torch
    try:
        if as_on_gpu:
            travel_as_on_gpu()
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
        torch.save(function(*args), f"{folder}/{rank}.pt")
        dist.barrier()
    except BaseException:
        with open(f"{folder}/{rank}.error", "w") as file:
            file.write(f"rank {rank}:\n{traceback.format_exc()}")
    finally:
        os._exit(0)  # the interpreter does not clean up, which gloo's threads can turn into an abort
