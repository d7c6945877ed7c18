"""The figures of bench.py as charts: rows (lists of dicts) in, a chart out.

`measured` says what was measured on what; it stands below the title.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from charts.style import INK, MEMORY, NUMBER, alt, dashes, number, opacity, rounded, scale_of, shown_in, styled
from forecast.modes import MODES

Rows = Sequence[Mapping[str, Any]]
Purposes = Mapping[str, tuple[str, str]]  # column: name and colour of a purpose, in the order of the stack
Unit = tuple[float, str]  # what to divide amounts by, and the unit then, see `shown_in`

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
    """A bar of parts. All amounts are in one unit."""

    parts: Mapping[str, float]  # amount by the name of the part
    text: str = "{}"  # at its end; {} stands for the sum of the parts, as it is shown
    tick: float | None = None
    dots: Sequence[float] = ()

    @property
    def length(self) -> float:
        return sum(self.parts.values())

    @property
    def end(self) -> float:
        """What the bar, its tick and its dots reach."""
        return max(self.length, self.tick or 0, *self.dots)


Group = tuple[str, Sequence[Bar]]  # a name, and the bars below it


def stack(groups: Sequence[Group], colours: Mapping[str, str], unit: Unit, end: float = 0, legend: int = 3) -> Any:
    """Draw bars, each with its text, below the name of its group. In the data, the position of a group is its `run`.

    Args:
        colours: of all parts, by their names.
        end: where the axis ends, if not after the longest bar and its text.
        legend: number of columns of the legend; 0: none, as for one part alone.
    """
    divisor, unit_name = unit
    rows: list[dict[str, Any]] = []
    y = 0.0
    for position, (name, bars) in enumerate(groups):
        if not bars:
            continue
        rows.append({"run": position, "label": name, "y": y + _NAME / 2 - 1})
        y += _NAME
        for bar in bars:
            x, middle = 0.0, y + _BAR / 2
            for part, amount in bar.parts.items():
                place = {"x": x, "x2": (x := x + amount / divisor), "y": y, "y2": y + _BAR - 1}
                rows.append({"run": position, "name": part, "value": rounded(amount / divisor), **place})
            if bar.tick is not None:
                rows.append({"run": position, "mark": bar.tick / divisor, "y": y - 1, "y2": y + _BAR})
            rows += [{"run": position, "dot": dot / divisor, "y": middle} for dot in bar.dots]
            text = bar.text.format(number(bar.length / divisor))
            rows.append({"run": position, "end": bar.end / divisor, "text": text, "y": middle})
            y += _BAR
        y += _GAP
    scale = alt.Scale(domain=[0, (end or 1.15 * _end(groups)) / divisor], nice=False)  # leaves room for the text
    shown = alt.Legend(title=None, columns=legend, labelLimit=200) if legend and len(colours) > 1 else None
    colour = alt.Color("name:N", scale=scale_of(colours), legend=shown)
    height = alt.Y("y:Q", scale=alt.Scale(domain=[0, y], nice=False, reverse=True), axis=None)
    base = alt.Chart().encode(y=height, opacity=opacity())
    tooltip = [alt.Tooltip("name:N", title=" "), alt.Tooltip("value:Q", title=unit_name, format=NUMBER)]
    drawn = base.transform_filter("isValid(datum.value)").mark_bar()
    drawn = drawn.encode(x=alt.X("x:Q", title=unit_name, scale=scale), x2="x2:Q", y2="y2:Q", color=colour, tooltip=tooltip)
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
    panels: dict[str, list[Group]] = {}
    for row in rows:
        point: str = row["point"]
        bar = Bar(_parts(row, MEMORY), tick=row.get("predicted"))
        panels.setdefault(row["mode"], []).append((POINTS.get(point, point), [bar]))
    has_ticks = any(row.get("predicted") is not None for row in rows)
    notes = [measured, "black tick: prediction"] if has_ticks else [measured]
    unit = shown_in("bytes", max(row["total"] for row in rows))
    return _chart(panels, MEMORY, unit, "Measured memory per rank", notes, _end(chain(*panels.values())))


def time_chart(rows: Rows, measured: str) -> Any:
    """Draw the milliseconds of a step by purpose, one panel per block size, with the ratio to the first mode at each bar.

    A bar is the median of the rounds, in it the parts in their proportion, and each round is a dot.
    """
    panels: dict[str, list[Group]] = {}
    for row in sorted(rows, key=lambda row: row["block_size"]):
        groups = panels.setdefault(f"{row['block_size']} tokens", [])
        parts = _parts(row, TIME)
        scale = row["ms per step"] / sum(parts.values())
        low, high = row["ratio, quartiles"]
        quartiles = f" ({low:.2f} to {high:.2f})" if len(row["rounds, ms"]) > 1 else ""
        text = f"{row['ratio']:.2f}x{quartiles}" if groups else "{} ms"
        groups.append((row["mode"], [Bar({name: part * scale for name, part in parts.items()}, text, dots=row["rounds, ms"])]))
    how = "bar: median; dot: a round; 1.03x: median of the ratios to "
    how += f"{rows[0]['mode']} in the same round, with their quartiles"
    return _chart(panels, TIME, (1, "ms"), "Time of a step", [measured, how])


def training_chart(rows: Rows, measured: str) -> Any:
    """Draw the peak of memory by mode, and beside it the losses of the same runs, which lie on each other."""
    unit, first = shown_in("bytes", max(row["peak"] for row in rows)), rows[0]
    colours = {row["mode"]: MODES[row["mode"]].colour for row in rows}
    groups: list[Group] = []
    for row in rows:
        saved = "" if row is first else f" ({row['peak'] / first['peak'] - 1:+.0%})"
        groups.append((MODES[row["mode"]].label, [Bar({row["mode"]: row["peak"]}, f"{{}} {unit[1]}{saved}")]))
    peaks = stack(groups, colours, unit, _ROOM * _end(groups), legend=0)
    peaks = peaks.properties(width=_WIDTH // 2, title=_title("Peak of memory while training, per rank"))
    values = [
        {"mode": row["mode"], "step": step, "loss": loss} for row in rows for step, loss in enumerate(row["losses"], start=1)
    ]
    turns = dict(zip(colours, dashes(len(colours)), strict=True))
    losses = alt.Chart(alt.InlineData(values=values)).mark_line(strokeWidth=2.5)
    losses = losses.encode(
        x=alt.X("step:Q", title="step", scale=alt.Scale(nice=False)),
        y=alt.Y("loss:Q", title=None, scale=alt.Scale(zero=False)),
        color=alt.Color("mode:N", legend=None, scale=scale_of(colours)),
        strokeDash=alt.StrokeDash("mode:N", legend=None, scale=scale_of(turns)),
    )
    losses = losses.properties(width=_WIDTH // 2, height=peaks.height, title=_title("Training loss of the same runs"))
    differences = [f"{row['largest difference']:.1g}" for row in rows[1:]]
    how = f"largest differences of a loss from the first bar's: {', '.join(differences)}; " if differences else ""
    notes = [measured, f"data: Python's standard library; {how}where lines lie on each other, their colours take turns"]
    both = alt.hconcat(peaks, losses, spacing=30).resolve_scale(color="independent")
    return styled(both, "The same training in less memory", subtitle=notes)


def _parts(row: Mapping[str, Any], purposes: Purposes) -> dict[str, float]:
    """Return the amount of each purpose by its name. Purposes with an amount of 0 are left out."""
    return {name: row[column] for column, (name, _) in purposes.items() if row.get(column)}


def _title(text: str) -> Any:
    return alt.TitleParams(text, fontSize=13, anchor="start", offset=4)


def _end(groups: Iterable[Group]) -> float:
    return max(bar.end for _, bars in groups for bar in bars)


def _chart(
    panels: Mapping[str, Sequence[Group]], purposes: Purposes, unit: Unit, title: str, notes: list[str], end: float = 0
) -> Any:
    """Draw panels of bars.

    Args:
        panels: the bars of each panel, by its name.
        title, notes: title, and the lines below it.
        end: what the longest bar of all panels reaches, if they have the same axis.
    """
    columns = min(len(panels), 2 if len(panels) in (2, 4) else 3)
    parts = {name for groups in panels.values() for _, bars in groups for bar in bars for name in bar.parts}
    colours = {name: colour for name, colour in purposes.values() if name in parts}
    drawn = []
    for name, groups in panels.items():
        panel = stack(groups, colours, unit, _ROOM * (end or _end(groups)), legend=len(colours))
        drawn.append(panel.properties(width=_WIDTH // columns, title=_title(name)))
    return styled(alt.concat(*drawn, columns=columns, spacing=25).resolve_scale(color="shared"), title, subtitle=notes)
