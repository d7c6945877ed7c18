"""charts/runs.py, lines.py, parts.py, series.py: what the pictures show is what metrics.jsonl holds."""

import itertools
import json

import pytest
from logged import MB, bars, curve, drawn, events, layers, notes, rows, write_run

import dashboard
from charts.lines import _apart
from charts.parts import scaled
from charts.series import MOST_POINTS, Curve, look, rolling_median
from charts.style import number, shown_in

SAME = {"dataset": "d", "learning_rate": 0.1, "world_size": 2}


@pytest.fixture
def runs(tmp_path):
    """The folders of two runs."""
    return [write_run(tmp_path / f"out-{name}", events(name), implementation=name, **SAME) for name in MB]


def logged(folder, key):
    """The points of a metric in the file."""
    with open(f"{folder}/metrics.jsonl") as file:
        return [(event["iter"], event[key]) for event in map(json.loads, file) if key in event]


CURVES = {
    "Gradient norm before clipping": ("iter/grad_norm", 1),
    "Model FLOPs utilization (MFU)": ("mfu", 1),
    "Peak memory": ("memory/peak_mb", 1000),
}


@pytest.mark.parametrize("title", CURVES)
def test_a_curve_is_what_the_file_holds(title, runs):
    key, divisor = CURVES[title]
    chart = drawn(runs)[title]
    for run, folder in enumerate(runs):
        assert curve(chart, run) == [(at, pytest.approx(value / divisor, rel=1e-5)) for at, value in logged(folder, key)]


def test_both_losses_are_in_one_chart_with_marks_and_the_last_value(runs):
    chart = drawn(runs)["Training and validation loss"]
    for run, folder in enumerate(runs):
        assert curve(chart, run, "training") == logged(folder, "iter/loss")
        assert curve(chart, run, "validation") == logged(folder, "val/loss")
    (marks,) = layers(chart, "point")
    assert marks["shape"]["field"] == "run"
    assert [layer["transform"][0]["filter"] for layer in chart["layer"] if layer["mark"]["type"] == "point"] == [
        "datum.kind == 'validation'"
    ]
    (name,) = (layer["data"]["name"] for layer in chart["layer"] if layer["mark"]["type"] == "text")
    assert [(row["run"], row["text"]) for row in chart["datasets"][name]] == [(0, "4.2000"), (1, "4.2000")]
    (single,) = (layer["data"]["name"] for layer in drawn(runs[:1])["Training and validation loss"]["layer"] if "data" in layer)
    ends = drawn(runs[:1])["Training and validation loss"]["datasets"][single]
    assert [row["text"] for row in ends] == ["training 3.8900", "validation 4.2000"]


def test_a_metric_that_a_changed_program_logs_gets_a_curve(tmp_path):
    own = [{"iter": iteration, "train/entropy": -iteration, "iter/z_loss": 2.5} for iteration in range(3)]
    known = write_run(tmp_path / "known", events("adamw"))
    charts = drawn([write_run(tmp_path / "own", [*events("adamw"), *own])])
    assert charts.keys() - drawn([known]).keys() == {"train/entropy", "iter/z_loss"}
    assert not [title for title in drawn([known]) if "/" in title], "the metrics of train.py have titles"
    assert curve(charts["train/entropy"], 0) == [(0, 0), (1, -1), (2, -2)]
    assert curve(charts["iter/z_loss"], 0) == [(0, 2.5), (1, 2.5), (2, 2.5)]


def test_where_losses_should_be_equal_the_colours_take_turns(runs, tmp_path):
    thin, thick = layers(drawn(runs)["Training and validation loss"], "line")[1:]
    assert "strokeDash" not in thin, "it fills the gaps between the dashes where a curve is alone"
    below, above = thick["strokeDash"]["scale"]["range"]
    assert below[1] == 0, "the lower line is not dashed"
    assert above[0] == above[1] > 0, "the upper line shows as much of the lower line as of itself"
    other = write_run(tmp_path / "other", events("adamw"), implementation="adamw", **SAME | {"learning_rate": 0.2})
    _, thick = layers(drawn([runs[0], other])["Training and validation loss"], "line")
    assert thick["strokeDash"]["scale"]["range"] == [[1, 0], [1, 0]]


def test_the_largest_difference_of_runs_that_should_agree(runs, tmp_path):
    title = "Training losses that should agree: largest difference"
    chart = drawn(runs)[title]
    assert curve(chart, 0, "difference") == [(iteration, 0) for iteration in range(12)]
    assert notes(chart) == "2 runs: equal in 12 of 12 points up to iteration 11, nowhere apart"
    flat = chart["height"]
    changed = [event | ({"iter/loss": 3.5} if event.get("iter/loss") == 4.0 - 3 / 100 else {}) for event in events("adamw")]
    third = write_run(tmp_path / "third", changed, implementation="torch", **SAME)
    chart = drawn([*runs, third])[title]
    assert curve(chart, 0, "difference") == [(at, pytest.approx(0.47 if at == 3 else 0)) for at in range(12)]
    assert notes(chart) == "3 runs: equal in 11 of 12 points up to iteration 11, at most 0.47 apart, at iteration 3"
    assert layers(chart, "point")[0]["y"]["scale"]["type"] == "log"
    assert flat < chart["height"], "without a difference there is nothing to see"
    other = write_run(tmp_path / "other", events("adamw"), implementation="adamw", **SAME | {"learning_rate": 0.2})
    assert title not in drawn([runs[0], other])
    assert notes(drawn([*runs, other])[title]).startswith("adamw, learning_rate=0.1 and 1 more: equal in 12 of 12")


def test_the_first_losses_and_a_run_that_diverges_do_not_flatten_the_rest(tmp_path):
    def loss(iteration):
        return 1.5 + 3.0 * 0.9**iteration

    good = [{"iter": iteration, "iter/loss": loss(iteration)} for iteration in range(200)]
    bad = [{"iter": iteration, "iter/loss": 4.5 + iteration} for iteration in range(200)]
    folders = [write_run(tmp_path / f"good{i}", good, dataset="d", seed=i) for i in range(2)]
    for given in (folders, [*folders, write_run(tmp_path / "bad", bad, dataset="d", seed=3)]):
        chart = drawn(given)["Training and validation loss"]
        bottom, top = layers(chart, "line")[0]["y"]["scale"]["domain"]
        assert bottom < 1.5
        assert loss(20) < top < loss(8)
        assert curve(chart, 0, "training")[0] == (0, 4.5)
        for last, is_in in ((2.1, True), (4.0, False)):
            short = [{"iter": iteration, "iter/loss": value} for iteration, value in enumerate((4.5, last))]
            run = write_run(tmp_path / f"short{len(given)} {last}", short, dataset="d", seed=4)
            with_short = drawn([*given, run])["Training and validation loss"]
            assert (layers(with_short, "line")[0]["y"]["scale"]["domain"][1] > last) == is_in
        assert f"the first losses, up to {4.5 if given == folders else 203.5:.2f}, are above the chart" in notes(chart)


def test_values_at_the_ends_of_curves_do_not_overlap():
    domain = [1.0, 2.0]
    for values in ([1.5] * 4, [1.0, 1.01, 1.02], [2.0, 1.99, 1.98, 1.2], [1.1, 1.5, 1.9]):
        places = sorted(_apart(values, domain))
        assert all(b - a > 0.049 for a, b in itertools.pairwise(places))
        assert domain[0] <= places[0] <= places[-1] <= domain[1]
    assert _apart([1.9, 1.1, 1.5], domain) == [1.9, 1.1, 1.5]


def test_the_gradient_norm_has_a_logarithmic_axis(runs):
    with open(f"{runs[0]}/metrics.jsonl", "a") as file:
        file.write('{"iter": 12, "iter/grad_norm": 0.0}\n')
    chart = drawn(runs)["Gradient norm before clipping"]
    assert layers(chart, "line")[0]["y"]["scale"]["type"] == "log"
    assert curve(chart, 0)[-1] == (11, 32.0), "zero has no place on it"


def test_speeds_are_rolling_medians(runs):
    charts = drawn(runs)
    assert curve(charts["Time of a step"], 0) == [(iteration, 100.0) for iteration in range(12)]
    assert curve(charts["Tokens per second, all ranks"], 1) == [(iteration, 10_000.0) for iteration in range(12)]
    assert notes(charts["Time of a step"]) == "rolling median of up to 25 points"
    points = [(iteration, float(iteration % 7)) for iteration in range(100)]
    found = rolling_median(points)
    assert [iteration for iteration, _ in found] == list(range(100))
    middle = sorted(value for _, value in points[50 - 12 : 50 + 13])
    assert found[50][1] == middle[12]
    assert found[0][1] == found[12][1]
    assert rolling_median(points[:3]) == points[:3]


def test_memory_has_its_points_and_its_predictions(runs):
    charts = drawn(runs)
    points = charts["Memory at the points of a step"]
    assert bars(points) == {"after init": [0.5] * 2, "before step": [2.3, 1.9], "after step": [1.8, 1.4], "peak": [2.71, 2.31]}
    assert [row["mark"] for row in rows(points) if "mark" in row] == [2.8, 2.4]
    assert [row["text"] for row in rows(points) if "text" in row] == [
        "0.500",
        "2.30",
        "1.80",
        "2.71",
        "0.500",
        "1.90",
        "1.40",
        "2.31",
    ]
    assert layers(points, "bar")[0]["x"]["title"] == "GB"
    parts = charts["What takes memory"]
    assert bars(parts) == {"parameters": [0.5, 0.5], "optimizer state": [0.8, 0.4]}
    assert bars(parts, "x2")["optimizer state"] == [1.3, 0.9], "the parts of a run are one bar"
    assert [row["text"] for row in rows(parts) if "text" in row] == ["1.30", "0.900"]
    assert [row["mark"] for row in rows(parts) if "mark" in row] == [0.804, 0.404]
    saved = bars(charts["Optimizer state, and memory saved"])
    assert saved == {"optimizer state": [800.0, 400.0], "saved": [400.0]}, "zero has no bar"


def test_points_at_which_a_run_holds_the_same_are_drawn_once(runs):
    with open(f"{runs[0]}/metrics.jsonl", "a") as file:
        file.write('{"iter": 12, "memory/before_step_mb": 1800.0, "memory/after_step_mb": 1800.0}\n')
    points = bars(drawn(runs)["Memory at the points of a step"])
    assert points == {
        **{"after init": [0.5] * 2, "before step": [1.9], "after step": [1.4], "before and after step": [1.8]},
        "peak": [2.71, 2.31],
    }


def test_on_a_cpu_the_peak_says_whose_it_is_and_is_not_beside_the_bytes_of_tensors(tmp_path):
    charts = drawn([write_run(tmp_path / "cpu", events("adamw", on_gpu=False), implementation="adamw")])
    assert list(bars(charts["Memory at the points of a step"])) == ["after init", "before step", "after step"]
    assert curve(charts["Peak memory"], 0)[0] == (0, 2.7)
    assert notes(charts["Peak memory"]) == "on a CPU it is that of the process, with Python and its libraries"


def test_the_time_of_a_step_is_one_bar_per_run(runs, tmp_path):
    chart = drawn(runs)["Where the time of a step goes"]
    exposed = {"of these, exposed communication": [7.0, 14.0]}
    assert bars(chart) == {"forward and backward": [77.0] * 2, "optimizer": [20.0] * 2, "rest": [3.0] * 2, **exposed}
    assert [row["text"] for row in rows(chart) if "text" in row] == ["100", "100"]
    on_cpu = write_run(tmp_path / "cpu", events("adamw", on_gpu=False), implementation="adamw")
    parts = bars(drawn([on_cpu])["Where the time of a step goes"])
    assert parts["data"] + parts["rest"] == [2.0, 1.0], "on a GPU, data is prepared while it computes"
    assert [row["label"] for row in rows(chart) if "label" in row] == ["adamw", "sharded"]


def test_communication_by_kind_without_the_unused(runs):
    charts = drawn(runs)
    for title, amount in {"Exposed communication of a step": 7.0, "Sent by a rank in a step": 300.0}.items():
        assert bars(charts[title]) == {kind: [amount] for kind in ("all-reduce", "reduce-scatter", "all-gather")}
        assert [row["run"] for row in rows(charts[title]) if "name" in row] == [0, 1, 1]


def test_checkpoints(runs):
    with open(f"{runs[1]}/metrics.jsonl", "a") as file:
        file.write('{"iter": 10, "checkpoint/blocked_s": 0.5}\n')
    charts = drawn(runs)
    assert bars(charts["Time of a checkpoint"]) == {
        **{"consolidate": [3.0, 3.0], "write": [2.0, 2.0], "training waits": [0.5]},
    }
    size = charts["Size of a checkpoint"]
    assert bars(size) == {"one checkpoint": [1.5, 1.5]}
    assert layers(size, "bar")[0]["x"]["title"] == "GB"


def test_units_in_which_amounts_can_be_read():
    assert shown_in("s", 0.00355) == (0.001, "ms")
    assert shown_in("s", 1.5) == (1, "s")
    assert shown_in("MB", 999) == (1, "MB")
    assert shown_in("MB", 1000) == (1000, "GB")
    assert shown_in("bytes", 2_500) == (1e3, "kB")
    assert shown_in("norm", 5) == (1, "norm")


def test_parts_add_up_to_the_whole():
    parts = {"all-reduce": [1.0, None, 2.0], "all-gather": [3.0, 4.0, None]}
    assert scaled(parts, [8.0, 4.0, None]) == {"all-reduce": [2.0, None, None], "all-gather": [6.0, 4.0, None]}


def test_numbers_have_three_digits():
    assert [number(value) for value in (0, 0.00355, 1.8, 24.12, 99.94, 99.96, -1817.4)] == [
        *("0", "0.00355", "1.80", "24.1", "99.9", "100", "-1,817"),
    ]


def test_a_short_checkpoint_is_in_ms(tmp_path):
    event = {"iter": 1, "checkpoint/consolidate_s": 0.00355, "checkpoint/write_s": 0.001}
    chart = drawn([write_run(tmp_path / "x", [event])])["Time of a checkpoint"]
    assert bars(chart) == {"consolidate": [3.55], "write": [1.0]}
    assert layers(chart, "bar")[0]["x"]["title"] == "ms"


def test_figures_that_no_run_has_are_left_out(tmp_path):
    assert list(drawn([write_run(tmp_path / "x", [{"iter": 0, "iter/loss": 2.0}])])) == ["Training and validation loss"]


def test_twenty_eight_runs_look_different():
    looks = [look(position) for position in range(28)]
    assert len({(colour, shape) for colour, shape, _ in looks}) == 28
    assert len({(colour, tuple(dashes)) for colour, _, dashes in looks}) == 28


@pytest.mark.parametrize("count", [1, 2, MOST_POINTS, MOST_POINTS + 1, 4 * MOST_POINTS, 10 * MOST_POINTS + 7])
def test_thinning_keeps_the_first_and_the_last_point(count):
    curve = Curve()
    for iteration in range(count):
        curve.add(iteration, iteration / 2)
    iterations = [iteration for iteration, _ in curve.points]
    assert all(value == iteration / 2 for iteration, value in curve.points)
    assert iterations[0] == 0
    assert iterations[-1] == curve.last[0] == count - 1
    assert len(set(iterations)) == len(iterations) <= MOST_POINTS + 1
    assert {b - a for a, b in itertools.pairwise(iterations[:-1])} <= {curve.every}
    if count <= MOST_POINTS:
        assert len(iterations) == count
    else:
        assert len(iterations) >= MOST_POINTS / 2


def test_what_a_curve_says_about_all_of_its_points():
    curve = Curve()
    values = [(iteration, float((7 * iteration) % 4001)) for iteration in range(5, 4 * MOST_POINTS, 10)]
    for iteration, value in values:
        curve.add(iteration, value)
    assert curve.lowest == min(values, key=lambda point: point[1])
    assert curve.largest == max(value for _, value in values)


def test_a_thinned_curve_says_so(runs):
    with open(f"{runs[0]}/metrics.jsonl", "a") as file:
        file.writelines(f'{{"iter": {iteration}, "iter/loss": 3.0}}\n' for iteration in range(12, 3 * MOST_POINTS))
    charts = drawn(runs)
    chart = charts["Training and validation loss"]
    assert notes(chart).endswith("one of 4 points is drawn")
    assert "drawn" not in notes(charts["Gradient norm before clipping"])
    assert len(rows(chart)) <= MOST_POINTS + 1 + 12 + 2
    assert dashboard.read_metrics(runs[0])["iter/loss"].every == 4
