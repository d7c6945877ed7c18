"""The file of a checkpoint, which is read as untrusted input."""

import os
import zipfile
from collections.abc import Callable
from contextlib import suppress
from types import NoneType
from typing import Any

import torch

from zero.checkpoint.archive import Pieces, write_archive
from zero.checkpoint.files import atomic_write, reading
from zero.checkpoint.state import CheckpointError, outlined, snapshot
from zero.host_comm import broadcast_object, on_all_ranks

NAME = "ckpt.pt"  # of the newest checkpoint of a folder
FORMAT = 1  # version of the keys that are added to nanoGPT's six
EXTRA_STATE = "_extra_state"  # same as in torch.nn.modules.module


def _is_plain(value: Any) -> bool:
    """Return whether `load` can read the value again: tensors and plain values, in dicts and lists."""
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(inner) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, torch.Tensor | int | float | str | bytes | NoneType)


def _is_model(value: Any) -> bool:
    """Return whether the value is a state dict: tensors, and results of a module's `get_extra_state`."""
    return isinstance(value, dict) and all(
        isinstance(name, str) and (isinstance(held, torch.Tensor) or (name.endswith(EXTRA_STATE) and _is_plain(held)))
        for name, held in value.items()
    )


def _is_optimizer(value: Any) -> bool:
    """Return whether the value has the form of a `state_dict()` of torch.optim, with numbers for parameters."""
    state, groups = (value.get("state"), value.get("param_groups")) if isinstance(value, dict) else (None, None)
    has_state = isinstance(state, dict) and all(isinstance(key, int) and isinstance(of, dict) for key, of in state.items())
    has_groups = isinstance(groups, list) and all(isinstance(of, dict) and isinstance(of.get("params"), list) for of in groups)
    return has_state and has_groups


def save(path: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, **values: Any) -> None:
    """Write a model, the state of its optimizer and plain values to a file, for `load`. Needs to be called on all ranks.

    Rank 0 writes the parts of the other ranks as they arrive. The file replaces an earlier one when it is complete.
    Raises OSError and the errors of `write` on rank 0, then CheckpointError on those that share the state, or as `consolidate`.
    """
    state = snapshot(optimizer, model)

    def stream() -> None:
        with state.arriving() as pieces:
            if state.outline is not None:
                with atomic_write(path) as temporary:
                    write({**state.outline, **values}, temporary, pieces)

    on_all_ranks(stream, state.everyone, CheckpointError)


def write(checkpoint: dict[str, Any], path: str, pieces: Pieces = ()) -> None:
    """Write a checkpoint that `load` reads to the disk. `pieces`: of its tensors on the meta device.

    Raises ValueError if its model has more than tensors and plain values.
    """
    if odd := [name for name, value in checkpoint["model"].items() if not _is_plain(value)]:
        raise ValueError(f"{odd[0]} is more than tensors and plain values, so the checkpoint could not be read; change it")
    write_archive({**checkpoint, "format": FORMAT}, path, pieces)


def load(path: str) -> dict[str, Any]:
    """Read a checkpoint, with its tensors memory-mapped: the ranks of a machine share one copy. Runs no code from it.

    Raises CheckpointError if it is missing or damaged, has no "model" or another "optimizer" than one of torch.optim, if any.
    """
    with reading(path):
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    found = checkpoint if isinstance(checkpoint, dict) else {}
    held = {key: value for key, value in found.items() if value is not None and not (key == "optimizer" and value == {})}
    wrong = [] if _is_model(held.get("model")) else ["model"]
    wrong += [] if "optimizer" not in held or _is_optimizer(held["optimizer"]) else ["optimizer"]
    if wrong:
        raise CheckpointError(f"{path} is no checkpoint of a model; wrong or missing keys: {', '.join(wrong)}")
    if type(number := held.get("format", FORMAT)) is not int or number != FORMAT:
        raise CheckpointError(f"{path} has format {number}, this program reads {FORMAT}; use the one that wrote it")
    if outlined(held):
        raise CheckpointError(f"{path} is a checkpoint without its tensors; convert shards with the program that wrote them")
    return held


def verify(path: str) -> None:
    """Read every byte of a file and compare the checksums; `load` says whether it is a checkpoint.

    Raises CheckpointError if it is missing or damaged.
    """
    with reading(path), zipfile.ZipFile(path) as archive:
        if bad := archive.testzip():
            raise ValueError(f"the checksum of its entry {bad} does not match")


def load_on_all_ranks(path: str, load: Callable[[str], dict[str, Any]] = load) -> dict[str, Any]:
    """Load a checkpoint: every rank reads it. Needs to be called on all ranks. A `load` of a program may refuse more.

    Raises CheckpointError on all ranks, if one cannot read the file, or sees another one than rank 0. An equal copy is fine.
    """
    own = _identity(path)
    of_rank_0 = broadcast_object(own)

    def read() -> dict[str, Any]:
        try:
            if own and of_rank_0 and own != of_rank_0:
                verify(path)  # a copy may be damaged
                if own[0] != of_rank_0[0]:
                    raise CheckpointError(f"{path} is another file than that of rank 0")
            return load(path)
        except CheckpointError as error:
            if own == of_rank_0:
                raise
            remedy = "use a folder that all machines share, or copy the file of rank 0 to every machine"
            raise CheckpointError(f"{error}; {remedy}") from error

    return on_all_ranks(read, kind=CheckpointError)


def _identity(path: str) -> tuple[list[Any], tuple[int, int]] | None:
    """Return the names, sizes and CRC-32s of the entries of the archive, then inode and time of the last change.

    The latter are equal where hosts share the file, not in a copy. None if the file cannot be read.
    """
    with suppress(Exception), open(path, "rb") as file, zipfile.ZipFile(file) as archive:  # damaged bytes can raise any error
        entries = [(entry.filename, entry.file_size, entry.CRC) for entry in archive.infolist()]
        status = os.fstat(file.fileno())
        return entries, (status.st_ino, status.st_mtime_ns)
    return None
