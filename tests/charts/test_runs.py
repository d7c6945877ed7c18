"""charts/: the pictures show what metrics.jsonl and results.json hold; what the names of runs are."""

from itertools import pairwise

import pytest
from logged import MB, bars, curve, drawn, events, layers, notes, rows, write_run
from scripts import events_of

from benchmarks.results import CHARTS as OF_RESULTS
from charts.bars import memory_chart, time_chart
from charts.differences import differences, in_common, names
from charts.lines import MOST_POINTS, Run, look
from charts.style import MEMORY, save
from forecast import modes
from run.metrics import METRICS, SECTIONS, Metric

SAME = {"dataset": "d", "learning_rate": 0.1, "world_size": 2}
LOSSES, APART = "Training and validation loss", "Training loss: difference from the first run"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folders of two runs."""
    folder = tmp_path_factory.mktemp("runs")
    return [write_run(folder / f"out-{name}", events(name), implementation=name, **SAME) for name in MB]


@pytest.fixture(scope="module")
def charts(runs):
    return drawn(runs)


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    """The charts of a run on a CPU, by AdamW, with metrics of its own and many more iterations."""
    own = [{"iter": at, "train/entropy": -at, "iter/z_loss": 2.5} for at in range(3)]
    own += [{"iter": at, "iter/loss": 3.0, "iter/grad_norm": 0.0} for at in range(12, 3 * MOST_POINTS)]
    folder = tmp_path_factory.mktemp("cpu") / "one"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METRICS, "iter/z_loss", declared := Metric("iter/z_loss", "nats", "iteration", "z-loss"))
        patch.setitem(SECTIONS, "Others", [declared])
        return drawn([write_run(folder, [*events("adamw", on_gpu=False), *own], implementation="adamw", **SAME)])


def logged(folder, key):
    """The points of a metric in the file."""
    return [(event["iter"], event[key]) for event in events_of(folder) if key in event]


CURVES = {  # key, what to divide by, unit, kind of the rows
    "Gradient norm before clipping": ("iter/grad_norm", 1, "norm", "value"),
    "Model FLOPs utilization (MFU)": ("mfu", 1, "%", "value"),
    "Peak memory": ("memory/peak_mb", 1000, "GB", "value"),
    "Time of a step": ("time/step_ms", 1, "ms", "value"),
    LOSSES: ("iter/loss", 1, "loss", "training"),
}


@pytest.mark.parametrize("title", CURVES)
def test_a_curve_is_what_the_file_holds_in_the_unit_of_the_metric(title, runs, charts):
    key, divisor, unit, kind = CURVES[title]
    assert layers(charts[title], "line")[0]["y"]["title"] == unit
    for run, folder in enumerate(runs):
        expected = [(at, pytest.approx(value / divisor, rel=1e-5)) for at, value in logged(folder, key)]
        assert curve(charts[title], run, kind) == expected


def test_a_metric_that_is_not_declared_or_has_no_other_section_gets_a_curve(charts, on_cpu):
    assert {title for title in on_cpu if "/" in title} == {"train/entropy", "iter/z_loss"}
    assert not [title for title in charts if "/" in title], "the metrics of train.py have titles"
    assert curve(on_cpu["train/entropy"], 0) == [(0, 0), (1, -1), (2, -2)]
    assert layers(on_cpu["iter/z_loss"], "line")[0]["y"]["title"] == "nats"


def test_how_far_losses_are_from_those_of_the_first_run_and_their_dashes(runs, charts, tmp_path):
    assert curve(charts[APART], 1, "difference") == [(iteration, 0) for iteration in range(12)]
    assert notes(charts[APART]) == "sharded: none"
    _, thick = charts[LOSSES]["layer"]
    assert curve(charts[LOSSES], 1, "validation") == logged(runs[1], "val/loss")
    assert thick["transform"] == [{"filter": "datum.kind == 'validation'"}]
    assert thick["mark"]["point"]["filled"]
    below, above = layers(charts[LOSSES], "line")[1]["strokeDash"]["scale"]["range"]
    assert below[1] == 0, "the lower line is not dashed"
    assert above[0] == above[1] > 0, "the upper line shows as much of the lower line as of itself"
    changed = [event | ({"iter/loss": 3.5} if event.get("iter/loss") == 4.0 - 3 / 100 else {}) for event in events("adamw")]
    found = drawn([*runs, write_run(tmp_path / "other", changed, implementation="adamw", **SAME | {"learning_rate": 0.2})])
    assert curve(found[APART], 2, "difference") == [(at, pytest.approx(0.47 if at == 3 else 0)) for at in range(12)]
    assert notes(found[APART]) == ("sharded, learning_rate=0.1: none; adamw, learning_rate=0.2: at most 0.47, at iteration 3")
    assert layers(found[LOSSES], "line")[1]["strokeDash"]["scale"]["range"][2] == [1, 0], "it is not equal to the first one"
    assert APART not in drawn(runs[:1])


def test_the_first_losses_do_not_flatten_the_rest(tmp_path):
    def loss(iteration):
        return 1.5 + 3.0 * 0.9**iteration

    logged = [{"iter": 0, "val/loss": 4.4}, *({"iter": iteration, "iter/loss": loss(iteration)} for iteration in range(200))]
    chart = drawn([write_run(tmp_path / "run", logged)])[LOSSES]
    assert loss(25) < layers(chart, "line")[0]["y"]["scale"]["domainMax"] == 4.4, "the only evaluation is in the chart"
    chart = drawn([write_run(tmp_path / "more", [*logged, {"iter": 199, "val/loss": 1.6}])])[LOSSES]
    assert loss(25) < layers(chart, "line")[0]["y"]["scale"]["domainMax"] < loss(15)
    assert notes(chart).endswith("losses up to 4.50 are above the chart")


def test_axes_and_medians(charts, on_cpu):
    chart = on_cpu["Gradient norm before clipping"]
    assert layers(chart, "line")[0]["y"]["scale"]["type"] == "log"
    assert curve(chart, 0)[-1] == (11, 32.0), "zero has no place on it"
    assert notes(charts["Time of a step"]) == "rolling median of 25 points"
    assert notes(charts["What takes memory"]) == "bytes held before a step; tick: prediction"
    (window,) = charts["Time of a step"]["transform"]
    assert (window["window"][0]["op"], window["frame"], window["groupby"]) == ("median", [-12, 12], ["run"])
    drawn = curve(on_cpu[LOSSES], 0, "training")
    assert (len(drawn), drawn[-1][0]) == (MOST_POINTS, 3 * MOST_POINTS - 1)


STEP = "forward and backward 77 optimizer 20 rest 3 = 100"
BARS = {  # of adamw and of sharded, in a unit; what is zero has no bar
    "Memory at the points of a step": (
        *("GB", "after init 0.5 = 0.500 before step 2.3 = 2.30 after step 1.8 = 1.80 peak 2.71 | 2.8 = 2.71"),
        "after init 0.5 = 0.500 before step 1.9 = 1.90 after step 1.4 = 1.40 peak 2.31 | 2.4 = 2.31",
    ),
    "What takes memory": (
        *("GB", "parameters 0.5 optimizer state 0.8 | 0.804 = 1.30"),
        "parameters 0.5 optimizer state 0.4 | 0.404 = 0.900",
    ),
    "Where the time of a step goes": ("ms", STEP, STEP),
    "Exposed communication of a step": ("ms", "all-reduce 7 = 7.00", "reduce-scatter 7 all-gather 7 = 14.0"),
    "Sent by a rank in a step": ("MB", "all-reduce 300 = 300", "reduce-scatter 300 all-gather 300 = 600"),
    "Time of a checkpoint": ("s", "consolidate 3 = 3.00 write 2 = 2.00", "consolidate 3 = 3.00 write 2 = 2.00"),
}


@pytest.mark.parametrize("title", BARS)
def test_bars_are_what_the_files_hold(title, charts):
    unit, adamw, sharded = BARS[title]
    places = [(row["x"], row["x2"]) for row in rows(charts[title]) if "x" in row]
    assert all(begin in (0, end) for (_, end), (begin, _) in pairwise(places)), "the parts of a bar"
    assert layers(charts[title], "bar")[0]["x"]["title"] == unit
    assert bars(charts[title]) == [f"adamw: {adamw}", f"sharded: {sharded}"]


def test_what_ddp_would_hold_stands_beside_a_run_that_holds_less(tmp_path):
    runs, parts = [], {"parameters": 500.0, "gradients": 500.0, "state": 800.0}
    plain = {f"memory/unsharded_{part}_mb": mb for part, mb in parts.items()}
    for name, held in (("sharded", {"parameters": 500.0, "gradients": 300.0, "state": 400.0}), ("adamw", parts)):
        measured = {f"memory/measured_{part}_mb": mb for part, mb in held.items()}
        runs.append(write_run(tmp_path / name, [{"iter": 0, **plain}, {"iter": 3, **measured}], implementation=name, **SAME))
    assert bars(drawn(runs)["What takes memory"]) == [
        "sharded: parameters 0.5 gradients 0.3 optimizer state 0.4 = 1.20 parameters 0.5 gradients 0.5 optimizer state 0.8 = "
        "1.80 with DDP (predicted)",
        "adamw: parameters 0.5 gradients 0.5 optimizer state 0.8 = 1.80",
    ]


def test_on_a_cpu_the_peak_is_that_of_the_process_and_data_takes_time(on_cpu):
    assert "peak" not in bars(on_cpu["Memory at the points of a step"])[0]
    assert curve(on_cpu["Peak memory"], 0)[0] == (0, 2.7)
    assert ": data 2 forward" in bars(on_cpu["Where the time of a step goes"])[0], "a GPU computes meanwhile"


def test_figures_that_no_run_has_are_left_out_and_28_runs_look_different(tmp_path):
    assert list(drawn([write_run(tmp_path / "x", [{"iter": 0, "iter/loss": 2.0}])])) == [LOSSES]
    assert len({(colour, tuple(dashes)) for colour, dashes in map(look, range(28))}) == 28


def test_figures_of_a_resumed_run_are_those_of_its_last_part():
    """On one GPU, say, after several; its best loss and its wall time are those of all parts."""
    curves = {"memory/peak_mb": [(1, 9.0), (6, 5.0)], "memory/saved_mb": [(1, 2.0)], "val/loss": [(1, 1.0), (6, 3.0)]}
    parts = [{"from_iter": 0}, {"from_iter": 5}]
    run = Run("", "", {"parts": parts}, curves)
    assert [run.get(key, max) for key in curves] == [5.0, None, 3.0]
    assert [run._replace(facts={}).get(key, max) for key in curves] == [9.0, 2.0, 3.0]


BASE = {
    **{"out_dir": "out", "dataset": "d", "batch_size": 4, "gradient_accumulation_steps": 2, "dropout": 0.0, "seed": 1},
    **{"learning_rate": 0.001, "n_layer": 2, "use_zero1": True, "zero1_impl": "sharded", "shard_gradients": False},
    **{"param_dtype": "float32", "max_iters": 100, "implementation": "sharded", "world_size": 2, "micro_steps": 1},
    **{"git_commit": "abc", "parameters": 800_000, "state": "ended"},
}
ADAMW = BASE | {"implementation": "adamw", "use_zero1": False}


def named(*facts):
    return names(facts, [f"runs/x{place}" for place in range(len(facts))])


def test_a_name_is_what_differs():
    assert named(BASE, ADAMW) == ["sharded", "adamw"]
    assert named(BASE | {"learning_rate": 3e-4}, BASE) == ["learning_rate=0.0003", "learning_rate=0.001"]
    one_rank = ADAMW | {"dataset": "other", "world_size": 1, "micro_steps": 2, "out_dir": "b"}
    assert named(one_rank, ADAMW) == ["dataset=other, 1 rank", "dataset=d, 2 ranks"]
    flags = [f"sharded, shard_gradients={value}" for value in (False, True)]
    assert named(BASE, BASE | {"shard_gradients": True}, ADAMW) == [*flags, "adamw"]


def test_what_runs_have_in_common_and_what_is_no_difference():
    assert in_common([BASE, ADAMW]) == ["d", "0.80M parameters", "2 ranks"]
    assert in_common([BASE]) == ["d", "0.80M parameters", "sharded", "2 ranks"]
    assert in_common([{}, BASE]) == []
    same = {"out_dir": "y", "wandb_run_name": "b", "state": "killed", "init_from": "resume", "parts": []}
    assert differences([BASE, BASE | same]) == [{}, {}]
    older = {key: value for key, value in BASE.items() if key != "seed"}  # its run.json does not have all settings
    assert differences([BASE, older]) == [{}, {}]


def test_a_name_has_four_differences_and_the_table_all():
    first = BASE | {"sample_interval": 0}
    second = BASE | {"dataset": "e", "learning_rate": 0.1, "n_layer": 3, "batch_size": 5, "seed": 2, "sample_interval": 3}
    different = "dataset", "sample_interval", "batch_size", "n_layer", "learning_rate", "seed"
    assert differences([first, second])[1] == {key: f"{key}={second[key]}" for key in different}
    assert named(first, second)[1] == "dataset=e, sample_interval=3, batch_size=5, n_layer=3", "in the order of train.py"


def test_runs_with_the_same_name_have_their_folder():
    assert named(BASE, BASE, ADAMW) == ["sharded, runs/x0", "sharded, runs/x1", "adamw"]
    assert named(BASE, BASE) == named(BASE, {}) == named({}, {}) == ["runs/x0", "runs/x1"]
    assert named(BASE) == ["runs/x0"]


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
TIMED = "forward and backward 72.7273 optimizer 13.6364 exposed communication 13.6364 o 90.0 o 100.0 o 130.0"
LARGEST = f"{WHOLE} temporary tensors 1"
DRAWN = {  # the medians of the parts of a step add up to 110 ms, and that of the whole is 100 ms
    "memory": {mode: [f"after init: {WHOLE[:12]} = 6.00", f"peak of training: {LARGEST} | 21.0 = 22.0"] for mode in MODES},
    "time": {f"{size} tokens": [f"sharded: {TIMED} = 100 ms", f"adamw: {TIMED} = 0.97x (0.91 to 1.02)"] for size in (64, 1024)},
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
