"""Parameters that forward reads through casts of autocast only: a ShardedOptimizer stores them as these casts return them."""

from collections.abc import Mapping

import torch
from torch import nn


def autocast_parameters(model: nn.Module, dtype: torch.dtype) -> dict[nn.Parameter, torch.dtype]:
    """Return the parameters that autocast to `dtype` casts wherever forward reads them, for `autocast` of ShardedOptimizer.

    These are the float32 weights and biases of its nn.Linear layers. A parameter that another module has too, such as a tied
    embedding, is left out, and so is a Linear with a forward of its own. Each layer must run once per backward; several times
    only in one block of autocast, and not in a compiled module: through several casts, float32 weights add up in float32.
    """
    found: dict[nn.Parameter, torch.dtype] = {}
    others: set[nn.Parameter] = set()
    for part in model.modules():
        is_linear = type(part) is nn.Linear and "forward" not in vars(part)
        for name, param in part.named_parameters(recurse=False):
            if is_linear and name in ("weight", "bias") and param.dtype == torch.float32:
                found[param] = dtype
            else:
                others.add(param)
    return {param: dtype for param in found if param not in others}


def check_autocast(autocast: Mapping[nn.Parameter, torch.dtype]) -> None:
    """Raise ValueError if parameters cannot be stored in these dtypes."""
    for param, dtype in autocast.items():
        if param.dtype != torch.float32 or dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"autocast casts float32 parameters to bfloat16 or float16, not {param.dtype} to {dtype}")


def check_runs_under(device_type: str, dtype: torch.dtype) -> None:
    """Raise RuntimeError outside of autocast of this dtype."""
    if not (torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type) == dtype):
        how = f"call the wrapper's forward in torch.autocast({device_type!r}, {dtype}), or give ShardedOptimizer no `autocast`"
        raise RuntimeError(f"weights are stored in {dtype}, as autocast rounds them; {how}")
