"""A folder of checkpoints: the newest, the one before it, those kept by iteration, and the shards that they refer to."""

import glob
import os
import re
import shutil
import uuid
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from zero.checkpoint import chunks, format
from zero.checkpoint.files import (
    FileSum,
    atomic_write,
    corruption_message,
    find_corruption,
    link_or_copy,
    sync_folder,
)
from zero.state import CheckpointError, TensorChunk

FORMATS = ("consolidated", "sharded")
NAME, PREVIOUS = "ckpt.pt", "ckpt_prev.pt"
_BY_ITERATION = "ckpt_{:08d}.pt"
# nothing else is ever removed
_KEPT, _SHARDS = re.compile(r"ckpt_(\d{8,})\.pt"), re.compile(r"shards_\d{8,}_[0-9a-f]{8}")


def commit(checkpoint: dict[str, Any], folder: str, keep: int = 0, rotate: bool = True) -> str | None:
    """Make a checkpoint the newest of a folder. One process only.

    At every moment `ckpt.pt` is either the old file or the new one. The new one is complete and on the disk before it
    takes the name; the old one becomes `ckpt_prev.pt`.

    Args:
        checkpoint: nanoGPT's six keys and any others of plain values and CPU tensors; with `shards_entry` the shards that
            have been written to its folder + ".tmp".
        keep: how many of the last checkpoints to keep by iteration as well.
        rotate: False if the old one is corrupt, so that it must not take the place of `ckpt_prev.pt`.

    Returns:
        What went wrong once the checkpoint was on the disk, if anything.

    Raises:
        OSError: if the disk is full or cannot be written to; the old files are unchanged.
    """
    path, previous = os.path.join(folder, NAME), os.path.join(folder, PREVIOUS)
    replaced = _referenced_shards(path) | _referenced_shards(previous)
    _commit_file(checkpoint, path, previous if rotate else None)
    try:
        if keep:
            # a copy, so that no program that overwrites `path` in place changes it
            link_or_copy(path, os.path.join(folder, _BY_ITERATION.format(checkpoint["iter_num"])))
            replaced |= _prune(folder, keep, checkpoint["iter_num"])
        _remove_unreferenced(folder, replaced)
    except OSError as error:
        return f"{path} is written, but old files could not be copied or removed: {error}"
    return None


def sweep(folder: str) -> None:
    """Remove what killed runs have left. One process only."""
    for leftover in _glob(folder, "ckpt*.pt.tmp"):
        _remove_unreferenced(folder, _referenced_shards(leftover))  # complete, but never committed
        os.remove(leftover)
    for leftover in _glob(folder, "shards_*.tmp"):
        if _SHARDS.fullmatch(os.path.basename(leftover).removesuffix(".tmp")):
            shutil.rmtree(leftover)


def find(folder: str) -> tuple[str, str | None]:
    """The newest checkpoint of a folder that is not corrupt, and what is wrong with a newer one, if there is such.

    Reads every byte of the file. One process only; the others are told.

    Raises:
        CheckpointError: if there is none.
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


def verify(path: str) -> None:
    """Read every byte of a checkpoint and compare checksums.

    They are those that a file's container, a zip archive, keeps of each entry, and those that it keeps of its shards.

    Raises:
        CheckpointError: if the file is missing, corrupt, or not a checkpoint.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint {path}") from error
    except IsADirectoryError as error:
        raise CheckpointError(f"{path} is a folder; name a file, such as {os.path.join(path, NAME)}") from error
    except Exception as error:  # see `format.read`
        raise CheckpointError(corruption_message(path, error)) from error
    if bad is not None:
        raise CheckpointError(corruption_message(path, f"the checksum of its entry {bad} does not hold"))
    checkpoint = format.read(path)
    if "shards" in checkpoint:
        sums = {name: FileSum(*entry) for name, entry in checkpoint["shards"]["files"].items()}
        if reason := find_corruption(shards_folder(path, checkpoint), sums):
            raise CheckpointError(corruption_message(path, reason))


def load(path: str) -> dict[str, Any]:
    """Read a checkpoint, its tensors memory-mapped, so that the ranks of a machine share one copy. Runs no code from it.

    Of a sharded one the model is read into memory, and the optimizer's state stays on the meta device: `chunk_reader`
    gives what `restore` needs to read it.

    Raises:
        CheckpointError: if the file is missing or corrupt, holds more than tensors and plain values, or lacks one of the
            keys of a checkpoint.
    """
    checkpoint = format.read(path)
    if "shards" in checkpoint:
        chunks.read_tensors(shards_folder(path, checkpoint), [("model", checkpoint["model"])])
    return checkpoint


def chunk_reader(path: str, checkpoint: dict[str, Any]) -> Callable[[list[TensorChunk]], None] | None:
    """What `restore` reads a sharded checkpoint's optimizer state with; None for a consolidated one, which holds it.

    Args:
        path: of the checkpoint.
        checkpoint: what `load` gave for it.
    """
    return partial(chunks.read, shards_folder(path, checkpoint)) if "shards" in checkpoint else None


def convert(source: str, target: str) -> str:
    """Write a consolidated checkpoint as a sharded one, or a sharded one as a consolidated one. One process only.

    A consolidated checkpoint is put together in memory.

    Returns:
        The format of the new one.

    Raises:
        CheckpointError: if the source cannot be read, or the target exists or does not end in .pt.
        OSError: if the target cannot be written.
    """
    if os.path.exists(target) or not target.endswith(".pt"):
        raise CheckpointError(f"{target} {'exists' if os.path.exists(target) else 'does not end in .pt'}; give another name")
    verify(source)
    checkpoint = format.read(source)
    tensors = [("model", checkpoint["model"])]
    tensors += [(f"optimizer.state.{param}", entries) for param, entries in checkpoint["optimizer"]["state"].items()]
    if "shards" in checkpoint:
        chunks.read_tensors(shards_folder(source, checkpoint), tensors)
        del checkpoint["shards"]
        _commit_file(checkpoint, target)
        return "consolidated"
    name = new_shards_name(checkpoint)
    with remove_shards_on_error(target, name):
        sums = chunks.write(chunks.take_tensors(tensors), os.path.join(os.path.dirname(target), name + ".tmp"), None)
        _commit_file({**checkpoint, "shards": shards_entry(name, sums)}, target)
    return "sharded"


def new_shards_name(checkpoint: dict[str, Any]) -> str:
    """A new name for a folder of shards; one that a checkpoint refers to is never written to."""
    return f"shards_{checkpoint['iter_num']:08d}_{uuid.uuid4().hex[:8]}"


def shards_entry(name: str, sums: dict[str, FileSum]) -> dict[str, Any]:
    """The entry "shards" of a sharded checkpoint: its folder, and size and checksum of each file there."""
    return {"folder": name, "files": {file: list(entry) for file, entry in sums.items()}}


def shards_folder(path: str, checkpoint: dict[str, Any]) -> str:
    """The folder of a sharded checkpoint's shards."""
    return os.path.join(os.path.dirname(path), checkpoint["shards"]["folder"])


@contextmanager
def remove_shards_on_error(path: str, name: str) -> Iterator[None]:
    """If the block fails before the file at `path` refers to the shards `name`, remove these."""
    try:
        yield
    except BaseException:
        if name not in _referenced_shards(path):
            for left in (name, name + ".tmp"):
                shutil.rmtree(os.path.join(os.path.dirname(path), left), ignore_errors=True)
        raise


def _commit_file(checkpoint: dict[str, Any], path: str, previous: str | None = None) -> None:
    """Write a checkpoint's file, and replace the one at `path`, which becomes `previous`, in one instant."""
    with atomic_write(path) as temporary:
        format.write(checkpoint, temporary)
        if "shards" in checkpoint:
            shards = shards_folder(path, checkpoint)
            os.rename(shards + ".tmp", shards)
            sync_folder(os.path.dirname(path) or ".")
        if previous is not None and os.path.exists(path):
            link_or_copy(path, previous, link=True)  # `path` is about to be another file


def _prune(folder: str, keep: int, iteration: int) -> set[str]:
    """Remove all but the last checkpoints by iteration. Returns the names of the shards that these referred to."""
    names = [match for file in _glob(folder, "ckpt_*.pt") if (match := _KEPT.fullmatch(os.path.basename(file)))]
    # later ones are of a run that has been resumed from an earlier iteration; it has yet to reach them
    so_far = sorted((int(name[1]), name[0]) for name in names if int(name[1]) <= iteration)
    shards: set[str] = set()
    for _, name in so_far[:-keep]:
        old = os.path.join(folder, name)
        shards |= _referenced_shards(old)
        os.remove(old)
    return shards


def _referenced_shards(path: str) -> set[str]:
    """The name of the folder of shards that a file refers to; nothing if it cannot be read or does not refer to any."""
    try:
        name = format.read(path).get("shards", {}).get("folder", "")
    except CheckpointError:
        return set()
    return {name} if _SHARDS.fullmatch(name) else set()


def _remove_unreferenced(folder: str, names: set[str]) -> None:
    """Remove those of the shards that no file refers to any more."""
    in_use = set().union(*map(_referenced_shards, _glob(folder, "*.pt"))) if names else set()
    for unused in filter(os.path.isdir, (os.path.join(folder, name) for name in names - in_use)):
        os.rename(unused, unused + ".tmp")  # if a kill interrupts the removal, the next start sweeps the rest
        shutil.rmtree(unused + ".tmp")


def _glob(folder: str, pattern: str) -> list[str]:
    return glob.glob(os.path.join(glob.escape(folder), pattern))
