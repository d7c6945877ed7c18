"""The file of a checkpoint, which is read as untrusted input."""

import os
import zipfile
from contextlib import suppress
from types import GenericAlias, NoneType, UnionType
from typing import Any

import torch
import torch.distributed as dist

from zero.checkpoint.files import reading
from zero.checkpoint.state import CheckpointError, outlined
from zero.host_comm import broadcast_object, cpu_group, gather_objects

NAME = "ckpt.pt"  # of the newest checkpoint of a folder
FORMAT = 1  # version of the keys that are added to nanoGPT's six
EXTRA_STATE = "_extra_state"  # same as in torch.nn.modules.module


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value is of a kind: a type, dict[keys, values], kinds by key, [that of each element], or a predicate."""
    if isinstance(kind, list):
        return isinstance(value, list) and all(_fits(inner, kind[0]) for inner in value)
    if isinstance(kind, dict):
        return isinstance(value, dict) and all(_fits(value.get(key), inner) for key, inner in kind.items())
    if isinstance(kind, GenericAlias):
        keys, values = kind.__args__
        return isinstance(value, dict) and all(isinstance(key, keys) and _fits(held, values) for key, held in value.items())
    return isinstance(value, kind) if isinstance(kind, type | UnionType) else kind(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta)


def is_plain(value: Any) -> bool:
    """Return whether `load` can read the value again: tensors and plain values, in dicts and lists."""
    if isinstance(value, dict):
        return all(is_plain(key) and is_plain(inner) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return isinstance(value, torch.Tensor | int | float | str | bytes | NoneType)


def _is_model(value: Any) -> bool:
    """Return whether the value is a state dict: tensors, and results of a module's `get_extra_state`."""
    return _fits(value, dict[str, object]) and all(
        isinstance(held, torch.Tensor) or (name.endswith(EXTRA_STATE) and is_plain(held)) for name, held in value.items()
    )


def _is_config(value: Any) -> bool:
    return _fits(value, dict[str, object]) and isinstance(value.get("dataset"), str | None)


def _is_scaler(value: Any) -> bool:
    """Return whether the value is a state of torch.amp.GradScaler, which is empty if the scaler is not enabled."""
    keys = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
    return _fits(value, dict[str, int | float]) and value.keys() in (set(), keys)


# keys of every checkpoint in training, including those of nanoGPT
KEYS = {
    "model": _is_model,
    "optimizer": {"state": dict[int, dict], "param_groups": [{"params": list}]},
    "model_args": dict[str, int | float | str | None],
    "iter_num": _is_count,
    "best_val_loss": _is_number,
    "config": _is_config,
}
# keys of this program's checkpoints only
_MORE_KEYS = {
    "data_position": _is_count,
    "dataset": dict[str, str],
    "elapsed_s": _is_number,
    "format": int,
    "scaler": _is_scaler,
    "vocabulary": str,
    "wandb_run_id": str | None,
}


def load(path: str) -> dict[str, Any]:
    """Read a checkpoint, with its tensors memory-mapped: the ranks of a machine share one copy. Runs no code from it.

    The file may hold the model only. Then its config is empty.

    Raises CheckpointError if it is missing or damaged, or does not hold the keys and plain values of a checkpoint.
    """
    with reading(path):
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    found = checkpoint if isinstance(checkpoint, dict) else {}
    held = {key: value for key, value in found.items() if value is not None and not (key == "optimizer" and value == {})}
    wrong = [key for key in ("model", "model_args") if key not in held]
    wrong += [key for key, kind in (KEYS | _MORE_KEYS).items() if key in held and not _fits(held[key], kind)]
    if wrong:
        raise CheckpointError(f"{path} is no checkpoint of a model; wrong or missing keys: {', '.join(wrong)}")
    if held.get("format", FORMAT) != FORMAT:
        raise CheckpointError(f"{path} has format {held['format']}, this program reads {FORMAT}; use the one that wrote it")
    if outlined(held):
        raise CheckpointError(f"{path} is a checkpoint without its tensors; convert shards with the program that wrote them")
    return {"config": {}, **held}


def check_trainable(checkpoint: dict[str, Any], path: str) -> None:
    """Raise CheckpointError if a checkpoint lacks what training needs to continue."""
    if missing := sorted(KEYS.keys() - checkpoint.keys()):
        remedy = "it can be sampled, evaluated and exported; train from the exported folder with --init_from=FOLDER"
        raise CheckpointError(f"{path} lacks {', '.join(missing)}, which training needs to go on; {remedy}")


def verify(path: str) -> None:
    """Read every byte of a checkpoint and compare the checksums.

    Raises CheckpointError if the file is missing, corrupt, or not a checkpoint.
    """
    with reading(path), zipfile.ZipFile(path) as archive:
        if bad := archive.testzip():
            raise ValueError(f"the checksum of its entry {bad} does not match")
    load(path)


def load_on_all_ranks(path: str) -> dict[str, Any]:
    """Load a checkpoint, see `load`, which every rank reads itself. Needs to be called on all ranks.

    Raises CheckpointError on all ranks, if one cannot read the file, or sees another one than rank 0. An equal copy is fine.
    """
    group = cpu_group(None) if dist.is_initialized() else None
    own = _identity(path)
    of_rank_0 = broadcast_object(own, group)
    checkpoint, reason = dict[str, Any](), None
    try:
        if own and of_rank_0 and own != of_rank_0:
            verify(path)  # a copy may be damaged
            if own[0] != of_rank_0[0]:
                raise CheckpointError(f"{path} is another file")
        checkpoint = load(path)
    except CheckpointError as error:
        reason = str(error)
    reasons = gather_objects(reason, group)
    if reasons[0]:
        raise CheckpointError(reasons[0])
    if rank := next((rank for rank, reason in enumerate(reasons) if reason), 0):
        remedy = "use a folder that all machines share, or copy the file to every machine"
        raise CheckpointError(f"rank {rank} does not see the checkpoint of rank 0: {reasons[rank]}; {remedy}")
    return checkpoint


def _identity(path: str) -> tuple[list[Any], tuple[int, int]] | None:
    """Return the names, sizes and CRC-32s of the entries of the archive, then inode and time of the last change.

    The latter are equal where hosts share the file, not in a copy. None if the file cannot be read.
    """
    with suppress(Exception), open(path, "rb") as file, zipfile.ZipFile(file) as archive:  # damaged bytes can raise any error
        entries = [(entry.filename, entry.file_size, entry.CRC) for entry in archive.infolist()]
        status = os.fstat(file.fileno())
        return entries, (status.st_ino, status.st_mtime_ns)
    return None
