"""The differences of two checkpoints: by weight and by entry of the optimizer state."""

import math
from typing import Any, NamedTuple

import torch

from zero.checkpoint.archive import place_of
from zero.checkpoint.format import load, verify
from zero.checkpoint.state import named
from zero.tensors import pieces


class Difference(NamedTuple):
    """A weight or an entry of state in two checkpoints."""

    name: str  # model.<name> or optimizer.state.<number of the parameter, as in torch.optim>.<name>
    is_identical: bool  # bit by bit
    largest: float  # absolute difference of an element; inf: a nan instead of a number, or it is in one checkpoint only
    why: str = ""  # if the elements cannot be compared


def compare(path: str, other: str) -> list[Difference]:
    """Return the weights and the state of two checkpoints, of this program or of nanoGPT, each with its difference.

    Raises CheckpointError if one of them cannot be read, or is damaged.
    """
    a, b = _leaves(path), _leaves(other)
    found: dict[Any, Difference] = {}
    for name in a | b:
        if name not in a or name not in b:
            found[name] = Difference(name, False, math.inf, f"only in {path if name in a else other}")
            continue
        key = tuple(place_of(leaf) if isinstance(leaf, torch.Tensor) else name for leaf in (a[name], b[name]))
        if key not in found:  # tied tensors count once
            found[key] = _difference(name, a[name], b[name])
    return list(found.values())


def _leaves(path: str) -> dict[str, Any]:
    verify(path)
    checkpoint = load(path)
    weights, state = named(checkpoint["model"]), named(checkpoint.get("optimizer", {}).get("state", {}))
    leaves = {f"model.{name.removeprefix('_orig_mod.')}": leaf for name, leaf in weights.items()}  # nanoGPT's, if compiled
    return leaves | {f"optimizer.state.{name}": leaf for name, leaf in state.items()}


def _difference(name: str, a: Any, b: Any) -> Difference:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        a, b = (leaf.item() if isinstance(leaf, torch.Tensor) and leaf.numel() == 1 else leaf for leaf in (a, b))
        if isinstance(a, int | float) and isinstance(b, int | float):
            return Difference(name, a == b, abs(a - b))
        is_same = type(a) is type(b) and not isinstance(a, torch.Tensor) and a == b
        return Difference(name, is_same, 0.0 if is_same else math.inf, f"{type(a).__name__} and {type(b).__name__}")
    if a.shape != b.shape:
        return Difference(name, False, math.inf, f"shapes {tuple(a.shape)} and {tuple(b.shape)}")
    largest, is_identical = 0.0, True
    for part, its in pieces(a.reshape(-1), b.reshape(-1)):
        if part.dtype != its.dtype or not torch.equal(part.view(torch.uint8), its.view(torch.uint8)):
            wide, its_wide = (each.to(torch.complex128 if each.is_complex() else torch.float64) for each in (part, its))
            same = (wide == its_wide) | (wide.isnan() & its_wide.isnan())  # also infinities
            apart = (wide - its_wide).abs().masked_fill(same, 0.0).nan_to_num(math.inf, math.inf)
            largest, is_identical = max(largest, apart.max().item() if len(apart) else 0.0), False
    return Difference(name, is_identical, largest)
