"""Folders of runs that no training has written: their metrics.jsonl and run.json, and what the charts make of them."""

import json

import dashboard
from charts.runs import sections

MB = {"adamw": 800.0, "sharded": 400.0}  # optimizer state
KINDS = {"adamw": ["all_reduce"], "sharded": ["reduce_scatter", "all_gather"]}
ALL_KINDS = ["all_reduce", "reduce_scatter", "all_gather", "broadcast"]


def events(implementation, iterations=12, on_gpu=True):
    """The events of a run whose first iteration takes 2000 ms instead of 100."""
    state, kinds = MB[implementation], KINDS[implementation]
    yield {"iter": 0, "memory/predicted_peak_mb": 2000 + state, "memory/predicted_state_mb": state + 4}
    yield {"iter": 0, "train/loss": 4.1, "val/loss": 4.2, "time/eval_s": 5.0}
    for iteration in range(iterations):
        ms = 100.0 if iteration else 2000.0
        yield {
            **{"iter": iteration, "iter/loss": 4.0 - iteration / 100, **({"mfu": 31.0} if iteration >= 5 else {})},
            "time/elapsed_s": 7.0 + iteration / 10,
            **{"iter/grad_norm": 2.0 ** (iteration - 6), "throughput/eta_hours": 0.5},
            **{"throughput/tokens_per_second": 1e6 / ms, "time/step_ms": ms, "time/data_ms": 2.0},
            **{"time/forward_backward_ms": ms - 23, "time/optimizer_ms": 20.0, "comm/exposed_ms": 7.0 * len(kinds)},
            **{f"comm/exposed_{kind}_ms": 7.0 * (kind in kinds) for kind in ALL_KINDS},
            **{f"comm/sent_{kind}_mb_per_step": 300.0 * (kind in kinds) for kind in ALL_KINDS},
        }
        if iteration % 5 == 0:
            yield {
                **{"iter": iteration, "memory/after_init_mb": 500.0, "memory/before_step_mb": 1500.0 + state},
                **{"memory/after_step_mb": 1000.0 + state, "memory/peak_mb": 1900.0 + state + iteration},
                **({"memory/reserved_mb": 3000.0} if on_gpu else {}),
                **{"memory/optimizer_state_mb": state, "memory/predicted_mb": 2000.0 + state, "memory/saved_mb": 800.0 - state},
            }
    yield {"iter": 3, "memory/measured_state_mb": state, "memory/measured_parameters_mb": 500.0}
    yield {"iter": 10, "checkpoint/consolidate_s": 3.0, "checkpoint/write_s": 2.0, "checkpoint/bytes": 1.5e9}
    yield {"iter": 10, "sample/text": "def"}


def write_run(folder, events=(), **facts):
    """Write a run into a new folder, and return the folder."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "run.json").write_text(json.dumps(facts))
    return str(folder)


def drawn(folders):
    """Title: chart as a dict, of all charts."""
    charts = [chart.to_dict(validate=False) for row in sections(dashboard.read(folders)).values() for chart in row]
    return {chart["title"]["text"]: chart for chart in charts}


def rows(chart):
    return chart["datasets"][chart["data"]["name"]]


def bars(chart, data=None):
    """A text for each group of bars: its name, the parts of each bar, its tick |, its dots, and = the text at its end."""
    found = []
    for row in rows(chart) if data is None else data:
        if "label" in row:
            found.append(f"{row['label']}:")
        else:
            kinds = {"name": "value", "mark": "|", "dot": "o", "text": "="}
            kind = next(kind for kind in kinds if kind in row)
            found[-1] += f" {row[kind]} {row['value']:g}" if kind == "name" else f" {kinds[kind]} {row[kind]}"
    return found


def curve(chart, run, kind="value"):
    return [(row["iter"], row["value"]) for row in rows(chart) if (row["run"], row["kind"]) == (run, kind)]


def layers(chart, mark):
    """The encodings of the layers with that mark."""
    return [layer["encoding"] for layer in chart["layer"] if layer["mark"]["type"] == mark]


def notes(chart):
    return " ".join(chart["title"]["subtitle"])
