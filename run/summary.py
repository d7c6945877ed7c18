"""The figures of a whole run, from its events: for the summary in wandb and TensorBoard, and for the report card."""

import math
from array import array
from typing import Any

import numpy as np

LOSSES = {"loss": "iter/loss", "val_loss": "val/loss"}
_MEDIANS = ("throughput/tokens_per_second", "mfu", "comm/exposed_ms", "comm/exposed_percent")


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
        self._series = {key: array("d") for key in (*LOSSES.values(), *_MEDIANS, "memory/peak_mb")}  # iteration, value, ...

    def add(self, event: dict[str, Any]) -> None:
        """Include an event, which has None or nan for a number that was not finite."""
        known = {key: value for key, value in event.items() if _is_known(value)}
        if "memory/predicted_peak_mb" in known:  # a process begins, perhaps with another implementation
            self.last = {key: value for key, value in self.last.items() if not key.startswith(("memory/", "comm/"))}
        self.last |= known
        for key in known.keys() & self._series.keys():
            self._series[key].extend((event["iter"], known[key]))
        if "checkpoint/bytes" in known:
            self.saves[event["iter"]] = known["checkpoint/bytes"]
        if any(key.startswith("checkpoint/") for key in known):
            self.save_error = known.get("checkpoint/error", "")
        if "warning" in known:
            self.warnings.append(known["warning"])

    def series(self, key: str) -> np.ndarray:
        """Return the iterations and the values of a metric that `figures` needs, (2, number) float64."""
        return np.array(self._series[key]).reshape(-1, 2).T

    def figures(self) -> dict[str, float]:
        """Return the figures that are known so far, by their names in run/metrics.py."""
        found: dict[str, float] = {}
        for name, key in LOSSES.items():
            if (values := self.series(key)[1]).size:
                found |= {f"first_{name}": values[0], f"best_{name}": values.min(), f"last_{name}": values[-1]}
        if "best_val_loss" in found and self.facts.get("val_bytes_per_token"):
            found["best_val_bits_per_byte"] = found["best_val_loss"] / math.log(2) / self.facts["val_bytes_per_token"]
        for key in _MEDIANS:
            iterations, values = self.series(key)
            if (counted := values[iterations >= self.medians_from]).size:
                found[f"median_{key.rpartition('/')[2]}"] = np.median(counted)
        if (peaks := self.series("memory/peak_mb")[1]).size:
            found["peak_memory_mb"] = peaks.max()
        found |= {"checkpoints": len(self.saves), "restarts": len(self.restarts), "warnings": len(self.warnings)}
        return {name: float(figure) for name, figure in found.items()}


def _is_known(value: Any) -> bool:
    return isinstance(value, str) or (value is not None and math.isfinite(value))
