"""A web page with the charts of runs: what differs between them and their figures in a table, then the charts. No network.

The layout, the colours of a light and of a dark screen, and what the mouse does are in page.html.
"""

import functools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from html import escape
from string import Template
from typing import Any

from charts.differences import differences, in_common
from charts.series import Curve, Panel, Run, look, whose_peak
from charts.style import ACTIONS, CONFIG, FONT, INK, PICKED, altair, number, shown_in

_ENDED_BADLY = ("killed", "failed")
# figures of a run
_BEST_LOSS, _SPEED, _PEAK = (
    ("val/loss", Curve.smallest),
    ("throughput/tokens_per_second", Curve.median),
    ("memory/peak_mb", Curve.largest),
)
_SAVED, _WALL_S = ("memory/saved_mb", Curve.latest), ("time/elapsed_s", Curve.latest)
# by the shapes of `look`: in a box of 12 x 12
_PATHS = {"circle": "M11 6A5 5 0 1 1 1 6A5 5 0 1 1 11 6Z", "square": "M1 1H11V11H1Z"}
_PATHS |= {"triangle-up": "M6 1L11.5 11H.5Z", "diamond": "M6 0L12 6L6 12L0 6Z"}


def page(runs: Sequence[Run], drawn: Mapping[str, list[Panel]], reload_s: float | None) -> str:
    """Return a web page.

    Args:
        drawn: what `sections` returned for the runs.
        reload_s: seconds until the page loads itself again; what is highlighted and the range of iterations stay. None: never.
    """
    panels = [panel for row in drawn.values() for panel in row]
    classes = ["wide" if panel.is_wide else "" for panel in panels]
    with open(os.path.join(os.path.dirname(__file__), "page.html"), encoding="utf-8") as file:
        template = Template(file.read())
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    facts = in_common([run.facts for run in runs])
    notes = [f"peak: {whose_peak(runs)}"] if whose_peak(runs) else []
    notes += ["saved: what a rank would hold in addition without sharding"] if any(run.get(*_SAVED) for run in runs) else []
    lost = ", without what was lost before a restart" if any(map(_restarts, runs)) else ""
    notes += [f"wall time: with evaluations and checkpoints{lost}"] if any(run.get(*_WALL_S) for run in runs) else []
    names, charts = [run.name for run in runs], list(map(_interactive, panels))
    hint = "Click a run to highlight it. " if len(runs) > 1 else ""
    hint += "Drag curves to move, scroll with Ctrl to zoom, double-click to undo."
    return template.substitute(
        title=escape(_label(runs[0]) if len(runs) == 1 else count),
        subtitle=escape(", ".join([*facts, time.strftime("drawn %Y-%m-%d %H:%M")])),
        font=FONT,
        library=_library(),
        verdict=verdict(runs),
        table=table(runs),
        notes="<br>".join([*([escape("; ".join(notes)) + "."] if notes else []), hint]),
        places="\n".join(f'<div id="chart{place}" class="{name}"></div>' for place, name in enumerate(classes)),
        page=_in_a_script({"names": names, "charts": charts, "config": CONFIG, "actions": ACTIONS}),
        reload_ms=json.dumps(reload_s and reload_s * 1000),
    )


@functools.cache
def _library() -> str:
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")  # takes seconds


def _in_a_script(value: Any) -> str:
    """Return JSON in which the name of a run cannot end the script."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _interactive(panel: Panel) -> dict[str, Any]:
    """Return a chart for the page, as wide as its place: runs can be highlighted, iterations zoomed, values are shown."""
    alt = altair()
    params: list[Any] = [{"name": INK, "value": "black"}, {"name": PICKED, "value": []}]
    chart = panel.chart
    if panel.under_mouse:
        zoom = alt.selection_interval("zoom", encodings=["x"], bind="scales", zoom="wheel![event.ctrlKey]")
        hovered = alt.selection_point("hovered", fields=["iter"], nearest=True, on="pointerover", clear="pointerout")
        for selection, view in ((zoom, "curves"), (hovered, "rule")):
            params.append(selection.param.to_dict() | {"views": [view]})
        values = [alt.Tooltip(f"{column}:Q", format=",.5~r") for column in panel.under_mouse]
        rule = alt.Chart().transform_calculate(column="datum.kind + ' ' + datum.run")
        rule = rule.transform_pivot("column", value="value", groupby=["iter"], op="max").mark_rule(color="#888888")
        rule = rule.encode(
            x="iter:Q",
            opacity=alt.when(hovered, empty=False).then(alt.value(1)).otherwise(alt.value(0)),
            tooltip=[alt.Tooltip("iter:Q", title="iteration", format=","), *values],
        )
        chart = chart.copy()
        chart.layer = [*chart.layer, rule.properties(name="rule")]
    found = chart.properties(width="container").to_dict(validate=False)  # the tests do
    return found | {"params": params, "config": {}, "padding": 0}


# -- the table ---------------------------------------------------------------------------------------------------------


def _hours(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))  # h:mm:ss


def verdict(runs: Sequence[Run]) -> str:
    """Return a sentence about the best run, as far as the runs can be compared."""
    losses = sorted((loss, place) for place, run in enumerate(runs) if (loss := run.get(*_BEST_LOSS)) is not None)
    if len(losses) < 2:
        return ""
    if not _same_data(runs):
        return '<p class="verdict">The runs have different datasets, so their losses do not compare.</p>'
    best = f"{losses[0][0]:.4f}"
    first = [place for loss, place in losses if f"{loss:.4f}" == best]
    if len(first) == len(losses):
        which = "All runs" if len(losses) == len(runs) else f"The {len(losses)} runs that were evaluated"
        text = f"{which} have the same best validation loss, {best}."
    else:
        names = "; ".join(f"<b>{escape(_label(runs[place]))}</b>" for place in first)
        at = f", at iteration {runs[first[0]].curves['val/loss'].lowest[0]:,}" if len(first) == 1 else ""
        second, other = losses[len(first)]
        text = f"Lowest validation loss: <b>{best}</b>, {names}{at}. "
        text += f"Next: {second:.4f} (+{float(f'{second:.4f}') - float(best):.4f}), {escape(_label(runs[other]))}."
    tokens = {seen for _, place in losses if (seen := runs[place].get("iter/tokens", Curve.latest)) is not None}
    if len(tokens) > 1:
        text += f" The runs have not seen the same number of tokens: {min(tokens):,.0f} to {max(tokens):,.0f}."
    return f'<p class="verdict">{text}</p>'


def _label(run: Run) -> str:
    return run.name if run.name.endswith(_folder(run)) else f"{run.name}, {_folder(run)}"


def _folder(run: Run) -> str:
    return os.path.basename(os.path.abspath(run.folder))


def _restarts(run: Run) -> int:
    return len(run.facts.get("starts", [])[1:])


def _same_data(runs: Sequence[Run]) -> bool:
    return len({run.facts["dataset"] for run in runs if "dataset" in run.facts}) <= 1  # as far as it is known


def state(run: Run) -> str:
    """Return the state of a run, how far it is, how long it will take, and how often it has been resumed."""
    steps, last = run.curves.get("iter/loss"), run.facts.get("max_iters")
    text = run.state
    if run.state == "running" and steps and last:
        hours = run.get("throughput/eta_hours", Curve.latest)
        text += f", {steps.last[0] / last:.0%}" + ("" if hours is None else f", {_hours(hours * 3600)} left")
    elif run.state != "ended" and steps and last:
        text = f"{text} at {steps.last[0]:,} of {last:,}".strip()
        saved = run.curves.get("checkpoint/bytes")
        text += f", checkpoint at {saved.last[0]:,}" if saved else ""
    restarts = f"{_restarts(run)} restart{'s' if _restarts(run) > 1 else ''}" if _restarts(run) else ""
    return ", ".join(filter(None, (text, restarts)))


def table(runs: Sequence[Run]) -> str:
    """Return the table at the top of the page, with the best figure of each column in bold."""
    on_gpus = {run.on_gpu for run in runs}
    peak = "peak" if len(on_gpus) > 1 else "tensors, peak" if True in on_gpus else "process, peak"
    columns: dict[str, list[str]] = {}
    for name, figure, text_of, best_of in (
        ("best validation loss", _BEST_LOSS, "{:.4f}".format, min if _same_data(runs) else None),
        ("tokens per second", _SPEED, number, max),
        (peak, _PEAK, _memory, min if len(on_gpus) == 1 else None),
        ("saved", _SAVED, _memory, max),
        ("wall time", _WALL_S, _hours, None),
    ):
        if any(values := [run.get(*figure) for run in runs]):
            columns[name] = _column(values, text_of, best_of)
    differ = [", ".join(texts.values()) for texts in differences([run.facts for run in runs])]
    heads = ["run", *(["what differs"] if any(differ) else []), "state"]
    rows = ["".join(f"<th>{head}</th>" for head in heads) + "".join(f'<th class="number">{name}</th>' for name in columns)]
    for place, run in enumerate(runs):
        folder = escape(_folder(run))
        row = f'<td class="run"><button>{_mark(place)}<span>{folder}</span></button></td>'
        row += f'<td class="differs">{escape(differ[place])}</td>' if any(differ) else ""
        row += f'<td class="{"bad" if run.state in _ENDED_BADLY else ""}">{escape(state(run))}</td>'
        rows.append(row + "".join(cells[place] for cells in columns.values()))
    body = "".join(f'<tr data-run="{place}">{row}</tr>' for place, row in enumerate(rows[1:]))
    return f'<table class="runs"><thead><tr>{rows[0]}</tr></thead><tbody>{body}</tbody></table>'


def _column(
    values: Sequence[float | None], text_of: Callable[[float], str], best_of: Callable[[list[float]], float] | None
) -> list[str]:
    """Return the cells of a column. The best one is bold, if not all are the same."""
    texts = ["" if value is None else text_of(value) for value in values]
    known = [value for value in values if value is not None]
    best = text_of(best_of(known)) if best_of and len(set(filter(None, texts))) > 1 else None
    return [f'<td class="number{" best" if text == best else ""}">{text}</td>' for text in texts]


def _memory(megabytes: float) -> str:
    divisor, unit = shown_in("MB", abs(megabytes))
    return f"{number(megabytes / divisor)} {unit}"


def _mark(place: int) -> str:
    """Return how a run is drawn: its colour, its dashes and its shape."""
    colour, shape, dashes = look(place)
    line = f'<path d="M0 6H30" stroke="{colour}" stroke-width="2.5" stroke-dasharray="{" ".join(map(str, dashes))}"/>'
    return f'<svg width="30" height="12">{line}<path transform="translate(9)" d="{_PATHS[shape]}" fill="{colour}"/></svg>'
