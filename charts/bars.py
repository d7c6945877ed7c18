"""The figures of plan.py and bench.py as charts: rows (lists of dicts) in, a chart out."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from charts.style import MEMORY, NUMBER, altair, styled

Rows = Sequence[Mapping[str, Any]]

POINTS = ("after init", "after wrapping", "accumulating", "before step", "after step", "saving", "peak")

TIME = {
    "forward and backward, ms": ("forward and backward", "#009E73"),
    "optimizer, ms": ("optimizer", "#E69F00"),
    "exposed communication, ms": ("exposed communication", "#CC79A7"),
}
_LIMIT = "#D55E00"  # colour of the line at the memory of a GPU
_WIDTH = 820  # of the facets side by side, in pixels before the scale


def plan_chart(rows: Rows, gpu_memory_gb: float | None) -> Any:
    """Draw the bytes of one rank by purpose and mode, one facet per number of ranks, with the peak and the memory of the GPU.

    The parts are not all at their largest at the same time. So their sum can differ from the peak.
    """
    title = "Predicted memory per rank", "black tick: peak"
    if gpu_memory_gb is not None:
        title = title[0], f"{title[1]}; dashed line: memory of the GPU, {gpu_memory_gb:g} GB"
    ranks = {size: f"{size} rank{'s' if size > 1 else ''}" for size in sorted(row["world_size"] for row in rows)}
    bars = [
        {"bar": row["mode"], "facet": ranks[row["world_size"]], "mark": row["peak"] / 1e9, "parts": _parts(row, MEMORY, 1e9)}
        for row in rows
    ]
    modes = _unique(sorted(rows, key=lambda row: -row["world_size"]), "mode")  # a single rank has fewer modes
    return _chart(bars, MEMORY, modes, list(ranks.values()), "GB", title, mark="peak", limit=gpu_memory_gb)


def memory_chart(rows: Rows) -> Any:
    """Draw the measured bytes of one rank by purpose at each point of a step, one facet per mode, with the prediction."""
    predictions = [row.get("predicted") for row in rows]
    largest = max([row["total"] for row in rows] + [prediction or 0 for prediction in predictions], default=0)
    divisor, unit = (1e9, "GB") if largest >= 1e9 else (1e6, "MB")
    bars = []
    for row, predicted in zip(rows, predictions, strict=True):
        bar = {"bar": row["point"], "facet": row["mode"], "parts": _parts(row, MEMORY, divisor)}
        bar["total"] = row["total"] / divisor
        bars.append(bar | {"mark": None if predicted is None else predicted / divisor})
    measured = _unique(rows, "point")
    points = [point for point in POINTS if point in measured] + [point for point in measured if point not in POINTS]
    title = "Measured memory per rank", "black tick: prediction" if any(predictions) else ""
    return _chart(bars, MEMORY, points, _unique(rows, "mode"), unit, title, mark="predicted")


def time_chart(rows: Rows) -> Any:
    """Draw the milliseconds of a step by purpose, one facet per block size, with the ratio at the end of each bar.

    The ratio is that to the first mode.
    """
    in_order = sorted(rows, key=lambda row: row["block_size"])
    return _time_chart(in_order, lambda row: f"block size {row['block_size']}", "Time of a step", "ms")


def network_chart(rows: Rows) -> Any:
    """Draw the same for the rows of benchmarks.network, one facet per number of ranks and speed of the network."""
    title = "Time of a step on two machines with a slow network"
    return _time_chart(rows, lambda row: f"{row['ranks']} ranks, {row['Gbit/s']:g} Gbit/s", title, "s")


def _time_chart(rows: Rows, facet: Callable[[Mapping[str, Any]], str], title: str, unit: str) -> Any:
    bars, divisor = [], {"ms": 1, "s": 1000}[unit]
    for row in rows:
        bar = {"bar": row["mode"], "facet": facet(row), "parts": _parts(row, TIME, divisor)}
        bar["total"] = row["ms per step"] / divisor
        bars.append(bar | {"text": None if row.get("ratio") is None else f"{row['ratio']:.2f}"})
    modes, facets = _unique(rows, "mode"), list(dict.fromkeys(map(facet, rows)))
    own_scales = "; each facet has its own scale" if len(facets) > 1 else ""
    subtitle = f"bars: median time; number: median of the ratio to {modes[0]}{own_scales}" if modes else ""
    return _chart(bars, TIME, modes, facets, unit, (title, subtitle))


def _unique(rows: Rows, column: str) -> list[Any]:
    return list(dict.fromkeys(row[column] for row in rows))


def _parts(row: Mapping[str, Any], purposes: Mapping[str, tuple[str, str]], divisor: float) -> dict[str, float]:
    """Return the amount of each purpose by its name. Purposes with an amount of 0 are left out."""
    return {name: row[column] / divisor for column, (name, _) in purposes.items() if row.get(column)}


def _chart(
    bars: list[dict[str, Any]],
    purposes: Mapping[str, tuple[str, str]],
    bar_order: list[str],
    facets: list[str],
    unit: str,
    title: tuple[str, str],
    mark: str = "",
    limit: float | None = None,
) -> Any:
    """Draw stacked horizontal bars in facets.

    Args:
        bars: each with its name (bar), facet and parts; optionally with its total, a value to mark, and a text for its end.
        purposes: column: name and colour, in the order of the stack.
        bar_order, facets: the names in the order in which they are drawn.
        unit: of all values.
        title: title and subtitle.
        mark: what the tick at a bar's "mark" shows.
        limit: where to draw a line through all facets.
    """
    alt = altair()
    if not bars:
        raise ValueError("a chart needs at least one row, and there are none; measure or plan something first")
    used = {name: colour for name, colour in purposes.values() if any(name in bar["parts"] for bar in bars)}
    order = {name: position for position, name in enumerate(used)}
    values: list[dict[str, Any]] = [{"facet": facet, "limit": limit} for facet in facets]
    for bar in bars:
        others = {key: value for key, value in bar.items() if key != "parts"}
        for name, amount in bar["parts"].items():
            place = {"bar": bar["bar"], "facet": bar["facet"], "total": bar.get("total")}
            values.append({**place, "purpose": name, "order": order[name], "amount": amount})
        end = sum(amount for amount in bar["parts"].values() if amount > 0)  # amounts below zero extend to the left
        room = max(end, bar.get("mark") or 0, limit or 0) * (1.15 if bar.get("text") else 1.03)  # nothing is drawn beyond
        values.append({**others, "end": end, "room": room})

    base = alt.Chart().encode(y=alt.Y("bar:N", title=None, scale=alt.Scale(domain=bar_order)))
    picked = alt.selection_point(fields=["purpose"], bind="legend")
    tooltip = ["purpose:N", alt.Tooltip("amount:Q", title=unit, format=NUMBER)]
    if any("total" in bar for bar in bars):
        tooltip.append(alt.Tooltip("total:Q", title=f"total, {unit}", format=NUMBER))
    stacked = base.transform_filter("isValid(datum.amount)").mark_bar(height={"band": 0.75})
    stacked = stacked.encode(
        x=alt.X("amount:Q", title=unit, scale=alt.Scale(nice=False)),
        color=alt.Color("purpose:N", title=None, scale=alt.Scale(domain=list(used), range=list(used.values()))),
        order="order:Q",
        opacity=alt.when(picked).then(alt.value(1)).otherwise(alt.value(0.15)),
        tooltip=tooltip,
    )
    layers = [stacked.add_params(picked), base.transform_filter("isValid(datum.room)").mark_point(opacity=0).encode(x="room:Q")]
    if limit is not None:
        line = alt.Chart().transform_filter("isValid(datum.limit)").mark_rule(color=_LIMIT, strokeWidth=2, strokeDash=[6, 3])
        layers.append(line.encode(x="limit:Q"))
    if any(bar.get("mark") is not None for bar in bars):
        tick = {"color": "black", "opacity": 1, "thickness": 2.5, "height": {"band": 0.95}}
        ticks = base.transform_filter("isValid(datum.mark)").mark_tick(**tick)
        layers.append(ticks.encode(x="mark:Q", tooltip=alt.Tooltip("mark:Q", title=f"{mark}, {unit}", format=NUMBER)))
    if any(bar.get("text") for bar in bars):
        ends = base.transform_filter("isValid(datum.text)").mark_text(align="left", dx=4, fontSize=12)
        layers.append(ends.encode(x="end:Q", text="text:N"))

    columns = min(len(facets), 2 if len(facets) == 4 else 3)
    facet = alt.Facet("facet:N", sort=facets, title=None)
    chart = (
        alt.layer(*layers)
        .properties(width=_WIDTH // columns, height=alt.Step(24))
        .facet(facet=facet, columns=columns, spacing=20, data=alt.InlineData(values=values))
        .resolve_scale(x="independent" if unit in ("ms", "s") else "shared")
        .resolve_axis(x="independent")  # a shared axis is also drawn below a place without a facet
        .properties(title=alt.TitleParams(title[0], subtitle=title[1]))
    )
    return styled(chart)
