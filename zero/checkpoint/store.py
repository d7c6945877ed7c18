"""A folder of checkpoints: the newest, the previous one, those kept by iteration, and the shards that they refer to."""

import glob
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from zero.checkpoint import chunks, format
from zero.checkpoint.files import atomic_write, link_or_copy, sync_folder
from zero.checkpoint.format import NAME, shards_entry, shards_folder, verify
from zero.checkpoint.state import CheckpointError, TensorChunk

FORMATS = ("consolidated", "sharded")
PREVIOUS = "ckpt_prev.pt"
_BY_ITERATION = "ckpt_{:08d}.pt"
# apart from temporary files, only names that match these patterns are removed
_KEPT, _SHARDS = re.compile(r"ckpt_(\d{8,})\.pt"), re.compile(r"shards_\d{8,}_[0-9a-f]{8}")


def commit(checkpoint: dict[str, Any], folder: str, rotate: bool = True) -> set[str]:
    """Make a checkpoint the newest in a folder. Call it on one process only, and `clean_up` after it.

    At every moment, `ckpt.pt` is either the old file or the new file, complete and on the disk. The old file becomes
    `ckpt_prev.pt`.

    Args:
        checkpoint: nanoGPT's six keys, and any other keys with plain values and CPU tensors. With the entry "shards" (see
            `shards_entry`), the shards must already be in the folder of this entry + ".tmp".
        rotate: False if the old file is corrupt and must not replace `ckpt_prev.pt`.

    Returns:
        The names of the shards that the old files referred to.

    Raises:
        OSError: if the disk is full or cannot be written to. The old files are unchanged.
    """
    path, previous = os.path.join(folder, NAME), os.path.join(folder, PREVIOUS)
    replaced = _referenced_shards(path) | _referenced_shards(previous)
    _commit_file(checkpoint, path, previous if rotate else None)
    return replaced


def clean_up(folder: str, keep: int, iteration: int, replaced: set[str]) -> str | None:
    """Keep the newest checkpoint, of `iteration`, as one of the last `keep` by iteration. Remove what is no longer needed.

    `replaced` is what `commit` returned. Return a description of a problem, or None. Call it on one process only.
    """
    path = os.path.join(folder, NAME)
    try:
        if keep:
            kept = os.path.join(folder, _BY_ITERATION.format(iteration))
            replaced = replaced | _referenced_shards(kept)  # a run that was resumed from an earlier iteration overwrites it
            # a copy, not a hard link: a program that overwrites `path` in place does not change it
            link_or_copy(path, kept)
            replaced |= _prune(folder, keep, iteration)
        _remove_unreferenced(folder, replaced)
    except OSError as error:
        return f"{path} is written, but old files could not be copied or removed: {error}"
    return None


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

    Reads every byte. Call it on one process only.

    Raises:
        CheckpointError: if there is no checkpoint that is not corrupt.
    """
    warnings = []
    for name in (NAME, PREVIOUS):
        path = os.path.join(folder, name)
        if os.path.exists(path):
            try:
                verify(path)
            except CheckpointError as error:
                warnings.append(str(error))
            else:
                return path, "; ".join(warnings) or None
        elif name == NAME:
            warnings.append(f"there is no checkpoint {path}")
    raise CheckpointError("; ".join(warnings))


def names(folder: str) -> list[str]:
    """Return the names of all checkpoints of a folder and of their shards, `ckpt.pt` as the last one.

    A file of another name, such as a copy of `ckpt.pt`, is among them if it refers to shards, which it needs beside it.
    """
    found = {name for name in os.listdir(folder) if name in (NAME, PREVIOUS) or _KEPT.fullmatch(name)}
    if shards := {name for name in os.listdir(folder) if _SHARDS.fullmatch(name)}:
        found |= shards | {os.path.basename(path) for path in _glob(folder, "*.pt") if _referenced_shards(path) & shards}
    return sorted(found, key=lambda name: (name == NAME, name))


def convert(source: str, target: str, to: str | None = None) -> str:
    """Write a checkpoint to a new file, and return its format. Call it on one process only.

    Args:
        to: "consolidated" (assembled in memory) or "sharded". None: the format that the source does not have.

    Raises:
        CheckpointError: if the source cannot be read, or the target exists or does not end in .pt.
        OSError: if the target cannot be written.
    """
    if os.path.exists(target) or not target.endswith(".pt"):
        raise CheckpointError(f"{target} {'exists' if os.path.exists(target) else 'does not end in .pt'}; give another name")
    verify(source)
    checkpoint = format.read(source)
    tensors = {"model": checkpoint["model"], "optimizer.state": checkpoint["optimizer"]["state"]}
    to = to or FORMATS["shards" not in checkpoint]
    taken: list[TensorChunk] = []
    if "shards" in checkpoint:
        tensors = chunks.read_tensors(shards_folder(source, checkpoint), tensors)
        del checkpoint["shards"]
    if to == "sharded":
        tensors, taken = chunks.take_tensors(tensors)
    checkpoint["model"], checkpoint["optimizer"]["state"] = tensors.values()
    if to == "consolidated":
        _commit_file(checkpoint, target)
        return to
    name = new_shards_name(checkpoint)
    with remove_shards_on_error(target, name):
        sums = chunks.write(taken, os.path.join(os.path.dirname(target), name + ".tmp"), None)
        _commit_file({**checkpoint, "shards": shards_entry(name, sums)}, target)
    return to


def new_shards_name(checkpoint: dict[str, Any]) -> str:
    """Return a new name for a folder of shards. A folder that a checkpoint refers to is never written again."""
    return f"shards_{checkpoint['iter_num']:08d}_{uuid.uuid4().hex[:8]}"


@contextmanager
def remove_shards_on_error(path: str, name: str) -> Iterator[None]:
    """Remove the shards `name` if the block fails before the file at `path` refers to them."""
    try:
        yield
    except BaseException:
        if name not in _referenced_shards(path):
            for left in (name, name + ".tmp"):
                shutil.rmtree(os.path.join(os.path.dirname(path), left), ignore_errors=True)
        raise


def _commit_file(checkpoint: dict[str, Any], path: str, previous: str | None = None) -> None:
    """Write a checkpoint file and atomically replace the file at `path` with it. The old file becomes `previous`."""
    with atomic_write(path) as temporary:
        format.write(checkpoint, temporary)
        if "shards" in checkpoint:
            shards = shards_folder(path, checkpoint)
            os.rename(shards + ".tmp", shards)
            sync_folder(os.path.dirname(path) or ".")
        if previous is not None and os.path.exists(path):
            link_or_copy(path, previous, link=True)  # `path` will be replaced by a new file, so a link is enough


def _prune(folder: str, keep: int, iteration: int) -> set[str]:
    """Remove all checkpoints by iteration except the last `keep`. Return the shards that the removed files referred to."""
    names = [match for file in _glob(folder, "ckpt_*.pt") if (match := _KEPT.fullmatch(os.path.basename(file)))]
    # ignore later iterations: a run that was resumed from an earlier iteration has not reached them yet
    so_far = sorted((int(name[1]), name[0]) for name in names if int(name[1]) <= iteration)
    shards: set[str] = set()
    for _, name in so_far[:-keep]:
        old = os.path.join(folder, name)
        shards |= _referenced_shards(old)
        os.remove(old)
    return shards


def _referenced_shards(path: str) -> set[str]:
    """Return the name of the shards folder that a file refers to; an empty set if it is not readable or has no shards."""
    try:
        name = format.read(path).get("shards", {}).get("folder", "")
    except CheckpointError:
        return set()
    return {name} if _SHARDS.fullmatch(name) else set()


def _remove_unreferenced(folder: str, names: set[str]) -> None:
    """Remove the shards in `names` that no file refers to any more."""
    in_use = set().union(*map(_referenced_shards, _glob(folder, "*.pt"))) if names else set()
    for unused in filter(os.path.isdir, (os.path.join(folder, name) for name in names - in_use)):
        os.rename(unused, unused + ".tmp")  # if a kill interrupts the removal, the next start sweeps the rest
        shutil.rmtree(unused + ".tmp")


def _glob(folder: str, pattern: str) -> list[str]:
    return glob.glob(os.path.join(glob.escape(folder), pattern))
