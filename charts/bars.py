"""The figures of plan.py and bench.py as charts: rows (lists of dicts) in, a chart out.

`measured` says what was measured on what; it stands below the title.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from charts.style import MEMORY, NUMBER, altair, dashes, number, shown_in, styled

Rows = Sequence[Mapping[str, Any]]
Purposes = Mapping[str, tuple[str, str]]  # column: name and colour of a purpose, in the order of the stack

POINTS = {  # of a step, and their names in a chart; saving is not a part of training
    "after init": "after init",
    "wrapping": "peak of wrapping",
    "after wrapping": "after wrapping",
    "accumulating": "accumulating",
    "before step": "before step",
    "after step": "after step",
    "peak": "peak of training",
    "saving": "saving, on rank 0",
}
TIME = {
    "forward and backward, ms": ("forward and backward", "#009E73"),
    "optimizer, ms": ("optimizer", "#E69F00"),
    "exposed communication, ms": ("exposed communication", "#CC79A7"),
}
_LIMIT = "#D55E00"  # colour of the limit of memory
_WIDTH = 820  # of the panels side by side, in pixels before the scale
_ROOM = 1.3  # of a panel, relative to its longest bar: the text needs the rest


class Bar(NamedTuple):
    """A stacked bar. All amounts are in the unit of its chart."""

    name: str
    parts: Mapping[str, float]  # amount by the name of the purpose
    text: str  # at its end
    tick: float | None = None
    dots: Sequence[float] = ()

    @property
    def end(self) -> float:
        """What the bar, its tick and its dots reach. Amounts below zero extend to the left."""
        return max(sum(amount for amount in self.parts.values() if amount > 0), self.tick or 0, *self.dots, 0)


def plan_chart(rows: Rows, limit: tuple[float, str] | None, measured: str) -> Any:
    """Draw the bytes of one rank at the peak by purpose and mode, one panel per number of ranks.

    `limit`: the bytes that tensors may take, and what to write there; None: none.
    """
    divisor, unit = shown_in("bytes", max((row["peak"] for row in rows), default=0))
    panels = {
        f"{size} rank{'s' if size > 1 else ''}": [_planned(row, divisor) for row in rows if row["world_size"] == size]
        for size in sorted({row["world_size"] for row in rows})
    }
    line = None if limit is None else (limit[0] / divisor, f"limit: {limit[1]}")
    return _chart(panels, MEMORY, unit, "Predicted peak of memory per rank", [measured], limit=line)


def _planned(row: Mapping[str, Any], divisor: float) -> Bar:
    """Return the bar of a row of plan.py, whose end is the peak.

    The parts are not all at their largest at the same time: gradients and buckets are drawn as far as the others leave room.
    """
    largest, at_peak, left = {**row, "rest": row["temporary"]}, dict[str, float](), row["peak"]
    for column in sorted(MEMORY, key=["gradients", "buckets"].count):  # these two last
        at_peak[column] = min(largest.get(column, 0), left)
        left -= at_peak[column]
    return Bar(row["mode"], _parts(at_peak, MEMORY, divisor), number(row["peak"] / divisor))


def memory_chart(rows: Rows, measured: str) -> Any:
    """Draw the measured bytes of one rank by purpose at each point of a step, one panel per mode, with the prediction."""
    divisor, unit = shown_in("bytes", max((row["total"] for row in rows), default=0))
    panels: dict[str, list[Bar]] = {mode: [] for mode in _unique(rows, "mode")}
    for row in sorted(rows, key=lambda row: list(POINTS).index(row["point"])):
        tick = row["predicted"] / divisor if row.get("predicted") is not None else None
        bar = Bar(POINTS[row["point"]], _parts(row, MEMORY, divisor), number(row["total"] / divisor), tick)
        panels[row["mode"]].append(bar)
    has_ticks = any(bar.tick is not None for bars in panels.values() for bar in bars)
    notes = [measured, "black tick: prediction"] if has_ticks else [measured]
    return _chart(panels, MEMORY, unit, "Measured memory per rank", notes)


def time_chart(rows: Rows, measured: str) -> Any:
    """Draw the milliseconds of a step by purpose, one panel per block size, with the ratio to the first mode at each bar."""
    in_order = sorted(rows, key=lambda row: row["block_size"])
    return _time_chart(in_order, lambda row: f"{row['block_size']} tokens", "Time of a step", "ms", measured)


def network_chart(rows: Rows, measured: str) -> Any:
    """Draw the same for the rows of benchmarks.network, one panel per number of ranks and speed of the network."""
    title = "Time of a step on two machines with a slow network"
    return _time_chart(rows, lambda row: f"{row['ranks']} ranks, {row['Gbit/s']:g} Gbit/s", title, "s", measured)


def _time_chart(rows: Rows, panel_of: Callable[[Mapping[str, Any]], str], title: str, unit: str, measured: str) -> Any:
    """Draw the median of the rounds as a bar, in it the parts in their proportion, and each round as a dot."""
    panels: dict[str, list[Bar]] = {}
    divisor = {"ms": 1, "s": 1000}[unit]
    for row in rows:
        bars = panels.setdefault(panel_of(row), [])
        parts = _parts(row, TIME, divisor)
        scale = row["ms per step"] / divisor / sum(parts.values())
        text = ratio(row) if bars else f"{number(row['ms per step'] / divisor)} {unit}"
        dots = [milliseconds / divisor for milliseconds in row["rounds, ms"]]
        bars.append(Bar(row["mode"], {name: part * scale for name, part in parts.items()}, text, dots=dots))
    first = rows[0]["mode"] if rows else ""
    how = f"bar: median; dot: a round; 1.03x: median of the ratios to {first} in the same round, with their quartiles"
    return _chart(panels, TIME, unit, title, [measured, how], shared=False)


def training_chart(rows: Rows, measured: str, known: Purposes) -> Any:
    """Draw the peak of memory by mode, and beside it the losses of the same runs, which lie on each other.

    `known`: what to write for each mode, and its colour.
    """
    alt = altair()
    divisor, unit = shown_in("bytes", max((row["peak"] for row in rows), default=0))
    modes, first = _unique(rows, "mode"), rows[0]
    bars, colours = [], {mode: known[mode][1] for mode in modes}
    for row in rows:
        saved = "" if row is first else f" ({row['peak'] / first['peak'] - 1:+.0%})"
        mode, peak = row["mode"], row["peak"] / divisor
        bars.append(Bar(known[mode][0], {mode: peak}, f"{number(peak)} {unit}{saved}"))
    parts = {mode: (mode, colour) for mode, colour in colours.items()}
    peaks = _panel("Peak of memory while training, per rank", bars, parts, unit, _WIDTH // 2, height=200, legend=False)
    values = [
        {"mode": row["mode"], "step": step, "loss": loss} for row in rows for step, loss in enumerate(row["losses"], start=1)
    ]
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
        .properties(width=_WIDTH // 2, height=200, title=alt.TitleParams("Training loss of the same runs", **_PANEL_TITLE))
    )
    differences = [
        f"{max(abs(loss - other) for loss, other in zip(row['losses'], first['losses'], strict=True)):.1g}" for row in rows[1:]
    ]
    how = f"largest differences of a loss from the first bar's: {', '.join(differences)}; " if differences else ""
    notes = [measured, f"data: Python's standard library; {how}where lines lie on each other, their colours take turns"]
    return styled(
        alt.hconcat(peaks, losses, spacing=30)
        .resolve_scale(color="independent")
        .properties(title=alt.TitleParams("The same training in less memory", subtitle=notes))
    )


def ratio(row: Mapping[str, Any]) -> str:
    """Return the median ratio of a row, and its quartiles if there are several rounds."""
    low, high = row["ratio, quartiles"]
    return f"{row['ratio']:.2f}x" + (f" ({low:.2f} to {high:.2f})" if len(row["rounds, ms"]) > 1 else "")


def _unique(rows: Rows, column: str) -> list[Any]:
    return list(dict.fromkeys(row[column] for row in rows))


def _parts(row: Mapping[str, Any], purposes: Purposes, divisor: float) -> dict[str, float]:
    """Return the amount of each purpose by its name. Purposes with an amount of 0 are left out."""
    return {name: row[column] / divisor for column, (name, _) in purposes.items() if row.get(column)}


_PANEL_TITLE: dict[str, Any] = {"fontSize": 13, "anchor": "start", "offset": 4}


def _chart(
    panels: Mapping[str, list[Bar]],
    purposes: Purposes,
    unit: str,
    title: str,
    notes: list[str],
    limit: tuple[float, str] | None = None,
    shared: bool = True,
) -> Any:
    """Draw panels of stacked horizontal bars.

    Args:
        panels: the bars of each panel, by its name.
        unit: of all amounts.
        title, notes: title, and the lines below it.
        limit: where to draw a line through all panels, and what it is; an arrow points to a limit that is farther away.
        shared: whether all panels have the same axis.
    """
    alt = altair()
    if not any(panels.values()):
        raise ValueError("a chart needs at least one row, and there are none; measure or plan something first")
    columns = min(len(panels), 2 if len(panels) in (2, 4) else 3)
    ends = {name: max(bar.end for bar in bars) for name, bars in panels.items()}
    drawn_names = {name for bar in itertools.chain(*panels.values()) for name in bar.parts}
    used = {column: purpose for column, purpose in purposes.items() if purpose[0] in drawn_names}
    drawn = [
        _panel(name, bars, used, unit, _WIDTH // columns, end=max(ends.values()) if shared else ends[name], limit=limit)
        for name, bars in panels.items()
    ]
    return styled(
        alt.concat(*drawn, columns=columns, spacing=25)
        .resolve_scale(color="shared")
        .properties(title=alt.TitleParams(title, subtitle=notes))
    )


def _panel(
    title: str,
    bars: list[Bar],
    purposes: Purposes,
    unit: str,
    width: int,
    end: float | None = None,
    limit: tuple[float, str] | None = None,
    height: int | None = None,
    legend: bool = True,
) -> Any:
    """Draw stacked bars over an axis that ends a little after `end`, or after the longest bar."""
    alt = altair()
    end = max(bar.end for bar in bars) if end is None else end
    colours = dict(purposes.values())
    order = {name: position for position, name in enumerate(colours)}
    values: list[dict[str, Any]] = []
    for bar in bars:
        values += [
            {"bar": bar.name, "purpose": name, "order": order[name], "amount": amount} for name, amount in bar.parts.items()
        ]
        values += [{"bar": bar.name, "dot": dot} for dot in bar.dots]
        values.append({"bar": bar.name, "text": bar.text, "end": bar.end, "tick": bar.tick})
    base = alt.Chart().encode(y=alt.Y("bar:N", title=None, sort=[bar.name for bar in bars]))
    scale = alt.Scale(domain=[0, end * _ROOM], nice=False)
    stacked = base.transform_filter("isValid(datum.amount)").mark_bar(height={"band": 0.75})
    stacked = stacked.encode(
        x=alt.X("amount:Q", title=unit, scale=scale),
        color=alt.Color(
            "purpose:N",
            scale=alt.Scale(domain=list(colours), range=list(colours.values())),
            legend=alt.Legend(title=None) if legend else None,
        ),
        order="order:Q",
        tooltip=["purpose:N", alt.Tooltip("amount:Q", title=unit, format=NUMBER)],
    )
    texts = base.transform_filter("isValid(datum.text)").mark_text(align="left", dx=5, fontSize=12)
    layers = [stacked, texts.encode(x="end:Q", text="text:N")]
    if any(bar.tick is not None for bar in bars):
        ticks = base.transform_filter("isValid(datum.tick)").mark_tick(color="black", thickness=2.5, height={"band": 0.95})
        layers.append(ticks.encode(x="tick:Q"))
    if any(bar.dots for bar in bars):
        dots = base.transform_filter("isValid(datum.dot)").mark_circle(color="black", opacity=0.5, size=18)
        layers.append(dots.encode(x="dot:Q"))
    if limit is not None:
        at, text = limit
        alone = alt.Chart(alt.InlineData(values=[{}]))
        label: dict[str, Any] = {"align": "right", "baseline": "bottom", "color": _LIMIT, "fontSize": 12}
        if at <= end * _ROOM:
            layers.append(alone.mark_rule(color=_LIMIT, strokeWidth=2, strokeDash=[6, 3]).encode(x=alt.XDatum(at)))
            layers.append(alone.mark_text(text=text, **label).encode(x=alt.XDatum(at), y=alt.value(-8)))
        else:
            layers.append(alone.mark_text(text=f"{text} →", **label).encode(x=alt.value(width), y=alt.value(-8)))
    return alt.layer(*layers, data=alt.InlineData(values=values)).properties(
        width=width, height=height or alt.Step(24), title=alt.TitleParams(title, **_PANEL_TITLE)
    )
