"""A folder of checkpoints."""

import glob
import os
import re
import shutil
import time
import uuid
import zipfile
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from zero.checkpoint.chunks import cut_out, read, read_tensors, write
from zero.checkpoint.files import FileSum, also_as, damage, damaged, replacing, sync_folder
from zero.checkpoint.format import read_file, write_file
from zero.state import CheckpointError, TensorChunk

FORMATS = ("consolidated", "sharded")
NAME, PREVIOUS = "ckpt.pt", "ckpt_prev.pt"
_BY_ITERATION = "ckpt_{:08d}.pt"
# nothing else is ever removed
_KEPT, _SHARDS = re.compile(r"ckpt_(\d{8,})\.pt"), re.compile(r"shards_\d{8,}_[0-9a-f]{8}")


class DivergedError(ArithmeticError):
    """Weights that are not finite, which take no checkpoint's place; the message names the first such tensor."""


class SaveReport(NamedTuple):
    """One checkpoint written."""

    iter_num: int
    nbytes: int
    write_s: float  # until it was on the disk
    consolidate_s: float = 0.0  # before that; training can go on after it, if the rest happens in the background
    complaint: str | None = None  # what went wrong once it was on the disk


def save(
    checkpoint: dict[str, Any], folder: str, keep: int = 0, rotate: bool = True, buffers: Container[str] = ()
) -> SaveReport:
    """Write `ckpt.pt` so that it is at every moment either the old file or the new one. One process only.

    The new file is complete and on the disk before it takes the name; the old one becomes `ckpt_prev.pt`.

    Args:
        checkpoint: nanoGPT's six keys and any others of plain values and CPU tensors.
        folder: where `ckpt.pt` lies; it must exist.
        keep: how many of the last checkpoints to keep by iteration besides.
        rotate: False if the old one is damaged, so that it must not take the place of `ckpt_prev.pt`.
        buffers: names in the model that may be inf, as a mask is.

    Raises:
        DivergedError: if a weight is not finite; the old files stand.
        OSError: if the disk is full or cannot be written to; the old files stand.
    """
    begin = time.perf_counter()
    _refuse([_first_not_finite((name, value) for name, value in checkpoint["model"].items() if name not in buffers)])
    path, previous = os.path.join(folder, NAME), os.path.join(folder, PREVIOUS)
    replaced = {_shards_of(path), _shards_of(previous)} - {None}
    _put(checkpoint, path, previous if rotate else None)
    report = SaveReport(checkpoint["iter_num"], os.path.getsize(path), time.perf_counter() - begin)
    try:
        if keep:
            also_as(path, os.path.join(folder, _BY_ITERATION.format(checkpoint["iter_num"])))  # whatever others do to `path`
            names = [match for file in _glob(folder, "ckpt_*.pt") if (match := _KEPT.fullmatch(os.path.basename(file)))]
            # later ones are of a run that went back behind them, and not of this one
            so_far = sorted((int(name[1]), name[0]) for name in names if int(name[1]) <= checkpoint["iter_num"])
            for _, name in so_far[:-keep]:
                old = os.path.join(folder, name)
                replaced |= {_shards_of(old)} - {None}
                os.remove(old)
        _remove_unused(folder, replaced)
    except OSError as error:
        return report._replace(complaint=f"{path} is written, but not all is tidy beside it: {error}")
    return report


def find(folder: str) -> tuple[str, str | None]:
    """The newest undamaged checkpoint of a folder, and what is wrong with a newer one, if there is such.

    Reads every byte of the file. One process only; the others are told.

    Raises:
        CheckpointError: if there is none.
    """
    complaints = []
    for name in (NAME, PREVIOUS):
        path = os.path.join(folder, name)
        if os.path.exists(path):
            try:
                verify(path)
            except CheckpointError as error:
                complaints.append(str(error))
            else:
                return path, "; ".join(complaints) or None
        elif name == NAME:
            complaints.append(f"there is no checkpoint {path}")
    raise CheckpointError("; ".join(complaints))


def verify(path: str) -> None:
    """Read every byte of a checkpoint and compare checksums.

    They are those that a file's container, a zip archive, keeps of each entry, and those that it keeps of its shards.

    Raises:
        CheckpointError: if the file is missing, damaged, or no checkpoint.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint {path}") from error
    except IsADirectoryError as error:
        raise CheckpointError(f"{path} is a folder; name a file, such as {os.path.join(path, NAME)}") from error
    except Exception as error:  # see `read_file`
        raise CheckpointError(damaged(path, error)) from error
    if bad is not None:
        raise CheckpointError(damaged(path, f"the checksum of its entry {bad} does not hold"))
    checkpoint = read_file(path)
    if "shards" in checkpoint:
        sums = {name: FileSum(*entry) for name, entry in checkpoint["shards"]["files"].items()}
        if harm := damage(_shards_folder(path, checkpoint), sums):
            raise CheckpointError(damaged(path, harm))


def load(path: str) -> dict[str, Any]:
    """Read a checkpoint, its tensors memory-mapped, so that the ranks of a machine share one copy. Runs no code from it.

    Of a sharded one the model is read into memory, and the optimizer's state stays on the meta device: `chunk_reader`
    gives what `restore` needs to read it.

    Raises:
        CheckpointError: if the file is missing or damaged, holds more than tensors and plain values, or lacks one of the
            keys of a checkpoint.
    """
    checkpoint = read_file(path)
    if "shards" in checkpoint:
        read_tensors(_shards_folder(path, checkpoint), [("model", checkpoint["model"])])
    return checkpoint


def chunk_reader(path: str, checkpoint: dict[str, Any]) -> Callable[[list[TensorChunk]], None] | None:
    """What `restore` reads a sharded checkpoint's optimizer state with; None for a consolidated one, which holds it.

    Args:
        path: of the checkpoint.
        checkpoint: what `load` gave for it.
    """
    return partial(read, _shards_folder(path, checkpoint)) if "shards" in checkpoint else None


def convert(source: str, target: str) -> str:
    """Write a consolidated checkpoint as a sharded one, or a sharded one as a consolidated one. One process only.

    A consolidated checkpoint is put together in memory.

    Returns:
        The format of the new one.

    Raises:
        CheckpointError: if the source cannot be read, or the target is no new name that ends in .pt.
        OSError: if the target cannot be written.
    """
    if os.path.exists(target) or not target.endswith(".pt"):
        raise CheckpointError(f"{target} {'exists' if os.path.exists(target) else 'does not end in .pt'}; give another name")
    verify(source)
    checkpoint = read_file(source)
    tensors = [("model", checkpoint["model"])]
    tensors += [(f"optimizer.state.{param}", entries) for param, entries in checkpoint["optimizer"]["state"].items()]
    if "shards" in checkpoint:
        read_tensors(_shards_folder(source, checkpoint), tensors)
        del checkpoint["shards"]
        _put(checkpoint, target)
        return "consolidated"
    name = _shards_name(checkpoint)
    with _gone_unless_it_counts(target, name):
        sums = write(cut_out(tensors), os.path.join(os.path.dirname(target), name + ".tmp"), None)
        _put({**checkpoint, "shards": _shards_entry(name, sums)}, target)
    return "sharded"


def _first_not_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """The first name whose tensor holds an inf or a nan; takes no memory to speak of. None on the meta device is looked at."""
    for name, tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.numel() and not tensor.is_meta:
            least, most = tensor.detach().aminmax()  # nan, if there is one
            if not (least.isfinite() and most.isfinite()):
                return name
    return None


def _refuse(bad: list[str | None]) -> None:
    """Raise for what any rank has found not to be finite."""
    if name := next(filter(None, bad), None):
        raise DivergedError(f"{name} is not finite")


def _shards_name(checkpoint: dict[str, Any]) -> str:
    """A new name for a folder of shards; one that counts already is never written to."""
    return f"shards_{checkpoint['iter_num']:08d}_{uuid.uuid4().hex[:8]}"


def _shards_entry(name: str, sums: dict[str, FileSum]) -> dict[str, Any]:
    """What the file of a sharded checkpoint says of its folder."""
    return {"folder": name, "files": {file: list(entry) for file, entry in sums.items()}}


def _shards_folder(path: str, checkpoint: dict[str, Any]) -> str:
    return os.path.join(os.path.dirname(path), checkpoint["shards"]["folder"])


def _shards_of(path: str) -> str | None:
    """The name of the folder that a file refers to, if it can be read and does."""
    try:
        name = read_file(path).get("shards", {}).get("folder", "")
    except CheckpointError:
        return None
    return name if _SHARDS.fullmatch(name) else None


def _remove_unused(folder: str, names: set[str]) -> None:
    """Remove those of the shards that no file refers to any more."""
    in_use = {_shards_of(file) for file in _glob(folder, "*.pt")} if names else set()
    for unused in filter(os.path.isdir, (os.path.join(folder, name) for name in names - in_use)):
        os.rename(unused, unused + ".tmp")  # what a kill leaves of it is swept at the next start
        shutil.rmtree(unused + ".tmp")


@contextmanager
def _gone_unless_it_counts(path: str, name: str) -> Iterator[None]:
    """If the block fails before the file at `path` refers to the shards `name`, these are removed."""
    try:
        yield
    except BaseException:
        if _shards_of(path) != name:
            for left in (name, name + ".tmp"):
                shutil.rmtree(os.path.join(os.path.dirname(path), left), ignore_errors=True)
        raise


def _put(checkpoint: dict[str, Any], path: str, previous: str | None = None) -> None:
    """Write a checkpoint's file, and let it and its shards count from one instant on. What was there becomes `previous`."""
    with replacing(path) as temporary:
        write_file(checkpoint, temporary)
        if "shards" in checkpoint:
            shards = _shards_folder(path, checkpoint)
            os.rename(shards + ".tmp", shards)
            sync_folder(os.path.dirname(path) or ".")
        if previous is not None and os.path.exists(path):
            also_as(path, previous, link=True)  # `path` is about to be another file


def _glob(folder: str, pattern: str) -> list[str]:
    return glob.glob(os.path.join(glob.escape(folder), pattern))
