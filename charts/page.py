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
from statistics import median
from string import Template
from typing import Any

from charts.differences import differences, in_common
from charts.lines import Run, interactive, is_over_iterations, latest, look
from charts.style import CONFIG, FONT, PARAMS, number, with_unit

ACTIONS = {"export": True, "source": False, "compiled": False, "editor": False}  # menu of a chart; the editor is a web page


def page(runs: Sequence[Run], drawn: Mapping[str, list[Any]]) -> str:
    """Return a web page. `drawn` is what `sections` returned for the runs."""
    charts = [_embedded(chart) for row in drawn.values() for chart in row]
    with open(os.path.join(os.path.dirname(__file__), "page.html"), encoding="utf-8") as file:
        template = Template(file.read())
    facts = in_common([run.facts for run in runs])
    content = {"names": [run.name for run in runs], "charts": charts, "config": CONFIG, "actions": ACTIONS}
    return template.substitute(
        title=escape(runs[0].name if len(runs) == 1 else f"{len(runs)} runs"),
        subtitle=escape(", ".join([*facts, time.strftime("drawn %Y-%m-%d %H:%M")])),
        font=FONT,
        library=_library(),
        table=table(runs),
        places="\n".join(f'<div id="chart{place}"></div>' for place in range(len(charts))),
        page=json.dumps(content, separators=(",", ":")).replace("<", "\\u003c"),  # the name of a run cannot end the script
    )


@functools.cache
def _library() -> str:
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")  # takes seconds


def _embedded(chart: Any) -> dict[str, Any]:
    """Return a chart for the page, as wide as its place, with the parameters that page.html sets."""
    chart = interactive(chart) if is_over_iterations(chart) else chart
    found = chart.properties(width="container").to_dict(validate=False)  # the tests do
    return found | {"params": [*PARAMS, *found.get("params", [])], "config": {}, "padding": 0}


def table(runs: Sequence[Run]) -> str:
    """Return the table at the top of the page, with the best figure of each column in bold."""
    is_one_kind = len({run.on_gpu for run in runs}) == 1
    has_same_data = len({run.facts["dataset"] for run in runs if "dataset" in run.facts}) <= 1  # as far as it is known
    memory = functools.partial(with_unit, unit="MB")
    figures: dict[str, list[str]] = {}  # the cells of a column by its name
    for name, key, figure_of, text_of, best_of in (
        ("best validation loss", "val/loss", min, "{:.4f}".format, min if has_same_data else None),
        ("tokens per second", "throughput/tokens_per_second", median, number, max),
        ("peak", "memory/peak_mb", max, memory, min if is_one_kind else None),
        ("saved", "memory/saved_mb", latest, memory, max),
        ("wall time", "time/elapsed_s", latest, lambda seconds: str(timedelta(seconds=round(seconds))), None),
    ):
        if any(values := [run.get(key, figure_of) for run in runs]):
            figures[name] = _column(values, text_of, best_of)
    differ = [", ".join(texts.values()) for texts in differences([run.facts for run in runs])]
    places = enumerate(escape(run.folder) for run in runs)
    texts = {"run": [f'<td class="run"><button>{_mark(place)}<span>{folder}</span></button></td>' for place, folder in places]}
    if any(differ):
        texts["what differs"] = [f'<td class="differs">{escape(text)}</td>' for text in differ]
    texts["state"] = [
        f'<td class="{"bad" if run.facts.get("state") in ("killed", "failed") else ""}">{escape(state(run))}</td>'
        for run in runs
    ]
    head = "".join([*(f"<th>{name}</th>" for name in texts), *(f'<th class="number">{name}</th>' for name in figures)])
    rows = enumerate(zip(*texts.values(), *figures.values(), strict=True))
    body = "".join(f'<tr data-run="{place}">{"".join(cells)}</tr>' for place, cells in rows)
    return f'<table class="runs"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def state(run: Run) -> str:
    """Return the state of a run, and how far it is if it has not ended."""
    known, steps, last = run.facts.get("state", ""), run.curves.get("iter/loss"), run.facts.get("max_iters")
    return f"{known} at {steps[-1][0]:,} of {last:,}".strip() if known != "ended" and steps and last else str(known)


def _column(
    values: Sequence[float | None], text_of: Callable[[float], str], best_of: Callable[[list[float]], float] | None
) -> list[str]:
    """Return the cells of a column. The best one is bold, if not all are the same."""
    texts = ["" if value is None else text_of(value) for value in values]
    known = [value for value in values if value is not None]
    best = text_of(best_of(known)) if best_of and len(set(filter(None, texts))) > 1 else None
    return [f'<td class="number{" best" if text == best else ""}">{text}</td>' for text in texts]


def _mark(place: int) -> str:
    """Return how a run is drawn: its colour and its dashes."""
    colour, dashes = look(place)
    line = f'<path d="M0 6H30" stroke="{colour}" stroke-width="2.5" stroke-dasharray="{" ".join(map(str, dashes))}"/>'
    return f'<svg width="30" height="12">{line}</svg>'
