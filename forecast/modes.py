"""The modes: ways to train that are compared, by the name in all tables and pictures.

A row says everything that bench.py, plan.py, `benchmarks.gpu` and the charts need to know of a mode.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from zero.flags import Flags
from zero.muon.muon import MOMENTUM

LOSS_CHUNK = 1024  # tokens: large enough for a GPU, small beside all tokens


@dataclass(frozen=True)
class Mode:
    """A way to train: ShardedOptimizer as in train.py, with what the other fields change."""

    label: str  # for a reader who does not know the name
    colour: str  # neighbours can be told apart by the colour-blind: Okabe and Ito, greys, Tol
    flags: Flags = Flags()
    planned: bool = False  # plan.py has a row of it, and bench.py trains with it by default
    in_place: bool = False  # zero_grad(set_to_none=False), see `forecast.run_memory.predicted`
    muon: bool = False
    loss_chunk: int = 0
    hybrid: bool = False  # shard_size ranks share the state
    overlap: bool = True
    simple: bool = False  # ShardedOptimizer under DistributedDataParallel
    fully_shard: Mapping[str, Any] | None = None  # PyTorch's FSDP2, with these arguments; if any, it gathers once an iteration

    @property
    def is_built(self) -> bool:
        """Whether `zero.build` makes it. Of the others there is no prediction and no checkpoint."""
        return not self.simple and self.fully_shard is None


_PLAIN, _TORCH = Flags(use_zero1=False), Flags(zero1_impl="torch")
_REMAINDER = Flags(param_dtype="bfloat16_remainder")
MODES = {
    "adamw_in_place": Mode("AdamW with DDP, in place", "#333333", _PLAIN, planned=True, in_place=True),
    "torch_in_place": Mode("ZeroRedundancyOptimizer, in place", "#F0E442", _TORCH, planned=True, in_place=True),
    "adamw": Mode("AdamW with DDP, set_to_none=True", "#888888", _PLAIN, planned=True),
    "torch": Mode("ZeroRedundancyOptimizer", "#E69F00", _TORCH, planned=True),
    "sharded": Mode("sharded (the default)", "#009E73", planned=True),
    "float32": Mode("sharded + float32 weights", "#DDAA33", Flags(param_dtype="float32")),
    "shard_gradients": Mode("sharded + shard_gradients", "#0072B2", Flags(shard_gradients=True), planned=True),
    "bfloat16": Mode("sharded + bfloat16 weights", "#CC79A7", Flags(param_dtype="bfloat16"), planned=True),
    "remainder": Mode("sharded + bfloat16 weights + 16-bit remainders", "#D55E00", _REMAINDER, planned=True),
    "int8": Mode("sharded + 8-bit state", "#56B4E9", Flags(state_dtype="int8"), planned=True),
    "codecs": Mode("sharded + remainders + 8-bit state", "#661100", replace(_REMAINDER, state_dtype="int8")),
    "loss_chunk": Mode(f"sharded + loss_chunk={LOSS_CHUNK}", "#44AA99", loss_chunk=LOSS_CHUNK),
    "hybrid": Mode("sharded, shard_size ranks share the state", "#117733", hybrid=True),
    "no_overlap": Mode("sharded, the step waits for the all-gathers", "#DDCC77", overlap=False),
    "simple": Mode("all-reduce, update of a part, all-gather", "#999933", simple=True),
    "fsdp2": Mode("fully_shard, whole in an iteration", "#882255", fully_shard={"reshard_after_forward": False}),
    "fsdp2_reshard": Mode("fully_shard with its defaults", "#AA4499", fully_shard={}),
    "muon": Mode("sharded, with Muon", "#332288", muon=True),
    "plain_muon": Mode("Muon with DDP", "#CC6677", _PLAIN, muon=True),
}


def muon_of(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what settings say of the groups of `zero.Muon` that have matrices; None: the optimizer is AdamW.

    Raises:
        ValueError: if it is AdamW and the momentum of Muon has been changed.
    """
    momentum = settings["muon_momentum"]
    if settings["optimizer"] == "muon":
        return {"momentum": momentum}
    if momentum != MOMENTUM:
        raise ValueError(f"muon_momentum={momentum} needs optimizer=muon")
    return None


def without_effect(flags: Flags, world_size: int) -> list[str]:
    """Return `use_zero1` and the settings other than the defaults, if they change nothing on `world_size` ranks."""
    if world_size > 1 or not flags.use_zero1:
        return []
    acting = {"param_dtype", "state_dtype"}
    if flags.implementation(1) == "sharded":
        acting |= {"use_zero1", "bucket_mb"}
    if flags.stored_dtype is not None:
        acting.add("shard_gradients")  # sums over micro-steps are float32
    values = {flag: getattr(flags, flag.name) for flag in fields(flags) if flag.name not in acting}
    return [f"{flag.name}={value}" for flag, value in values.items() if value is True or value != flag.default]


def explained(names: Iterable[str]) -> str:
    """Return a line per mode for a help text: its name, and its label with the settings of train.py that it stands for."""
    lines = []
    for name in names:
        flags = vars(MODES[name].flags)
        changed = [f"{flag.name}={flags[flag.name]}" for flag in fields(Flags) if flags[flag.name] != flag.default]
        lines.append(f"  {name:<15}  {'; '.join([MODES[name].label, *changed])}\n")
    return "".join(lines)


def divided_batch(batch_size: int, steps: int, world_size: int) -> tuple[int, int]:
    """Return a batch_size and gradient_accumulation_steps that the ranks can share, for the same sequences per iteration.

    The batch size is the largest one that is possible, up to the given one. If the number of sequences is no multiple of the
    number of ranks, it grows to the next one.
    """
    each = math.ceil(batch_size * steps / world_size)  # sequences of a rank
    size = next(size for size in range(batch_size, 0, -1) if each % size == 0)
    return size, each // size * world_size


def batch_in_words(sequences: int, before: int) -> str:
    """Return whether an iteration with other settings has as many sequences as `before`."""
    if sequences == before:
        return "the same global batch"
    return f"a global batch of {sequences} sequences in place of {before}, {sequences / before - 1:.1%} more"
