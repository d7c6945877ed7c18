"""The horizons of a run, in iterations. Arithmetic only."""

import math
from collections.abc import Mapping
from typing import Any


def horizons(settings: Mapping[str, Any], tokens_per_iter: int) -> dict[str, int]:
    """Return `max_iters`, `warmup_iters` and `lr_decay_iters`. A number of tokens comes before a number of iterations.

    As the first iteration is number 0, a run makes `max_iters` + 1 of them: the last one begins before `max_tokens`.

    Args:
        settings: the settings of train.py.
        tokens_per_iter: tokens per iteration, all ranks together.
    """
    found = {f"{name}_iters": settings[f"{name}_iters"] for name in ("max", "warmup", "lr_decay")}
    for name, first in (("max", 1), ("warmup", 0), ("lr_decay", 0)):
        if tokens := settings[f"{name}_tokens"]:
            found[f"{name}_iters"] = math.ceil(tokens / tokens_per_iter) - first
    return found
