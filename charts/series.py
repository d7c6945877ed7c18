"""What the charts of runs share: a run with its curves, how each run looks, titles."""

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from statistics import median
from typing import Any, NamedTuple

from charts.differences import Facts
from charts.style import PICKED, altair

MOST_POINTS = 1000  # of a curve; more than a chart has pixels
WINDOW = 25  # points of a rolling median

# Okabe and Ito, as in style.py, but a lighter blue, and a grey instead of black and yellow, so that all can be seen on a white
# and on a black page. With more runs the colours repeat, with other shapes and dashes.
COLOURS = ("#1B80C4", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C8C8C")
_SHAPES = ("circle", "square", "triangle-up", "diamond")
_DASHES = ([1, 0], [6, 3], [2, 2], [8, 2, 2, 2])
WIDTH, HEIGHT = 540, 240  # of a chart of curves without its axes, in pixels before the scale


class Curve:
    """The points (iteration, value) of one metric, thinned out while they arrive, so that a long run takes little memory.

    At most `MOST_POINTS` stay: the first one, and every `every`-th after it. The last one stays in addition.

    Attributes:
        last, lowest, highest: of all points that have arrived, the last one, and those with the smallest and the largest value.
    """

    def __init__(self) -> None:
        self.every = 1
        self.last = self.lowest = self.highest = 0, math.nan
        self._kept: list[tuple[int, float]] = []
        self._count = 0

    def add(self, iteration: int, value: float) -> None:
        self.last = iteration, value
        self.lowest = min(self.lowest, self.last, key=itemgetter(1)) if self._count else self.last
        self.highest = max(self.highest, self.last, key=itemgetter(1)) if self._count else self.last
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

    def smallest(self) -> float:
        return self.lowest[1]

    def largest(self) -> float:
        return self.highest[1]

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

    def get(self, key: str, value_of: Callable[[Curve], float]) -> float | None:
        """Return a figure of a metric, such as `Curve.median`, or None if the run does not have it."""
        return value_of(self.curves[key]) if key in self.curves else None

    @property
    def on_gpu(self) -> bool:
        return "memory/reserved_mb" in self.curves


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


def whose_peak(runs: Sequence[Run]) -> str:
    """Return what there is to say about the peak of runs on a CPU."""
    return "" if all(run.on_gpu for run in runs) else "on a CPU it is that of the process, with Python and its libraries"


def rows(position: int, points: Sequence[tuple[int, float]], kind: str, divisor: float = 1) -> list[dict[str, Any]]:
    """Return the points of a run as rows of a chart."""
    return [
        {"run": position, "kind": kind, "iter": iteration, "value": rounded(value / divisor)} for iteration, value in points
    ]


def rounded(value: float) -> float:
    return float(f"{value:.6g}")


def by_run(runs: Sequence[Run], *channels: str, opaque: float = 1, **looks: Sequence[Any]) -> dict[str, Any]:
    """Return the encodings in which each run has its look, or that of `looks`, and fades when others are highlighted.

    `channels`: of "color", "shape" and "strokeDash".
    """
    alt, places = altair(), list(range(len(runs)))
    looks = dict(zip(("color", "shape", "strokeDash"), zip(*map(look, places), strict=True), strict=True)) | looks
    kinds = {"color": alt.Color, "shape": alt.Shape, "strokeDash": alt.StrokeDash}
    scales = {channel: alt.Scale(domain=places, range=list(looks[channel])) for channel in channels}
    found = {channel: kinds[channel]("run:N", scale=scale, legend=None) for channel, scale in scales.items()}
    return {**found, "opacity": opacity(opaque)}


def opacity(opaque: float = 1) -> Any:
    alt = altair()
    picked = f"!{PICKED}.length || indexof({PICKED}, datum.run) >= 0"
    return alt.when(picked).then(alt.value(opaque)).otherwise(alt.value(0.08))


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
