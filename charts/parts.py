"""Bars of runs: one bar per run with its parts, or a few bars per run, below the name of the run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from charts import series
from charts.bars import TIME
from charts.series import Curve, Panel, Run
from charts.style import MEMORY, NUMBER, altair, number, shown_in

# height of the name above the bars of a run, of a bar, of a thin bar below it, and of what is between two runs
_NAME, _BAR, _THIN, _GAP = 18, 13, 4, 6

Amounts = Mapping[str, Sequence[float | None]]  # by the name of a bar or of a part of it: one per run, None if a run has none


def each(runs: Sequence[Run], key: str, value_of: Callable[[Curve], float]) -> list[float | None]:
    return [value_of(run.curves[key]) if key in run.curves else None for run in runs]


def scaled(amounts: Amounts, wholes: Sequence[float | None]) -> Amounts:
    """Return the parts so that those of a run add up to its whole: medians of parts do not add up to the median of the sum."""
    sums = [sum(filter(None, found)) for found in zip(*amounts.values(), strict=True)]
    return {
        name: [
            value * whole / total if value and whole else None for value, whole, total in zip(values, wholes, sums, strict=True)
        ]
        for name, values in amounts.items()
    }


def phases(runs: Sequence[Run]) -> Amounts:
    """Return the parts of the time of a step. On a GPU, batches are prepared while it computes, so they are no part of it."""
    data, forward_backward, optimizer, whole = (
        each(runs, f"time/{phase}_ms", Curve.median) for phase in ("data", "forward_backward", "optimizer", "step")
    )
    data = [None if series.on_gpu(run) else ms for run, ms in zip(runs, data, strict=True)]
    found = {"data": data, "forward and backward": forward_backward, "optimizer": optimizer}
    counted = [sum(filter(None, parts)) for parts in zip(*found.values(), strict=True)]
    return found | {"rest": [None if ms is None else max(0, ms - part) for ms, part in zip(whole, counted, strict=True)]}


def memory_points(runs: Sequence[Run]) -> Panel | None:
    """Return the memory at the points of a step. Two points at which a run holds the same are drawn as one."""
    keys = {name: f"memory/{name.replace(' ', '_')}_mb" for name in ("after init", "before step", "after step")}
    points = {name: each(runs, key, Curve.latest) for name, key in keys.items()}
    both = "before and after step"
    points[both] = [before if before == after else None for before, after in zip(*list(points.values())[1:], strict=True)]
    for name in ("before step", "after step"):
        points[name] = [size if same is None else None for size, same in zip(points[name], points[both], strict=True)]
    peaks = each(runs, "memory/peak_mb", Curve.latest)
    points["peak"] = [peak if series.on_gpu(run) else None for run, peak in zip(runs, peaks, strict=True)]
    predicted = each(runs, "memory/predicted_mb", Curve.latest)
    marks = [None if peak is None else mark for peak, mark in zip(points["peak"], predicted, strict=True)]
    return bars(runs, "Memory at the points of a step", points, "MB", stacked=False, marks=marks)


def bars(
    runs: Sequence[Run],
    title: str,
    amounts: Amounts,
    unit: str,
    note: str = "latest values",
    stacked: bool = True,
    below: Amounts | None = None,
    marks: Sequence[float | None] | None = None,
) -> Panel | None:
    """Return horizontal bars below the name of each run, or None if no run has any. What is zero is left out.

    Args:
        amounts: the parts of one bar per run if `stacked`, otherwise a bar each.
        unit: of all amounts.
        below: what is drawn as a thin bar below that of the run, such as an amount that is included in it.
        marks: where to draw a tick, the prediction for the last bar of a run.
    """
    amounts = {name: values for name, values in amounts.items() if any(values)}
    if not amounts:
        return None
    alt = altair()
    every = [sum(filter(None, parts)) for parts in zip(*amounts.values(), strict=True)] if stacked else []
    every += [value for values in (*amounts.values(), marks or []) for value in values if value is not None]
    divisor, unit = shown_in(unit, max(map(abs, every)))
    thin = {name: values for name, values in (below or {}).items() if any(values)}
    values: list[dict[str, Any]] = []
    y = 0.0
    for position, run in enumerate(runs):
        mine = [(name, amount / divisor) for name, found in amounts.items() if (amount := found[position])]
        if not mine:
            continue
        values.append({"run": position, "label": run.name, "y": y + _NAME / 2 - 1})
        y += _NAME
        for bar in [mine] if stacked else [[part] for part in mine]:
            values += _bar(position, bar, y, y + _BAR - 1)
            end = sum(value for _, value in bar)
            mark = marks[position] if marks and bar[-1] == mine[-1] else None
            values += [] if mark is None else [{"run": position, "mark": mark / divisor, "y": y - 1, "y2": y + _BAR}]
            place = max(0, end, (mark or 0) / divisor)
            values.append({"run": position, "end": place, "text": number(end), "y": y + _BAR / 2})
            y += _BAR
        for name, found in thin.items():
            values += _bar(position, [(name, amount / divisor)] if (amount := found[position]) else [], y, y + _THIN)
            y += _THIN
        y += _GAP

    ends = [row[column] for row in values for column in ("x2", "end", "mark") if column in row]
    scale = alt.Scale(domain=[min(0, *ends), max(0, *ends) * 1.15], nice=False)  # leaves room for the text
    colours = _part_colours([*amounts, *thin])
    legend = None if len(colours) == 1 else alt.Legend(title=None, columns=3, labelLimit=200)
    colour = alt.Color("name:N", scale=alt.Scale(domain=list(colours), range=list(colours.values())), legend=legend)
    height = alt.Y("y:Q", scale=alt.Scale(domain=[0, y], nice=False, reverse=True), axis=None)
    base = alt.Chart().encode(y=height, opacity=series.opacity())
    tooltip = [alt.Tooltip("name:N", title=" "), alt.Tooltip("value:Q", title=unit, format=NUMBER)]
    drawn = base.transform_filter("isValid(datum.value)").mark_bar()
    drawn = drawn.encode(x=alt.X("x:Q", title=unit, scale=scale), x2="x2:Q", y2="y2:Q", color=colour, tooltip=tooltip)
    names = base.transform_filter("isValid(datum.label)").mark_text(
        align="left", fontSize=12, color={"expr": series.INK}, limit={"expr": "width"}
    )
    texts = base.transform_filter("isValid(datum.text)").mark_text(align="left", dx=4, fontSize=11, color={"expr": series.INK})
    layers = [drawn, names.encode(x=alt.value(0), text="label:N"), texts.encode(x="end:Q", text="text:N")]
    if any("mark" in row for row in values):
        ticks = base.transform_filter("isValid(datum.mark)").mark_rule(color={"expr": series.INK}, strokeWidth=2.5)
        layers.append(ticks.encode(x="mark:Q", y2="y2:Q"))
        note += "; tick: prediction"
    if thin:
        note += f"; thin: {', '.join(thin)}"
    chart = alt.layer(*layers, data=alt.InlineData(values=values)).properties(height=y, title=series.title(title, [note]))
    return Panel(chart)


def _bar(position: int, parts: Sequence[tuple[str, float]], top: float, bottom: float) -> list[dict[str, Any]]:
    """Return the rows of one bar of a run, with its parts from left to right."""
    rows, end = [], 0.0
    for name, value in parts:
        begin, end = end, end + value
        place = {"x": begin, "x2": end, "y": top, "y2": bottom}
        rows.append({"run": position, "name": name, "value": series.rounded(value), **place})
    return rows


def _part_colours(names: Sequence[str]) -> dict[str, str]:
    """Return the colour of each part: that of other charts if it is in them."""
    known = dict([*MEMORY.values(), *TIME.values(), ("data", "#56B4E9"), ("rest", "#BBBBBB")])
    found = {name: colour for part, colour in known.items() for name in names if name.endswith(part)}
    others = iter(colour for colour in series.COLOURS if colour not in found.values())
    return {name: found.get(name) or next(others) for name in names}
