"""Curves of runs over the iterations: losses, how far they lie apart, and any other metric; and how each run looks."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from statistics import median, quantiles
from typing import Any, NamedTuple

from charts.differences import Facts
from charts.style import alt, dashes, opacity, rounded, scale_of, shown_in
from run.metrics import METRICS, is_of_part

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
    """A run: its name, its folder, its facts (`state`: running, ended, stopped, failed, killed, or none), and its metrics."""

    name: str
    folder: str
    facts: Facts
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


def title(title: str, notes: Sequence[str]) -> Any:
    """Return a title with notes below it, in lines that fit in the narrowest chart of the page."""
    lines = textwrap.wrap("; ".join(filter(None, notes)), 75)
    return alt.TitleParams(title, subtitle=lines or [" "], fontSize=14, subtitleFontSize=12)


def losses(runs: Sequence[Run]) -> Any:
    """Return the losses of the batches as thin lines, those of the evaluations as thick lines with marks."""
    keys = {"training": "iter/loss", "validation": "val/loss"}
    found = ((position, kind, run.curves.get(key)) for position, run in enumerate(runs) for kind, key in keys.items())
    curves = {(position, kind): points for position, kind, points in found if points}
    if not curves:
        return None
    values = [value for points in curves.values() for _, value in points]
    largest = top = max(values)
    if len(values) >= 20:  # the fall at the beginning would make the rest flat
        top = max(quantiles(values, n=10)[-1], *(min(value for _, value in points) for points in curves.values()))
    pixel, apart = (top - min(values)) / HEIGHT, [_apart(runs[0], run) for run in runs]
    equal = [position for position, points in enumerate(apart) if points and _farthest(points)[1] < pixel]
    turns = dict(zip(equal, dashes(len(equal)), strict=True)) if len(equal) > 1 else {}  # they lie on top of each other
    base = _base("loss", alt.Scale(domainMax=top, zero=False, nice=False))
    batches = base.transform_filter("datum.kind == 'training'").mark_line(clip=True, strokeWidth=1, strokeJoin="round")
    evaluations = base.transform_filter("datum.kind == 'validation'")
    thick = evaluations.mark_line(clip=True, strokeWidth=2.5, strokeJoin="round", point={"filled": True, "size": 40})
    notes = ["thin: training, each batch; thick: validation, a mark for each evaluation"]
    notes += ["where losses are equal, the colours take turns"] if turns else []
    notes += [f"losses up to {largest:.2f} are above the chart"] if top < largest else []
    drawn = [row for (position, kind), points in curves.items() for row in rows(position, points, kind)]
    layers = [batches.encode(**by_run(len(runs), turns, opaque=0.6)), thick.encode(**by_run(len(runs), turns))]
    return _chart("Training and validation loss", notes, drawn, layers)


def _base(unit: str, scale: Any, **options: Any) -> Any:
    """Return a chart of values over the iterations, to which layers give marks. `options`: of the axis of the values."""
    x = alt.X("iter:Q", title="iteration", scale=alt.Scale(nice=False, padding=5), axis=alt.Axis(labelFlush=True))
    return alt.Chart().encode(x=x, y=alt.Y("value:Q", title=unit, scale=scale, **options))


def _chart(text: str, notes: Sequence[str], values: Sequence[dict[str, Any]], layers: Sequence[Any]) -> Any:
    chart = alt.layer(*layers, data=alt.InlineData(values=values))
    return chart.properties(height=HEIGHT, title=title(text, notes))


def is_over_iterations(chart: Any) -> bool:
    """Return whether this is a chart of curves."""
    return "iter" in chart.data.values[0]


def interactive(chart: Any) -> Any:
    """Return a chart of curves whose iterations can be zoomed, with a rule that shows the values under the mouse."""
    zoom = alt.selection_interval("zoom", encodings=["x"], bind="scales", zoom="wheel![event.ctrlKey]")
    hovered = alt.selection_point("hovered", fields=["iter"], nearest=True, on="pointerover", clear="pointerout")
    columns = dict.fromkeys(f"{row['kind']} {row['run']}" for row in chart.data.values)
    rule = alt.Chart().transform_calculate(column="datum.kind + ' ' + datum.run")
    rule = rule.transform_pivot("column", value="value", groupby=["iter"], op="max").mark_rule(color="#888888")
    rule = rule.encode(
        x="iter:Q",
        opacity=alt.when(hovered, empty=False).then(alt.value(1)).otherwise(alt.value(0)),
        tooltip=[alt.Tooltip("iter:Q", title="iteration"), *(alt.Tooltip(f"{name}:Q", format=",.5~r") for name in columns)],
    )
    chart = chart.copy()
    first, *others = chart.layer
    chart.layer = [first.add_params(zoom), *others, rule.add_params(hovered)]
    return chart


def disagreement(runs: Sequence[Run]) -> Any:
    """Return how far the training losses of other runs lie from those of the first one, or None if they share no iteration."""
    found = {position: apart for position in range(1, len(runs)) if (apart := _apart(runs[0], runs[position]))}
    if not found:
        return None
    largest = {position: _farthest(apart) for position, apart in found.items()}
    notes = [
        f"{runs[position].name}: {f'at most {most:.2g}, at iteration {where:,}' if most else 'none'}"
        for position, (where, most) in largest.items()
    ]
    values = [row for position, apart in found.items() for row in rows(position, apart, "difference")]
    top = max(most for _, most in largest.values()) or 1e-9
    axis = alt.Axis(format=".0e", values=[0, *(10.0**power for power in range(-9, 2, 2))])
    base = _base("difference", alt.Scale(type="symlog", constant=1e-9, domain=[0, top], nice=False), axis=axis)
    points = base.mark_point(filled=True, size=14).encode(**by_run(len(runs)))
    return _chart("Training loss: difference from the first run", notes, values, [points])


def _apart(first: Run, other: Run) -> list[tuple[int, float]]:
    """Return how far the training losses of two runs lie apart in the iterations that both have."""
    losses = dict(other.curves.get("iter/loss", ()))
    return [(at, abs(loss - losses[at])) for at, loss in first.curves.get("iter/loss", ()) if at in losses]


def _farthest(apart: Sequence[tuple[int, float]]) -> tuple[int, float]:
    return max(apart, key=itemgetter(1))


def curves(runs: Sequence[Run], title: str, key: str, is_log: bool = False, is_rolling: bool = False, note: str = "") -> Any:
    """Return the curves of one metric over the iterations, or None if no run has it.

    Args:
        is_log: the axis is logarithmic; otherwise it begins at zero.
        is_rolling: draw rolling medians.
        note: to be written below the title.
    """
    drawn = {position: run.curves.get(key, ()) for position, run in enumerate(runs)}
    drawn = {position: [point for point in points if point[1] > 0 or not is_log] for position, points in drawn.items()}
    found = {position: points for position, points in drawn.items() if points}
    if not found:
        return None
    metric = METRICS.get(key)
    unit = (metric.unit or title.lower()) if metric else ""
    divisor, unit = shown_in(unit, max(median(value for _, value in points) for points in found.values()))
    values = [row for position, points in found.items() for row in rows(position, points, "value", divisor)]
    has_dot = any(len(points) == 1 for points in found.values())  # one point makes no line
    base = _base(unit, alt.Scale(type="log", nice=False, padding=5) if is_log else alt.Scale(zero=True))
    line = base.mark_line(clip=True, strokeWidth=1.5, strokeJoin="round", point=has_dot).encode(**by_run(len(runs)))
    chart = _chart(title, [f"rolling median of {WINDOW} points" if is_rolling else "", note], values, [line])
    if is_rolling:
        frame = [-(WINDOW // 2), WINDOW // 2]
        chart = chart.transform_window(value="median(value)", frame=frame, groupby=["run"], sort=[{"field": "iter"}])
    return chart
