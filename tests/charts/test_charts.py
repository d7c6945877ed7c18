"""charts/bars.py: every chart, what it draws, and what it refuses."""

import pytest
from logged import bars

from benchmarks.results import CHARTS as OF_RESULTS
from charts.bars import memory_chart, time_chart
from charts.style import MEMORY, save
from forecast import modes

MODES = ("sharded", "adamw")
PARTS = {"parameters": 6e9, "gradients": 5e9, "state": 4e9, "master": 3e9, "buckets": 2e9, "activations": 1e9}
TIMES = {"forward and backward, ms": 80.0, "optimizer, ms": 15.0, "exposed communication, ms": 15.0, "ms per step": 100.0}
ROUNDS = {"rounds, ms": [90.0, 100.0, 130.0], "ratio": 0.966, "ratio, quartiles": [0.91, 1.02]}
MEASURED = "gpt2, 2 ranks; cpu; 2026-11-23"


AFTER_INIT = {"point": "after init", "total": 6e9, "parameters": 6e9}
PEAK = {"point": "peak", "total": 22e9, "rest": 1e9, **PARTS, "predicted": 21e9}
CHARTS = {  # how it is drawn, and the rows
    "memory": (memory_chart, [{"mode": mode, **row} for mode in MODES for row in (AFTER_INIT, PEAK)]),
    "time": (time_chart, [{"mode": mode, "block_size": size, **TIMES, **ROUNDS} for size in (1024, 64) for mode in MODES]),
    "training": (OF_RESULTS["training"], [
        {"mode": "adamw", "peak": 4e9, "losses": [3.0, 2.5, 2.0], "largest difference": 0.0},
        {"mode": "sharded", "peak": 3e9, "losses": [3.0, 2.0, 2.125], "largest difference": 0.5},
    ]),
}  # fmt: skip


def panels(chart):
    """The rows of each panel of bars, by its title."""
    spec = chart.to_dict(validate=False)  # saving does
    drawn = [panel for panel in spec.get("concat", spec.get("hconcat")) if "layer" in panel]
    data = [panel.get("data", spec.get("data"))["name"] for panel in drawn]  # Altair lifts the data of a single panel
    return {panel["title"]["text"]: spec["datasets"][name] for panel, name in zip(drawn, data, strict=True)}


WHOLE = "parameters 6 gradients 5 optimizer state 4 master weights 3 communication buffers 2 activations 1"
STEP = "forward and backward 72.7273 optimizer 13.6364 exposed communication 13.6364 o 90.0 o 100.0 o 130.0"
LARGEST = f"{WHOLE} temporary tensors 1"
DRAWN = {  # the medians of the parts of a step add up to 110 ms, and that of the whole is 100 ms
    "memory": {mode: [f"after init: {WHOLE[:12]} = 6.00", f"peak of training: {LARGEST} | 21.0 = 22.0"] for mode in MODES},
    "time": {f"{size} tokens": [f"sharded: {STEP} = 100 ms", f"adamw: {STEP} = 0.97x (0.91 to 1.02)"] for size in (64, 1024)},
    "training": {
        "Peak of memory while training, per rank": [
            f"{modes.MODES['adamw'].label}: adamw 4 = 4.00 GB",
            f"{modes.MODES['sharded'].label}: sharded 3 = 3.00 GB (-25%)",
        ]
    },
}


@pytest.mark.parametrize("kind", CHARTS)
def test_bars_are_the_rows_in_order_and_the_picture_says_what_was_measured(kind, tmp_path):
    draw, rows = CHARTS[kind]
    chart, path = draw(rows, MEASURED), tmp_path / "new folder" / f"{kind}.png"
    found = panels(chart)
    assert {title: bars(None, rows) for title, rows in found.items()} == DRAWN[kind]
    assert list(found) == list(DRAWN[kind])
    assert chart.to_dict()["title"]["subtitle"][0] == MEASURED
    save(chart, str(path))
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n")
    assert 1500 < int.from_bytes(content[16:20]) < 2500


def test_parts_and_modes_have_names_and_colours_of_their_own():
    for pairs in (list(MEMORY.values()), [(mode.label, mode.colour) for mode in modes.MODES.values()]):
        labels, colours = zip(*pairs, strict=True)
        assert len(set(labels)) == len(set(colours)) == len(pairs)
