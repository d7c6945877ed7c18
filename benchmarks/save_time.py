"""Time and memory to collect the state of all ranks on rank 0, and to write and load it in each checkpoint format."""

import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contenders import Contender, Setup
from benchmarks.memory_profile import free_unused_memory
from forecast.modes import MODES
from run.memory_meter import peak_bytes, reset_peak
from zero import checkpoint
from zero.host_comm import broadcast_object, gather_objects, is_rank_0
from zero.tensors import tensors_in

COST = 1, 1  # models and micro-steps of a mode, without the checkpoints


def checkpoint_rows(setup: Setup, modes: list[str], rounds: int) -> list[dict[str, Any]]:
    """Return one row per mode and format. Needs to be called on all ranks.

    A row holds the seconds of the first consolidation, the median seconds of the consolidations after it, the memory that they
    take in addition to the state itself, and the seconds and megabytes of one checkpoint format on the disk.

    If `torch` is one of the modes, the last row is PyTorch's own `consolidate_state_dict`. It takes a minute and runs once.
    """
    rows = []
    for mode in modes:
        contender = _trained(setup, mode)
        tries = [_consolidation(contender, checkpoint.consolidate) for _ in range(rounds + 1)]
        figures = _figures(tries)
        rows += [{"mode": mode, **figures, **saved} for saved in _save_and_restore(contender)]
        del contender
    if "torch" in modes:
        tries = [_consolidation(_trained(setup, "torch"), _consolidate_pytorch)]
        rows.append({"mode": "consolidate_state_dict", **_figures(tries)})
    return rows


def _trained(setup: Setup, mode: str) -> Contender:
    """Return a contender after one step, so that there is optimizer state."""
    contender = Contender(setup, MODES[mode]).wrap()
    contender.step()
    contender.wait()
    return contender


def _figures(tries: list[tuple[float, int]]) -> dict[str, float]:
    """Return the columns for several calls of `_consolidation`. Needs to be called on all ranks."""
    first, *rest = (seconds for seconds, _ in tries)
    extra = gather_objects(max(extra for _, extra in tries))  # by rank
    return {
        "first, s": first,
        "consolidate, s": statistics.median(rest or [first]),
        "rank 0 extra, MB": extra[0] / 1e6,
        "others extra, MB": max(extra[1:], default=0) / 1e6,
    }


def _consolidation(contender: Contender, consolidate: Callable[[torch.optim.Optimizer], Any]) -> tuple[float, int]:
    """Return the seconds of a consolidation and its peak memory in bytes, without the state that it returned."""
    free_unused_memory()
    dist.barrier()
    cpu = torch.device("cpu")
    reset_peak(cpu)
    before, begin = peak_bytes(cpu), time.perf_counter()
    state = consolidate(contender.optimizer)
    return time.perf_counter() - begin, peak_bytes(cpu) - before - sum(tensor.nbytes for tensor in tensors_in(state))


def _consolidate_pytorch(optimizer: Any) -> dict[str, Any] | None:
    optimizer.consolidate_state_dict(to=0)
    return optimizer.state_dict() if is_rank_0() else None


def _save_and_restore(contender: Contender) -> list[dict[str, Any]]:
    """Return the seconds and megabytes of a checkpoint on disk, for each format. Needs to be called on all ranks."""
    rows = []
    for format in checkpoint.FORMATS:
        with tempfile.TemporaryDirectory() as folder:
            folder = broadcast_object(folder)
            writer = checkpoint.CheckpointWriter(folder, format=format)
            values = {"model_args": {}, "config": {}, "iter_num": 1, "best_val_loss": 0.0}
            writer.write(contender.module, contender.optimizer, values)
            dist.barrier()
            begin = time.perf_counter()
            path = f"{folder}/ckpt.pt"
            loaded = checkpoint.load(path)
            checkpoint.restore(contender.optimizer, loaded["optimizer"], checkpoint.chunk_reader(path, loaded))
            row: dict[str, Any] = {"format": format, "load, s": time.perf_counter() - begin}
            for report in writer.outcomes():
                if not isinstance(report, checkpoint.SaveReport):
                    raise report
                row |= {"write, s": report.write_s, "MB": report.nbytes / 1e6}
            rows.append(row)
            dist.barrier()
    return rows
