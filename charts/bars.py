"""The figures of bench.py as charts: rows (lists of dicts) in, a chart out.

`measured` says what was measured on what; it stands below the title.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from charts.series import opacity, rounded
from charts.style import INK, MEMORY, NUMBER, alt, dashes, number, shown_in, styled
from forecast.modes import MODES

Rows = Sequence[Mapping[str, Any]]
Purposes = Mapping[str, tuple[str, str]]  # column: name and colour of a purpose, in the order of the stack

# points of a step whose names in a chart say more; saving is not a part of training
POINTS = {"wrapping": "peak of wrapping", "peak": "peak of training", "saving": "saving, on rank 0"}
TIME = {
    "forward and backward, ms": ("forward and backward", "#009E73"),
    "optimizer, ms": ("optimizer", "#E69F00"),
    "exposed communication, ms": ("exposed communication", "#CC79A7"),
}
_WIDTH = 820  # of the panels side by side, in pixels before the scale
_ROOM = 1.3  # of a panel, relative to its longest bar: the text needs the rest
# height of the name above the bars of a group, of a bar, and of what is between two groups
_NAME, _BAR, _GAP = 18, 13, 6


class Bar(NamedTuple):
    """A bar of parts. All amounts are in the unit of its chart."""

    parts: Mapping[str, float]  # amount by the name of the part
    text: str = ""  # at its end
    tick: float | None = None
    dots: Sequence[float] = ()

    @property
    def end(self) -> float:
        """What the bar, its tick and its dots reach."""
        return max(sum(self.parts.values()), self.tick or 0, *self.dots)


Group = tuple[str, Sequence[Bar]]  # a name, and the bars below it


def stack(groups: Sequence[Group], colours: Mapping[str, str], unit: str, end: float = 0, legend: int = 3) -> Any:
    """Draw bars, each with its text, below the name of its group. In the data, the position of a group is its `run`.

    Args:
        colours: of all parts, by their names.
        unit: of all amounts.
        end: where the axis ends, if not after the longest bar and its text.
        legend: number of columns of the legend; 0: none, as for one part alone.
    """
    rows: list[dict[str, Any]] = []
    y = 0.0
    for position, (name, bars) in enumerate(groups):
        if not bars:
            continue
        rows.append({"run": position, "label": name, "y": y + _NAME / 2 - 1})
        y += _NAME
        for bar in bars:
            end_of_part = 0.0
            for part, amount in bar.parts.items():
                place = {"x": end_of_part, "x2": (end_of_part := end_of_part + amount), "y": y, "y2": y + _BAR - 1}
                rows.append({"run": position, "name": part, "value": rounded(amount), **place})
            rows += [] if bar.tick is None else [{"run": position, "mark": bar.tick, "y": y - 1, "y2": y + _BAR}]
            rows += [{"run": position, "dot": dot, "y": y + _BAR / 2} for dot in bar.dots]
            rows += [{"run": position, "end": bar.end, "text": bar.text, "y": y + _BAR / 2}] if bar.text else []
            y += _BAR
        y += _GAP
    end = end or 1.15 * max(bar.end for _, bars in groups for bar in bars)  # leaves room for the text
    scale = alt.Scale(domain=[0, end], nice=False)
    shown = alt.Legend(title=None, columns=legend, labelLimit=200) if legend and len(colours) > 1 else None
    colour = alt.Color("name:N", scale=alt.Scale(domain=list(colours), range=list(colours.values())), legend=shown)
    height = alt.Y("y:Q", scale=alt.Scale(domain=[0, y], nice=False, reverse=True), axis=None)
    base = alt.Chart().encode(y=height, opacity=opacity())
    tooltip = [alt.Tooltip("name:N", title=" "), alt.Tooltip("value:Q", title=unit, format=NUMBER)]
    drawn = base.transform_filter("isValid(datum.value)").mark_bar()
    drawn = drawn.encode(x=alt.X("x:Q", title=unit, scale=scale), x2="x2:Q", y2="y2:Q", color=colour, tooltip=tooltip)
    ink = {"color": {"expr": INK}}
    labels = base.transform_filter("isValid(datum.label)").mark_text(align="left", fontSize=12, limit={"expr": "width"}, **ink)
    texts = base.transform_filter("isValid(datum.text)").mark_text(align="left", dx=4, fontSize=11, **ink)
    layers = [drawn, labels.encode(x=alt.value(0), text="label:N"), texts.encode(x="end:Q", text="text:N")]
    if any("mark" in row for row in rows):
        ticks = base.transform_filter("isValid(datum.mark)").mark_rule(strokeWidth=2.5, **ink)
        layers.append(ticks.encode(x="mark:Q", y2="y2:Q"))
    if any("dot" in row for row in rows):
        dots = base.transform_filter("isValid(datum.dot)").mark_circle(size=18, **ink)
        layers.append(dots.encode(x="dot:Q", opacity=alt.value(0.5)))
    return alt.layer(*layers, data=alt.InlineData(values=rows)).properties(height=y)


def memory_chart(rows: Rows, measured: str) -> Any:
    """Draw the measured bytes of one rank by purpose at each point of a step, one panel per mode, with the prediction."""
    divisor, unit = shown_in("bytes", max(row["total"] for row in rows))
    panels: dict[str, list[Group]] = {}
    for row in rows:
        tick = row["predicted"] / divisor if row.get("predicted") is not None else None
        bar = Bar(_parts(row, MEMORY, divisor), number(row["total"] / divisor), tick)
        point: str = row["point"]
        panels.setdefault(row["mode"], []).append((POINTS.get(point, point), [bar]))
    notes = [measured, "black tick: prediction"] if any(row.get("predicted") is not None for row in rows) else [measured]
    return _chart(panels, MEMORY, unit, "Measured memory per rank", notes)


def time_chart(rows: Rows, measured: str) -> Any:
    """Draw the milliseconds of a step by purpose, one panel per block size, with the ratio to the first mode at each bar.

    A bar is the median of the rounds, in it the parts in their proportion, and each round is a dot.
    """
    panels: dict[str, list[Group]] = {}
    for row in sorted(rows, key=lambda row: row["block_size"]):
        groups = panels.setdefault(f"{row['block_size']} tokens", [])
        parts = _parts(row, TIME, 1)
        scale = row["ms per step"] / sum(parts.values())
        low, high = row["ratio, quartiles"]
        quartiles = f" ({low:.2f} to {high:.2f})" if len(row["rounds, ms"]) > 1 else ""
        text = f"{row['ratio']:.2f}x{quartiles}" if groups else f"{number(row['ms per step'])} ms"
        bar = Bar({name: part * scale for name, part in parts.items()}, text, dots=row["rounds, ms"])
        groups.append((row["mode"], [bar]))
    first = rows[0]["mode"]
    how = f"bar: median; dot: a round; 1.03x: median of the ratios to {first} in the same round, with their quartiles"
    return _chart(panels, TIME, "ms", "Time of a step", [measured, how], shared=False)


def training_chart(rows: Rows, measured: str) -> Any:
    """Draw the peak of memory by mode, and beside it the losses of the same runs, which lie on each other."""
    divisor, unit = shown_in("bytes", max(row["peak"] for row in rows))
    first = rows[0]
    colours = {row["mode"]: MODES[row["mode"]].colour for row in rows}
    groups: list[Group] = []
    for row in rows:
        saved = "" if row is first else f" ({row['peak'] / first['peak'] - 1:+.0%})"
        mode, peak = row["mode"], row["peak"] / divisor
        groups.append((MODES[mode].label, [Bar({mode: peak}, f"{number(peak)} {unit}{saved}")]))
    peaks = stack(groups, colours, unit, _end(groups), legend=0)
    peaks = peaks.properties(width=_WIDTH // 2, title=_title("Peak of memory while training, per rank"))
    values = [
        {"mode": row["mode"], "step": step, "loss": loss} for row in rows for step, loss in enumerate(row["losses"], start=1)
    ]
    modes = list(colours)
    scale = alt.Scale(domain=modes, range=list(colours.values()))
    dashed = alt.StrokeDash("mode:N", legend=None, scale=alt.Scale(domain=modes, range=dashes(len(modes))))
    losses = (
        alt.Chart(alt.InlineData(values=values))
        .mark_line(strokeWidth=2.5)
        .encode(
            x=alt.X("step:Q", title="step", scale=alt.Scale(nice=False)),
            y=alt.Y("loss:Q", title=None, scale=alt.Scale(zero=False)),
            color=alt.Color("mode:N", scale=scale, legend=None),
            strokeDash=dashed,
        )
        .properties(width=_WIDTH // 2, height=peaks.height, title=_title("Training loss of the same runs"))
    )
    differences = [f"{row['largest difference']:.1g}" for row in rows[1:]]
    how = f"largest differences of a loss from the first bar's: {', '.join(differences)}; " if differences else ""
    notes = [measured, f"data: Python's standard library; {how}where lines lie on each other, their colours take turns"]
    both = alt.hconcat(peaks, losses, spacing=30).resolve_scale(color="independent")
    return styled(both, "The same training in less memory", subtitle=notes)


def _parts(row: Mapping[str, Any], purposes: Purposes, divisor: float) -> dict[str, float]:
    """Return the amount of each purpose by its name. Purposes with an amount of 0 are left out."""
    return {name: row[column] / divisor for column, (name, _) in purposes.items() if row.get(column)}


def _title(text: str) -> Any:
    return alt.TitleParams(text, fontSize=13, anchor="start", offset=4)


def _end(groups: Iterable[Group]) -> float:
    return _ROOM * max(bar.end for _, bars in groups for bar in bars)


def _chart(
    panels: Mapping[str, Sequence[Group]], purposes: Purposes, unit: str, title: str, notes: list[str], shared: bool = True
) -> Any:
    """Draw panels of bars.

    Args:
        panels: the bars of each panel, by its name.
        unit: of all amounts.
        title, notes: title, and the lines below it.
        shared: whether all panels have the same axis.
    """
    columns = min(len(panels), 2 if len(panels) in (2, 4) else 3)
    width = _WIDTH // columns
    parts = {name for groups in panels.values() for _, bars in groups for bar in bars for name in bar.parts}
    colours = {name: colour for name, colour in purposes.values() if name in parts}
    drawn = []
    for name, groups in panels.items():
        end = _end(itertools.chain(*panels.values()) if shared else groups)
        panel = stack(groups, colours, unit, end, legend=len(colours))
        drawn.append(panel.properties(width=width, title=_title(name)))
    return styled(alt.concat(*drawn, columns=columns, spacing=25).resolve_scale(color="shared"), title, subtitle=notes)
