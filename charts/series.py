"""What the charts of runs share: a run with its curves, how each run looks, titles."""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from charts.differences import Facts
from charts.style import altair

MOST_POINTS = 1000  # of a curve; more than a chart has pixels
WINDOW = 25  # points of a rolling median

# Okabe and Ito, as in style.py, but a lighter blue, and a grey instead of black and yellow, so that all can be seen on a white
# and on a black page. With more runs the colours repeat, with other shapes and dashes.
COLOURS = ("#1B80C4", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C8C8C")
_SHAPES = ("circle", "square", "triangle-up", "diamond")
_DASHES = ([1, 0], [6, 3], [2, 2], [8, 2, 2, 2])
INK = "ink"  # the parameter of a chart with the colour of texts and ticks
PICKED = "picked"  # the parameter of a chart with the runs that are highlighted; none: all of them
WIDTH, HEIGHT = 540, 240  # of a chart of curves without its axes, in pixels before the scale


class Curve:
    """The points (iteration, value) of one metric, thinned out while they arrive, so that a long run takes little memory.

    At most `MOST_POINTS` stay: the first one, and every `every`-th after it. The last one stays in addition.

    Attributes:
        last, lowest: the last point, and the first one with the smallest value, of all points that have arrived.
        largest: the largest value of them.
    """

    def __init__(self) -> None:
        self.every = 1
        self.last = self.lowest = 0, math.nan
        self._kept: list[tuple[int, float]] = []
        self._count = 0
        self.largest = -math.inf

    def add(self, iteration: int, value: float) -> None:
        self.last = iteration, value
        self.lowest = self.last if self._count == 0 or value < self.lowest[1] else self.lowest
        self.largest = max(value, self.largest)
        if self._count % self.every == 0:
            self._kept.append(self.last)
        self._count += 1
        if len(self._kept) > MOST_POINTS:
            del self._kept[1::2]
            self.every *= 2

    @property
    def points(self) -> list[tuple[int, float]]:
        return self._kept if self._kept[-1] is self.last else [*self._kept, self.last]

    def latest(self) -> float:
        return self.last[1]

    def median(self) -> float:
        return median(value for _, value in self.points)


def rolling_median(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return for each point the median of the points around it: `WINDOW`, or a third of a short curve."""
    half = min(WINDOW // 2, len(points) // 6)
    values, found = [value for _, value in points], []
    for place, (iteration, _) in enumerate(points):
        first = max(0, min(place - half, len(points) - 2 * half - 1))
        found.append((iteration, median(values[first : first + 2 * half + 1])))
    return found


class Run(NamedTuple):
    """A run: its folder, its facts, its state (running, ended, stopped, failed, killed; "" if unknown), and its metrics."""

    name: str
    folder: str
    facts: Facts
    state: str
    curves: Mapping[str, Curve]


class Panel(NamedTuple):
    """A chart without its width.

    Attributes:
        under_mouse: kind and run of the rows that the page shows for the iteration under the mouse; none if the x axis has no
            iterations.
        is_wide: the page gives it two columns, if there are any.
    """

    chart: Any
    under_mouse: Sequence[str] = ()
    is_wide: bool = False


def look(position: int) -> tuple[str, str, list[int]]:
    """Return the colour, the shape and the dashes of the run at a position: no two of the first 28 have the same."""
    row = position // len(COLOURS)
    return COLOURS[position % len(COLOURS)], _SHAPES[row % len(_SHAPES)], _DASHES[row % len(_DASHES)]


def on_gpu(run: Run) -> bool:
    return "memory/reserved_mb" in run.curves


def whose_peak(runs: Sequence[Run]) -> str:
    """Return what there is to say about the peak of runs on a CPU."""
    return "" if all(map(on_gpu, runs)) else "on a CPU it is that of the process, with Python and its libraries"


def rows(position: int, points: Sequence[tuple[int, float]], kind: str, divisor: float = 1) -> list[dict[str, Any]]:
    """Return the points of a run as rows of a chart."""
    return [
        {"run": position, "kind": kind, "iter": iteration, "value": rounded(value / divisor)} for iteration, value in points
    ]


def rounded(value: float) -> float:
    return float(f"{value:.6g}")


def positions(runs: Sequence[Run]) -> list[int]:
    return list(range(len(runs)))


def colour(runs: Sequence[Run]) -> Any:
    alt = altair()
    colours = [look(position)[0] for position in positions(runs)]
    return alt.Color("run:N", scale=alt.Scale(domain=positions(runs), range=colours), legend=None)


def shape(runs: Sequence[Run]) -> Any:
    alt = altair()
    shapes = [look(position)[1] for position in positions(runs)]
    return alt.Shape("run:N", scale=alt.Scale(domain=positions(runs), range=shapes), legend=None)


def dash(runs: Sequence[Run], dashes: list[list[int]] | None = None) -> Any:
    alt = altair()
    dashes = dashes or [look(position)[2] for position in positions(runs)]
    return alt.StrokeDash("run:N", scale=alt.Scale(domain=positions(runs), range=dashes), legend=None)


def opacity(opacity: float = 1) -> Any:
    alt = altair()
    picked = f"!{PICKED}.length || indexof({PICKED}, datum.run) >= 0"
    return alt.when(picked).then(alt.value(opacity)).otherwise(alt.value(0.08))


def iterations() -> Any:
    alt = altair()
    return alt.X("iter:Q", title="iteration", scale=alt.Scale(nice=False, padding=5), axis=alt.Axis(labelFlush=True))


def thinned(curves: Iterable[Curve]) -> list[str]:
    every = max(curve.every for curve in curves)
    return [f"one of {every} points is drawn"] if every > 1 else []


def title(title: str, notes: Sequence[str]) -> Any:
    """Return a title with notes below it, in lines that fit in the narrowest chart of the page."""
    lines = textwrap.wrap("; ".join(filter(None, notes)), 75)
    return altair().TitleParams(title, subtitle=lines or [" "], fontSize=14, subtitleFontSize=12)
