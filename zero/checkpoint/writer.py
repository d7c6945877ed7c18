"""Saving: the state of all ranks to the disk, in the background if asked to, and a report of each save."""

import os
import time
from collections import deque
from collections.abc import Callable, Container, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zero.checkpoint import chunks, store
from zero.collectives import LONG_TIMEOUT, broadcast_object, gather_objects
from zero.state import TensorChunk, full_state, local_chunks


class DivergedError(ArithmeticError):
    """Weights that are not finite, so that no checkpoint is written; the message names the first such tensor."""


class SaveReport(NamedTuple):
    """One checkpoint written."""

    iter_num: int
    nbytes: int
    write_s: float  # until it was on the disk
    consolidate_s: float = 0.0  # before that; training can go on after it, if the rest happens in the background
    warning: str | None = None  # what went wrong once it was on the disk


def save(
    checkpoint: dict[str, Any], folder: str, keep: int = 0, rotate: bool = True, buffers: Container[str] = ()
) -> SaveReport:
    """Write a consolidated checkpoint. One process only.

    Args:
        checkpoint, folder, keep, rotate: see `store.commit`; the folder must exist.
        buffers: names in the model that may be inf, as a mask is.

    Raises:
        DivergedError: if a weight is not finite; the old files are unchanged.
        OSError: if the disk is full or cannot be written to; the old files are unchanged.
    """
    begin = time.perf_counter()
    weights = ((name, value) for name, value in checkpoint["model"].items() if name not in buffers)
    _check_finite([_first_nonfinite(weights)])
    warning = store.commit(checkpoint, folder, keep, rotate)
    nbytes = os.path.getsize(os.path.join(folder, store.NAME))
    return SaveReport(checkpoint["iter_num"], nbytes, time.perf_counter() - begin, warning=warning)


def save_sharded(
    checkpoint: dict[str, Any] | None,
    tensor_chunks: list[TensorChunk],
    folder: str,
    keep: int = 0,
    rotate: bool = True,
    buffers: Container[str] = (),
    group: dist.ProcessGroup | None = None,
) -> SaveReport | None:
    """Write the chunks of all ranks, then rank 0's checkpoint. Needs to be called on all ranks of the group.

    Args:
        checkpoint: on rank 0, with tensors on the meta device in place of those in chunks; elsewhere None.
        tensor_chunks: of this rank.
        folder, keep, rotate, buffers: see `save`; all ranks must share the folder.
        group: of CPU tensors; None: this process alone.

    Returns:
        On rank 0 the report, elsewhere None.

    Raises:
        DivergedError: on all ranks if a weight is not finite; the old files are unchanged.
        OSError: on all ranks if one cannot write its chunks, on rank 0 if it cannot write the file; the old files are
            unchanged.
    """
    begin = time.perf_counter()
    named = ((chunk.name.removeprefix("model."), chunk) for chunk in tensor_chunks if chunk.name.startswith("model."))
    weights = ((name, chunk.elements) for name, chunk in named if name not in buffers)
    _check_finite(gather_objects(_first_nonfinite(weights), group))
    name = broadcast_object(store.new_shards_name(checkpoint) if checkpoint else None, group)
    unfinished = os.path.join(folder, name + ".tmp")
    with store.remove_shards_on_error(os.path.join(folder, store.NAME), name) if checkpoint else nullcontext():
        own_sums = chunks.write(tensor_chunks, unfinished, group)
        sums = {file: entry for each in gather_objects(own_sums, group) for file, entry in each.items()}
        if checkpoint is None:
            return None
        if missing := [file for file in sums if not os.path.exists(os.path.join(unfinished, file))]:
            raise OSError(f"rank 0 does not see what other ranks wrote to {folder} ({missing[0]}); use one that all share")
        warning = store.commit({**checkpoint, "shards": store.shards_entry(name, sums)}, folder, keep, rotate)
    nbytes = os.path.getsize(os.path.join(folder, store.NAME)) + sum(entry.nbytes for entry in sums.values())
    return SaveReport(checkpoint["iter_num"], nbytes, time.perf_counter() - begin, warning=warning)


class CheckpointWriter:
    """Writes the checkpoints of a run one after the other. Needs to be made on all ranks.

    Args:
        folder, keep: see `save`; the folder must be one that all ranks share.
        background: `save` returns once the state is collected, on the CPU, and a thread writes the file; a second `save`
            waits for the first.
        format: 'consolidated', everything on rank 0, or 'sharded', every rank what it owns.
        newest_is_corrupt: whether `find` has found so; rank 0's answer counts.
        sweep: remove what killed runs have left; False for a run that will save nothing and must change nothing.
    """

    def __init__(
        self,
        folder: str,
        keep: int = 0,
        background: bool = False,
        format: str = "consolidated",
        newest_is_corrupt: bool = False,
        sweep: bool = True,
    ) -> None:
        self.folder, self.keep, self.background, self.format = folder, keep, background, format
        self.newest_is_corrupt = newest_is_corrupt
        # of its own, and on the CPU, whatever the backend of the run: the thread's collectives run beside the others, and
        # NCCL would end a run whose ranks wait for its timeout, 10 minutes, while rank 0 writes
        distributed = dist.is_initialized()
        self._group = dist.new_group(backend="gloo", timeout=LONG_TIMEOUT) if distributed else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._outcomes: deque[SaveReport | OSError | DivergedError] = deque()
        if sweep and (not distributed or dist.get_rank() == 0):
            store.sweep(folder)

    def save(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, values: dict[str, Any]) -> None:
        """Write a checkpoint; `outcomes` will tell whether that was possible. Needs to be called on all ranks.

        Args:
            model: as the training code made it, without what `zero.build` wrapped around it.
            values: plain values to go beside "model" and "optimizer"; those of rank 0 count.
        """
        self.wait()
        begin = time.perf_counter()
        make_task = self._sharded_task if self.format == "sharded" else self._consolidated_task
        task = make_task(model, optimizer, values)
        run = partial(self._run, task, time.perf_counter() - begin)
        if self.background:
            self._pending = self._thread.submit(run)
            return
        try:
            run()
        finally:
            self._barrier()

    def wait(self) -> None:
        """Wait until nothing is being written. Needs to be called on all ranks.

        Raises what the thread raised, unless that is an outcome.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.result()
            finally:
                self._barrier()

    def outcomes(self) -> list[SaveReport | OSError | DivergedError]:
        """The results of the saves that have ended since the last call; on rank 0, of all of them."""
        return [self._outcomes.popleft() for _ in range(len(self._outcomes))]

    def _consolidated_task(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, values: dict[str, Any]) -> "_Task":
        state = full_state(model, optimizer)
        if state is None:  # rank 0 has it all
            return None
        return partial(save, {**state, **values}, self.folder, self.keep, not self.newest_is_corrupt, _buffers(model))

    def _sharded_task(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, values: dict[str, Any]) -> "_Task":
        own, state = local_chunks(model, optimizer)
        if self.background:  # training goes on and overwrites what the chunks are views of
            own = [chunk._replace(elements=chunk.elements.to("cpu", copy=True)) for chunk in own]
        checkpoint = None if state is None else {**state, **values}
        return partial(
            save_sharded, checkpoint, own, self.folder, self.keep, not self.newest_is_corrupt, _buffers(model), self._group
        )

    def _run(self, task: "_Task", consolidate_s: float) -> None:
        try:
            report = None if task is None else task()
        except (OSError, DivergedError) as error:
            self._outcomes.append(error)
            return
        self.newest_is_corrupt = False
        if report is not None:
            self._outcomes.append(report._replace(consolidate_s=consolidate_s))

    def _barrier(self) -> None:
        """Have the ranks wait here, however long one of them writes, rather than in the run's own collectives."""
        if self._group is not None:
            dist.barrier(self._group)


_Task = Callable[[], SaveReport | None] | None


def _buffers(model: torch.nn.Module) -> set[str]:
    """The names in a model's state dict that are not of parameters."""
    return model.state_dict().keys() - {name for name, _ in model.named_parameters(remove_duplicate=False)}


def _first_nonfinite(tensors: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """The first name whose tensor holds an inf or a nan. Needs almost no memory. Tensors on the meta device are skipped."""
    for name, tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.numel() and not tensor.is_meta:
            least, most = tensor.detach().aminmax()  # nan, if there is one
            if not (least.isfinite() and most.isfinite()):
                return name
    return None


def _check_finite(nonfinite: list[str | None]) -> None:
    """Raise for the first name that any rank has found."""
    if name := next(filter(None, nonfinite), None):
        raise DivergedError(f"{name} is not finite")
