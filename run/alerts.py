"""Alerts about a run, from the metrics that it logs."""

import math
from collections import deque
from typing import Any, NamedTuple

import numpy as np

_WINDOW = 50  # logged losses that a new one is compared with
_DEVIATIONS = 6  # a loss is a spike if it is this many standard deviations above their mean ...
_RATIO = 1.1  # ... and this many times their mean
_LAG = 0.25  # a rank lags if the fastest one computes less than the slowest one by this part of the step ...
_TIMES = 5  # ... and the same rank is the slowest one in this many consecutive measurements


class Alert(NamedTuple):
    title: str
    text: str


class Alerts:
    """Finds loss spikes and ranks that lag. Each is reported once, until it has ended."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._slowest = -1  # rank
        self._in_a_row = 0  # number of measurements in which it was the slowest one by far

    def check(self, event: dict[str, Any]) -> list[Alert]:
        """Return the alerts of an event, the metrics by key."""
        return [alert for alert in (self._spike(event), self._lag(event)) if alert is not None]

    def _spike(self, event: dict[str, Any]) -> Alert | None:
        loss, losses, alert = event.get("iter/loss"), self._losses, None
        if loss is None or not math.isfinite(loss):  # the guard reports a loss that is not finite
            return None
        if len(losses) == _WINDOW:
            mean, deviation = float(np.mean(losses)), float(np.std(losses))
            if loss > max(mean + _DEVIATIONS * deviation, _RATIO * mean):
                alert = Alert("Loss spike", f"the loss of iteration {event['iter']} is {loss:.4f}; the mean was {mean:.4f}")
                losses.clear()  # compare only with losses from now on
        losses.append(loss)
        return alert

    def _lag(self, event: dict[str, Any]) -> Alert | None:
        if "time/slowest_rank" not in event:
            return None
        rank, spread, step = (event[f"time/{name}"] for name in ("slowest_rank", "rank_spread_ms", "step_ms"))
        if spread < _LAG * step:
            self._slowest, self._in_a_row = -1, 0
            return None
        self._slowest, self._in_a_row = rank, self._in_a_row + 1 if rank == self._slowest else 1
        if self._in_a_row != _TIMES:
            return None
        computes = f"computes {spread:.0f} ms longer than the fastest rank in a step of {step:.0f} ms"
        return Alert("A rank lags", f"at iteration {event['iter']}, rank {rank} {computes}")
