"""charts/runs.py, lines.py, parts.py, series.py: what the pictures show is what metrics.jsonl holds."""

import itertools
import json

import pytest
from logged import MB, bars, curve, drawn, events, layers, notes, rows, write_run

from charts.lines import _apart
from charts.parts import scaled
from charts.series import MOST_POINTS, Curve, look, rolling_median
from charts.style import number, shown_in
from run.metrics import METRICS, SECTIONS, Metric

SAME = {"dataset": "d", "learning_rate": 0.1, "world_size": 2}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folders of two runs."""
    folder = tmp_path_factory.mktemp("runs")
    return [write_run(folder / f"out-{name}", events(name), implementation=name, **SAME) for name in MB]


@pytest.fixture(scope="module")
def charts(runs):
    return drawn(runs)


def one(tmp_path, *more, on_gpu=True, **facts):
    """The folder of a run by AdamW that logs these events as well."""
    return write_run(tmp_path / "one", [*events("adamw", on_gpu=on_gpu), *more], implementation="adamw", **SAME | facts)


def logged(folder, key):
    """The points of a metric in the file."""
    with open(f"{folder}/metrics.jsonl") as file:
        return [(event["iter"], event[key]) for event in map(json.loads, file) if key in event]


CURVES = {
    "Gradient norm before clipping": ("iter/grad_norm", 1, "norm"),
    "Model FLOPs utilization (MFU)": ("mfu", 1, "%"),
    "Peak memory": ("memory/peak_mb", 1000, "GB"),
}


@pytest.mark.parametrize("title", CURVES)
def test_a_curve_is_what_the_file_holds_in_the_unit_of_the_metric(title, runs, charts):
    key, divisor, unit = CURVES[title]
    assert layers(charts[title], "line")[0]["y"]["title"] == unit
    for run, folder in enumerate(runs):
        expected = [(at, pytest.approx(value / divisor, rel=1e-5)) for at, value in logged(folder, key)]
        assert curve(charts[title], run) == expected


def test_both_losses_are_in_one_chart_with_marks_and_the_last_value(runs, charts):
    chart = charts["Training and validation loss"]
    for run, folder in enumerate(runs):
        assert curve(chart, run, "training") == logged(folder, "iter/loss")
        assert curve(chart, run, "validation") == logged(folder, "val/loss")
    (marks,) = (layer for layer in chart["layer"] if layer["mark"]["type"] == "point")
    assert marks["encoding"]["shape"]["field"] == "run"
    assert marks["transform"][0]["filter"] == "datum.kind == 'validation'"
    for folders, expected in ((runs, ["4.2000", "4.2000"]), (runs[:1], ["training 3.8900", "validation 4.2000"])):
        chart = drawn(folders)["Training and validation loss"]
        (name,) = (layer["data"]["name"] for layer in chart["layer"] if layer["mark"]["type"] == "text")
        assert [row["text"] for row in chart["datasets"][name]] == expected


def test_a_metric_that_is_not_declared_or_has_no_other_section_gets_a_curve(tmp_path, charts, monkeypatch):
    own = [{"iter": iteration, "train/entropy": -iteration, "iter/z_loss": 2.5} for iteration in range(3)]
    monkeypatch.setitem(METRICS, "iter/z_loss", declared := Metric("iter/z_loss", "nats", "iteration", "z-loss"))
    monkeypatch.setitem(SECTIONS, "Others", [declared])
    found = drawn([one(tmp_path, *own)])
    assert found.keys() - charts.keys() == {"train/entropy", "iter/z_loss"}
    assert not [title for title in charts if "/" in title], "the metrics of train.py have titles"
    assert curve(found["train/entropy"], 0) == [(0, 0), (1, -1), (2, -2)]
    assert curve(found["iter/z_loss"], 0) == [(0, 2.5), (1, 2.5), (2, 2.5)]
    assert layers(found["iter/z_loss"], "line")[0]["y"]["title"] == "nats"


def test_where_losses_should_be_equal_the_colours_take_turns(runs, charts, tmp_path):
    thin, thick = layers(charts["Training and validation loss"], "line")[1:]
    assert "strokeDash" not in thin, "it fills the gaps between the dashes where a curve is alone"
    below, above = thick["strokeDash"]["scale"]["range"]
    assert below[1] == 0, "the lower line is not dashed"
    assert above[0] == above[1] > 0, "the upper line shows as much of the lower line as of itself"
    _, thick = layers(drawn([runs[0], one(tmp_path, learning_rate=0.2)])["Training and validation loss"], "line")
    assert thick["strokeDash"]["scale"]["range"] == [[1, 0], [1, 0]]


def test_the_largest_difference_of_runs_that_should_agree(runs, charts, tmp_path):
    title = "Training losses that should agree: largest difference"
    chart = charts[title]
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
    other = one(tmp_path, learning_rate=0.2)
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


def test_the_gradient_norm_has_a_logarithmic_axis(tmp_path):
    chart = drawn([one(tmp_path, {"iter": 12, "iter/grad_norm": 0.0})])["Gradient norm before clipping"]
    assert layers(chart, "line")[0]["y"]["scale"]["type"] == "log"
    assert curve(chart, 0)[-1] == (11, 32.0), "zero has no place on it"


def test_speeds_are_rolling_medians(charts):
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


POINTS = "after init 0.5 = 0.500 before step"
STEP = "forward and backward 77 optimizer 20 rest 3 = 100 of these, exposed communication"
BARS = {  # of adamw and of sharded, in a unit; what is zero has no bar
    "Memory at the points of a step": (
        *("GB", f"{POINTS} 2.3 = 2.30 after step 1.8 = 1.80 peak 2.71 | 2.8 = 2.71"),
        f"{POINTS} 1.9 = 1.90 after step 1.4 = 1.40 peak 2.31 | 2.4 = 2.31",
    ),
    "What takes memory": (
        *("GB", "parameters 0.5 optimizer state 0.8 | 0.804 = 1.30"),
        "parameters 0.5 optimizer state 0.4 | 0.404 = 0.900",
    ),
    "Optimizer state, and memory saved": ("MB", "optimizer state 800 = 800", "optimizer state 400 = 400 saved 400 = 400"),
    "Where the time of a step goes": ("ms", f"{STEP} 7", f"{STEP} 14"),
    "Exposed communication of a step": ("ms", "all-reduce 7 = 7.00", "reduce-scatter 7 all-gather 7 = 14.0"),
    "Sent by a rank in a step": ("MB", "all-reduce 300 = 300", "reduce-scatter 300 all-gather 300 = 600"),
    "Time of a checkpoint": ("s", "consolidate 3 write 2 = 5.00", "consolidate 3 write 2 = 5.00"),
    "Size of a checkpoint": ("GB", "one checkpoint 1.5 = 1.50", "one checkpoint 1.5 = 1.50"),
}


@pytest.mark.parametrize("title", BARS)
def test_bars_are_what_the_files_hold(title, charts):
    unit, adamw, sharded = BARS[title]
    assert layers(charts[title], "bar")[0]["x"]["title"] == unit
    assert bars(charts[title]) == [f"adamw: {adamw}", f"sharded: {sharded}"]


def test_parts_of_a_run_are_one_bar_and_notes_say_what_is_drawn(charts):
    chart = charts["What takes memory"]
    assert [(row["x"], row["x2"]) for row in rows(chart) if "x" in row][:2] == [(0, 0.5), (0.5, 1.3)]
    assert notes(chart) == "bytes held before a step; tick: prediction"
    assert notes(charts["Where the time of a step goes"]) == "medians; thin: of these, exposed communication"


def test_points_at_which_a_run_holds_the_same_are_drawn_once(tmp_path):
    same = {"iter": 12, "memory/before_step_mb": 1800.0, "memory/after_step_mb": 1800.0}
    (points,) = bars(drawn([one(tmp_path, same)])["Memory at the points of a step"])
    assert points.endswith(": after init 0.5 = 0.500 before and after step 1.8 = 1.80 peak 2.71 | 2.8 = 2.71")


def test_on_a_cpu_the_peak_is_that_of_the_process_and_data_takes_time(tmp_path):
    charts = drawn([one(tmp_path, on_gpu=False)])
    assert "peak" not in bars(charts["Memory at the points of a step"])[0]
    assert curve(charts["Peak memory"], 0)[0] == (0, 2.7)
    assert notes(charts["Peak memory"]) == "on a CPU it is that of the process, with Python and its libraries"
    assert ": data 2 forward" in bars(charts["Where the time of a step goes"])[0], "a GPU computes meanwhile"


def test_how_long_training_waits_for_a_checkpoint_is_a_thin_bar(tmp_path):
    chart = drawn([one(tmp_path, {"iter": 10, "checkpoint/blocked_s": 0.5})])["Time of a checkpoint"]
    assert bars(chart)[0].endswith("consolidate 3 write 2 = 5.00 training waits 0.5")


def test_units_in_which_amounts_can_be_read():
    cases = [("s", 0.00355, 0.001, "ms"), ("s", 1.5, 1, "s"), ("MB", 999, 1, "MB"), ("MB", 1000, 1000, "GB")]
    for unit, amount, divisor, shown in [*cases, ("bytes", 2_500, 1e3, "kB"), ("norm", 5, 1, "norm")]:
        assert shown_in(unit, amount) == (divisor, shown)


def test_parts_add_up_to_the_whole():
    assert scaled({"all-reduce": 1.0, "all-gather": 3.0, "broadcast": None}, 8.0) == {
        **{"all-reduce": 2.0, "all-gather": 6.0, "broadcast": None},
    }
    assert scaled({"all-reduce": 2.0}, None) == {"all-reduce": None}


def test_numbers_have_three_digits():
    assert [number(value) for value in (0, 0.00355, 1.8, 24.12, 99.94, 99.96, -1817.4)] == [
        *("0", "0.00355", "1.80", "24.1", "99.9", "100", "-1,817"),
    ]


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
    assert curve.largest() == max(value for _, value in values)
    assert curve.smallest() == min(value for _, value in values)


def test_a_thinned_curve_says_so(tmp_path):
    long = [{"iter": iteration, "iter/loss": 3.0} for iteration in range(12, 3 * MOST_POINTS)]
    charts = drawn([one(tmp_path, *long)])
    chart = charts["Training and validation loss"]
    assert notes(chart).endswith("one of 4 points is drawn")
    assert "drawn" not in notes(charts["Gradient norm before clipping"])
    assert len(rows(chart)) <= MOST_POINTS + 1 + 12 + 2
