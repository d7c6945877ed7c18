"""charts/bars.py: every chart in every format, what it draws, and what it refuses."""

import sys

import pytest

from charts.bars import memory_chart, plan_chart, time_chart
from charts.style import MEMORY, check_path, save

MODES = ("sharded", "adamw")
PARTS = {"parameters": 6e9, "gradients": 5e9, "state": 4e9, "master": 3e9, "buckets": 2e9, "activations": 1e9}
PURPOSES = ["parameters", "gradients", "optimizer state", "master weights", "communication buffers", "activations"]
TIMES = {"forward and backward, ms": 80.0, "optimizer, ms": 15.0, "exposed communication, ms": 5.0, "ms per step": 100.0}
START = {"png": b"\x89PNG\r\n", "svg": b"<svg", "html": b"<!DOCTYPE html>"}


def plan_rows(**changed):
    return [{"mode": mode, "world_size": size, "peak": 20e9, **PARTS, **changed} for size in (8, 2) for mode in MODES]


def memory_rows(scale=1.0):
    after_init = {"point": "after init", "total": 6e9 * scale, "parameters": 6e9 * scale}
    peak = {"point": "peak", "total": 22e9 * scale, "rest": 1e9 * scale, **{name: size * scale for name, size in PARTS.items()}}
    return [{"mode": mode, **row} for mode in MODES for row in (peak | {"predicted": 21e9 * scale}, after_init)]


def time_rows():
    return [{"mode": mode, "block_size": size, "ratio": 0.966, **TIMES} for size in (1024, 64) for mode in MODES]


CHARTS = {
    "plan": lambda: plan_chart(plan_rows(), 80),
    "memory": lambda: memory_chart(memory_rows()),
    "time": lambda: time_chart(time_rows()),
}


def values(chart):
    (rows,) = chart.to_dict()["datasets"].values()
    return rows


def fields(chart, mark):
    """The encoding of the layer with that mark; None if there is none."""
    found = [layer["encoding"] for layer in chart.to_dict()["spec"]["layer"] if layer["mark"]["type"] == mark]
    return found[0] if found else None


def purposes(chart):
    """Purpose: colour, in the order of the legend."""
    scale = fields(chart, "bar")["color"]["scale"]
    assert set(scale["domain"]) == {value["purpose"] for value in values(chart) if "purpose" in value}
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
        assert 1700 < int.from_bytes(content[16:20]) < 2300


def test_purposes_that_are_not_zero_appear():
    assert list(purposes(plan_chart(plan_rows(), 80))) == PURPOSES
    assert list(purposes(memory_chart(memory_rows()))) == [*PURPOSES, "other"]
    assert list(purposes(time_chart(time_rows()))) == ["forward and backward", "optimizer", "exposed communication"]
    assert list(purposes(plan_chart(plan_rows(master=0, buckets=0), 80))) == [*PURPOSES[:3], "activations"]


def test_a_purpose_has_one_colour():
    assert len(set(dict(MEMORY.values()).values())) == len(MEMORY)
    assert purposes(memory_chart(memory_rows())).items() >= purposes(plan_chart(plan_rows(), 80)).items()


def test_ranks_points_and_modes_are_in_order():
    plan, memory, time = (make() for make in CHARTS.values())
    assert plan.to_dict()["facet"]["sort"] == ["2 ranks", "8 ranks"]
    assert time.to_dict()["facet"]["sort"] == ["block size 64", "block size 1024"]
    assert memory.to_dict()["facet"]["sort"] == list(MODES)
    assert fields(plan, "bar")["y"]["scale"]["domain"] == list(MODES)
    assert fields(memory, "bar")["y"]["scale"]["domain"] == ["after init", "peak"]


def test_what_is_drawn_beside_the_bars():
    plan, memory, time = (make() for make in CHARTS.values())
    assert {value["limit"] for value in values(plan) if "limit" in value} == {80}
    assert [value["mark"] for value in values(plan) if "mark" in value] == [20.0] * 4
    assert [value["mark"] for value in values(memory) if value.get("mark")] == [21.0] * 2
    assert [value["text"] for value in values(time) if "text" in value] == ["0.97"] * 4
    assert fields(plan_chart(plan_rows(), None), "rule") is None
    without = [{**row, "predicted": None} for row in memory_rows()]
    assert fields(memory_chart(without), "tick") is None


@pytest.mark.parametrize(("scale", "unit"), [(1.0, "GB"), (0.01, "MB")])
def test_memory_has_the_unit_of_its_size(scale, unit):
    chart = memory_chart(memory_rows(scale))
    assert fields(chart, "bar")["x"]["title"] == unit
    largest = max(value["amount"] for value in values(chart) if "amount" in value)
    assert largest == pytest.approx(6 if unit == "GB" else 60)


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


def test_no_rows_are_refused():
    for make in (lambda: plan_chart([], 80), lambda: memory_chart([]), lambda: time_chart([])):
        with pytest.raises(ValueError, match="at least one row"):
            make()
