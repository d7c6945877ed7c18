"""Curves of runs over the iterations: losses, how far they lie apart, and any other metric."""

from collections.abc import Sequence
from operator import itemgetter
from statistics import median, quantiles
from typing import Any

from charts.series import HEIGHT, WINDOW, Run, by_run, look, rows, title
from charts.style import alt, dashes, shown_in
from run.metrics import METRICS


def losses(runs: Sequence[Run]) -> Any:
    """Return the losses of the batches as thin lines, those of the evaluations as thick lines with marks."""
    curves = {
        (position, kind): run.curves[key]
        for position, run in enumerate(runs)
        for kind, key in (("training", "iter/loss"), ("validation", "val/loss"))
        if key in run.curves
    }
    if not curves:
        return None
    values = [value for points in curves.values() for _, value in points]
    largest = top = max(values)
    if len(values) >= 20:  # the fall at the beginning would make the rest flat
        top = max(quantiles(values, n=10)[-1], *(min(value for _, value in points) for points in curves.values()))
    patterns = [look(position)[1] for position in range(len(runs))]
    pixel, apart = (top - min(values)) / HEIGHT, [_apart(runs[0], run) for run in runs]
    equal = [position for position, found in enumerate(apart) if found and max(found, key=itemgetter(1))[1] < pixel]
    if len(equal) > 1:  # they lie on top of each other
        for position, pattern in zip(equal, dashes(len(equal)), strict=True):
            patterns[position] = pattern
    y = alt.Y("value:Q", title="loss", scale=alt.Scale(domainMax=top, zero=False, nice=False))
    base = alt.Chart().encode(x=_iterations(), y=y)
    batches = base.transform_filter("datum.kind == 'training'").mark_line(clip=True, strokeWidth=1, strokeJoin="round")
    evaluations = base.transform_filter("datum.kind == 'validation'")
    thick = evaluations.mark_line(clip=True, strokeWidth=2.5, strokeJoin="round", point={"filled": True, "size": 40})
    notes = ["thin: training, each batch; thick: validation, a mark for each evaluation"]
    notes += ["where losses are equal, the colours take turns"] if len(equal) > 1 else []
    notes += [f"losses up to {largest:.2f} are above the chart"] if top < largest else []
    drawn = [row for (position, kind), points in curves.items() for row in rows(position, points, kind)]
    layers = [batches.encode(**by_run(patterns, opaque=0.6)), thick.encode(**by_run(patterns))]
    return _chart("Training and validation loss", notes, drawn, layers)


def _iterations() -> Any:
    return alt.X("iter:Q", title="iteration", scale=alt.Scale(nice=False, padding=5), axis=alt.Axis(labelFlush=True))


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
    at, largest = zip(*(max(apart, key=itemgetter(1)) for apart in found.values()), strict=True)
    notes = [
        f"{runs[position].name}: {f'at most {most:.2g}, at iteration {where:,}' if most else 'none'}"
        for position, where, most in zip(found, at, largest, strict=True)
    ]
    values = [row for position, apart in found.items() for row in rows(position, apart, "difference")]
    scale = alt.Scale(type="symlog", constant=1e-9, domain=[0, max(largest) or 1e-9], nice=False)
    axis = alt.Axis(format=".0e", values=[0, *(10.0**power for power in range(-9, 2, 2))])
    y = alt.Y("value:Q", title="difference", scale=scale, axis=axis)
    points = alt.Chart().mark_point(filled=True, size=14).encode(x=_iterations(), y=y, **by_run([[1, 0]] * len(runs)))
    return _chart("Training loss: difference from the first run", notes, values, [points])


def _apart(first: Run, other: Run) -> list[tuple[int, float]]:
    """Return how far the training losses of two runs lie apart in the iterations that both have."""
    losses = dict(other.curves.get("iter/loss", ()))
    return [(at, abs(loss - losses[at])) for at, loss in first.curves.get("iter/loss", ()) if at in losses]


def curves(runs: Sequence[Run], title: str, key: str, is_log: bool = False, is_rolling: bool = False, note: str = "") -> Any:
    """Return the curves of one metric over the iterations, or None if no run has it.

    Args:
        is_log: the axis is logarithmic; otherwise it begins at zero.
        is_rolling: draw rolling medians.
        note: to be written below the title.
    """
    curves = {position: run.curves.get(key, ()) for position, run in enumerate(runs)}
    drawn = {position: [point for point in points if point[1] > 0 or not is_log] for position, points in curves.items()}
    found = {position: points for position, points in drawn.items() if points}
    if not found:
        return None
    metric = METRICS.get(key)
    unit = (metric.unit or title.lower()) if metric else ""
    divisor, unit = shown_in(unit, max(median(value for _, value in points) for points in found.values()))
    values = [row for position, points in found.items() for row in rows(position, points, "value", divisor)]
    has_dot = any(len(points) == 1 for points in found.values())  # one point makes no line
    scale = alt.Scale(type="log", nice=False, padding=5) if is_log else alt.Scale(zero=True)
    base = alt.Chart().encode(x=_iterations(), y=alt.Y("value:Q", title=unit, scale=scale))
    line = base.mark_line(clip=True, strokeWidth=1.5, strokeJoin="round", point=has_dot)
    chart = _chart(
        title,
        [f"rolling median of {WINDOW} points" if is_rolling else "", note],
        values,
        [line.encode(**by_run([look(position)[1] for position in range(len(runs))]))],
    )
    if is_rolling:
        half = WINDOW // 2
        chart = chart.transform_window(value="median(value)", frame=[-half, half], groupby=["run"], sort=[{"field": "iter"}])
    return chart
