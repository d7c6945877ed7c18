"""The keys of a checkpoint of train.py or of nanoGPT, which is read as untrusted input."""

from types import GenericAlias, UnionType
from typing import Any

import torch

from zero import checkpoint as ckpt
from zero.checkpoint import CheckpointError


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta)


def _is_config(value: Any) -> bool:
    return _fits(value, dict[str, object]) and isinstance(value.get("dataset"), str | None)


def _is_scaler(value: Any) -> bool:
    """Return whether the value is a state of torch.amp.GradScaler, which is empty if the scaler is not enabled."""
    keys = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
    return _fits(value, dict[str, int | float]) and value.keys() in (set(), keys)


_IN_TRAINING = {  # those of nanoGPT, beside "model" and "optimizer"
    "model_args": dict[str, int | float | str | None],
    "iter_num": _is_count,
    "best_val_loss": _is_number,
    "config": _is_config,
}
_KINDS = _IN_TRAINING | {
    "data_position": _is_count,
    "dataset": dict[str, str],
    "elapsed_s": _is_number,
    "is_best": bool,
    "scaler": _is_scaler,
    "vocabulary": str,
    "wandb_run_id": str | None,
}


def load(path: str) -> dict[str, Any]:
    """Read a checkpoint, see `zero.checkpoint.load`. It may hold the model only. Then its config is empty.

    Raises CheckpointError also if it does not hold the keys and plain values of a checkpoint of train.py or nanoGPT.
    """
    held = ckpt.load(path)
    wrong = [key for key, kind in _KINDS.items() if key in held and not _fits(held[key], kind)]
    if wrong or "model_args" not in held:
        raise CheckpointError(f"{path} is no checkpoint of a GPT; wrong or missing keys: {', '.join(wrong or ['model_args'])}")
    return {"config": {}, **held}


def load_to_train(path: str) -> dict[str, Any]:
    """Read a checkpoint. Raises CheckpointError also if it lacks what training needs to continue."""
    checkpoint = load(path)
    if missing := sorted({"optimizer", *_IN_TRAINING} - checkpoint.keys()):
        remedy = "it can be sampled, evaluated and exported; train from the exported folder with --init_from=FOLDER"
        raise CheckpointError(f"{path} lacks {', '.join(missing)}, which training needs to go on; {remedy}")
    return checkpoint


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value is of a kind: a type, dict[keys, values], or a predicate."""
    if isinstance(kind, GenericAlias):
        keys, values = kind.__args__
        return isinstance(value, dict) and all(isinstance(key, keys) and isinstance(of, values) for key, of in value.items())
    return isinstance(value, kind) if isinstance(kind, type | UnionType) else kind(value)
