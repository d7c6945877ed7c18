"""A folder of checkpoints: the newest, the previous one, those kept by iteration, and the shards that they refer to."""

import glob
import os
import re
import shutil
import time
import uuid
from contextlib import suppress
from typing import Any, NamedTuple

import torch.distributed as dist

from zero.checkpoint import chunks
from zero.checkpoint.files import atomic_write, link_or_copy, sync_folder
from zero.checkpoint.format import NAME, check_trainable, read_file, shards_folder, verify, write_file
from zero.checkpoint.state import CheckpointError, TensorChunk
from zero.host_comm import broadcast_object

FORMATS = ("consolidated", "sharded")
PREVIOUS = "ckpt_prev.pt"
_BY_ITERATION = "ckpt_{:08d}.pt"
# apart from temporary files, only names that match these patterns are removed
_KEPT, _SHARDS = re.compile(r"ckpt_(\d{8,})\.pt"), re.compile(r"shards_\d{8,}_[0-9a-f]{8}")


class SaveReport(NamedTuple):
    """The report of one written checkpoint."""

    iter_num: int
    nbytes: int
    write_s: float  # time until the checkpoint was on the disk
    consolidate_s: float = 0.0  # time before that; a background save lets training continue afterwards
    warning: str | None = None  # a problem that occurred after the checkpoint was on the disk


def commit(
    checkpoint: dict[str, Any] | None,
    own: list[TensorChunk] | None,
    folder: str,
    keep: int = 0,
    rotate: bool = True,
    group: dist.ProcessGroup | None = None,
) -> SaveReport | None:
    """Make a checkpoint the newest in a folder, which must exist, and remove what is no longer needed. Report it on rank 0.

    At every moment, `ckpt.pt` is the old file or the new one, complete and on the disk. The old one becomes `ckpt_prev.pt`.

    Args:
        checkpoint: on rank 0: nanoGPT's six keys, and any other keys with plain values and CPU tensors. On other ranks: None.
        own: for a sharded checkpoint, this rank's chunks; `checkpoint` has tensors on the meta device in their place. Call it
            on all ranks of `group`, which share the folder. None: one file; call it on rank 0 only.
        keep: number of checkpoints that are kept by iteration.
        rotate: False if the old file is corrupt and must not replace `ckpt_prev.pt`.
        group: process group for CPU tensors; None if there is one process.

    Raises OSError if the disk is full or cannot be written to, of chunks on all ranks. The old files are unchanged.
    """
    begin = time.perf_counter()
    path, previous = os.path.join(folder, NAME), os.path.join(folder, PREVIOUS)
    before = _references(folder) if checkpoint is not None else set()
    nbytes = _write(checkpoint, own, path, previous if rotate else None, group)
    if checkpoint is None:
        return None
    iteration, write_s = checkpoint["iter_num"], time.perf_counter() - begin
    return SaveReport(iteration, nbytes, write_s, warning=_clean_up(folder, keep, iteration, before))


def sweep(folder: str) -> None:
    """Remove files that killed runs have left. Call it on one process only."""
    for leftover in _glob(folder, "ckpt*.pt.tmp"):
        _remove_unreferenced(folder, _referenced_shards(leftover))  # complete, but never committed
        os.remove(leftover)
    for leftover in _glob(folder, "shards_*.tmp"):
        if _SHARDS.fullmatch(os.path.basename(leftover).removesuffix(".tmp")):
            shutil.rmtree(leftover)


def find(folder: str) -> tuple[str, str | None]:
    """Return the newest checkpoint of a folder that is not corrupt, and what is wrong with a newer one, or None.

    Reads every byte. Call it on one process only. Raises CheckpointError if all are corrupt, or there is none.
    """
    warnings: list[str] = []
    for name in (NAME, PREVIOUS):
        path = os.path.join(folder, name)
        try:
            verify(path)
            return path, "; ".join(warnings) or None
        except CheckpointError as error:
            if name == NAME or os.path.exists(path):
                warnings.append(str(error))
    raise CheckpointError("; ".join(warnings))


def names(folder: str) -> list[str]:
    """Return the names of all checkpoints of a folder and of their shards, `ckpt.pt` as the last one.

    Files of other names, such as copies of `ckpt.pt`, are among them if they refer to shards, which they need beside them.
    """
    found = {name for name in os.listdir(folder) if name in (NAME, PREVIOUS) or _KEPT.fullmatch(name)}
    if shards := {name for name in os.listdir(folder) if _SHARDS.fullmatch(name)}:
        found |= shards | {os.path.basename(path) for path in _glob(folder, "*.pt") if _referenced_shards(path) & shards}
    return sorted(found, key=lambda name: (name == NAME, name))


def convert(source: str, target: str, to: str | None = None) -> str:
    """Write a checkpoint to a new file, and return its format. Call it on one process only.

    `to`: "consolidated" (assembled in memory) or "sharded". None: the format that the source does not have.

    Raises CheckpointError if the source cannot be read, or the target exists or does not end in .pt; OSError if the target
    cannot be written.
    """
    if os.path.exists(target) or not target.endswith(".pt"):
        raise CheckpointError(f"{target} {'exists' if os.path.exists(target) else 'does not end in .pt'}; give another name")
    verify(source)
    checkpoint = read_file(source)
    check_trainable(checkpoint, source)
    tensors = {"model": checkpoint["model"], "optimizer.state": checkpoint["optimizer"]["state"]}
    to = to or FORMATS["shards" not in checkpoint]
    own: list[TensorChunk] | None = None
    if "shards" in checkpoint:
        tensors = chunks.read_tensors(shards_folder(source, checkpoint), tensors)
        del checkpoint["shards"]
    if to == "sharded":
        tensors, own = chunks.take_tensors(tensors)
    checkpoint["model"], checkpoint["optimizer"]["state"] = tensors.values()
    _write(checkpoint, own, target)
    return to


def _write(
    checkpoint: dict[str, Any] | None,
    own: list[TensorChunk] | None,
    path: str,
    previous: str | None = None,
    group: dist.ProcessGroup | None = None,
) -> int:
    """Write a checkpoint in place of the file at `path`, which becomes `previous`, see `commit`. Return its bytes on rank 0."""
    if own is None:
        assert checkpoint is not None
        _replace_file(checkpoint, path, previous)
        return os.path.getsize(path)
    # a folder that a checkpoint refers to is never written again, so each one has a new name
    name = f"shards_{checkpoint['iter_num']:08d}_{uuid.uuid4().hex[:8]}" if checkpoint is not None else ""
    name = broadcast_object(name, group) if group is not None else name
    folder = os.path.dirname(path)
    shards = os.path.join(folder, name)
    try:
        sums = chunks.write_chunks(own, shards + ".tmp", group)
        if checkpoint is None:
            return 0
        if missing := [file for file in sums if not os.path.exists(os.path.join(shards + ".tmp", file))]:
            raise OSError(f"rank 0 does not see what other ranks wrote to {folder} ({missing[0]}); use a folder that all share")
        files = {file: list(entry) for file, entry in sums.items()}
        _replace_file({**checkpoint, "shards": {"folder": name, "files": files}}, path, previous)
    except BaseException:
        if checkpoint is not None and name not in _referenced_shards(path):
            for left in (shards, shards + ".tmp"):
                shutil.rmtree(left, ignore_errors=True)
        raise
    return os.path.getsize(path) + sum(entry.nbytes for entry in sums.values())


def _replace_file(checkpoint: dict[str, Any], path: str, previous: str | None) -> None:
    """Write the file of a checkpoint and give its shards their name. Either all of this counts or nothing."""
    with atomic_write(path) as temporary:
        write_file(checkpoint, temporary)
        if "shards" in checkpoint:
            shards = shards_folder(path, checkpoint)
            os.rename(shards + ".tmp", shards)
            sync_folder(os.path.dirname(path) or ".")
        if previous is not None and os.path.exists(path):
            link_or_copy(path, previous, link=True)  # `path` will be replaced by a new file, so a link is enough


def _clean_up(folder: str, keep: int, iteration: int, shards: set[str]) -> str | None:
    """Copy the newest checkpoint to the name of its `iteration`, and of such copies keep the last `keep` only.

    Then remove those of `shards` that no file refers to any more. Return a description of a problem, or None.
    """
    path = os.path.join(folder, NAME)
    try:
        if keep:
            # a copy, not a hard link: a program that overwrites `path` in place does not change it
            link_or_copy(path, os.path.join(folder, _BY_ITERATION.format(iteration)))
            names = [match for file in _glob(folder, "ckpt_*.pt") if (match := _KEPT.fullmatch(os.path.basename(file)))]
            # ignore later iterations: a run that was resumed from an earlier iteration has not reached them yet
            so_far = sorted((int(name[1]), name[0]) for name in names if int(name[1]) <= iteration)
            for _, name in so_far[:-keep]:
                os.remove(os.path.join(folder, name))
        _remove_unreferenced(folder, shards)
    except OSError as error:
        return f"{path} is written, but old files could not be copied or removed: {error}"
    return None


def _references(folder: str) -> set[str]:
    """Return the names of the shards that the files of a folder refer to."""
    return set().union(*map(_referenced_shards, _glob(folder, "*.pt"))) if _glob(folder, "shards_*") else set()


def _referenced_shards(path: str) -> set[str]:
    """Return the name of the shards folder that a file refers to; an empty set if it is not readable or has no shards."""
    with suppress(CheckpointError):
        if _SHARDS.fullmatch(name := read_file(path).get("shards", {}).get("folder", "")):
            return {name}
    return set()


def _remove_unreferenced(folder: str, names: set[str]) -> None:
    """Remove the shards in `names` that no file refers to any more."""
    for unused in filter(os.path.isdir, (os.path.join(folder, name) for name in names - _references(folder))):
        os.rename(unused, unused + ".tmp")  # if a kill interrupts the removal, the next start sweeps the rest
        shutil.rmtree(unused + ".tmp")


def _glob(folder: str, pattern: str) -> list[str]:
    return glob.glob(os.path.join(glob.escape(folder), pattern))
