"""Draw the metrics of runs over each other, in sections: curves over the iterations, and bars. charts/page.py makes the page.

A chart that would be empty is left out. The data of a chart names a run by its position among the runs, so that a name may have
any characters.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

from charts import lines
from charts.bars import TIME, Bar, stack
from charts.differences import in_common
from charts.lines import COLOURS, WIDTH, Run, by_run, latest, title
from charts.style import MEMORY, alt, shown_in, styled
from run.metrics import EXPOSED_KEYS, METRICS, POINT_KEYS, SECTIONS, SENT_KEYS

Amounts = dict[str, float | None]  # by the name of a part

_MEASURED = {name: key for part, (name, _) in MEMORY.items() if (key := f"memory/measured_{part}_mb") in METRICS}
_UNSHARDED = {name: key.replace("measured", "unsharded") for name, key in _MEASURED.items()}
_PHASES = {"data": "time/data_ms", "forward and backward": "time/forward_backward_ms", "optimizer": "time/optimizer_ms"}
_ON_CPU = "on a CPU it is that of the process, with Python and its libraries"
_CHECKPOINT = {name: f"checkpoint/{name}_s" for name in ("consolidate", "write", "blocked")}


def sections(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return the name of each section that has anything to show, and its charts, without their widths."""
    curve, bars = partial(lines.curves, runs), partial(_bars, runs)
    others = sorted({key for run in runs for key in run.curves if METRICS.get(key) in (None, *SECTIONS["Others"])})
    found = [
        ("Loss", lines.losses(runs)),
        ("Loss", lines.disagreement(runs)),
        ("Loss", curve("Gradient norm before clipping", "iter/grad_norm", is_log=True)),
        ("Loss", curve("Learning rate", "lr")),
        ("Throughput", curve("Tokens per second, all ranks", "throughput/tokens_per_second", is_rolling=True)),
        ("Throughput", curve("Time of a step", "time/step_ms", is_rolling=True)),
        ("Throughput", bars("Where the time of a step goes", "ms", "medians", _phases)),
        ("Throughput", curve("Model FLOPs utilization (MFU)", "mfu")),
        ("Memory", bars("Memory at the points of a step", "MB", "latest values", _memory_points)),
        ("Memory", bars("What takes memory", "MB", "bytes held before a step", _held)),
        ("Memory", curve("Peak memory", "memory/peak_mb", note=_ON_CPU)),
        ("Communication", bars("Exposed communication of a step", "ms", "medians", partial(_medians, EXPOSED_KEYS))),
        ("Communication", bars("Sent by a rank in a step", "MB", "medians", partial(_medians, SENT_KEYS))),
        ("Checkpoints", bars("Time of a checkpoint", "s", "medians; training is blocked", _checkpoint)),
        *(("Others", curve(key, key)) for key in others),
    ]
    drawn: dict[str, list[Any]] = {}
    for section, chart in found:
        if chart is not None:
            drawn.setdefault(section, []).append(chart)
    return drawn


def _figures(run: Run, keys: Mapping[str, str], figure_of: Callable[[Sequence[float]], float]) -> Amounts:
    """Return a figure of each metric of a run, such as the `latest`, by the name of the metric."""
    return {name: run.get(key, figure_of) for name, key in keys.items()}


def _bar(amounts: Amounts, **options: Any) -> list[Bar]:
    """Return one bar of all parts that are not zero, if there are any. `options`: of the bar."""
    parts = {name: amount for name, amount in amounts.items() if amount}
    return [Bar(parts, **options)] if parts else []


def _each(amounts: Amounts) -> list[Bar]:
    """Return a bar for each part."""
    return [bar for name, amount in amounts.items() for bar in _bar({name: amount})]


def _medians(keys: Mapping[str, str], run: Run) -> list[Bar]:
    return _bar(_figures(run, keys, median))


def _checkpoint(run: Run) -> list[Bar]:
    return _each(_figures(run, _CHECKPOINT, median))


def _phases(run: Run) -> list[Bar]:
    """Return the parts of the time of a step. On a GPU, batches are prepared while it computes, so they are no part of it."""
    found = _figures(run, _PHASES, median) | ({"data": None} if run.on_gpu else {})
    whole = run.get("time/step_ms", median)
    return _bar(found | {"rest": None if whole is None else max(0, whole - sum(filter(None, found.values())))})


def _memory_points(run: Run) -> list[Bar]:
    """Return the memory at each point of a step, and on a GPU the peak with its prediction."""
    points = _each(_figures(run, POINT_KEYS, latest))
    if run.on_gpu:
        points += _bar({"peak": run.get("memory/peak_mb", latest)}, tick=run.get("memory/predicted_mb", latest))
    return points


def _held(run: Run) -> list[Bar]:
    """Return what takes memory, with the predicted sum, and beside it what DDP would hold, where that is not as much."""
    predicted = sum(run.get(key.replace("measured", "predicted"), latest) or 0 for key in _MEASURED.values())
    held = _bar(_figures(run, _MEASURED, latest), tick=predicted or None)
    with_ddp = _bar(_figures(run, _UNSHARDED, latest), text="{} with DDP (predicted)") if held else []
    return held + [bar for bar in with_ddp if abs(bar.length - held[0].length) > 0.01 * bar.length]


def _bars(runs: Sequence[Run], text: str, unit: str, note: str, bars_of: Callable[[Run], list[Bar]]) -> Any:
    """Return horizontal bars below the name of each run, or None if no run has any.

    Args:
        unit: of all amounts.
        note: to be written below the title.
    """
    groups = [(run.name, bars_of(run)) for run in runs]
    bars = [bar for _, of_run in groups for bar in of_run]
    if not bars:
        return None
    note += "; tick: prediction" if any(bar.tick for bar in bars) else ""
    names = list(dict.fromkeys(name for bar in bars for name in bar.parts))
    drawn = stack(groups, _part_colours(names), shown_in(unit, max(bar.length for bar in bars)))
    return drawn.properties(title=title(text, [note]))


def _part_colours(names: Sequence[str]) -> dict[str, str]:
    """Return the colour of each part: that of other charts if it is in them."""
    known = dict([*MEMORY.values(), *TIME.values(), ("data", "#56B4E9"), ("rest", "#BBBBBB")])
    others = iter(colour for colour in COLOURS if colour not in [known.get(name) for name in names])
    return {name: known.get(name) or next(others) for name in names}


def picture(name: str, row: list[Any], runs: Sequence[Run]) -> Any:
    """Return one section of `sections` as a chart. If it has curves, the names of the runs are above it."""
    names = [{"run": position, "name": run.name} for position, run in enumerate(runs)]
    axis = alt.Axis(orient="right", labelFontSize=13, labelLimit=2 * WIDTH)
    legend = alt.Chart(alt.InlineData(values=names)).mark_rule(strokeWidth=2.5)
    y = alt.Y("name:N", title=None, sort=None, axis=axis)
    legend = legend.encode(x=alt.value(0), x2=alt.value(36), y=y, **by_run(len(runs)))
    own = dict.fromkeys(("color", "strokeDash"), "independent")
    charts = [chart.properties(width=WIDTH) for chart in row]
    columns = alt.concat(*charts, columns=2, spacing=30).resolve_scale(**own)
    subtitle = ", ".join([*in_common([run.facts for run in runs]), time.strftime("drawn %Y-%m-%d")])
    above = [legend.properties(width=36, height=alt.Step(18))] if any(map(lines.is_over_iterations, row)) else []
    return styled(alt.vconcat(*above, columns).resolve_scale(**own), name, subtitle=subtitle, offset=12)
