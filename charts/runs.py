"""Draw the metrics of runs over each other, in sections: curves over the iterations, and bars. charts/page.py makes the page.

A chart that would be empty is left out. The data of a chart names a run by its position among the runs, so that a name may have
any characters.
"""

import re
import time
from collections.abc import Sequence
from typing import Any

from charts import lines, parts, series
from charts.differences import in_common
from charts.series import Curve, Panel, Run
from charts.style import MEMORY, altair, styled
from forecast.prediction import PURPOSES
from zero.communication import KINDS

COLLECTIVES = tuple(kind.replace("-", "_") for kind in KINDS)
PARTS = {part: MEMORY[part][0] for part in PURPOSES}  # of the memory of a rank: their names
# what train.py logs, of which the charts show the most useful; anything else, which a changed train.py logs, gets a curve
_KNOWN = re.compile(
    r"lr|mfu|iter/(loss|loss_max_rank|grad_norm|tokens)|(train|val)/loss|(throughput|time|comm|memory|checkpoint)/.*"
)


def sections(runs: Sequence[Run]) -> dict[str, list[Panel]]:
    """Return the name of each section that has anything to show, and its charts."""
    by_kind = {
        figure: {kind.replace("_", "-"): parts.each(runs, f"comm/{figure.format(kind)}", Curve.median) for kind in COLLECTIVES}
        for figure in ("exposed_{}_ms", "sent_{}_mb_per_step")
    }
    seconds = {name: parts.each(runs, f"checkpoint/{name}_s", Curve.median) for name in ("consolidate", "write", "blocked")}
    blocked = {"training waits": seconds.pop("blocked")}
    state = {"optimizer state": "memory/optimizer_state_mb", "saved": "memory/saved_mb"}
    purposes = {name: parts.each(runs, f"memory/measured_{part}_mb", Curve.latest) for part, name in PARTS.items()}
    predicted = [
        [run.curves[key].latest() for part in PARTS if (key := f"memory/predicted_{part}_mb") in run.curves] for run in runs
    ]
    exposed_ms = parts.each(runs, "comm/exposed_ms", Curve.median)
    exposed = {"of these, exposed communication": exposed_ms}
    size = {"one checkpoint": parts.each(runs, "checkpoint/bytes", Curve.latest)}
    others = sorted({key for run in runs for key in run.curves if not _KNOWN.fullmatch(key)})
    found = {
        "Loss": [
            lines.losses(runs),
            lines.disagreement(runs),
            lines.curves(runs, "Gradient norm before clipping", "iter/grad_norm", "norm", is_log=True),
            lines.curves(runs, "Learning rate", "lr", "learning rate"),
        ],
        "Throughput": [
            lines.curves(runs, "Tokens per second, all ranks", "throughput/tokens_per_second", "tokens/s", is_rolling=True),
            lines.curves(runs, "Time of a step", "time/step_ms", "ms", is_rolling=True),
            parts.bars(runs, "Where the time of a step goes", parts.phases(runs), "ms", "medians", below=exposed),
            lines.curves(runs, "Model FLOPs utilization (MFU)", "mfu", "%"),
        ],
        "Memory": [
            parts.memory_points(runs),
            parts.bars(
                runs,
                "What takes memory",
                purposes,
                "MB",
                "bytes held before a step",
                marks=[sum(sizes) or None for sizes in predicted],
            ),
            parts.bars(
                runs,
                "Optimizer state, and memory saved",
                {name: parts.each(runs, key, Curve.latest) for name, key in state.items()},
                "MB",
                "latest values; saved: against no sharding, gradients included",
                stacked=False,
            ),
            lines.curves(runs, "Peak memory", "memory/peak_mb", "MB", note=series.whose_peak(runs)),
        ],
        "Communication": [
            parts.bars(
                runs, "Exposed communication of a step", parts.scaled(by_kind["exposed_{}_ms"], exposed_ms), "ms", "medians"
            ),
            parts.bars(runs, "Sent by a rank in a step", by_kind["sent_{}_mb_per_step"], "MB", "medians"),
        ],
        "Checkpoints": [
            parts.bars(runs, "Time of a checkpoint", seconds, "s", "medians", below=blocked),
            parts.bars(runs, "Size of a checkpoint", size, "bytes"),
        ],
        "Others": [lines.curves(runs, key, key, "") for key in others],
    }
    drawn = {name: [panel for panel in row if panel is not None] for name, row in found.items()}
    return {name: row for name, row in drawn.items() if row}


def picture(name: str, row: list[Panel], runs: Sequence[Run]) -> Any:
    """Return one section of `sections` as a chart. If it has curves, the names of the runs are above it."""
    alt = altair()
    charts = [panel.chart.properties(width=series.WIDTH) for panel in row]
    place = alt.Y("run:O", title=None, axis=None, scale=alt.Scale(domain=series.positions(runs)))
    names = alt.Chart(alt.InlineData(values=[{"run": position, "name": run.name} for position, run in enumerate(runs)]))
    line = names.mark_rule(strokeWidth=2.5).encode(
        x=alt.value(0), x2=alt.value(36), y=place, color=series.colour(runs), strokeDash=series.dash(runs)
    )
    mark = names.mark_point(filled=True, size=60, opacity=1).encode(
        x=alt.value(18), y=place, color=series.colour(runs), shape=series.shape(runs)
    )
    text = names.mark_text(align="left", fontSize=13, limit=2 * series.WIDTH).encode(x=alt.value(44), y=place, text="name:N")
    legend = alt.layer(line, mark, text).properties(width=2 * series.WIDTH, height=alt.Step(18))
    own = dict.fromkeys(("color", "shape", "strokeDash"), "independent")
    columns = alt.concat(*charts, columns=2, spacing=30).resolve_scale(**own)
    shown = [legend, columns] if any(panel.under_mouse for panel in row) else [columns]
    subtitle = ", ".join([*in_common([run.facts for run in runs]), time.strftime("drawn %Y-%m-%d")])
    both = alt.vconcat(*shown, spacing=16, title=alt.TitleParams(name, subtitle=subtitle, offset=12)).resolve_scale(**own)
    params = [alt.VariableParameter(name=series.INK, value="black"), alt.VariableParameter(name=series.PICKED, value=[])]
    return styled(both.properties(params=params))
