"""charts/bars.py: every chart in every format, what it draws, and what it refuses."""

import json
import pathlib
import sys

import pytest
from conftest import ROOT

from benchmarks.report import CHARTS as OF_RESULTS
from charts.bars import memory_chart, network_chart, plan_chart, time_chart, training_chart
from charts.style import MEMORY, check_path, save

MODES = ("sharded", "adamw")
PARTS = {"parameters": 6e9, "gradients": 5e9, "state": 4e9, "master": 3e9, "buckets": 2e9, "activations": 1e9}
PURPOSES = ["parameters", "gradients", "optimizer state", "master weights", "communication buffers", "activations"]
TIMES = {"forward and backward, ms": 80.0, "optimizer, ms": 15.0, "exposed communication, ms": 15.0, "ms per step": 100.0}
ROUNDS = {"rounds, ms": [90.0, 100.0, 130.0], "ratio": 0.966, "ratio, quartiles": [0.91, 1.02]}
START = {"png": b"\x89PNG\r\n", "svg": b"<svg", "html": b"<!DOCTYPE html>"}
MEASURED = "gpt2, 2 ranks; cpu; 2026-11-23"


def plan_rows(**changed):
    row = {"peak": 24e9, "temporary": 3e9, **PARTS, **changed}
    return [{"mode": mode, "world_size": size, **row} for size in (8, 2) for mode in MODES]


def memory_rows(scale=1.0):
    after_init = {"point": "after init", "total": 6e9 * scale, "parameters": 6e9 * scale}
    peak = {"point": "peak", "total": 22e9 * scale, "rest": 1e9 * scale, **{name: size * scale for name, size in PARTS.items()}}
    return [{"mode": mode, **row} for mode in MODES for row in (peak | {"predicted": 21e9 * scale}, after_init)]


def time_rows():
    return [{"mode": mode, "block_size": size, **TIMES, **ROUNDS} for size in (1024, 64) for mode in MODES]


def network_rows():
    return [{"ranks": "2 x 1", "Gbit/s": speed, **row} for speed in (10, 0.1) for row in time_rows()[:2]]


def training_rows():
    return [{"mode": mode, "peak": peak, "losses": [3.0, 2.5, 2.0]} for mode, peak in (("adamw", 4e9), ("sharded", 3e9))]


CHARTS = {
    "plan": lambda: plan_chart(plan_rows(), (80e9, "80 GB"), MEASURED),
    "memory": lambda: memory_chart(memory_rows(), MEASURED),
    "time": lambda: time_chart(time_rows(), MEASURED),
    "network": lambda: network_chart(network_rows(), MEASURED),
    "training": lambda: training_chart(training_rows(), MEASURED),
}


def panels(chart):
    """Title of each panel of bars: its layers, each with its mark, encoding and rows."""
    spec = chart.to_dict()
    found = {}
    for panel in spec.get("concat", spec.get("hconcat")):
        if "layer" in panel:
            rows = spec["datasets"][panel.get("data", spec.get("data"))["name"]]  # Altair lifts the data of a single panel
            found[panel["title"]["text"]] = (rows, {layer["mark"]["type"]: layer for layer in panel["layer"]})
    return found


def rows_with(chart, column):
    return [row for rows, _ in panels(chart).values() for row in rows if row.get(column) is not None]


def purposes(chart):
    """Purpose: colour, in the order of the legend."""
    _, layers = next(iter(panels(chart).values()))
    scale = layers["bar"]["encoding"]["color"]["scale"]
    assert set(scale["domain"]) == {row["purpose"] for row in rows_with(chart, "purpose")}
    return dict(zip(scale["domain"], scale["range"], strict=True))


@pytest.mark.parametrize("kind", CHARTS)
@pytest.mark.parametrize("ending", START)
def test_every_chart_in_every_format(kind, ending, tmp_path):
    path = tmp_path / "new folder" / f"{kind}.{ending}"
    save(CHARTS[kind](), str(path))
    content = path.read_bytes()
    assert content.startswith(START[ending])
    if ending == "html":  # self-contained
        assert b"cdn" not in content
        assert b"<script src" not in content
        assert b"<link" not in content
    if ending == "png":
        assert 1700 < int.from_bytes(content[16:20]) < 2500


@pytest.mark.parametrize("kind", CHARTS)
def test_every_chart_says_what_was_measured(kind):
    assert CHARTS[kind]().to_dict()["title"]["subtitle"][0] == MEASURED


def test_purposes_that_are_not_zero_appear():
    plan, memory, time, *_ = (make() for make in CHARTS.values())
    assert list(purposes(plan)) == list(purposes(memory)) == [*PURPOSES, "temporary tensors"]
    assert list(purposes(time)) == ["forward and backward", "optimizer", "exposed communication"]
    fewer = plan_chart(plan_rows(master=0, buckets=0, temporary=0, peak=16e9), None, MEASURED)
    assert list(purposes(fewer)) == [*PURPOSES[:3], "activations"]


def test_a_purpose_has_one_colour():
    assert len(set(dict(MEMORY.values()).values())) == len(MEMORY)
    assert purposes(CHARTS["memory"]()).items() >= purposes(CHARTS["plan"]()).items()


def test_ranks_points_and_modes_are_in_order():
    plan, memory, time, network, training = (make() for make in CHARTS.values())
    assert list(panels(plan)) == ["2 ranks", "8 ranks"]
    assert list(panels(time)) == ["64 tokens", "1024 tokens"]
    assert list(panels(network)) == ["2 x 1 ranks, 10 Gbit/s", "2 x 1 ranks, 0.1 Gbit/s"]
    assert list(panels(memory)) == list(MODES)
    for chart, names in ((plan, MODES), (memory, ("after init", "peak of training")), (training, ("adamw", "sharded"))):
        for _, layers in panels(chart).values():
            assert layers["bar"]["encoding"]["y"]["sort"] == list(names)


def test_the_bar_of_a_plan_ends_at_its_peak():
    for changed in ({}, {"peak": 20e9, "temporary": 0}):  # in the second, the parts are larger at different times
        chart = plan_chart(plan_rows(**changed), None, MEASURED)
        for end in rows_with(chart, "end"):
            assert end["end"] == pytest.approx(changed.get("peak", 24e9) / 1e9)
            assert end["text"] == ("20" if changed else "24")


@pytest.mark.parametrize(("limit", "text"), [(25e9, "limit: x"), (80e9, "limit: x →")])
def test_the_limit_is_a_line_or_an_arrow(limit, text):
    for _, layers in panels(plan_chart(plan_rows(), (limit, "x"), MEASURED)).values():
        assert ("rule" in layers) == (limit == 25e9)
        assert layers["text"]["mark"]["text"] == text
        assert layers["bar"]["encoding"]["x"]["scale"]["domain"][1] < 40


def test_what_is_drawn_beside_the_bars():
    memory, time, training = (CHARTS[kind]() for kind in ("memory", "time", "training"))
    assert [row["tick"] for row in rows_with(memory, "tick")] == [21.0] * 2
    assert [row["text"] for row in rows_with(time, "text")] == ["100 ms", "0.97x (0.91 to 1.02)"] * 2
    assert [row["dot"] for row in rows_with(time, "dot")] == [90.0, 100.0, 130.0] * 4
    assert [row["text"] for row in rows_with(training, "text")] == ["4.00 GB", "3.00 GB (-25%)"]
    without = memory_chart([{**row, "predicted": None} for row in memory_rows()], MEASURED)
    assert not any("tick" in layers for _, layers in panels(without).values())
    assert "black tick: prediction" not in without.to_dict()["title"]["subtitle"]


def test_parts_of_the_time_fill_the_measured_whole():
    """The medians of the parts add up to 110 ms here, and the median of the whole is 100 ms."""
    amounts = [row["amount"] for row in rows_with(CHARTS["time"](), "amount")][:3]
    assert amounts == pytest.approx([80 / 1.1, 15 / 1.1, 15 / 1.1])


def test_results_from_before_the_rounds_were_kept_are_drawn():
    chart = time_chart([{key: value for key, value in row.items() if "rounds" not in key} for row in time_rows()], MEASURED)
    assert [row["text"] for row in rows_with(chart, "text")] == ["100 ms", "0.97x"] * 2
    assert not rows_with(chart, "dot")


@pytest.mark.parametrize(("scale", "unit"), [(1.0, "GB"), (0.01, "MB")])
def test_memory_has_the_unit_of_its_size(scale, unit):
    chart = memory_chart(memory_rows(scale), MEASURED)
    for _, layers in panels(chart).values():
        assert layers["bar"]["encoding"]["x"]["title"] == unit
    assert max(row["amount"] for row in rows_with(chart, "amount")) == pytest.approx(6 if unit == "GB" else 60)


@pytest.mark.parametrize(
    "path", sorted(pathlib.Path(ROOT, "results").glob("*/results.json")), ids=lambda path: path.parent.name
)
def test_pictures_of_the_results_have_their_figures(path):
    """What is drawn from results.json is what stands in it: the length of each bar, each round, each ratio."""
    for measure, entry in json.loads(path.read_text()).items():
        if measure not in OF_RESULTS:
            continue
        rows = [row for row in entry["rows"] if row.get("world_size") == entry["rows"][0].get("world_size")]
        chart = OF_RESULTS[measure](rows, "")
        column = {"memory": "total", "training": "peak"}.get(measure, "ms per step")
        texts = rows_with(chart, "text")
        lengths = [
            sum(part["amount"] for part in drawn if part.get("amount", 0) > 0 and part["bar"] == text["bar"])
            for drawn, _ in panels(chart).values()
            for text in drawn
            if text.get("text")
        ]
        expected = sorted(row[column] for row in rows)
        unit = expected[-1] / max(lengths)
        assert unit in (pytest.approx(1e9), pytest.approx(1e6), pytest.approx(1000), pytest.approx(1))  # GB, MB, s, ms
        assert sorted(length * unit for length in lengths) == pytest.approx(expected, rel=1e-6)
        ratios = [f"{row['ratio']:.2f}x" for row in rows if row.get("ratio", 1) != 1]
        assert sorted(text["text"].split()[0] for text in texts if "x" in text["text"]) == sorted(ratios)


def test_other_endings_are_refused():
    for path in ("results/plan.pdf", "plan"):
        with pytest.raises(ValueError, match=rf"^the picture {path} must end with .png, .svg or .html; change the ending$"):
            check_path(path)


@pytest.mark.parametrize("library", ["altair", "vl_convert"])
def test_a_missing_library_is_named(library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    for call in (lambda: check_path("plan.png"), CHARTS["plan"]):
        with pytest.raises(ImportError, match=r"^pictures need altair and vl-convert-python; pip install -e '\.\[plots\]'$"):
            call()


@pytest.mark.parametrize("chart", [memory_chart, time_chart, network_chart])
def test_no_rows_are_refused(chart):
    with pytest.raises(ValueError, match="at least one row"):
        chart([], MEASURED)
