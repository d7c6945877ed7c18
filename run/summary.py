"""The figures of a whole run, from its events: for the summary in wandb and TensorBoard, and for the report card."""

import math
from array import array
from typing import Any

import numpy as np

from run.metrics import is_of_part

_LOSSES = {"loss": "iter/loss", "val_loss": "val/loss", "val_bits_per_byte": "val/bits_per_byte"}
_MEDIANS = ("throughput/tokens_per_second", "mfu", "comm/exposed_ms", "comm/exposed_percent")


def is_reached(settings: dict[str, Any], val_loss: float) -> bool:
    """Return whether a run ends at this loss. Runs of earlier versions do not have the setting."""
    return val_loss <= (settings.get("stop_at_val_loss") or -math.inf)


class Summary:
    """Collects events. `figures` has what is known so far.

    A run that resumes begins with the events that it keeps, so that what a killed process had done beyond its checkpoint
    counts once, when it is done again.

    Args:
        facts: content of run.json. The medians begin with the last change of implementation or world size.
    """

    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts = facts
        self.medians_from: int = facts["parts"][-1]["from_iter"] if "parts" in facts else 0
        self.restarts: list[int] = facts.get("starts", [])[1:]  # iterations at which the run was resumed
        self.last: dict[str, Any] = {}  # by metric
        self.saves: dict[int, float] = {}  # iteration of a checkpoint: its bytes
        self.save_error = ""  # why the last save failed, if it did
        self.warnings: list[str] = []
        self.reached: dict[str, Any] = {}  # the first evaluation with a loss of at most `stop_at_val_loss`
        self.best_at: dict[str, int] = {}  # iteration of the best loss, by its name in `_LOSSES`
        self._figures: dict[str, float] = {}  # what is known so far, without the medians
        self._series = {key: array("d") for key in _MEDIANS}

    def add(self, event: dict[str, Any]) -> None:
        """Include an event, which has None or nan for a number that was not finite."""
        known = {key: value for key, value in event.items() if _is_known(value)}
        if "memory/predicted_peak_mb" in known:  # a process begins, perhaps with another implementation
            self.last = {key: value for key, value in self.last.items() if not is_of_part(key)}
        self.last |= known
        for name, key in _LOSSES.items():
            if key in known:
                self._add_loss(name, known[key], event["iter"])
        if not self.reached and "val/loss" in known and is_reached(self.facts, known["val/loss"]):
            self.reached = known
        if "memory/peak_mb" in known:
            self._figures["peak_memory_mb"] = max(known["memory/peak_mb"], self._figures.get("peak_memory_mb", 0.0))
        if event["iter"] >= self.medians_from:
            for key in known.keys() & self._series.keys():
                self._series[key].append(known[key])
        if "checkpoint/bytes" in known:
            self.saves[event["iter"]] = known["checkpoint/bytes"]
        if any(key.startswith("checkpoint/") for key in known):
            self.save_error = known.get("checkpoint/error", "")
        if "warning" in known:
            self.warnings.append(known["warning"])

    def _add_loss(self, name: str, loss: float, iteration: int) -> None:
        self._figures.setdefault(f"first_{name}", loss)
        if loss < self._figures.get(f"best_{name}", math.inf):
            self._figures[f"best_{name}"], self.best_at[name] = loss, iteration
        self._figures[f"last_{name}"] = loss

    def figures(self) -> dict[str, float]:
        """Return the figures that are known so far, by their names in run/metrics.py."""
        found = dict(self._figures)
        found |= {f"median_{key.rpartition('/')[2]}": np.median(series) for key, series in self._series.items() if series}
        found |= {"checkpoints": len(self.saves), "restarts": len(self.restarts), "warnings": len(self.warnings)}
        return {name: float(figure) for name, figure in found.items()}


def _is_known(value: Any) -> bool:
    return isinstance(value, str) or (value is not None and math.isfinite(value))
