"""Curves of runs over the iterations: losses, how far they lie apart, and any other metric."""

from collections.abc import Collection, Sequence
from statistics import median, quantiles
from typing import Any

from charts import series
from charts.differences import agreeing
from charts.series import Curve, Panel, Run
from charts.style import altair, dashes, shown_in
from run.metrics import METRICS

_LINE = 12  # height of a value at the end of a curve


def losses(runs: Sequence[Run]) -> Panel | None:
    """Return the losses of the batches as thin lines, those of the evaluations as thick lines with marks and the last value."""
    keys = {"training": "iter/loss", "validation": "val/loss"}
    curves = {
        (position, name): run.curves[key]
        for position, run in enumerate(runs)
        for name, key in keys.items()
        if key in run.curves
    }
    if not curves:
        return None
    alt = altair()
    domain, above = _range_of_losses(curves.values())
    values = [row for (position, name), curve in curves.items() for row in series.rows(position, curve.points, name)]
    last = {}
    for (position, name), curve in curves.items():
        if name == "validation" or len(runs) == 1 or (position, "validation") not in curves:
            last[position, name] = curve.latest()
    places = _apart(list(last.values()), domain)
    ends: list[dict[str, Any]] = [
        {"run": position, "end": place, "text": f"{name} {value:.4f}" if len(runs) == 1 else f"{value:.4f}"}
        for ((position, name), value), place in zip(last.items(), places, strict=True)
    ]

    groups = agreeing([run.facts for run in runs])
    patterns = [series.look(position)[2] for position in range(len(runs))]
    for group in groups:  # equal losses lie on top of each other
        for position, pattern in zip(group, dashes(len(group)), strict=True):
            patterns[position] = pattern
    y = alt.Y("value:Q", title="loss", scale=alt.Scale(domain=domain, zero=False, nice=False))
    base = alt.Chart().encode(x=series.iterations(), y=y, **series.by_run(runs, "color"))
    batches = base.transform_filter("datum.kind == 'training'").mark_line(clip=True, strokeWidth=1, strokeJoin="round")
    evaluations = base.transform_filter("datum.kind == 'validation'")
    thick = evaluations.mark_line(clip=True, strokeWidth=2.5, strokeJoin="round")
    thin = evaluations.mark_line(clip=True, strokeWidth=1, strokeJoin="round")  # in the gaps between dashes
    marks = evaluations.mark_point(clip=True, filled=True, size=40).encode(**series.by_run(runs, "shape"))
    text = alt.Chart(alt.InlineData(values=ends)).mark_text(align="left", dx=6, fontSize=12, fontWeight="bold", clip=False)
    layers = [
        batches.encode(**series.by_run(runs, "strokeDash", opaque=0.6)).properties(name="curves"),
        *([thin] if groups else []),
        thick.encode(**series.by_run(runs, "strokeDash", strokeDash=patterns)),
        marks,
        text.encode(x=alt.value("width"), y="end:Q", text="text:N", **series.by_run(runs, "color")),
    ]
    notes = ["thin: training, each batch; thick: validation, a mark for each evaluation"]
    notes += ["where losses are equal, the colours take turns"] if groups else []
    notes += [f"the first losses, up to {above:.2f}, are above the chart"] if above else []
    notes += series.thinned(curves.values())
    panel = _panel("Training and validation loss", notes, values, layers)
    return panel._replace(chart=panel.chart.resolve_scale(strokeDash="independent"), is_wide=True)


def _panel(title: str, notes: Sequence[str], rows: Sequence[dict[str, Any]], layers: Sequence[Any]) -> Panel:
    """Return a chart of curves. The first layer is the one in which iterations are zoomed."""
    alt = altair()
    chart = alt.layer(*layers, data=alt.InlineData(values=rows))
    chart = chart.properties(height=series.HEIGHT, title=series.title(title, notes))
    return Panel(chart, list(dict.fromkeys(f"{row['kind']} {row['run']}" for row in rows)))


def _range_of_losses(curves: Collection[Curve]) -> tuple[list[float], float | None]:
    """Return the range of the axis, and the largest loss if it is outside.

    The fall at the beginning would make the rest flat, and so would a run that diverges. So the axis ends at what 9 of 10
    losses of a curve stay below, and at most at three times the typical distance from the lowest loss. Curves with few points,
    such as those of evaluations, do not count if there are others, but their lowest loss is in the chart, unless that doubles
    the range.
    """
    lowest, largest = min(curve.lowest[1] for curve in curves), max(curve.largest() for curve in curves)
    long = [quantiles([value for _, value in curve.points], n=10)[-1] for curve in curves if len(curve.points) >= 20]
    tops = long or [curve.largest() for curve in curves]
    top = min(max(tops), lowest + 3 * (median(tops) - lowest), largest)
    doubled = lowest + 2 * (top - lowest)
    top = max([top, *(curve.lowest[1] for curve in curves if curve.lowest[1] < doubled)])
    room = 0.04 * (top - lowest) or 0.01 * abs(top) or 1
    return [lowest - room, top + room], largest if largest > top + room else None


def _apart(values: list[float], domain: list[float]) -> list[float]:
    """Return where to write values beside an axis so that no two lines of text overlap, as long as there is room."""
    lines = (domain[1] - domain[0]) * _LINE / series.HEIGHT
    order = sorted(range(len(values)), key=values.__getitem__)
    places, lowest = [0.0] * len(values), domain[0]
    for place, index in enumerate(order):
        highest = domain[1] - lines * (len(order) - 1 - place)  # leaves room for those above
        places[index] = max(lowest, min(values[index], highest))
        lowest = places[index] + lines
    return places


def disagreement(runs: Sequence[Run]) -> Panel | None:
    """Return how far the training losses of runs lie apart that should be the same, or None if there are no such runs."""
    rows: list[dict[str, Any]] = []
    notes = []
    for group in agreeing([run.facts for run in runs]):
        found = [runs[position].curves["iter/loss"] for position in group if "iter/loss" in runs[position].curves]
        by_run = [dict(curve.points) for curve in found]
        shared = sorted(set(by_run[0]).intersection(*by_run)) if len(by_run) > 1 else []
        if not shared:
            continue
        losses = {iteration: [losses[iteration] for losses in by_run] for iteration in shared}
        apart = [(iteration, max(values) - min(values)) for iteration, values in losses.items()]
        at, largest = max(apart, key=lambda point: point[1])
        equal = sum(difference == 0 for _, difference in apart)
        which = f"{len(by_run)} runs" if len(group) == len(runs) else f"{runs[group[0]].name} and {len(by_run) - 1} more"
        rest = f"at most {largest:.2g} apart, at iteration {at}" if largest else "nowhere apart"
        until = f"up to iteration {shared[-1]:,}"
        notes.append(", ".join([f"{which}: equal in {equal} of {len(apart)} points {until}", rest, *series.thinned(found)]))
        rows += series.rows(group[0], apart, "difference")
    if not rows:
        return None
    alt = altair()
    positive = [row["value"] for row in rows if row["value"] > 0]
    scale, axis, height = alt.Scale(domain=[-1, 1]), alt.Axis(values=[0]), 40
    if positive:
        scale = alt.Scale(type="log", nice=False, domain=[min(positive) / 2, max(positive) * 2])
        axis, height = alt.Axis(format=".0e", tickCount=5), series.HEIGHT
    y = alt.Y("value:Q", title="largest difference" if positive else None, scale=scale, axis=axis)
    base = alt.Chart().encode(x=series.iterations(), y=y, **series.by_run(runs, "color"))
    drawn = base.transform_filter("datum.value > 0") if positive else base
    layer = drawn.mark_point(filled=True, size=14, clip=True).properties(name="curves")
    panel = _panel("Training losses that should agree: largest difference", notes, rows, [layer])
    return panel._replace(chart=panel.chart.properties(height=height))


def curves(
    runs: Sequence[Run], title: str, key: str, is_log: bool = False, is_rolling: bool = False, note: str = ""
) -> Panel | None:
    """Return the curves of one metric over the iterations, or None if no run has it.

    Args:
        is_log: the axis is logarithmic; otherwise it begins at zero.
        is_rolling: draw rolling medians.
        note: to be written below the title.
    """
    curves = {position: run.curves[key] for position, run in enumerate(runs) if key in run.curves}
    if not curves:
        return None
    alt = altair()
    points = {
        position: series.rolling_median(curve.points) if is_rolling else curve.points for position, curve in curves.items()
    }
    if is_log:
        points = {position: [point for point in found if point[1] > 0] for position, found in points.items()}
    metric = METRICS.get(key)
    unit = (metric.unit or title.lower()) if metric else ""
    divisor, unit = shown_in(unit, max((value for found in points.values() for _, value in found), default=0))
    values = [row for position, found in points.items() for row in series.rows(position, found, "value", divisor)]
    scale = alt.Scale(type="log", nice=False, padding=5) if is_log else alt.Scale(zero=True)
    has_dot = any(len(found) == 1 for found in points.values())  # one point makes no line
    y = alt.Y("value:Q", title=unit, scale=scale)
    base = alt.Chart().encode(x=series.iterations(), y=y, **series.by_run(runs, "color", "strokeDash"))
    layer = base.mark_line(clip=True, strokeWidth=1.5, strokeJoin="round", point=has_dot).properties(name="curves")
    notes = [f"rolling median of up to {series.WINDOW} points"] if is_rolling else []
    notes += [*filter(None, [note]), *series.thinned(curves.values())]
    return _panel(title, notes, values, [layer])
