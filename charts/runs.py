"""Draw the metrics of runs over each other, in sections: curves over the iterations, and bars. charts/page.py makes the page.

A chart that would be empty is left out. The data of a chart names a run by its position among the runs, so that a name may have
any characters.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from charts import lines, parts, series
from charts.differences import in_common
from charts.parts import latest, medians
from charts.series import Curve, Panel, Run
from charts.style import MEMORY, altair, styled
from run.metrics import METRICS, SECTIONS
from zero.communication import KINDS

_EXPOSED, _SENT = (
    {kind: key.format(kind.replace("-", "_")) for kind in KINDS} for key in ("comm/exposed_{}_ms", "comm/sent_{}_mb_per_step")
)
_MEASURED = {name: key for part, (name, _) in MEMORY.items() if (key := f"memory/measured_{part}_mb") in METRICS}


def sections(runs: Sequence[Run]) -> dict[str, list[Panel]]:
    """Return the name of each section that has anything to show, and its charts."""
    curve, bars = partial(lines.curves, runs), partial(parts.bars, runs)
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
            bars(
                "Where the time of a step goes",
                parts.phases,
                "time/step_ms",
                "medians",
                below=medians({"of these, exposed communication": "comm/exposed_ms"}),
            ),
            curve("Model FLOPs utilization (MFU)", "mfu"),
        ],
        "Memory": [
            bars(
                "Memory at the points of a step",
                parts.memory_points,
                "memory/peak_mb",
                stacked=False,
                mark=parts.predicted_peak,
            ),
            bars("What takes memory", latest(_MEASURED), "memory/peak_mb", "bytes held before a step", mark=_predicted),
            bars(
                "Optimizer state, and memory saved",
                latest({"optimizer state": "memory/optimizer_state_mb", "saved": "memory/saved_mb"}),
                "memory/saved_mb",
                "latest values; saved: against no sharding, gradients included",
                stacked=False,
            ),
            curve("Peak memory", "memory/peak_mb", note=series.whose_peak(runs)),
        ],
        "Communication": [
            bars("Exposed communication of a step", _exposed, "comm/exposed_ms", "medians"),
            bars("Sent by a rank in a step", medians(_SENT), "comm/sent_mb_per_step", "medians"),
        ],
        "Checkpoints": [
            bars(
                "Time of a checkpoint",
                medians({"consolidate": "checkpoint/consolidate_s", "write": "checkpoint/write_s"}),
                "checkpoint/write_s",
                "medians",
                below=medians({"training waits": "checkpoint/blocked_s"}),
            ),
            bars("Size of a checkpoint", latest({"one checkpoint": "checkpoint/bytes"}), "checkpoint/bytes"),
        ],
        "Others": [curve(key, key) for key in others],
    }
    drawn = {name: [panel for panel in row if panel is not None] for name, row in found.items()}
    return {name: row for name, row in drawn.items() if row}


def _exposed(run: Run) -> parts.Amounts:
    return parts.scaled(medians(_EXPOSED)(run), run.get("comm/exposed_ms", Curve.median))


def _predicted(run: Run) -> float | None:
    """Return the sum of the parts of memory that were predicted."""
    return sum(run.get(key.replace("measured", "predicted"), Curve.latest) or 0 for key in _MEASURED.values()) or None


def picture(name: str, row: list[Panel], runs: Sequence[Run]) -> Any:
    """Return one section of `sections` as a chart. If it has curves, the names of the runs are above it."""
    alt = altair()
    charts = [panel.chart.properties(width=series.WIDTH) for panel in row]
    place = alt.Y("run:O", title=None, axis=None, scale=alt.Scale(domain=list(range(len(runs)))))
    names = alt.Chart(alt.InlineData(values=[{"run": position, "name": run.name} for position, run in enumerate(runs)]))
    line = names.mark_rule(strokeWidth=2.5).encode(
        x=alt.value(0), x2=alt.value(36), y=place, **series.by_run(runs, "color", "strokeDash")
    )
    mark = names.mark_point(filled=True, size=60, opacity=1).encode(
        x=alt.value(18), y=place, **series.by_run(runs, "color", "shape")
    )
    text = names.mark_text(align="left", fontSize=13, limit=2 * series.WIDTH).encode(x=alt.value(44), y=place, text="name:N")
    legend = alt.layer(line, mark, text).properties(width=2 * series.WIDTH, height=alt.Step(18))
    own = dict.fromkeys(("color", "shape", "strokeDash"), "independent")
    columns = alt.concat(*charts, columns=2, spacing=30).resolve_scale(**own)
    shown = [legend, columns] if any(panel.under_mouse for panel in row) else [columns]
    subtitle = ", ".join([*in_common([run.facts for run in runs]), time.strftime("drawn %Y-%m-%d")])
    both = alt.vconcat(*shown, spacing=16, title=alt.TitleParams(name, subtitle=subtitle, offset=12)).resolve_scale(**own)
    return styled(both)
