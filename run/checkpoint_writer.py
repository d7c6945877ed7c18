"""Save the state of all ranks to the disk, in the background if requested, and report each save."""

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from run import checkpoint_folder
from run.checkpoint_folder import SaveReport
from zero.checkpoint.state import Part, Snapshot, snapshot
from zero.host_comm import LONG_TIMEOUT, gather_objects, is_rank_0, on_all_ranks


class DivergedError(ArithmeticError):
    """Weights are not finite, so no checkpoint is written. The message names the first such tensor."""


class CheckpointWriter:
    """Writes the checkpoints of a run one after the other, on rank 0, as they arrive. Needs to be constructed on all ranks.

    Args:
        folder: of the checkpoints; it must exist on rank 0.
        keep: number of checkpoints that are kept by iteration.
        background: `write` returns when each rank has copied its parts to the CPU, and a thread writes the file.
        newest_is_corrupt: whether the newest checkpoint was found to be corrupt. Only the value of rank 0 counts.
        sweep: remove files that killed runs have left. Pass False for a run that saves nothing and must change nothing.
    """

    def __init__(
        self, folder: str, keep: int = 0, background: bool = False, newest_is_corrupt: bool = False, sweep: bool = True
    ) -> None:
        self.folder, self.keep, self.background = folder, keep, background
        self.newest_is_corrupt = newest_is_corrupt
        # a process group of its own, because the collectives of the thread run concurrently with the others, and because NCCL
        # would end the run if the ranks wait longer than its timeout, 10 minutes, while rank 0 writes
        self._group = dist.new_group(backend="gloo", timeout=LONG_TIMEOUT) if dist.is_initialized() else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._outcomes: deque[SaveReport | OSError | DivergedError] = deque()
        if sweep and is_rank_0():
            checkpoint_folder.sweep(folder)

    def write(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, values: dict[str, Any]) -> None:
        """Write a checkpoint. `outcomes` reports whether this succeeded. Needs to be called on all ranks.

        `model`: without the wrapper of `zero.build`. `values`: plain values that are saved beside "model" and "optimizer". Only
        those of rank 0 count.
        """
        self.wait()
        begin = time.perf_counter()
        state = snapshot(optimizer, model, group=self._group)  # the thread sends beside the collectives of the run
        if self.background:
            on_all_ranks(state.hold, self._group)
        checkpoint = {**state.outline, **values} if state.outline is not None else None
        params = {f"model.{name}" for name, _ in model.named_parameters(remove_duplicate=False)}
        stream = partial(self._stream, checkpoint, state, params, time.perf_counter() - begin)
        # while rank 0 writes, the others wait in `on_all_ranks`, in a group with a long timeout, not in a collective of the run
        if self.background:
            self._pending = self._thread.submit(on_all_ranks, stream, self._group)
        else:
            on_all_ranks(stream, self._group)

    def wait(self) -> None:
        """Wait until no checkpoint is being written. Raise an error that is not an outcome. Needs to be called on all ranks."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def outcomes(self) -> list[SaveReport | OSError | DivergedError]:
        """Return the results of the saves that have ended since the last call. Rank 0 has the results of all saves."""
        return [self._outcomes.popleft() for _ in range(len(self._outcomes))]

    def _stream(self, checkpoint: dict[str, Any] | None, state: Snapshot, params: set[str], consolidate_s: float) -> None:
        """Let rank 0 commit the state as it arrives, unless a weight is not finite. Needs to be called on all ranks."""
        try:
            self._check_finite([part for part in state.own if part.name in params])
            with state.arriving() as pieces:
                if checkpoint is not None:
                    report = checkpoint_folder.commit(checkpoint, self.folder, self.keep, not self.newest_is_corrupt, pieces)
                    self.newest_is_corrupt = False
                    self._outcomes.append(report._replace(consolidate_s=consolidate_s))
        except (OSError, DivergedError) as error:
            self._outcomes.append(error)

    def _check_finite(self, weights: list[Part]) -> None:
        """Raise DivergedError on all ranks for the first weight with an inf or a nan on any of them."""
        named = ((part.name.removeprefix("model."), part) for part in weights)
        found = on_all_ranks(lambda: next((name for name, part in named if not _is_finite(part.read())), None), self._group)
        for name in filter(None, gather_objects(found, self._group)):
            raise DivergedError(f"{name} is not finite")


def _is_finite(value: torch.Tensor) -> bool:
    """Return whether a tensor has no inf and no nan. Needs almost no memory."""
    if not (value.is_floating_point() and value.numel()):
        return True
    least, most = value.detach().aminmax()  # both are nan if the tensor holds a nan
    return bool(least.isfinite() and most.isfinite())
