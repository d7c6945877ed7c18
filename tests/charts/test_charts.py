"""charts/bars.py: every chart, what it draws, and what it refuses."""

import json
import pathlib
import sys

import pytest
from conftest import ROOT
from logged import bars, notes

from benchmarks.results import CHARTS as OF_RESULTS
from charts.bars import POINTS, memory_chart, time_chart
from charts.style import MEMORY, save
from forecast import modes

MODES = ("sharded", "adamw")
PARTS = {"parameters": 6e9, "gradients": 5e9, "state": 4e9, "master": 3e9, "buckets": 2e9, "activations": 1e9}
TIMES = {"forward and backward, ms": 80.0, "optimizer, ms": 15.0, "exposed communication, ms": 15.0, "ms per step": 100.0}
ROUNDS = {"rounds, ms": [90.0, 100.0, 130.0], "ratio": 0.966, "ratio, quartiles": [0.91, 1.02]}
MEASURED = "gpt2, 2 ranks; cpu; 2026-11-23"


def memory_rows(scale=1.0, predicted=21e9):
    after_init = {"point": "after init", "total": 6e9 * scale, "parameters": 6e9 * scale}
    peak = {"point": "peak", "total": 22e9 * scale, "rest": 1e9 * scale, **{name: size * scale for name, size in PARTS.items()}}
    return [
        {"mode": mode, **row} for mode in MODES for row in (after_init, peak | {"predicted": predicted and predicted * scale})
    ]


def time_rows():
    return [{"mode": mode, "block_size": size, **TIMES, **ROUNDS} for size in (1024, 64) for mode in MODES]


def training_rows():
    rows = (("adamw", 4e9, [3.0, 2.5, 2.0], 0.0), ("sharded", 3e9, [3.0, 2.0, 2.125], 0.5))
    return [{"mode": mode, "peak": peak, "losses": losses, "largest difference": most} for mode, peak, losses, most in rows]


CHARTS = {
    "memory": lambda: memory_chart(memory_rows(), MEASURED),
    "time": lambda: time_chart(time_rows(), MEASURED),
    "training": lambda: OF_RESULTS["training"](training_rows(), MEASURED),
}


def panels(chart):
    """Title of each panel of bars: its rows, and its layers by their marks."""
    spec = chart.to_dict(validate=False)  # saving does
    found = {}
    for panel in spec.get("concat", spec.get("hconcat")):
        if "layer" in panel:
            rows = spec["datasets"][panel.get("data", spec.get("data"))["name"]]  # Altair lifts the data of a single panel
            found[panel["title"]["text"]] = (rows, {layer["mark"]["type"]: layer for layer in panel["layer"]})
    return found


def purposes(chart):
    """Purpose: colour, in the order of the legend."""
    rows, layers = next(iter(panels(chart).values()))
    scale = layers["bar"]["encoding"]["color"]["scale"]
    assert set(scale["domain"]) == {row["name"] for row in rows if "name" in row}
    return dict(zip(scale["domain"], scale["range"], strict=True))


@pytest.mark.parametrize("kind", CHARTS)
def test_every_chart_is_a_picture_that_says_what_was_measured(kind, tmp_path):
    path = tmp_path / "new folder" / f"{kind}.png"
    chart = CHARTS[kind]()
    save(chart, str(path))
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n")
    assert 1500 < int.from_bytes(content[16:20]) < 2500
    assert chart.to_dict()["title"]["subtitle"][0] == MEASURED


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
def test_bars_are_the_rows_in_order(kind):
    found = panels(CHARTS[kind]())
    assert {title: bars(None, rows) for title, (rows, _) in found.items()} == DRAWN[kind]
    assert list(found) == list(DRAWN[kind])


def test_purposes_have_their_colours_and_order():
    memory, time, *_ = (make() for make in CHARTS.values())
    names = ["parameters", "gradients", "optimizer state", "master weights", "communication buffers", "activations"]
    assert list(purposes(memory)) == [*names, "temporary tensors"]
    assert list(purposes(time)) == ["forward and backward", "optimizer", "exposed communication"]
    fewer = memory_chart([{**row, "master": 0, "buckets": 0, "rest": 0} for row in memory_rows()], MEASURED)
    assert list(purposes(fewer)) == [*names[:3], "activations"]
    assert len(set(dict(MEMORY.values()).values())) == len(MEMORY)


def test_every_mode_has_a_name_and_a_colour_in_pictures():
    rows = [{**training_rows()[0], "mode": mode} for mode in modes.MODES]
    assert set(purposes(OF_RESULTS["training"](rows, MEASURED))) == set(modes.MODES)
    for kind in ("label", "colour"):
        assert len({getattr(mode, kind) for mode in modes.MODES.values()}) == len(modes.MODES)


def test_notes_say_what_is_drawn_beside_the_bars():
    assert "largest differences of a loss from the first bar's: 0.5;" in notes(CHARTS["training"]().to_dict())
    assert notes(CHARTS["memory"]().to_dict()).endswith("black tick: prediction")
    assert notes(memory_chart(memory_rows(predicted=None), MEASURED).to_dict()) == MEASURED


@pytest.mark.parametrize(("scale", "unit", "largest"), [(1.0, "GB", 6), (0.01, "MB", 60)])
def test_memory_has_the_unit_of_its_size(scale, unit, largest):
    for rows, layers in panels(memory_chart(memory_rows(scale), MEASURED)).values():
        assert layers["bar"]["encoding"]["x"]["title"] == unit
        assert max(row["value"] for row in rows if "value" in row) == pytest.approx(largest)


def place_and_length(measure, row):
    """Panel and name of the bar of a row, and its length."""
    if measure == "memory":
        return row["mode"], POINTS.get(row["point"], row["point"]), row["total"]
    if measure == "training":
        return "Peak of memory while training, per rank", modes.MODES[row["mode"]].label, row["peak"]
    return f"{row['block_size']} tokens", row["mode"], row["ms per step"]


@pytest.mark.parametrize(
    "path", sorted(pathlib.Path(ROOT, "results").glob("*/results.json")), ids=lambda path: path.parent.name
)
def test_pictures_of_the_results_have_their_figures(path):
    """What is drawn from results.json is what stands in it: each bar in its panel, each round, each ratio."""
    for measure, entry in json.loads(path.read_text()).items():
        if measure in OF_RESULTS:
            rows = [row for row in entry["rows"] if row.get("world_size") == entry["rows"][0].get("world_size")]
            found = {}  # panel and bar: its length, its dots and its text
            for panel, (values, layers) in panels(OF_RESULTS[measure](rows, "")).items():
                unit = {"GB": 1e9, "MB": 1e6, "s": 1e3, "ms": 1}[layers["bar"]["encoding"]["x"]["title"]]
                names = {row["run"]: row["label"] for row in values if "label" in row}
                for run, name in names.items():
                    of_bar = [row for row in values if row["run"] == run]
                    length = sum(unit * row.get("value", 0) for row in of_bar)
                    text = "".join(row.get("text", "") for row in of_bar)
                    found[panel, name] = length, [unit * row["dot"] for row in of_bar if "dot" in row], text
            assert len(found) == len(rows)
            first = {}
            for row in rows:
                panel, bar, length = place_and_length(measure, row)
                drawn, dots, text = found[panel, bar]
                assert drawn == pytest.approx(length, rel=1e-5)
                assert dots == pytest.approx(row.get("rounds, ms", []))
                ms, ratio = first.setdefault(panel, length), row.get("ratio", 1)
                if ratio != 1:
                    low, high = row["ratio, quartiles"]
                    assert text == f"{ratio:.2f}x ({low:.2f} to {high:.2f})"
                    assert (length > ms) == (ratio > 1) or low <= 1 <= high, "a bar contradicts its ratio"


@pytest.mark.parametrize("library", ["altair", "vl_convert"])
def test_a_missing_library_is_named(library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=r"^pictures need altair and vl-convert-python; pip install -e '\.\[plots\]'$"):
        CHARTS["memory"]()
