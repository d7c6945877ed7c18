"""A folder of checkpoints. At every moment, the newest file is complete, either the new checkpoint or the previous one.

ckpt.pt             the newest checkpoint
ckpt_prev.pt        the previous checkpoint, which is used if the newest is damaged
ckpt_best.pt        the best checkpoint of a run that keeps it, if the newest is another one
ckpt_<iter>.pt      the last checkpoints by iteration, if requested
ckpt*.pt.tmp        a file that is being written. The next start removes what a killed process has left.
"""

import glob
import os
import re
import shutil
import time
from contextlib import suppress
from typing import Any, NamedTuple

from run.checkpoint_keys import load
from zero.checkpoint.archive import Pieces
from zero.checkpoint.files import atomic_write
from zero.checkpoint.format import NAME, verify, write
from zero.checkpoint.state import CheckpointError

PREVIOUS, BEST = "ckpt_prev.pt", "ckpt_best.pt"
NEWEST = NAME, PREVIOUS  # from which a run can resume
_BY_ITERATION = "ckpt_{:08d}.pt"
_KEPT = re.compile(r"ckpt_(\d{8,})\.pt")  # apart from temporary files, only names that match this are removed


class SaveReport(NamedTuple):
    """The report of one written checkpoint."""

    iter_num: int
    nbytes: int
    write_s: float  # time until the checkpoint was on the disk, with the wait for the parts of other ranks
    consolidate_s: float = 0.0  # time before that: the list of parts, and their copies for a background save
    warning: str | None = None  # a problem that occurred after the checkpoint was on the disk


def commit(checkpoint: dict[str, Any], folder: str, keep: int = 0, rotate: bool = True, pieces: Pieces = ()) -> SaveReport:
    """Make a checkpoint the newest in a folder, and remove what is no longer needed. Call it on rank 0 only.

    At every moment, `ckpt.pt` is the old file or the new one, complete and on the disk. The old one becomes `ckpt_prev.pt`.

    Args:
        checkpoint: nanoGPT's six keys, and any other keys with plain values and tensors, on the CPU or the meta device. With
            "is_best", the last one for which this is true is kept.
        keep: number of checkpoints that are kept by iteration.
        rotate: False if the old file is corrupt and must not replace `ckpt_prev.pt`.
        pieces: of the tensors of `checkpoint` that are on the meta device.

    Raises OSError if the disk is full or cannot be written to; ValueError as `zero.checkpoint.format.write` does. The old files
    are unchanged then.
    """
    begin = time.perf_counter()
    path, best = (os.path.join(folder, name) for name in (NAME, BEST))
    os.makedirs(folder, exist_ok=True)  # somebody may have removed it
    with atomic_write(path) as temporary:
        write(checkpoint, temporary, pieces)
        if rotate and os.path.exists(path):
            _link_or_copy(path, os.path.join(folder, PREVIOUS), link=True)  # `path` becomes a new file, so a link is enough
            if checkpoint.get("is_best") is False and _is_best(path):
                _link_or_copy(path, best, link=True)
    if checkpoint.get("is_best") is not False and os.path.exists(best):
        os.remove(best)
    iteration, write_s = checkpoint["iter_num"], time.perf_counter() - begin
    return SaveReport(iteration, os.path.getsize(path), write_s, warning=_keep(path, keep, iteration) if keep else None)


def sweep(folder: str) -> None:
    """Remove files that killed runs have left. Call it on one process only."""
    for leftover in _glob(folder, "ckpt*.pt.tmp"):
        os.remove(leftover)


def find(folder: str, best: bool = False) -> tuple[str, str | None]:
    """Return the newest checkpoint of a folder that `checkpoint_keys.load` reads, and what is wrong with a newer one.

    `best`: return the best one, if it is kept. Reads every byte. Call it on one process only.

    Raises CheckpointError if there is none.
    """
    warnings: list[str] = []
    for name in (BEST, *NEWEST) if best and _is_kept(folder) else NEWEST:
        path = os.path.join(folder, name)
        try:
            verify(path)
            load(path)
            return path, "; ".join(warnings) or None
        except CheckpointError as error:
            if name == NAME or os.path.exists(path):
                warnings.append(str(error))
    raise CheckpointError("; ".join(warnings))


def exists(folder: str) -> bool:
    """Return whether a folder has a checkpoint to resume from."""
    return any(os.path.exists(os.path.join(folder, name)) for name in NEWEST)


def _is_best(path: str) -> bool:
    with suppress(CheckpointError):
        return load(path).get("is_best", False)
    return False


def _is_kept(folder: str) -> bool:
    """Return whether the best checkpoint is an earlier one of the run that has the newest, as it was trained last."""
    with suppress(CheckpointError):
        newest, best = (load(os.path.join(folder, name)) for name in (NAME, BEST))
        is_earlier = best.get("iter_num", 0) < newest.get("iter_num", 0) and best.get("dataset") == newest.get("dataset")
        return is_earlier and newest.get("is_best") is False
    return False


def names(folder: str) -> list[str]:
    """Return the names of all checkpoints of a folder, `ckpt.pt` as the last one."""
    found = [name for name in os.listdir(folder) if name in (BEST, *NEWEST) or _KEPT.fullmatch(name)]
    return sorted(found, key=lambda name: (name == NAME, name))


def _keep(path: str, count: int, iteration: int) -> str | None:
    """Copy the newest checkpoint to the name of its `iteration`, and of such copies keep the last `count` only.

    Return a description of a problem, or None.
    """
    folder = os.path.dirname(path)
    try:
        # a copy, not a hard link: a program that overwrites `path` in place does not change it
        _link_or_copy(path, os.path.join(folder, _BY_ITERATION.format(iteration)))
        names = [match for file in _glob(folder, "ckpt_*.pt") if (match := _KEPT.fullmatch(os.path.basename(file)))]
        # ignore later iterations: a run that was resumed from an earlier iteration has not reached them yet
        so_far = sorted((int(name[1]), name[0]) for name in names if int(name[1]) <= iteration)
        for _, name in so_far[:-count]:
            os.remove(os.path.join(folder, name))
    except OSError as error:
        return f"{path} is written, but old files could not be copied or removed: {error}"
    return None


def _link_or_copy(path: str, other: str, link: bool = False) -> None:
    """Copy a file to another name and replace any file there. With `link`, make a hard link instead, if possible."""
    with atomic_write(other) as temporary:
        if os.path.lexists(temporary):
            os.remove(temporary)  # it may be a hard link to a checkpoint
        if link:
            with suppress(OSError):
                os.link(path, temporary)
        if not os.path.lexists(temporary):
            shutil.copyfile(path, temporary)
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())


def _glob(folder: str, pattern: str) -> list[str]:
    return glob.glob(os.path.join(glob.escape(folder), pattern))
