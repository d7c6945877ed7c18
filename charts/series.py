"""What the charts of runs share: a run with its curves, how each run looks, titles."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from charts.differences import Facts
from charts.style import PICKED, alt, scale_of
from run.metrics import is_of_part

MOST_POINTS = 1000  # of a curve in a chart; more than it has pixels
WINDOW = 25  # points of a rolling median
WIDTH, HEIGHT = 540, 240  # of a chart of curves without its axes, in pixels before the scale

# Okabe and Ito, as in style.py, but a lighter blue, and a grey instead of black and yellow, so that all can be seen on a white
# and on a black page. With more runs the colours repeat, with other dashes.
COLOURS = ("#1B80C4", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C8C8C")
_DASHES = ([1, 0], [6, 3], [2, 2], [8, 2, 2, 2])

Points = Sequence[tuple[int, float]]  # iteration and value
latest: Callable[[Sequence[float]], float] = itemgetter(-1)


class Run(NamedTuple):
    """A run: its folder, its facts, its state (running, ended, stopped, failed, killed; "" if unknown), and its metrics."""

    name: str
    folder: str
    facts: Facts
    state: str
    curves: Mapping[str, Points]

    def get(self, key: str, figure_of: Callable[[Sequence[float]], float]) -> float | None:
        """Return a figure, such as the `median`, of a metric's values, those of the last part if it `is_of_part`, or None."""
        begin = self.facts["parts"][-1]["from_iter"] if is_of_part(key) and self.facts.get("parts") else 0
        values = [value for at, value in self.curves.get(key, ()) if at >= begin]
        return figure_of(values) if values else None

    @property
    def on_gpu(self) -> bool:
        return "memory/reserved_mb" in self.curves


def look(position: int) -> tuple[str, list[int]]:
    """Return the colour and the dashes of the run at a position: no two of the first 28 have the same."""
    return COLOURS[position % len(COLOURS)], _DASHES[position // len(COLOURS) % len(_DASHES)]


def rows(position: int, points: Points, kind: str, divisor: float = 1) -> list[dict[str, Any]]:
    """Return the points of a run, or `MOST_POINTS` of them from the first to the last, as rows of a chart."""
    last, drawn = len(points) - 1, points
    if len(points) > MOST_POINTS:
        drawn = [points[step * last // (MOST_POINTS - 1)] for step in range(MOST_POINTS)]
    return [{"run": position, "kind": kind, "iter": at, "value": rounded(value / divisor)} for at, value in drawn]


def rounded(value: float) -> float:
    return float(f"{value:.6g}")


def by_run(count: int, dashes: Mapping[int, list[int]] = {}, opaque: float = 1) -> dict[str, Any]:
    """Return the encodings in which each of `count` runs has its look, and fades when others are highlighted.

    `dashes`: of runs that have others, by their positions.
    """
    colours = {position: look(position)[0] for position in range(count)}
    dashed = {position: dashes.get(position, look(position)[1]) for position in range(count)}
    return {
        "color": alt.Color("run:N", scale=scale_of(colours), legend=None),
        "strokeDash": alt.StrokeDash("run:N", scale=scale_of(dashed), legend=None),
        "opacity": opacity(opaque),
    }


def opacity(opaque: float = 1) -> Any:
    picked = f"!{PICKED}.length || indexof({PICKED}, datum.run) >= 0"
    return alt.when(picked).then(alt.value(opaque)).otherwise(alt.value(0.08))


def title(title: str, notes: Sequence[str]) -> Any:
    """Return a title with notes below it, in lines that fit in the narrowest chart of the page."""
    lines = textwrap.wrap("; ".join(filter(None, notes)), 75)
    return alt.TitleParams(title, subtitle=lines or [" "], fontSize=14, subtitleFontSize=12)
