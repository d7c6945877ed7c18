"""The options of ShardedOptimizer: which ranks share the state, in which buckets, and in which form it is held."""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, get_args

import torch

BucketMB = float | Literal["auto"]  # megabytes (10**6 bytes) per bucket; auto: see `zero.layout.auto_bucket_mb`
ParamDtype = Literal["auto", "float32", "bfloat16", "bfloat16_remainder"]
PARAM_DTYPES = (*get_args(ParamDtype), "float16")  # float16 needs a scaler, which train.py has for float32 weights only


def weight_dtype(param_dtype: str) -> str:
    """Return the name of the dtype of gradients, and of weights that autocast does not cast, for a value of `param_dtype`."""
    return "float32" if param_dtype == "auto" else param_dtype.removesuffix("_remainder")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What ShardedOptimizer can do. Raises ValueError if `bucket_mb` or `param_dtype` is invalid; others are checked in use."""

    # consecutive ranks that share the state, as those of a machine; each group of them has a replica (hybrid sharding). 0: all
    shard_size: int = 0
    bucket_mb: BucketMB = "auto"
    # 'float32': each parameter keeps its dtype. 'auto': those that only autocast reads are stored in its dtype, and each rank
    # keeps float32 masters of its own slices: no value changes. Otherwise the dtype in which all are stored, with masters;
    # 'bfloat16_remainder' holds these as the 16 bits that bfloat16 lacks, see `zero.masters`
    param_dtype: str = "auto"
    # 'bfloat16' or 'int8' hold state that has a float32 number per element in fewer bytes between updates, see `zero.codecs`.
    # The update itself is in float32. Classes of your own name in `rounded_state` what may be rounded
    state_dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.bucket_mb != "auto" and not (isinstance(self.bucket_mb, int | float) and 0 < self.bucket_mb < math.inf):
            raise ValueError(f"bucket_mb={self.bucket_mb!r} must be 'auto' or a positive number")
        if self.param_dtype not in PARAM_DTYPES:
            raise ValueError(f"param_dtype={self.param_dtype!r} is not one of {', '.join(PARAM_DTYPES)}")

    @classmethod
    def taken_from(cls, arguments: dict[str, Any]) -> Self:
        """Return the options among `arguments`, and remove them there."""
        return cls(**{option.name: arguments.pop(option.name) for option in fields(cls) if option.name in arguments})

    @property
    def stored_dtype(self) -> torch.dtype | None:
        """The dtype in which all parameters are stored; None: their own, or that of autocast."""
        return None if self.param_dtype in ("auto", "float32") else getattr(torch, weight_dtype(self.param_dtype))

    def sharing(self, world_size: int) -> int:
        """Return how many of `world_size` ranks share the state. One rank shares it with nobody, whatever `shard_size` is.

        Raises ValueError if `shard_size` does not divide `world_size`.
        """
        size = self.shard_size if world_size > 1 else 0
        if size and (size < 0 or world_size % size):
            fitting = [str(each) for each in range(1, world_size + 1) if world_size % each == 0]
            raise ValueError(f"shard_size={size} does not divide {world_size} ranks; use one of {', '.join(fitting)}")
        return size or world_size
