"""Draw the metrics of runs over each other, in sections: curves over the iterations, and bars. charts/page.py makes the page.

A chart that would be empty is left out. The data of a chart names a run by its position among the runs, so that a name may have
any characters.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

from charts import lines, series
from charts.bars import TIME, Bar, Group, stack
from charts.differences import in_common
from charts.series import COLOURS, Run, latest
from charts.style import MEMORY, alt, number, shown_in, styled
from run.metrics import EXPOSED_KEYS, METRICS, POINT_KEYS, SECTIONS, SENT_KEYS

Amounts = Mapping[str, float | None]  # of a run, by the name of a bar or of a part of it

_MEASURED = {name: key for part, (name, _) in MEMORY.items() if (key := f"memory/measured_{part}_mb") in METRICS}
_UNSHARDED = {name: key.replace("measured", "unsharded") for name, key in _MEASURED.items()}
_PHASES = {"data": "time/data_ms", "forward and backward": "time/forward_backward_ms", "optimizer": "time/optimizer_ms"}
_CHECKPOINT = {name: f"checkpoint/{name}_s" for name in ("consolidate", "write", "blocked")}


def sections(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return the name of each section that has anything to show, and its charts, without their widths."""
    curve, bars = partial(lines.curves, runs), partial(_bars, runs)
    others = sorted({key for run in runs for key in run.curves if METRICS.get(key) in (None, *SECTIONS["Others"])})
    found = {
        "Loss": [
            lines.losses(runs),
            lines.disagreement(runs),
            curve("Gradient norm before clipping", "iter/grad_norm", is_log=True),
            curve("Learning rate", "lr"),
        ],
        "Throughput": [
            curve("Tokens per second, all ranks", "throughput/tokens_per_second", is_rolling=True),
            curve("Time of a step", "time/step_ms", is_rolling=True),
            bars("Where the time of a step goes", _phases, "ms", "medians"),
            curve("Model FLOPs utilization (MFU)", "mfu"),
        ],
        "Memory": [
            bars("Memory at the points of a step", _memory_points, "MB", "latest values", stacked=False, mark=_predicted_peak),
            bars(
                "What takes memory",
                _figures(_MEASURED, latest),
                "MB",
                "bytes held before a step",
                mark=_predicted,
                beside=("with DDP (predicted)", _figures(_UNSHARDED, latest)),
            ),
            curve("Peak memory", "memory/peak_mb", note="on a CPU it is that of the process, with Python and its libraries"),
        ],
        "Communication": [
            bars("Exposed communication of a step", _figures(EXPOSED_KEYS, median), "ms", "medians"),
            bars("Sent by a rank in a step", _figures(SENT_KEYS, median), "MB", "medians"),
        ],
        "Checkpoints": [
            bars("Time of a checkpoint", _figures(_CHECKPOINT, median), "s", "medians; training is blocked", stacked=False)
        ],
        "Others": [curve(key, key) for key in others],
    }
    drawn = {name: [chart for chart in row if chart is not None] for name, row in found.items()}
    return {name: row for name, row in drawn.items() if row}


def _figures(keys: Mapping[str, str], figure_of: Callable[[Sequence[float]], float]) -> Callable[[Run], Amounts]:
    """Return a function that returns a figure of each metric of a run, such as the `latest`, by the name of the metric."""
    return lambda run: {name: run.get(key, figure_of) for name, key in keys.items()}


def _phases(run: Run) -> Amounts:
    """Return the parts of the time of a step. On a GPU, batches are prepared while it computes, so they are no part of it."""
    found = {**_figures(_PHASES, median)(run), **({"data": None} if run.on_gpu else {})}
    whole = run.get("time/step_ms", median)
    return found | {"rest": None if whole is None else max(0, whole - sum(filter(None, found.values())))}


def _memory_points(run: Run) -> Amounts:
    return {**_figures(POINT_KEYS, latest)(run), "peak": run.get("memory/peak_mb", latest) if run.on_gpu else None}


def _predicted_peak(run: Run) -> float | None:
    return run.get("memory/predicted_mb", latest) if run.on_gpu else None


def _predicted(run: Run) -> float | None:
    """Return the sum of the parts of memory that were predicted."""
    return sum(run.get(key.replace("measured", "predicted"), latest) or 0 for key in _MEASURED.values()) or None


def _bars(
    runs: Sequence[Run],
    title: str,
    amounts_of: Callable[[Run], Amounts],
    unit: str,
    note: str,
    stacked: bool = True,
    mark: Callable[[Run], float | None] = lambda run: None,
    beside: tuple[str, Callable[[Run], Amounts]] = ("", lambda run: {}),
) -> Any:
    """Return horizontal bars below the name of each run, or None if no run has any. What is zero is left out.

    Args:
        amounts_of: the parts of one bar per run if `stacked`, otherwise a bar each.
        unit: of all amounts.
        note: to be written below the title.
        mark: where to draw a tick, the prediction for the last bar of a run.
        beside: the parts of another bar, to compare with, and what it is in words. Left out where it is as long.
    """

    def found(run: Run, amounts_of: Callable[[Run], Amounts]) -> dict[str, float]:
        return {name: amount for name, amount in amounts_of(run).items() if amount}

    amounts = [found(run, amounts_of) for run in runs]
    compared = [found(run, beside[1]) if of else {} for run, of in zip(runs, amounts, strict=True)]
    names = list(dict.fromkeys(name for of in amounts + compared for name in of))
    if not names:
        return None
    every = [sum(of.values()) if stacked else max(of.values(), default=0) for of in amounts]
    divisor, unit = shown_in(unit, max(every + [sum(of.values()) for of in compared]))
    groups: list[Group] = []
    ticks = list(map(mark, runs))
    note += "; tick: prediction" if any(ticks) else ""
    for run, of, tick, other in zip(runs, amounts, ticks, compared, strict=True):
        parts = {name: amount / divisor for name, amount in of.items()}
        alone = [parts] if stacked and parts else [{name: amount} for name, amount in parts.items()]
        bars = [Bar(of_bar, number(sum(of_bar.values()))) for of_bar in alone]
        if bars and tick is not None:
            bars[-1] = bars[-1]._replace(tick=tick / divisor)
        if other and abs(sum(other.values()) - sum(of.values())) > 0.01 * sum(other.values()):
            parts = {name: amount / divisor for name, amount in other.items()}
            bars.append(Bar(parts, f"{number(sum(parts.values()))} {beside[0]}"))
        groups.append((run.name, bars))
    return stack(groups, _part_colours(names), unit).properties(title=series.title(title, [note]))


def _part_colours(names: Sequence[str]) -> dict[str, str]:
    """Return the colour of each part: that of other charts if it is in them."""
    known = dict([*MEMORY.values(), *TIME.values(), ("data", "#56B4E9"), ("rest", "#BBBBBB")])
    others = iter(colour for colour in COLOURS if colour not in [known.get(name) for name in names])
    return {name: known.get(name) or next(others) for name in names}


def picture(name: str, row: list[Any], runs: Sequence[Run]) -> Any:
    """Return one section of `sections` as a chart. If it has curves, the names of the runs are above it."""
    names = [{"run": position, "name": run.name} for position, run in enumerate(runs)]
    axis = alt.Axis(orient="right", labelFontSize=13, labelLimit=2 * series.WIDTH)
    legend = alt.Chart(alt.InlineData(values=names)).mark_rule(strokeWidth=2.5)
    legend = legend.encode(x=alt.value(0), x2=alt.value(36), y=alt.Y("name:N", title=None, sort=None, axis=axis))
    legend = legend.encode(**series.by_run([series.look(position)[1] for position in range(len(runs))]))
    own = dict.fromkeys(("color", "strokeDash"), "independent")
    charts = [chart.properties(width=series.WIDTH) for chart in row]
    columns = alt.concat(*charts, columns=2, spacing=30).resolve_scale(**own)
    subtitle = ", ".join([*in_common([run.facts for run in runs]), time.strftime("drawn %Y-%m-%d")])
    above = [legend.properties(width=36, height=alt.Step(18))] if any(map(lines.is_over_iterations, row)) else []
    return styled(alt.vconcat(*above, columns).resolve_scale(**own), name, subtitle=subtitle, offset=12)
