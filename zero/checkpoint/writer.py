"""Save the state of all ranks to the disk, in the background if requested, and report each save."""

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
from zero.checkpoint.format import NAME, shards_entry
from zero.checkpoint.state import TensorChunk, full_state, local_chunks
from zero.host_comm import LONG_TIMEOUT, broadcast_object, gather_objects, is_rank_0


class DivergedError(ArithmeticError):
    """Weights are not finite, so no checkpoint is written. The message names the first such tensor."""


class SaveReport(NamedTuple):
    """The report of one written checkpoint."""

    iter_num: int
    nbytes: int
    write_s: float  # time until the checkpoint was on the disk
    consolidate_s: float = 0.0  # time before that; a background save lets training continue afterwards
    warning: str | None = None  # a problem that occurred after the checkpoint was on the disk


def save(
    checkpoint: dict[str, Any], folder: str, keep: int = 0, rotate: bool = True, buffers: Container[str] = ()
) -> SaveReport:
    """Write a consolidated checkpoint. Call it on one process only.

    Args:
        checkpoint, folder, rotate, keep: see `store.commit` and `store.clean_up`. The folder must exist.
        buffers: names in the model whose values may be inf, for example a mask.

    Raises:
        DivergedError: if a weight is not finite. The old files are unchanged, as with OSError.
    """
    begin = time.perf_counter()
    weights = ((name, value) for name, value in checkpoint["model"].items() if name not in buffers)
    _check_finite([_first_nonfinite(weights)])
    replaced = store.commit(checkpoint, folder, rotate)
    return _report(checkpoint["iter_num"], folder, keep, replaced, begin)


def _report(iteration: int, folder: str, keep: int, replaced: set[str], begin: float, shard_bytes: int = 0) -> SaveReport:
    nbytes, write_s = os.path.getsize(os.path.join(folder, NAME)) + shard_bytes, time.perf_counter() - begin
    return SaveReport(iteration, nbytes, write_s, warning=store.clean_up(folder, keep, iteration, replaced))


def _save_sharded(
    checkpoint: dict[str, Any] | None,
    folder: str,
    keep: int,
    rotate: bool,
    buffers: Container[str],
    own: list[TensorChunk],
    group: dist.ProcessGroup | None,
) -> SaveReport | None:
    """Write the chunks of all ranks, then rank 0's checkpoint, as `save` does. Needs to be called on all ranks of the group.

    Args:
        checkpoint: on rank 0, the checkpoint with tensors on the meta device in place of the tensors in chunks.
        folder, keep, rotate, buffers: see `save`. All ranks must share the folder.
        own: the chunks of this rank.
        group: process group for CPU tensors; None only without torch.distributed.

    Raises:
        DivergedError, OSError: see `save`; on all ranks, if one of them cannot write its chunks.
    """
    begin = time.perf_counter()
    named = ((chunk.name.removeprefix("model."), chunk) for chunk in own if chunk.name.startswith("model."))
    weights = ((name, chunk.read()) for name, chunk in named if name not in buffers)
    _check_finite(gather_objects(_first_nonfinite(weights), group))
    name = broadcast_object(store.new_shards_name(checkpoint) if checkpoint else None, group)
    unfinished = os.path.join(folder, name + ".tmp")
    with store.remove_shards_on_error(os.path.join(folder, NAME), name) if checkpoint else nullcontext():
        own_sums = chunks.write(own, unfinished, group)
        sums = {file: entry for each in gather_objects(own_sums, group) for file, entry in each.items()}
        if checkpoint is None:
            return None
        if missing := [file for file in sums if not os.path.exists(os.path.join(unfinished, file))]:
            raise OSError(f"rank 0 does not see what other ranks wrote to {folder} ({missing[0]}); use a folder that all share")
        replaced = store.commit({**checkpoint, "shards": shards_entry(name, sums)}, folder, rotate)
    return _report(checkpoint["iter_num"], folder, keep, replaced, begin, sum(entry.nbytes for entry in sums.values()))


class CheckpointWriter:
    """Writes the checkpoints of a run one after the other. Needs to be constructed on all ranks.

    Args:
        folder, keep: see `save`. All ranks must share the folder.
        background: `save` returns when the state is collected on the CPU, and a thread writes the file.
        format: 'consolidated' (rank 0 writes everything) or 'sharded' (each rank writes what it owns).
        newest_is_corrupt: whether `find` has found that the newest checkpoint is corrupt. Only the value of rank 0 counts.
        sweep: remove files that killed runs have left. Pass False for a run that saves nothing and must change nothing.
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
        # a process group of its own, because the collectives of the thread run concurrently with the others, and because NCCL
        # would end the run if the ranks wait longer than its timeout, 10 minutes, while rank 0 writes
        self._group = dist.new_group(backend="gloo", timeout=LONG_TIMEOUT) if dist.is_initialized() else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._outcomes: deque[SaveReport | OSError | DivergedError] = deque()
        if sweep and is_rank_0():
            store.sweep(folder)

    def save(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, values: dict[str, Any]) -> None:
        """Write a checkpoint. `outcomes` reports whether this succeeded. Needs to be called on all ranks.

        Args:
            model: the model from the training code, without the wrapper of `zero.build`.
            values: plain values that are saved in addition to "model" and "optimizer". Only the values of rank 0 count.
        """
        self.wait()
        begin = time.perf_counter()
        write = self._collect(model, optimizer, values)
        run = partial(self._run, write, time.perf_counter() - begin)
        if self.background:
            self._pending = self._thread.submit(run)
            return
        try:
            run()
        finally:
            self._barrier()

    def wait(self) -> None:
        """Wait until no checkpoint is being written. Raise an error that is not an outcome. Needs to be called on all ranks."""
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.result()
            finally:
                self._barrier()

    def outcomes(self) -> list[SaveReport | OSError | DivergedError]:
        """Return the results of the saves that have ended since the last call. Rank 0 has the results of all saves."""
        return [self._outcomes.popleft() for _ in range(len(self._outcomes))]

    def _collect(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, values: dict[str, Any]
    ) -> Callable[[], SaveReport | None]:
        """Collect the state, and return the function with which this rank writes it. Needs to be called on all ranks."""
        where = (self.folder, self.keep, not self.newest_is_corrupt, _buffers(model))
        if self.format == "sharded":
            outline, own = local_chunks(model, optimizer)
            if self.background:  # training continues and overwrites the memory that the chunks view
                own = [chunk._replace(elements=chunk.read().to("cpu", copy=True), decode=None) for chunk in own]
            return partial(_save_sharded, outline and {**outline, **values}, *where, own, self._group)
        state = full_state(model, optimizer)
        return partial(save, {**state, **values}, *where) if state else lambda: None  # only rank 0 has the state

    def _run(self, write: Callable[[], SaveReport | None], consolidate_s: float) -> None:
        try:
            report = write()
        except (OSError, DivergedError) as error:
            self._outcomes.append(error)
            return
        self.newest_is_corrupt = False
        if report is not None:
            self._outcomes.append(report._replace(consolidate_s=consolidate_s))

    def _barrier(self) -> None:
        """Make the ranks wait here, and not in the collectives of the run, for as long as one of them writes."""
        if self._group is not None:
            dist.barrier(self._group)


def _buffers(model: torch.nn.Module) -> set[str]:
    """Return the names in a model's state dict that are not names of parameters."""
    return model.state_dict().keys() - {name for name, _ in model.named_parameters(remove_duplicate=False)}


def _first_nonfinite(tensors: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """Return the first name whose tensor holds an inf or a nan. Needs almost no memory. Skips tensors on the meta device."""
    for name, tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.numel() and not tensor.is_meta:
            least, most = tensor.detach().aminmax()  # both are nan if the tensor holds a nan
            if not (least.isfinite() and most.isfinite()):
                return name
    return None


def _check_finite(nonfinite: list[str | None]) -> None:
    """Raise an error for the first name that any rank has found."""
    if name := next(filter(None, nonfinite), None):
        raise DivergedError(f"{name} is not finite")
