"""The checkpoints of a run in its output folder: find, load, save and report them."""

import math
import os
import sys
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO

import torch

from data.dataset import Dataset
from distributed.ranks import on_rank_0, print0
from distributed.signals import Action
from distributed.watchdog import position
from run import checkpoint_folder, out_folder
from run.checkpoint_folder import SaveReport
from run.checkpoint_keys import load, load_to_train
from run.checkpoint_writer import CheckpointWriter, DivergedError
from run.logger import Logger
from run.rank_checks import check_vocabulary
from zero import checkpoint as ckpt
from zero.checkpoint import CheckpointError
from zero.host_comm import gather_objects, is_rank_0


@dataclass
class State:
    """The progress of a run. A checkpoint holds it in addition to the weights and the optimizer state."""

    iter_num: int = 0  # the next iteration
    data_position: int = 0  # number of sequences that all ranks together have seen
    best_val_loss: float = math.inf
    wandb_run_id: str | None = None
    elapsed_s: float = 0.0  # wall time until the end of the last iteration, with evaluations and checkpoints; nan: unknown

    def resume(self, checkpoint: dict[str, Any], sequences_per_iter: int, dataset: dict[str, str]) -> None:
        """Continue from a checkpoint, which may be nanoGPT's. With another dataset, the best loss starts anew."""
        self.iter_num, self.wandb_run_id = checkpoint["iter_num"], checkpoint.get("wandb_run_id")
        self.data_position = checkpoint.get("data_position", self.iter_num * sequences_per_iter)
        self.elapsed_s = checkpoint.get("elapsed_s", math.nan)
        is_same = checkpoint.get("dataset", dataset) == dataset
        if is_same and not math.isnan(checkpoint["best_val_loss"]):  # with nan, no later loss would be an improvement
            self.best_val_loss = float(checkpoint["best_val_loss"])


def find_newest(folder: str) -> str:
    """Return the path of the checkpoint of a run, the best one if it is kept, for scripts that do not train.

    Needs to be called on all ranks. Raises ValueError on all ranks if there is none.
    """

    def find() -> str:
        path, warning = checkpoint_folder.find(folder, best=True)
        if warning:
            sys.stderr.write(f"WARNING: {warning}; using {path}, the previous checkpoint\n")
        return path

    try:
        return on_rank_0(find)
    except CheckpointError as error:
        raise ValueError(f"{error}; give the --out_dir of a run") from error


def load_newest(folder: str) -> dict[str, Any]:
    """Return the checkpoint that `find_newest` finds. Needs to be called on all ranks.

    Raises ValueError on all ranks, if there is none, or a rank cannot read it.
    """
    return ckpt.load_on_all_ranks(find_newest(folder), load)


def load_weights(folder: str, data: Dataset) -> dict[str, Any] | None:
    """Return the checkpoint of another run, to begin with its weights; None if rank 0 sees none. Call it on all ranks.

    Raises ValueError as `load_newest`, or if the dataset has another vocabulary.
    """
    if not on_rank_0(partial(checkpoint_folder.exists, folder)):
        return None
    checkpoint = load_newest(folder)
    check_vocabulary(checkpoint, data.name, data.meta)
    return checkpoint


class Checkpoints:
    """Loads and saves the checkpoints of a run. The constructor and every method need to be called on all ranks.

    Args:
        settings: of train.py. If the hosts do not share `out_dir`, that of rank 0 has the checkpoints, and to resume, every
            host needs a copy. With `eval_only`, the run saves no checkpoint and changes nothing in the folder.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.folder, self.always, self.read_only = (settings[key] for key in ("out_dir", "always_save_checkpoint", "eval_only"))
        self._keep, self._in_background, self._interval = (
            settings[key] for key in ("keep_checkpoints", "async_save", "save_interval")
        )
        self.error: OSError | DivergedError | None = None  # on rank 0: why the last save failed on any rank
        self.newest: int | None = None  # iteration of the checkpoint that was loaded, or whose save began last
        self._lock: TextIO | None = None  # on rank 0
        self.loaded_from = ""  # path of the checkpoint from which the run resumes
        self._newest_is_corrupt = False  # on rank 0: True if an older checkpoint was loaded instead
        self._writer: CheckpointWriter  # set by `claim`
        self._blocked_s: deque[float] = deque()  # on rank 0: how long `save` took, for each save without a report so far

    def load(self, init_from: str) -> dict[str, Any] | None:
        """Lock the folder, unless the run is read-only, and return the newest checkpoint in it that is not corrupt.

        See `zero.checkpoint.load_on_all_ranks`. This is for 'resume', and for 'auto' if rank 0 sees a checkpoint. Anything else
        begins a new run, and returns None.

        Raises ValueError if there is no checkpoint, a rank cannot read it, or the folder is in use or not writable. For
        'auto', also if only another rank sees a checkpoint, in a folder of its own: a restart may put rank 0 on another host.
        """
        if init_from == "auto":
            seen = gather_objects(checkpoint_folder.exists(self.folder))  # by rank
            if any(seen) and not seen[0]:
                raise ValueError(
                    f"init_from=auto: rank {seen.index(True)} has a checkpoint in out_dir, but rank 0 has none; use an out_dir "
                    "that all hosts share, or copy the checkpoint to all of them"
                )
            init_from = "resume" if seen[0] else "scratch"
        if init_from != "resume":
            on_rank_0(self._check_writable)
            return None
        found = on_rank_0(self._find)
        print0(f"Resuming training from {self.folder}")
        self.loaded_from = os.path.join(self.folder, os.path.basename(found))  # each host may have another folder
        checkpoint = ckpt.load_on_all_ranks(self.loaded_from, load_to_train)
        self.newest = checkpoint["iter_num"]
        return checkpoint

    def claim(self) -> None:
        """Lock the folder for this run. A new run first renames the folder of an earlier run.

        A read-only run changes nothing. Raises ValueError as `out_folder.take` and `out_folder.set_aside`.
        """
        if not self.read_only:
            on_rank_0(self._claim)
        how = self._keep, self._in_background, self._newest_is_corrupt, not self.read_only
        self._writer = CheckpointWriter(self.folder, *how)

    def save(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, values: dict[str, Any], is_best: bool) -> None:
        """Write a checkpoint, see `CheckpointWriter.write`; `report` says whether this succeeded.

        Without `always`, samples are drawn from the best one, which stays beside this one.
        """
        print0(f"saving checkpoint to {self.folder}")
        self.newest = values["iter_num"]
        begin = time.perf_counter()
        self._writer.write(model, optimizer, values if self.always else {**values, "is_best": is_best})
        if is_rank_0():
            self._blocked_s.append(time.perf_counter() - begin)

    def action_due(self, iteration: int, is_end: bool) -> Action:
        """Return Action.SAVE if a checkpoint is due before `iteration` and not written, otherwise Action.CONTINUE."""
        is_due = is_end or (self._interval > 0 < iteration and iteration % self._interval == 0)
        return Action.SAVE if is_due and self.newest != iteration else Action.CONTINUE

    def report(self, log: Logger, at_end: bool = False) -> bool:
        """Print and log the results of the saves that have ended since the last call. `at_end`: first wait for all saves.

        Return whether the run has failed: a weight is not finite or, `at_end`, the last save failed. Other ranks than 0 return
        False.
        """
        if at_end:
            with position.at("saving the checkpoint", patient=True):
                self._writer.wait()
        for outcome in self._writer.outcomes() if is_rank_0() else ():
            blocked_s, self.error = self._blocked_s.popleft(), None
            if not isinstance(outcome, SaveReport):
                self.error = outcome
                reason = {"checkpoint/error": str(outcome)} if isinstance(outcome, OSError) else {}  # else the guard's
                log.warn(f"the checkpoint was not written: {outcome}; files from before are unchanged", reason)
                continue
            if outcome.warning:
                log.warn(outcome.warning)
            log.log(
                {
                    "iter": outcome.iter_num,
                    "checkpoint/consolidate_s": outcome.consolidate_s,
                    "checkpoint/write_s": outcome.write_s,
                    "checkpoint/blocked_s": blocked_s,
                    "checkpoint/bytes": outcome.nbytes,
                }
            )
        return isinstance(self.error, DivergedError) or (at_end and self.error is not None)

    def explain_failure(self, diverged: bool) -> None:
        """Print on stderr which checkpoint a failed run leaves in the folder. Only rank 0 prints."""
        if not is_rank_0():
            return
        if diverged and checkpoint_folder.exists(self.folder):
            print("the checkpoint is unchanged; --init_from=resume goes on from there", flush=True, file=sys.stderr)
        if self.error is not None:
            print(f"the run ends without its last checkpoint, which was not written: {self.error}", flush=True, file=sys.stderr)

    def _check_writable(self) -> None:
        """Check, before the model is made, that files may be written where `claim` will make the folder."""
        above = os.path.abspath(self.folder)
        while not os.path.exists(above):
            above = os.path.dirname(above)
        if not (self.read_only or os.access(os.path.join(above, ""), os.W_OK)):
            why = "is not writable" if os.path.isdir(above) else "is no folder"
            raise ValueError(f"cannot write to out_dir={self.folder}: {above} {why}; use another --out_dir")

    def _find(self) -> str:
        if not self.read_only and os.path.isdir(self.folder):
            self._take_lock()  # before reading: another run could replace the file
        try:
            path, warning = checkpoint_folder.find(self.folder, best=self.read_only)
        except CheckpointError as error:
            runs = out_folder.earlier(self.folder)
            remedy = f"use --out_dir={runs[max(runs)]}" if runs else "check --out_dir"
            raise CheckpointError(f"{error}; to resume, {remedy}; to start a new run, use --init_from=scratch") from error
        if warning:
            print(f"WARNING: {warning}; resuming from {path}, the previous checkpoint")
            self._newest_is_corrupt = True
        return path

    def _take_lock(self) -> TextIO:
        if self._lock is None:
            self._lock = out_folder.take(self.folder)
        return self._lock

    def _claim(self) -> None:
        lock = self._take_lock()
        if not self.loaded_from:
            self._lock = out_folder.set_aside(self.folder, lock)
