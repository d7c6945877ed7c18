"""Loss and peak of memory of the same short training in each mode."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contenders import Contender, Setup
from benchmarks.memory_profile import MICRO_STEPS, MemoryProfile, free_unused_memory
from data.dataset import Dataset
from distributed.ranks import sum_over_ranks
from forecast.modes import MODES
from zero.host_comm import gather_objects


def training_rows(setup: Setup, modes: list[str], data: Dataset, steps: int) -> Iterator[dict[str, Any]]:
    """Yield one row per mode: the peak of the fullest rank, and the losses. A step has two micro-steps in both.

    All modes begin with the same weights and get the same batches. A token beyond a small vocabulary becomes another one.
    Needs to be called on all ranks.
    """
    first: dict[str, Any] = {}
    for mode in modes:
        by_rank = gather_objects(MemoryProfile(setup, MODES[mode]).measure(can_save=False))
        peak = max(points["peak"]["total"] for points in by_rank)
        free_unused_memory()
        losses = _losses(setup, mode, data, steps)
        first = first or {"peak": peak, "losses": losses}
        differences = [abs(loss - other) for loss, other in zip(losses, first["losses"], strict=True)]
        row = {"mode": mode, "peak": peak, "losses": losses, "saved, %": 100 * (1 - peak / first["peak"])}
        yield row | {"first loss": losses[0], "last loss": losses[-1], "largest difference": max(differences)}


def _losses(setup: Setup, mode: str, data: Dataset, steps: int) -> list[float]:
    """Return the mean loss over the ranks of each step."""
    contender, rank, world_size = Contender(setup, MODES[mode]).wrap(), dist.get_rank(), dist.get_world_size()
    sequences = data.micro_batches(setup.seed, 0, setup.batch_size, MICRO_STEPS * world_size, rank, world_size)
    losses = []
    for _ in range(steps):
        batches = [data.batch("train", next(sequences)) % setup.config.vocab_size for _ in range(MICRO_STEPS)]
        loss = contender.step([torch.from_numpy(batch).to(setup.device) for batch in batches])
        losses.append(sum_over_ranks(loss) / world_size)
    return losses
