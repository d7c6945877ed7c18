"""The figures of a whole run, from its events: for the summary in wandb and for the report card."""

import math
from array import array
from typing import Any

import numpy as np

from run.metrics import FIGURES, is_of_part


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
        self.at: dict[str, int] = {}  # iteration of a figure, such as best_loss
        self.timed = -1  # the last iteration whose time is known
        self._figures: dict[str, float] = {}  # what is known so far, without the medians
        self._series: dict[str, array[float]] = {}  # the values of each median

    def add(self, event: dict[str, Any]) -> None:
        """Include an event, which has None or nan for a number that was not finite."""
        known = {key: value for key, value in event.items() if _is_known(value)}
        if "memory/predicted_peak_mb" in known:  # a process begins, perhaps with another implementation
            self.last = {key: value for key, value in self.last.items() if not is_of_part(key)}
            if event["iter"] == self.medians_from:
                self._series.clear()  # of the evaluation at the end of the part before
        self.last |= known
        for name, (which, metric) in FIGURES.items():
            if metric.key not in known or (which == "median" and event["iter"] < self.medians_from):
                continue
            value = known[metric.key]
            if which == "median":
                self._series.setdefault(name, array("d")).append(value)
            elif which == "last" or name not in self._figures or (which == "best" and value < self._figures[name]):
                self._figures[name], self.at[name] = value, event["iter"]
        if not self.reached and "val/loss" in known and is_reached(self.facts, known["val/loss"]):
            self.reached = known
        if "throughput/tokens_per_second" in known:
            self.timed = event["iter"]
        if "memory/peak_mb" in known:
            self._figures["peak_memory_mb"] = max(known["memory/peak_mb"], self._figures.get("peak_memory_mb", 0.0))
        if "checkpoint/bytes" in known:
            self.saves[event["iter"]] = known["checkpoint/bytes"]
        if any(key.startswith("checkpoint/") for key in known):
            self.save_error = known.get("checkpoint/error", "")
        if "warning" in known:
            self.warnings.append(known["warning"])

    def figures(self) -> dict[str, float]:
        """Return the figures that are known so far, by their names in run/metrics.py."""
        found = self._figures | {name: np.median(series) for name, series in self._series.items()}
        found |= {"checkpoints": len(self.saves), "restarts": len(self.restarts), "warnings": len(self.warnings)}
        return {name: float(figure) for name, figure in found.items()}


def _is_known(value: Any) -> bool:
    return isinstance(value, str) or (value is not None and math.isfinite(value))
