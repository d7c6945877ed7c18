"""The horizons of a run, in iterations. Arithmetic only."""

import math
from collections.abc import Mapping
from typing import Any


def horizons(settings: Mapping[str, Any], tokens_per_iter: int) -> dict[str, int]:
    """Return `max_iters`, `warmup_iters` and `lr_decay_iters`. A number of tokens comes before a number of iterations.

    Args:
        settings: the settings of train.py.
        tokens_per_iter: tokens per iteration, all ranks together.
    """
    return {
        f"{name}_iters": math.ceil(settings[f"{name}_tokens"] / tokens_per_iter) or settings[f"{name}_iters"]
        for name in ("max", "warmup", "lr_decay")
    }
