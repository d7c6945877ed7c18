"""Draw the metrics of runs over each other: curves over the iterations and bars, in sections. `page` puts them on a web page.

A run is a mapping from the keys of `metrics.jsonl` to their curves. Its label is its name in the legend. A chart that would be
empty is left out.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from string import Template
from typing import Any

from charts.style import ACTIONS, FONT, MEMORY, NUMBER, altair, styled
from zero.communication import KINDS
from zero.prediction import PURPOSES

Runs = Mapping[str, Mapping[str, "Curve"]]  # label: metric: curve

MOST_POINTS = 1000  # of a curve; more than a chart has pixels

# Okabe and Ito, as in style.py, without the yellow, in which thin lines are hard to see; with more runs the colours repeat
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
COLLECTIVES = tuple(kind.replace("-", "_") for kind in KINDS)
PARTS = {part: MEMORY[part][0] for part in PURPOSES}  # of the memory of a rank: their names
_WIDTH, _HEIGHT = 540, 220  # of a chart without its axes, in pixels before the scale
_BAR, _NAME = 15, 24  # height of a bar, and of the name above a group of bars
_AXIS = {"minExtent": 56}  # the same width for all axes on the left, so that the charts stand in line
_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Runs</title>
<style>
body { font: 14px $font; color: #222222; margin: 20px auto; width: max-content; }
p { color: #444444; margin: 0 10px 10px; }
</style>
<script>$library</script>
</head>
<body>
<p>Click a name to highlight a run, with Shift several. Drag curves to move, scroll with Ctrl to zoom, double-click to undo.</p>
<div id="charts"></div>
<script>
const reload_ms = $reload_ms;
vegaEmbed("#charts", $chart, $options).then(({view}) => {
  const kept = {signals: name => name == "zoom_iter", data: name => name == "picked_store", recurse: false};
  const reload = () => {
    sessionStorage.setItem("view", JSON.stringify(view.getState(kept)));
    location.reload();
  };
  if (reload_ms) setTimeout(reload, reload_ms);
  const before = JSON.parse(sessionStorage.getItem("view"));
  if (!before) return;
  for (const [name, value] of Object.entries(before.signals)) view.signal(name, value);
  for (const [name, rows] of Object.entries(before.data)) view.data(name, rows);
  view.runAsync();
});
</script>
</body>
</html>
""")
_DASH = 10  # pixels of one colour where the losses of several runs are equal


class Curve:
    """The points (iteration, value) of one metric, thinned out while they arrive, so that a long run takes little memory.

    At most `MOST_POINTS` stay: the first one, and every `every`-th after it. The last one stays in addition.
    """

    def __init__(self) -> None:
        self.every = 1
        self._kept: list[tuple[int, float]] = []
        self._count = 0

    def add(self, iteration: int, value: float) -> None:
        self.last = iteration, value
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


def sections(runs: Runs) -> dict[str, list[Any]]:
    """Return the name of each section that has anything to show, and its charts."""
    exposed = {kind.replace("_", "-"): f"comm/exposed_{kind}_ms" for kind in COLLECTIVES}
    sent = {kind.replace("_", "-"): f"comm/sent_{kind}_mb_per_step" for kind in COLLECTIVES}
    points = {name: f"memory/{name.replace(' ', '_')}_mb" for name in ("after init", "before step", "after step")}
    if any("memory/reserved_mb" in run for run in runs.values()):  # on a CPU, the peak includes Python and its libraries
        points["peak"] = "memory/peak_mb"
    parts = {name: f"memory/measured_{part}_mb" for part, name in PARTS.items()}
    predicted = {name: f"memory/predicted_{part}_mb" for part, name in PARTS.items()}
    state = {"optimizer state": "memory/optimizer_state_mb", "saved against plain AdamW, gradients included": "memory/saved_mb"}
    phases = {"whole step": "time/step_ms", "data": "time/data_ms", "forward and backward": "time/forward_backward_ms"}
    phases |= {"optimizer": "time/optimizer_ms", "of these, exposed communication": "comm/exposed_ms"}
    seconds = {name: f"checkpoint/{name}_s" for name in ("consolidate", "write", "blocked")}
    found = {
        "Loss": [
            _curves(runs, "Training loss", "iter/loss", is_loss=True),
            _curves(runs, "Validation loss", "val/loss", is_loss=True),
            _curves(runs, "Gradient norm before clipping", "iter/grad_norm", "norm"),
            _curves(runs, "Learning rate", "lr", "learning rate"),
        ],
        "Memory": [
            _bars(runs, "Memory at the points of a step", points, "MB", Curve.latest, {"peak": "memory/predicted_mb"}),
            _bars(runs, "Optimizer state, and memory saved", state, "MB", Curve.latest),
            _bars(runs, "What takes memory", parts, "MB", Curve.latest, predicted),
            _curves(runs, "Peak memory", "memory/peak_mb", "MB"),
        ],
        "Throughput": [
            _curves(runs, "Tokens per second, all ranks", "throughput/tokens_per_second", "tokens/s"),
            _curves(runs, "Time of a step", "time/step_ms", "ms"),
            _bars(runs, "Where the time of a step goes", phases, "ms", Curve.median),
            _curves(runs, "Model FLOPs utilization (MFU)", "mfu", "%"),
        ],
        "Communication": [
            _bars(runs, "Exposed communication of a step", exposed, "ms", Curve.median),
            _bars(runs, "Sent by a rank in a step", sent, "MB", Curve.median),
        ],
        "Checkpoints": [
            _bars(runs, "Time of a checkpoint", seconds, "s", Curve.median),
            _bars(runs, "Size of a checkpoint", {"one checkpoint": "checkpoint/bytes"}, "bytes", Curve.latest),
        ],
    }
    drawn = {name: [chart for chart in row if chart is not None] for name, row in found.items()}
    return {name: row for name, row in drawn.items() if row}


def picture(name: str, row: list[Any]) -> Any:
    """Return one section of `sections` as a chart."""
    return styled(_with_selections(_section(name, row)))


def page(found: Mapping[str, list[Any]], reload_s: float | None) -> str:
    """Return a web page with all sections, which needs no network.

    Args:
        found: what `sections` returned.
        reload_s: seconds until the page loads itself again; what is highlighted and the range of iterations stay. None: never.
    """
    alt = altair()
    import vl_convert

    stacked = alt.vconcat(*itertools.starmap(_section, found.items()), spacing=40).resolve_scale(color="independent")
    chart = styled(_with_selections(stacked))
    spec = chart.to_json(indent=None, separators=(",", ":"))
    return _PAGE.substitute(
        font=FONT,
        library=vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"),
        chart=spec.replace("<", "\\u003c"),  # so the name of a run cannot end the script
        options=json.dumps({"mode": "vega-lite", "actions": ACTIONS}),
        reload_ms=json.dumps(reload_s and reload_s * 1000),
    )


def _section(name: str, row: list[Any]) -> Any:
    alt = altair()
    return alt.concat(*row, columns=2, spacing=30, title=alt.TitleParams(name, offset=12))


def _with_selections(chart: Any) -> Any:
    """Return a chart of charts in which all parts share what is highlighted, hovered and zoomed.

    Altair could collect the selections by itself, but it puts each one into all layers of a chart, which Vega refuses.
    """
    alt = altair()
    names, params = list(_layer_names(chart)), []
    picked, hovered, zoom = _selections()
    for selection, kinds in ((picked, ("curves", "bars")), (hovered, ("rule",)), (zoom, ("curves",))):
        if views := [name for name in names if name.startswith(kinds)]:
            params.append(alt.TopLevelSelectionParameter(views=views, **selection.param.to_dict()))
    return chart.properties(params=params)


def _layer_names(chart: Any) -> Iterator[str]:
    """Yield the names of the layers, at any depth. Altair has put numbers at the ends of these names."""
    for kind in ("vconcat", "concat", "layer"):
        for part in getattr(chart, kind, []):
            yield from _layer_names(part)
    if isinstance(chart.name, str):
        yield chart.name


def _curves(runs: Runs, title: str, key: str, unit: str = "", is_loss: bool = False) -> Any:
    """Return the curves of one metric over the iterations, or None if no run has it.

    Equal losses lie on top of each other. So the upper lines are dashed, and the colours alternate. The axis of other metrics
    begins at zero. Values of more than twice the median, such as the time of the first iteration, do not stretch their axis.
    """
    curves = {label: metrics[key] for label, metrics in runs.items() if key in metrics}
    if not curves:
        return None
    alt = altair()
    ranges = [(curve.median(), max(value for _, value in curve.points)) for curve in curves.values()]
    divisor, unit = _unit(unit, max(largest for _, largest in ranges))
    notes = []
    if is_loss:
        scale = alt.Scale(zero=False)
        notes += ["where losses are equal, the colours take turns"] if len(curves) > 1 else []
    else:
        top = 1.05 * max(min(largest, 2 * middle) or largest for middle, largest in ranges) / divisor
        scale = alt.Scale(domain=[0, top or 1], nice=False)
        outside = sum(value / divisor > top for curve in curves.values() for _, value in curve.points)
        notes += [f"{outside} value{'s are' if outside > 1 else ' is'} outside of the chart"] if outside else []
    every = max(curve.every for curve in curves.values())
    notes += [f"one of {every} points is drawn"] if every > 1 else []
    values = [
        {"run": label, "iter": iteration, "value": float(f"{value / divisor:.6g}")}
        for label, curve in curves.items()
        for iteration, value in curve.points
    ]

    labels = list(runs)
    picked, hovered, _ = _selections()
    picked_or_faint = alt.when(picked).then(alt.value(1)).otherwise(alt.value(0.1))
    dashes = [[_DASH * (len(labels) - place), _DASH * place] for place in range(len(labels))]
    dash = alt.StrokeDash("run:N", legend=None, scale=alt.Scale(domain=labels, range=dashes))
    has_dot = any(len(curve.points) == 1 for curve in curves.values())  # one point makes no line
    base = alt.Chart().encode(x=alt.X("iter:Q", title="iteration", scale=alt.Scale(nice=False), axis=alt.Axis(labelFlush=True)))
    lines = base.mark_line(clip=True, strokeWidth=2.5 if is_loss else 1.5, strokeJoin="round", point=has_dot).encode(
        y=alt.Y("value:Q", title=unit or "loss", scale=scale, axis=alt.Axis(**_AXIS)),
        color=_colour(labels, "stroke"),
        strokeDash=dash if is_loss else alt.Undefined,
        opacity=picked_or_faint,
    )
    under_mouse = [alt.Tooltip("iter:Q", title="iteration", format=",")]
    under_mouse += [alt.Tooltip(f"{_escaped(label)}:Q", title=label, format=NUMBER) for label in curves]
    rule = base.transform_pivot("run", value="value", groupby=["iter"], op="max").mark_rule(color="#888888")
    rule = rule.encode(
        opacity=alt.when(hovered, empty=False).then(alt.value(1)).otherwise(alt.value(0)), tooltip=under_mouse
    ).properties(name=f"rule {title}")
    layers = [lines.properties(name=f"curves {title}"), rule]
    if is_loss and len(curves) > 1:  # where a curve is alone, this fills the gaps between its dashes
        thin = base.mark_line(clip=True, strokeWidth=1.5, strokeJoin="round")
        layers.insert(0, thin.encode(y="value:Q", color=_colour(labels, "stroke"), opacity=picked_or_faint))
    layers = alt.layer(*layers, data=alt.InlineData(values=values))
    return layers.properties(width=_WIDTH, height=_HEIGHT, title=_title(title, notes))


def _bars(
    runs: Runs,
    title: str,
    keys: Mapping[str, str],
    unit: str,
    value_of: Callable[[Curve], float],
    predicted: Mapping[str, str] | None = None,
) -> Any:
    """Return a group of bars per name of `keys`, one bar per run, or None if no run has any. Groups of zeros are left out.

    Args:
        keys: metric by the name of its group.
        unit: of all metrics.
        value_of: what a bar shows of the curve of its metric.
        predicted: metric, by the name of the group, whose value is marked at the bars.
    """
    alt = altair()
    predicted = predicted or {}
    values: list[dict[str, Any]] = []
    group: list[dict[str, Any]]
    for name, key in keys.items():
        group = [{"run": label, "name": name, "value": value_of(run[key])} for label, run in runs.items() if key in run]
        if not any(row["value"] for row in group):
            continue
        for row in group:
            mark = runs[row["run"]].get(predicted.get(name, ""))
            values.append(row | ({"mark": mark.latest()} if mark else {}))
    if not values:
        return None
    amounts = [row[column] for row in values for column in ("value", "mark") if column in row]
    divisor, unit = _unit(unit, max(map(abs, amounts)))
    for row in values:
        row |= {column: row[column] / divisor for column in ("value", "mark") if column in row}
        row["text"] = f"{row['value']:,.0f}" if abs(row["value"]) >= 100 else f"{row['value']:.3g}"
        row["end"] = max(0, row["value"], row.get("mark", 0))

    labels, names = list(runs), list(dict.fromkeys(row["name"] for row in values))
    domain = [min(0, *amounts) / divisor, max(0, *amounts) / divisor * 1.15]  # leaves room for the text
    picked, _, _ = _selections()
    thickness = len(labels) * _BAR  # of a group
    gap = _NAME / (thickness + _NAME)
    bands = alt.Scale(paddingInner=gap, paddingOuter=gap / 2, align=1)  # a gap above each group
    above = alt.Axis(labelAlign="left", labelPadding=0, labelOffset=-(thickness / 2 + 8), labelLimit=_WIDTH, **_AXIS)
    base = alt.Chart().encode(
        y=alt.Y("name:N", title=" ", sort=names, axis=above, scale=bands),
        yOffset=alt.YOffset("run:N", sort=labels, scale=alt.Scale(domain=labels)),
        opacity=alt.when(picked).then(alt.value(1)).otherwise(alt.value(0.1)),
    )
    tooltip = ["run:N", "name:N", alt.Tooltip("value:Q", title=unit, format=NUMBER)]
    if any("mark" in row for row in values):
        tooltip.append(alt.Tooltip("mark:Q", title=f"predicted, {unit}", format=NUMBER))
    bars = (
        base.mark_bar()
        .encode(
            x=alt.X("value:Q", title=unit, scale=alt.Scale(domain=domain, nice=False)),
            color=_colour(labels, "square"),
            tooltip=tooltip,
        )
        .properties(name=f"bars {title}")
    )
    layers = [bars, base.mark_text(align="left", dx=4, fontSize=11).encode(x="end:Q", text="text:N")]
    notes = ["median" if value_of is Curve.median else "latest value"]
    if any("mark" in row for row in values):
        ticks = base.transform_filter("isValid(datum.mark)").mark_tick(color="black", thickness=2.5, height={"band": 1})
        layers.insert(1, ticks.encode(x="mark:Q"))
        notes.append("black tick: prediction")
    height = len(names) * (thickness + _NAME)
    chart = alt.layer(*layers, data=alt.InlineData(values=values))
    return chart.properties(width=_WIDTH, height=height, title=_title(title, notes))


def _selections() -> tuple[Any, Any, Any]:
    """Return the runs that are highlighted, the iteration under the mouse, and the range of iterations on the x axis."""
    alt = altair()
    picked = alt.selection_point("picked", fields=["run"], bind="legend")
    hovered = alt.selection_point("hovered", fields=["iter"], nearest=True, on="pointerover", clear="pointerout")
    zoom = alt.selection_interval("zoom", encodings=["x"], bind="scales", zoom="wheel![event.ctrlKey]")
    return picked, hovered, zoom


def _colour(labels: list[str], symbol: str) -> Any:
    alt = altair()
    colours = [_COLOURS[place % len(_COLOURS)] for place in range(len(labels))]
    legend = alt.Legend(title=None, columns=3, labelLimit=320, symbolType=symbol, symbolStrokeWidth=3)
    return alt.Color("run:N", scale=alt.Scale(domain=labels, range=colours), legend=legend)


def _title(title: str, notes: list[str]) -> Any:
    return altair().TitleParams(title, subtitle="; ".join(notes) or " ", fontSize=13, subtitleFontSize=12)


def _unit(unit: str, largest: float) -> tuple[float, str]:
    """Return what to divide by, and the unit then: MB and bytes become GB if they are large."""
    if unit == "MB" and largest >= 1000:
        return 1000, "GB"
    if unit == "bytes":
        return (1e9, "GB") if largest >= 1e9 else (1e6, "MB")
    return 1, unit


def _escaped(label: str) -> str:
    """Return the label as the name of a field: without the backslashes, these characters would have a meaning."""
    return "".join(f"\\{character}" if character in "\\.[]:'\"" else character for character in label)
