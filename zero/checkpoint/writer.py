"""Saving: the state of all ranks to the disk, in the background if asked to, and a report of each save."""

import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Container
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from zero.checkpoint.chunks import write
from zero.checkpoint.store import (
    _SHARDS,
    NAME,
    DivergedError,
    SaveReport,
    _first_not_finite,
    _glob,
    _gone_unless_it_counts,
    _refuse,
    _remove_unused,
    _shards_entry,
    _shards_name,
    _shards_of,
    save,
)
from zero.collectives import PATIENCE, broadcast_object, gather_objects
from zero.state import TensorChunk, full_state, local_chunks


def _save_sharded(
    contents: dict[str, Any] | None,
    pieces: list[TensorChunk],
    folder: str,
    keep: int,
    rotate: bool,
    buffers: Container[str],
    group: dist.ProcessGroup | None,
) -> SaveReport | None:
    """Write the pieces of all ranks, then rank 0's `contents` as `ckpt.pt`. Needs to be called on all ranks of the group.

    Returns:
        On rank 0 the report, elsewhere None.

    Raises:
        DivergedError: on all ranks if a weight is not finite; the old ones stand.
        OSError: on all ranks if one cannot write its pieces, on rank 0 if it cannot write the file; the old ones stand.
    """
    begin = time.perf_counter()
    named = ((piece.name.removeprefix("model."), piece) for piece in pieces if piece.name.startswith("model."))
    bad = _first_not_finite((name, piece.elements) for name, piece in named if name not in buffers)
    _refuse(gather_objects(bad, group))
    name = broadcast_object(_shards_name(contents) if contents else None, group)
    unfinished = os.path.join(folder, name + ".tmp")
    with _gone_unless_it_counts(os.path.join(folder, NAME), name) if contents else nullcontext():
        sums = write(pieces, unfinished, group)
        sums = {file: entry for each in gather_objects(sums, group) for file, entry in each.items()}
        if contents is None:
            return None
        if missing := [file for file in sums if not os.path.exists(os.path.join(unfinished, file))]:
            raise OSError(f"rank 0 does not see what other ranks wrote to {folder} ({missing[0]}); use one that all share")
        report = save({**contents, "shards": _shards_entry(name, sums)}, folder, keep, rotate)
    nbytes = report.nbytes + sum(entry.nbytes for entry in sums.values())
    return report._replace(nbytes=nbytes, write_s=time.perf_counter() - begin)


class CheckpointWriter:
    """Writes the checkpoints of a run one after the other. Needs to be made on all ranks.

    Args:
        folder, keep: see `save`; the folder must be one that all ranks share.
        background: `save` returns once the state is collected, on the CPU, and a thread writes the file; a second `save`
            waits for the first.
        format: 'consolidated', everything on rank 0, or 'sharded', every rank what it owns.
        damaged: whether `find` has found the folder's newest checkpoint to be; what rank 0 says counts.
        sweep: remove what killed runs have left; False for a run that will save nothing and is to change nothing.
    """

    def __init__(
        self,
        folder: str,
        keep: int = 0,
        background: bool = False,
        format: str = "consolidated",
        damaged: bool = False,
        sweep: bool = True,
    ) -> None:
        self.folder, self.keep, self.background, self.format, self.damaged = folder, keep, background, format, damaged
        # of its own, and on the CPU, whatever the backend of the run: the thread's collectives run beside the others, and
        # NCCL would end a run whose ranks wait for its timeout, 10 minutes, while rank 0 writes
        distributed = dist.is_initialized()
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE) if distributed else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._outcomes: deque[SaveReport | OSError | DivergedError] = deque()
        if sweep and (not distributed or dist.get_rank() == 0):
            for leftover in _glob(folder, "ckpt*.pt.tmp"):
                _remove_unused(folder, {_shards_of(leftover)} - {None})  # whole, but killed before it counted
                os.remove(leftover)
            for leftover in _glob(folder, "shards_*.tmp"):
                if _SHARDS.fullmatch(os.path.basename(leftover).removesuffix(".tmp")):
                    shutil.rmtree(leftover)

    def save(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, values: dict[str, Any]) -> None:
        """Write a checkpoint; `outcomes` will tell whether that was possible. Needs to be called on all ranks.

        Args:
            model: as the training code made it, without what `zero.build` wrapped around it.
            values: plain values to go beside "model" and "optimizer"; those of rank 0 count.
        """
        self.wait()
        begin = time.perf_counter()
        buffers = model.state_dict().keys() - {name for name, _ in model.named_parameters(remove_duplicate=False)}
        if self.format == "sharded":
            pieces, contents = local_chunks(model, optimizer)
            if self.background:
                pieces = [piece._replace(elements=piece.elements.to("cpu", copy=True)) for piece in pieces]
            contents = None if contents is None else {**contents, **values}
            write_it = partial(_save_sharded, contents, pieces, self.folder, self.keep, not self.damaged, buffers, self._group)
        else:
            contents = full_state(model, optimizer)
            if contents is None:  # rank 0 has it all
                write_it = _nothing
            else:
                write_it = partial(save, {**contents, **values}, self.folder, self.keep, not self.damaged, buffers)
        write_it = partial(self._write, write_it, time.perf_counter() - begin)
        if self.background:
            self._pending = self._thread.submit(write_it)
        else:
            try:
                write_it()
            finally:
                self._meet()

    def wait(self) -> None:
        """Wait until nothing is being written. Needs to be called on all ranks.

        Raises what the thread raised, unless that is an outcome.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.result()
            finally:
                self._meet()

    def _meet(self) -> None:
        """Have the ranks wait here, however long one of them writes, rather than in the run's own collectives."""
        if self._group is not None:
            dist.barrier(self._group)

    def outcomes(self) -> list[SaveReport | OSError | DivergedError]:
        """What has come of the saves that have ended since the last call; on rank 0, of all of them."""
        return [self._outcomes.popleft() for _ in range(len(self._outcomes))]

    def _write(self, write_it: Callable[[], SaveReport | None], consolidate_s: float) -> None:
        try:
            report = write_it()
        except (OSError, DivergedError) as error:
            self._outcomes.append(error)
            return
        self.damaged = False
        if report is not None:
            self._outcomes.append(report._replace(consolidate_s=consolidate_s))


def _nothing() -> None:
    """What a rank writes that has nothing to write."""
