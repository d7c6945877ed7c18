"""The checkpoint: state gathered from all ranks, in a file that is whole or the one before it.

    $ python -m zero.checkpoint inspect out/ckpt.pt

prints what a file holds and whether its checksums hold.

A folder of checkpoints holds

ckpt.pt             the newest
ckpt_prev.pt        the one before, which takes over if the newest is damaged
ckpt_<iter>.pt      the last few by iteration, if asked for
ckpt*.pt.tmp        being written; what a killed process leaves of it is swept at the next start
"""

import glob
import os
import re
import shutil
import sys
import time
import zipfile
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from zero.consolidation import CheckpointError, consolidate, model_state_dict, restore

__all__ = [
    "FORMAT",
    "CheckpointError",
    "CheckpointWriter",
    "SaveReport",
    "consolidate",
    "find",
    "load",
    "model_state_dict",
    "restore",
    "save",
    "verify",
]

FORMAT = 1  # of the keys beside nanoGPT's six
NAME, PREVIOUS = "ckpt.pt", "ckpt_prev.pt"
_BY_ITERATION = "ckpt_{:08d}.pt"

# of every checkpoint, nanoGPT's included
_KEYS = {
    "model": dict,
    "optimizer": dict,
    "model_args": dict,
    "iter_num": int,
    "best_val_loss": (int, float, torch.Tensor),
    "config": dict,
}


class SaveReport(NamedTuple):
    """One file written."""

    iter_num: int
    nbytes: int
    write_s: float  # until it was on the disk


def save(checkpoint: dict[str, Any], folder: str, keep: int = 0) -> SaveReport:
    """Write `ckpt.pt` so that it is at every moment either the old file or the new one. One process only.

    The new file is complete and on the disk before it takes the name; the old one becomes `ckpt_prev.pt`. A manifest of
    its tensors goes into the file: name, shape, dtype and CRC-32 of each.

    Args:
        checkpoint: nanoGPT's six keys and any others of plain values and CPU tensors.
        folder: where `ckpt.pt` lies; it must exist.
        keep: how many of the newest checkpoints to keep by iteration besides.

    Raises:
        OSError: if the disk is full or cannot be written to; the old file stands.
    """
    begin = time.perf_counter()
    path, temporary = os.path.join(folder, NAME), os.path.join(folder, NAME + ".tmp")
    tensors = dict(_tensors(checkpoint))
    checksums = {id(tensor): _crc32(tensor) for tensor in {id(tensor): tensor for tensor in tensors.values()}.values()}
    manifest = {
        name: {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."), "crc32": checksums[id(tensor)]}
        for name, tensor in tensors.items()
    }
    try:
        with open(temporary, "wb") as file:
            try:
                torch.save({**checkpoint, "format": FORMAT, "manifest": manifest}, file)
            except RuntimeError as error:  # torch's zip writer hides what the file said
                raise OSError(f"cannot write {temporary}: {error}") from error
            file.flush()
            os.fsync(file.fileno())
        if os.path.exists(path):
            _also_as(path, os.path.join(folder, PREVIOUS))
        os.replace(temporary, path)
        _sync_folder(folder)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)
    if keep:
        _also_as(path, os.path.join(folder, _BY_ITERATION.format(checkpoint["iter_num"])))
        for old in sorted(glob.glob(os.path.join(glob.escape(folder), "ckpt_[0-9]*.pt")))[:-keep]:
            os.remove(old)
    return SaveReport(checkpoint["iter_num"], os.path.getsize(path), time.perf_counter() - begin)


class CheckpointWriter:
    """Writes the checkpoints of a run one after the other, in the background if asked to. One process only.

    Args:
        folder, keep: see `save`.
        background: `save` returns at once and the file is written by a thread; a second `save` waits for the first.
    """

    def __init__(self, folder: str, keep: int = 0, background: bool = False) -> None:
        self.folder, self.keep, self.background = folder, keep, background
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._outcomes: list[SaveReport | OSError] = []
        for leftover in glob.glob(os.path.join(glob.escape(folder), "ckpt*.pt.tmp")):
            os.remove(leftover)

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Write a checkpoint, which must not be changed any more; `outcomes` will tell whether that was possible."""
        self.wait()
        if self.background:
            self._pending = self._thread.submit(self._write, checkpoint)
        else:
            self._write(checkpoint)

    def wait(self) -> None:
        """Wait until nothing is being written; raises what the thread raised, but for an OSError, which is an outcome."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def outcomes(self) -> list[SaveReport | OSError]:
        """What has come of the saves that have ended since the last call."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _write(self, checkpoint: dict[str, Any]) -> None:
        try:
            self._outcomes.append(save(checkpoint, self.folder, self.keep))
        except OSError as error:
            self._outcomes.append(error)


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
                load(path)
            except CheckpointError as error:
                complaints.append(str(error))
            else:
                return path, "; ".join(complaints) or None
        elif name == NAME:
            complaints.append(f"there is no checkpoint {path}")
    raise CheckpointError("; ".join(complaints))


def verify(path: str) -> None:
    """Read every byte of a checkpoint and compare the checksums that its container, a zip archive, keeps of each entry.

    Raises:
        CheckpointError: if the file is missing or damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint {path}") from error
    except Exception as error:  # there is no end to what damaged bytes provoke: zlib, struct, Unicode, memory, ...
        raise CheckpointError(_damaged(path, error)) from error
    if bad is not None:
        raise CheckpointError(_damaged(path, f"the checksum of its entry {bad} does not hold"))


def load(path: str) -> dict[str, Any]:
    """Read a checkpoint, its tensors memory-mapped, so that the ranks of a machine share one copy. Runs no code from it.

    Raises:
        CheckpointError: if the file is missing or damaged, holds more than tensors and plain values, or lacks one of the
            keys of a checkpoint.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint {path}") from error
    except Exception as error:  # as in `verify`
        raise CheckpointError(_damaged(path, error)) from error
    held = checkpoint if isinstance(checkpoint, dict) else {}
    missing = [key for key, kind in _KEYS.items() if not isinstance(held.get(key), kind)]
    if "optimizer" not in missing:
        missing += [f"optimizer.{key}" for key in ("state", "param_groups") if key not in held["optimizer"]]
    if missing:
        raise CheckpointError(f"{path} is no checkpoint of a model in training: it lacks {', '.join(missing)}")
    if held.get("format", FORMAT) != FORMAT:
        raise CheckpointError(f"{path} has format {held['format']}, this program reads {FORMAT}; use the one that wrote it")
    return checkpoint


def _damaged(path: str, reason: object) -> str:
    refused = re.search(r"GLOBAL ([\w.]+)", str(reason))
    if refused:
        return f"{path} asks for {refused[1]}; a checkpoint holds tensors and plain values only, so nothing of it was run"
    lines = [line for line in str(reason).splitlines() if line and not line.startswith("Weights only load failed")]
    return f"{path} is damaged, or no checkpoint: {lines[0] if lines else type(reason).__name__}"


def _also_as(path: str, other: str) -> None:
    """Give a file a second name, in place of what had it; where a file cannot have two names, copy it."""
    temporary = other + ".tmp"
    try:
        try:
            os.link(path, temporary)
        except OSError:
            shutil.copyfile(path, temporary)
        os.replace(temporary, other)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


def _sync_folder(folder: str) -> None:
    """Have the names in a folder on the disk, too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in nested dicts and lists, by the keys that lead to it, joined by dots."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict | list | tuple):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(inner, f"{name}.{key}" if name else str(key))


def _crc32(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy())


def _inspect(path: str) -> bool:
    """Print what a file holds; whether its checksums hold."""
    verify(path)
    checkpoint = load(path)
    manifest, tensors = checkpoint.get("manifest", {}), dict(_tensors(checkpoint))
    print(f"{path}: {os.path.getsize(path) / 1e6:.1f} MB, {'format ' + str(FORMAT) if manifest else 'written by nanoGPT'}")
    print(f"iteration {checkpoint['iter_num']}, best validation loss {float(checkpoint['best_val_loss']):.4f}")
    print(f"model_args {checkpoint['model_args']}")
    for key in sorted(checkpoint.keys() - _KEYS.keys() - {"manifest"}):
        print(f"{key} {checkpoint[key]}")
    wrong = sorted(manifest.keys() ^ tensors.keys()) if manifest else []
    for name, tensor in tensors.items():
        entry = manifest.get(name)
        holds = entry is None or (entry["shape"] == list(tensor.shape) and entry["crc32"] == _crc32(tensor))
        if not holds:
            wrong.append(name)
        print(f"  {name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{'' if holds else ' WRONG CHECKSUM'}")
    elements = sum(tensor.numel() for name, tensor in tensors.items())
    print(f"{len(tensors)} tensors, {elements / 1e6:.1f}M numbers; {'all checksums hold' if not wrong else f'wrong: {wrong}'}")
    return not wrong


if __name__ == "__main__":
    try:
        if len(sys.argv) != 3 or sys.argv[1] != "inspect":
            raise CheckpointError("say what to do: python -m zero.checkpoint inspect FILE")
        sys.exit(0 if _inspect(sys.argv[2]) else 1)
    except CheckpointError as problem:
        sys.stderr.write(f"error: {problem}\n")
        sys.exit(2)
