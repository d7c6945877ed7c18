"""charts/bars.py: every chart in every format, what it draws, and what it refuses."""

import html
import json
import pathlib
import sys

import pytest
from conftest import ROOT

from benchmarks.results import CHARTS as OF_RESULTS
from charts.bars import POINTS, memory_chart, network_chart, plan_chart, time_chart
from charts.style import MEMORY, check_path, save
from forecast import modes

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
    rows = (("adamw", 4e9, [3.0, 2.5, 2.0]), ("sharded", 3e9, [3.0, 2.0, 2.125]))
    return [{"mode": mode, "peak": peak, "losses": losses} for mode, peak, losses in rows]


CHARTS = {
    "plan": lambda: plan_chart(plan_rows(), (80e9, "80 GB"), MEASURED),
    "memory": lambda: memory_chart(memory_rows(), MEASURED),
    "time": lambda: time_chart(time_rows(), MEASURED),
    "network": lambda: network_chart(network_rows(), MEASURED),
    "training": lambda: OF_RESULTS["training"](training_rows(), MEASURED),
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
    named = [modes.MODES[mode].label for mode in ("adamw", "sharded")]
    for chart, names in ((plan, MODES), (memory, ("after init", "peak of training")), (training, named)):
        for _, layers in panels(chart).values():
            assert layers["bar"]["encoding"]["y"]["sort"] == list(names)


def test_every_mode_has_a_name_and_a_colour_in_pictures():
    rows = [{**training_rows()[0], "mode": mode} for mode in modes.MODES]
    assert set(purposes(OF_RESULTS["training"](rows, MEASURED))) == set(modes.MODES)
    for kind in ("label", "colour"):
        assert len({getattr(mode, kind) for mode in modes.MODES.values()}) == len(modes.MODES)


def test_the_bar_of_a_plan_ends_at_its_peak():
    for changed, missing in (
        ({}, 0),
        ({"shadow": 2e9, "peak": 26e9}, 0),
        ({"peak": 20e9, "temporary": 0}, 1),  # the parts are largest at different times: 1 GB of the buckets
        ({"peak": 17e9, "temporary": 0}, 4),  # 2 GB of buckets and 2 GB of gradients
    ):
        chart = plan_chart(plan_rows(**changed), None, MEASURED)
        peak = changed.get("peak", 24e9) / 1e9
        for end in rows_with(chart, "end"):
            assert end["end"] == pytest.approx(peak)
            assert end["text"] == f"{peak:.1f}"
        drawn = [row for row in rows_with(chart, "amount") if row["bar"] == "adamw"]
        assert min(row["amount"] for row in drawn) >= 0
        assert sum(row["amount"] for row in drawn) == pytest.approx(2 * peak), "two panels"
        parts = sum(PARTS.values()) + changed.get("temporary", 3e9) + changed.get("shadow", 0)
        assert parts / 1e9 - peak == pytest.approx(missing)


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
    assert "largest differences of a loss from the first bar's: 0.5;" in training.to_dict()["title"]["subtitle"][1]
    without = memory_chart([{**row, "predicted": None} for row in memory_rows()], MEASURED)
    assert not any("tick" in layers for _, layers in panels(without).values())
    assert "black tick: prediction" not in without.to_dict()["title"]["subtitle"]


def test_parts_of_the_time_fill_the_measured_whole():
    """The medians of the parts add up to 110 ms here, and the median of the whole is 100 ms."""
    amounts = [row["amount"] for row in rows_with(CHARTS["time"](), "amount")][:3]
    assert amounts == pytest.approx([80 / 1.1, 15 / 1.1, 15 / 1.1])


@pytest.mark.parametrize(("scale", "unit"), [(1.0, "GB"), (0.01, "MB")])
def test_memory_has_the_unit_of_its_size(scale, unit):
    chart = memory_chart(memory_rows(scale), MEASURED)
    for _, layers in panels(chart).values():
        assert layers["bar"]["encoding"]["x"]["title"] == unit
    assert max(row["amount"] for row in rows_with(chart, "amount")) == pytest.approx(6 if unit == "GB" else 60)


def place_and_length(measure, row):
    """Panel and name of the bar of a row, and its length."""
    if measure == "memory":
        return row["mode"], POINTS[row["point"]], row["total"]
    if measure == "training":
        return "Peak of memory while training, per rank", modes.MODES[row["mode"]].label, row["peak"]
    panel = f"{row['block_size']} tokens" if measure == "time" else f"{row['ranks']} ranks, {row['Gbit/s']:g} Gbit/s"
    return panel, row["mode"], row["ms per step"]


@pytest.mark.parametrize(
    "path", sorted(pathlib.Path(ROOT, "results").glob("*/results.json")), ids=lambda path: path.parent.name
)
def test_pictures_of_the_results_have_their_figures(path):
    """What is drawn from results.json is what stands in it: each bar in its panel, each round, each ratio."""
    for measure, entry in json.loads(path.read_text()).items():
        for world_size in {row.get("world_size") for row in entry["rows"]} if measure in OF_RESULTS else ():
            rows = [row for row in entry["rows"] if row.get("world_size") == world_size]
            drawn = panels(OF_RESULTS[measure](rows, ""))
            lengths, texts, dots = {}, {}, {}
            for panel, (values, layers) in drawn.items():
                unit = {"GB": 1e9, "MB": 1e6, "s": 1e3, "ms": 1}[layers["bar"]["encoding"]["x"]["title"]]
                for row in values:
                    place = panel, row["bar"]
                    lengths[place] = lengths.get(place, 0) + unit * row.get("amount", 0)
                    dots.setdefault(place, []).extend([unit * row["dot"]] if "dot" in row else [])
                    texts |= {place: row["text"]} if "text" in row else {}
            assert len(lengths) == len(rows)
            picture = html.unescape((path.parent / f"{measure}{f'-{world_size}' if world_size else ''}.svg").read_text())
            assert all(f">{text}<" in picture for text in texts.values()), "the picture is of these results"
            first = {}
            for row in rows:
                panel, bar, length = place_and_length(measure, row)
                assert lengths[panel, bar] == pytest.approx(length)
                assert dots[panel, bar] == pytest.approx(row.get("rounds, ms", []))
                ms, ratio = first.setdefault(panel, length), row.get("ratio", 1)
                if ratio != 1:
                    low, high = row["ratio, quartiles"]
                    assert texts[panel, bar] == f"{ratio:.2f}x ({low:.2f} to {high:.2f})"
                    assert (length > ms) == (ratio > 1) or low <= 1 <= high, "a bar contradicts its ratio"


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
