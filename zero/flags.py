"""The flags of `zero.build.build`: which combinations are valid, which implementation they choose, and its plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

import torch

from zero.codecs import codec_of
from zero.layout import (
    BucketMB,
    ParameterSpec,
    Plan,
    check_options,
    plan,
    replicated_plan,
    resolve_shard_size,
    zero_redundancy_plan,
)

IMPLEMENTATIONS = ("sharded", "torch")
OPTIMIZERS = ("adamw", "muon")
MUON: dict[str, Any] = {
    "momentum": 0.95,
    "nesterov": True,
    "ns_steps": 5,
    "ns_dtype": "bfloat16",
}  # the defaults of `zero.Muon`
PARAM_DTYPES = {"float32": None, "bfloat16": torch.bfloat16}  # None: the model keeps its dtypes


@dataclass(frozen=True)
class Flags:
    """How the ranks share the optimizer state. All flags from `bucket_mb` on belong to ShardedOptimizer."""

    use_zero1: bool = True  # divide the optimizer state among the ranks; a single process does not divide it
    zero1_impl: str = "sharded"  # `zero.ShardedOptimizer`, or 'torch': `torch.distributed.optim.ZeroRedundancyOptimizer`
    bucket_mb: BucketMB = "auto"  # megabytes per bucket, see `zero.layout.auto_bucket_mb`
    shard_gradients: bool = False  # no full gradient outlives its bucket; takes one reduce-scatter per micro-step
    param_dtype: str = "float32"  # 'bfloat16': also the gradients, and each rank holds 1/N of the float32 masters
    check_reads: bool = False  # with `overlap`: each forward refuses operations on parameters that have not arrived
    shard_size: int = 0  # consecutive ranks that share the state, each such group has all of it; 0: all ranks
    master_dtype: str = "float32"  # 'remainder': hold the masters of bfloat16 weights as the 16 bits that these lack
    state_dtype: str = "float32"  # 'bfloat16' or 'int8': hold the state in fewer bytes between updates

    def __post_init__(self) -> None:
        if self.zero1_impl not in IMPLEMENTATIONS:
            raise ValueError(f"zero1_impl={self.zero1_impl!r} is not one of {', '.join(IMPLEMENTATIONS)}")
        if self.param_dtype not in PARAM_DTYPES:
            raise ValueError(f"param_dtype={self.param_dtype!r} is not one of {', '.join(PARAM_DTYPES)}")
        check_options(self.bucket_mb, "element", self.master_dtype)
        codec_of(self.state_dtype)
        if self.master_dtype == "remainder" and self.param_dtype != "bfloat16":
            raise ValueError(f"master_dtype='remainder' needs param_dtype='bfloat16', not {self.param_dtype!r}")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """Return the flags of a program's settings, which have the names of the flags, or the prefix "zero_" before them."""
        names = {flag.name: flag.name if flag.name in settings else f"zero_{flag.name}" for flag in fields(cls)}
        return cls(**{name: settings[setting] for name, setting in names.items()})

    def implementation(self, world_size: int) -> Literal["adamw", "torch", "sharded"]:
        """Return the implementation on `world_size` ranks. A single rank has plain AdamW for all flags.

        Raises:
            ValueError: if several ranks cannot combine the flags, or `shard_size` does not divide `world_size`.
        """
        if world_size == 1:
            return "adamw"
        if self.use_zero1 and self.zero1_impl == "sharded":
            resolve_shard_size(self.shard_size, world_size)
            return "sharded"
        if self.param_dtype != "float32":
            raise ValueError(
                f"param_dtype={self.param_dtype!r} needs the master weights of use_zero1=True, zero1_impl='sharded'"
            )
        for name in ("shard_gradients", "check_reads", "shard_size", "state_dtype"):
            if (value := getattr(self, name)) not in (0, "float32"):
                setting = f"zero_{name}" if name in ("check_reads", "shard_size") else name
                raise ValueError(f"{setting}={value} needs use_zero1=True, zero1_impl='sharded'")
        return "torch" if self.use_zero1 else "adamw"

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `zero.layout.plan` that ShardedOptimizer takes as well."""
        return {
            "bucket_mb": self.bucket_mb,
            "param_dtype": PARAM_DTYPES[self.param_dtype],
            "master_dtype": self.master_dtype,
            "state_dtype": self.state_dtype,
        }

    def plan(self, params: Sequence[ParameterSpec], world_size: int) -> Plan:
        """Return the plan of the implementation on `world_size` ranks. Raises ValueError, see `implementation`."""
        implementation = self.implementation(world_size)
        if implementation == "sharded":
            sharing = resolve_shard_size(self.shard_size, world_size)
            return plan(params, sharing, **self.options)
        return zero_redundancy_plan(params, world_size) if implementation == "torch" else replicated_plan(params)


def muon_of(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what a program's settings say of the groups of `zero.Muon` that have matrices; None: its optimizer is AdamW.

    Raises:
        ValueError: if `optimizer` is neither, or it is AdamW and a setting of Muon has been changed.
    """
    if settings["optimizer"] not in OPTIMIZERS:
        raise ValueError(f"optimizer={settings['optimizer']!r} is not one of {', '.join(OPTIMIZERS)}")
    found = {name: settings[f"muon_{name}"] for name in MUON}
    for name, value in found.items() if settings["optimizer"] != "muon" else ():
        if value != MUON[name]:
            raise ValueError(f"muon_{name}={value} needs optimizer=muon")
    return found if settings["optimizer"] == "muon" else None
