"""The checkpoints of a run in its output folder: found and loaded, saved, reported."""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from distributed import on_rank_0
from lock import Lock
from logger import Logger
from zero import checkpoint as ckpt
from zero.checkpoint import CheckpointError, CheckpointWriter, DivergedError, SaveReport


class Checkpoints:
    """What a run does with its checkpoints. Every method needs to be called on all ranks, construction included.

    Args:
        folder: the run's output folder, which all ranks share.
        read_only: a run that saves nothing and changes nothing in the folder.
        stop_on_error: a checkpoint that cannot be written ends the run.
        keep, background, format: see `zero.checkpoint.CheckpointWriter`.
    """

    def __init__(self, folder: str, *, read_only: bool, stop_on_error: bool, keep: int, background: bool, format: str) -> None:
        self.folder, self.read_only, self.stop_on_error = folder, read_only, stop_on_error
        self.keep, self.background, self.format = keep, background, format
        self.is_rank_0 = not dist.is_initialized() or dist.get_rank() == 0
        self.error: OSError | DivergedError | None = None  # why the last save failed; on rank 0, which knows of all
        self._lock: Lock | None = None  # on rank 0
        self._path = ""  # of the checkpoint that was loaded
        self._newest_is_corrupt = False  # then another one was loaded; on rank 0
        self._writer: CheckpointWriter  # from `claim` on

    def load(self) -> dict[str, Any]:
        """Read the newest checkpoint that is not corrupt. Locks the folder first, unless the run is read-only.

        Returns:
            See `zero.checkpoint.load`.

        Raises:
            ValueError: if there is none, it cannot be read, or another run writes to the folder.
        """
        self._path = on_rank_0(self._find)
        return ckpt.load(self._path)

    def restore(self, optimizer: torch.optim.Optimizer, checkpoint: dict[str, Any]) -> None:
        """Load the optimizer's state from what `load` returned. See `zero.checkpoint.restore`."""
        ckpt.restore(optimizer, checkpoint["optimizer"], ckpt.chunk_reader(self._path, checkpoint))

    def claim(self) -> None:
        """Lock the folder for this run, unless it is read-only, and remove what killed runs have left in it.

        Raises:
            ValueError: if another run writes to the folder, or it cannot be written to.
        """
        if not self.read_only:
            on_rank_0(self._claim)
        self._writer = CheckpointWriter(
            self.folder, self.keep, self.background, self.format, self._newest_is_corrupt, sweep=not self.read_only
        )

    def save(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, values: dict[str, Any]) -> None:
        """Write a checkpoint; `report` will say what became of it. See `CheckpointWriter.save`."""
        if self.is_rank_0:
            print(f"saving checkpoint to {self.folder}", flush=True)
        self._writer.save(model, optimizer, values)

    def report(self, log: Logger, required: bool = False) -> bool:
        """Print and log what became of the saves since the last call.

        Args:
            required: the last one must have succeeded.

        Returns:
            On rank 0, which knows of every save, whether the run must end for it; elsewhere False.
        """
        for outcome in self._writer.outcomes() if self.is_rank_0 else ():
            self.error = None if isinstance(outcome, SaveReport) else outcome
            if not isinstance(outcome, SaveReport):
                print(f"WARNING: the checkpoint was not written: {outcome}; files from before are unchanged", flush=True)
                continue
            if outcome.warning:
                print(f"WARNING: {outcome.warning}", flush=True)
            log.log(
                {
                    "iter": outcome.iter_num,
                    "checkpoint/consolidate_s": outcome.consolidate_s,
                    "checkpoint/write_s": outcome.write_s,
                    "checkpoint/bytes": outcome.nbytes,
                }
            )
        return isinstance(self.error, DivergedError) or (self.error is not None and (required or self.stop_on_error))

    def wait(self) -> None:
        """Wait until nothing is being written."""
        self._writer.wait()

    def explain_failure(self, diverged: bool) -> None:
        """Print on stderr what a run that failed leaves behind, on rank 0."""
        if not self.is_rank_0:
            return
        if diverged and self.exist():
            print("its checkpoint is as it was; --init_from=resume goes on from there", flush=True, file=sys.stderr)
        if self.error is not None:
            print(f"the run ends without its last checkpoint, which was not written: {self.error}", flush=True, file=sys.stderr)

    def exist(self) -> bool:
        """Whether there is a checkpoint to resume from."""
        return os.path.exists(os.path.join(self.folder, "ckpt.pt"))

    def _find(self) -> str:
        if not self.read_only and os.path.isdir(self.folder):
            self._lock = Lock(self.folder)  # before reading what another run may be about to replace
        try:
            path, warning = ckpt.find(self.folder)
        except CheckpointError as error:
            remedy = "to resume, check --out_dir; to begin anew, use --init_from=scratch"
            raise CheckpointError(f"{error}; {remedy}") from error
        if warning:
            print(f"WARNING: {warning}; resuming from {path}, the checkpoint before")
            self._newest_is_corrupt = True
        return path

    def _claim(self) -> None:
        self._lock = self._lock or Lock(self.folder)
        if not self._path and self.exist():
            print(
                f"WARNING: out_dir={self.folder} holds another run, which this one replaces; --init_from=resume goes on with it"
            )
