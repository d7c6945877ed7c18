"""The flags of `zero.build.build`: which combinations are valid, which implementation they choose, and its plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, get_args

from zero.codecs import codec_of
from zero.layout import ParameterSpec, Plan, plan
from zero.options import Options, ParamDtype
from zero.sharded_state import zero_redundancy_plan

Implementation = Literal["sharded", "torch"]


@dataclass(frozen=True, kw_only=True)
class Flags(Options):
    """How the ranks share the optimizer state. The options and `shard_gradients` belong to ShardedOptimizer."""

    use_zero1: bool = True  # divide the optimizer state among the ranks
    zero1_impl: str = "sharded"  # `zero.ShardedOptimizer`, or 'torch': `torch.distributed.optim.ZeroRedundancyOptimizer`
    shard_gradients: bool = False  # no full gradient outlives its bucket; takes one reduce-scatter per micro-step

    def __post_init__(self) -> None:
        super().__post_init__()
        codec_of(self.state_dtype)
        for name, choices in (("zero1_impl", get_args(Implementation)), ("param_dtype", get_args(ParamDtype))):
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"{name}={value!r} is not one of {', '.join(choices)}")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """Return the flags among other settings of a program."""
        return cls(**{flag.name: settings[flag.name] for flag in fields(cls)})

    @property
    def is_sharded(self) -> bool:
        """Whether ShardedOptimizer is asked for: `implementation` says whether it is used."""
        return self.use_zero1 and self.zero1_impl == "sharded"

    def implementation(self, world_size: int) -> Literal["adamw", "torch", "sharded"]:
        """Return the implementation on `world_size` ranks: on one, AdamW, unless `param_dtype` or `state_dtype` save memory.

        Raises ValueError if the flags cannot be combined, or `shard_size` does not divide `world_size`.
        """
        if self.is_sharded:
            self.sharing(world_size)
            saves_alone = self.stored_dtype is not None or self.state_dtype != "float32"
            return "sharded" if world_size > 1 or saves_alone else "adamw"
        for flag in fields(self):
            value, changes_nothing = getattr(self, flag.name), flag.name in ("use_zero1", "zero1_impl", "bucket_mb")
            if value not in (flag.default, "float32") and not changes_nothing:  # a dtype of "float32" changes nothing either
                raise ValueError(f"{flag.name}={value} needs use_zero1=True, zero1_impl='sharded'")
        return "torch" if self.use_zero1 and world_size > 1 else "adamw"

    def stores_as_autocast(self, world_size: int) -> bool:
        """Whether ShardedOptimizer stores weights as autocast rounds them: with all masters on one rank, this saves nothing."""
        return self.param_dtype == "auto" and self.sharing(world_size) > 1

    def plan(self, params: Sequence[ParameterSpec], world_size: int) -> Plan:
        """Return the plan of the implementation on `world_size` ranks. Raises ValueError, see `implementation`."""
        implementation = self.implementation(world_size)
        if implementation == "sharded":
            params = params if self.stores_as_autocast(world_size) else [spec._replace(autocast=None) for spec in params]
            return plan(params, self.sharing(world_size), self)
        return zero_redundancy_plan(params, world_size) if implementation == "torch" else Plan(tuple(params), 1)
