"""dashboard.py and charts/runs.py: what is read, what is drawn, the page, the pictures, the watch, and what is refused."""

import itertools
import json
import os
import re
import sys

import pytest
from scripts import run

import dashboard
from charts.runs import MOST_POINTS, Curve, sections

MB = {"adamw": 800.0, "sharded": 400.0}  # optimizer state
KINDS = {"adamw": ["all_reduce"], "sharded": ["reduce_scatter", "all_gather"]}
ALL_KINDS = ["all_reduce", "reduce_scatter", "all_gather", "broadcast"]
SECTIONS = ["Loss", "Memory", "Throughput", "Communication", "Checkpoints"]


def events(implementation, iterations=12, on_gpu=True):
    """The events of a run whose first iteration takes 2000 ms instead of 100."""
    state, kinds = MB[implementation], KINDS[implementation]
    yield {"iter": 0, "memory/predicted_peak_mb": 2000 + state, "memory/predicted_state_mb": state + 4}
    yield {"iter": 0, "train/loss": 4.1, "val/loss": 4.2}
    for iteration in range(iterations):
        ms = 100.0 if iteration else 2000.0
        yield {
            **{"iter": iteration, "iter/loss": 4.0 - iteration / 100, **({"mfu": 31.0} if iteration >= 5 else {})},
            **{"throughput/tokens_per_second": 1e6 / ms, "time/step_ms": ms, "time/data_ms": 2.0},
            **{"time/forward_backward_ms": ms - 22, "time/optimizer_ms": 20.0, "comm/exposed_ms": 7.0 * len(kinds)},
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


@pytest.fixture
def runs(tmp_path):
    """The folders of two runs."""
    folders = []
    for implementation in MB:
        folder = tmp_path / f"out-{implementation}"
        folder.mkdir()
        lines = [json.dumps(event) + "\n" for event in events(implementation)]
        (folder / "metrics.jsonl").write_text("".join(lines))
        (folder / "run.json").write_text(json.dumps({"implementation": implementation, "world_size": 2}))
        folders.append(str(folder))
    return folders


def append(folder, text):
    with open(os.path.join(folder, "metrics.jsonl"), "a") as file:
        file.write(text)


def drawn(folders):
    """Title: chart as a dict, of all charts."""
    found = sections(dict(zip(dashboard.labels(folders), map(dashboard.read_metrics, folders), strict=True)))
    charts = [chart.to_dict() for row in found.values() for chart in row]
    return {chart["title"]["text"]: chart for chart in charts}


def rows(chart):
    (values,) = chart["datasets"].values()
    return values


def bars(chart, column="value"):
    """Group: the value of each run, in the order of the runs."""
    names = dict.fromkeys(row["name"] for row in rows(chart))
    return {name: [row.get(column) for row in rows(chart) if row["name"] == name] for name in names}


def curve(chart, run):
    return [(row["iter"], row["value"]) for row in rows(chart) if row["run"] == run]


def y_axis(chart):
    return chart["layer"][0]["encoding"]["y"]


def ends(monkeypatch, capsys, *arguments):
    """The exit code of dashboard.py and its error line."""
    monkeypatch.setattr(sys, "argv", ["dashboard.py", *arguments])
    with pytest.raises(SystemExit) as end:
        dashboard.main()
    (line,) = capsys.readouterr().err.splitlines()
    return end.value.code, line


def test_the_script_writes_a_page_and_the_pictures(runs, tmp_path):
    page, pictures = tmp_path / "new" / "runs.html", tmp_path / "pictures"
    process = run("dashboard.py", *runs, f"--html={page}", f"--png={pictures}")
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines() == [f"the page is in {page}", f"the pictures are in {pictures}"]
    assert process.stderr == ""
    assert sorted(os.listdir(pictures)) == sorted(f"{name.lower()}.png" for name in SECTIONS)
    assert all(path.read_bytes().startswith(b"\x89PNG\r\n") for path in pictures.iterdir())
    text = page.read_text()
    assert not re.search(r"<script src|<link|cdn\.", text), "the page needs the network"
    assert text.endswith("</html>\n")
    assert "reload_ms = null" in text
    assert os.listdir(page.parent) == ["runs.html"]


def test_losses_lie_over_each_other(runs):
    charts = drawn(runs)
    expected = [(iteration, pytest.approx(4.0 - iteration / 100)) for iteration in range(12)]
    for label in ("adamw, 2 ranks", "sharded, 2 ranks"):
        assert curve(charts["Training loss"], label) == expected
        assert curve(charts["Validation loss"], label) == [(0, 4.2)]
    thin, thick = (layer["encoding"] for layer in charts["Training loss"]["layer"][:2])
    assert "strokeDash" not in thin, "it fills the gaps between the dashes where a curve is alone"
    encoding = thick
    assert encoding["color"]["scale"]["domain"] == ["adamw, 2 ranks", "sharded, 2 ranks"]
    assert len(set(encoding["color"]["scale"]["range"])) == 2
    below, above = encoding["strokeDash"]["scale"]["range"]
    assert below[1] == 0, "the lower line is not dashed"
    assert above[0] == above[1] > 0, "the upper line shows as much of the lower line as of itself"


def test_memory_has_its_points_and_its_predictions(runs):
    charts = drawn(runs)
    points = charts["Memory at the points of a step"]
    assert bars(points) == {"after init": [0.5] * 2, "before step": [2.3, 1.9], "after step": [1.8, 1.4], "peak": [2.71, 2.31]}
    assert bars(points, "mark")["peak"] == [2.8, 2.4]
    assert points["layer"][0]["encoding"]["x"]["title"] == "GB"
    parts = charts["What takes memory"]
    assert bars(parts) == {"parameters": [500.0, 500.0], "optimizer state": [800.0, 400.0]}
    assert bars(parts, "mark")["optimizer state"] == [804.0, 404.0]
    assert parts["layer"][0]["encoding"]["x"]["title"] == "MB"
    saved = bars(charts["Optimizer state, and memory saved"])
    assert saved == {"optimizer state": [800.0, 400.0], "saved against plain AdamW, gradients included": [0.0, 400.0]}
    assert curve(charts["Peak memory"], "sharded, 2 ranks") == [(0, 2.3), (5, 2.305), (10, 2.31)]


def test_on_a_cpu_the_peak_of_the_process_is_not_beside_the_bytes_of_tensors(runs):
    for folder in runs:
        with open(os.path.join(folder, "metrics.jsonl"), "w") as file:
            file.writelines(json.dumps(event) + "\n" for event in events("adamw", on_gpu=False))
    charts = drawn(runs)
    assert list(bars(charts["Memory at the points of a step"])) == ["after init", "before step", "after step"]
    assert curve(charts["Peak memory"], "adamw, 2 ranks")[0] == (0, 2.7)


def test_the_first_iteration_does_not_stretch_the_axis(runs):
    charts = drawn(runs)
    time = charts["Time of a step"]
    assert curve(time, "adamw, 2 ranks") == [(iteration, 100.0 if iteration else 2000.0) for iteration in range(12)]
    assert y_axis(time)["scale"]["domain"] == [0, pytest.approx(210)]
    assert time["title"]["subtitle"] == "2 values are outside of the chart"
    assert y_axis(time)["title"] == "ms"
    speed = charts["Tokens per second, all ranks"]
    assert y_axis(speed)["scale"]["domain"] == [0, pytest.approx(10500)]
    assert speed["title"]["subtitle"].strip() == ""
    assert bars(charts["Where the time of a step goes"]) == {
        **{"whole step": [100.0] * 2, "data": [2.0] * 2, "forward and backward": [78.0] * 2, "optimizer": [20.0] * 2},
        "of these, exposed communication": [7.0, 14.0],
    }


def test_mfu_begins_when_it_is_measured(runs):
    mfu = drawn(runs)["Model FLOPs utilization (MFU)"]
    assert curve(mfu, "adamw, 2 ranks") == [(iteration, 31.0) for iteration in range(5, 12)]


def test_communication_by_kind_without_the_unused(runs):
    charts = drawn(runs)
    kinds = {"all-reduce": [1, 0], "reduce-scatter": [0, 1], "all-gather": [0, 1]}
    for title, amount in {"Exposed communication of a step": 7.0, "Sent by a rank in a step": 300.0}.items():
        assert bars(charts[title]) == {kind: [amount * used for used in by_run] for kind, by_run in kinds.items()}


def test_checkpoints(runs):
    charts = drawn(runs)
    assert bars(charts["Time of a checkpoint"]) == {"consolidate": [3.0, 3.0], "write": [2.0, 2.0]}
    size = charts["Size of a checkpoint"]
    assert bars(size) == {"one checkpoint": [1.5, 1.5]}
    assert size["layer"][0]["encoding"]["x"]["title"] == "GB"


def test_figures_that_no_run_has_are_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"iter": 0, "iter/loss": 2.0}\n')
    assert list(drawn([str(tmp_path)])) == ["Training loss"]


def test_a_figure_that_one_run_lacks_is_drawn_for_the_other(runs):
    append(runs[1], '{"iter": 10, "checkpoint/blocked_s": 0.5}\n')
    blocked = [row for row in rows(drawn(runs)["Time of a checkpoint"]) if row["name"] == "blocked"]
    assert [(row["run"], row["value"]) for row in blocked] == [("sharded, 2 ranks", 0.5)]


FOREIGN = ['{"iter": 12, "iter/lo', "", "[1]", "null", "3", '{"iter/loss": 1.0}', '{"iter": "x", "iter/loss": 1.0}', "\xff"]
FOREIGN += ['{"iter": 12, "iter/loss": null}', '{"iter": 12, "iter/loss": NaN}', '{"iter": 12, "iter/loss": "1"}']
FOREIGN += ['{"iter": null, "iter/loss": 1.0}', f'{{"iter": 12, "iter/loss": {10**400}}}', '{"iter": NaN, "iter/loss": 1.0}']


@pytest.mark.parametrize("line", FOREIGN)
def test_lines_without_a_figure_are_skipped(runs, line):
    before = dashboard.read_metrics(runs[0])["iter/loss"].points
    with open(os.path.join(runs[0], "metrics.jsonl"), "ab") as file:
        file.write(line.encode("latin-1") + b'\n{"iter": 13, "iter/loss": 3.5}\n' + line.encode("latin-1"))
    assert dashboard.read_metrics(runs[0])["iter/loss"].points == [*before, (13, 3.5)]


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


def test_a_thinned_curve_says_so(runs):
    append(runs[0], "".join(f'{{"iter": {iteration}, "iter/loss": 3.0}}\n' for iteration in range(12, 3 * MOST_POINTS)))
    charts = drawn(runs)
    assert charts["Training loss"]["title"]["subtitle"].endswith("one of 4 points is drawn")
    assert "drawn" not in charts["Validation loss"]["title"]["subtitle"]
    assert len(rows(charts["Training loss"])) <= MOST_POINTS + 1 + 12


def test_labels(tmp_path):
    def folder(path, text):
        (tmp_path / path).mkdir(parents=True)
        if text is not None:
            (tmp_path / path / "run.json").write_text(text)
        return str(tmp_path / path)

    one = folder("one", '{"implementation": "adamw", "world_size": 1}')
    first, second = (folder(path, '{"implementation": "torch", "world_size": 4}') for path in ("a/x", "a/y"))
    others = [folder(f"other{i}", text) for i, text in enumerate([None, "", "[]", '{"implementation": "torch"}'])]
    assert dashboard.labels([one, first]) == ["adamw, 1 rank", "torch, 4 ranks"]
    assert dashboard.labels([one, first, second]) == ["adamw, 1 rank, one", "torch, 4 ranks, x", "torch, 4 ranks, y"]
    assert dashboard.labels(others) == ["other0", "other1", "other2", "other3"]
    assert dashboard.labels([others[0] + "/."]) == ["other0"]
    same = [folder("b/x", None), folder("c/x", None)]
    assert dashboard.labels(same) == [f"x, {path}" for path in same]
    parts = '"parts": [{"implementation": "sharded", "world_size": 2}, {"implementation": "torch", "world_size": 1}]'
    changed = folder("changed", f'{{"implementation": "torch", "world_size": 1, {parts}}}')
    assert dashboard.labels([changed]) == ["sharded, 2 ranks then torch, 1 rank"]


@pytest.mark.slow("other tests draw every chart, with plain labels", seconds=6)
def test_a_label_may_have_any_characters(tmp_path):
    append(tmp_path, '{"iter": 0, "iter/loss": 2.0}\n{"iter": 1, "iter/loss": 1.0}\n')
    (tmp_path / "run.json").write_text(json.dumps({"implementation": "</script><b>.[x]'\"\\", "world_size": 2}))
    dashboard.draw([str(tmp_path)], str(tmp_path / "runs.html"), str(tmp_path / "pictures"))
    assert "</script><b>" not in (tmp_path / "runs.html").read_text()
    assert os.listdir(tmp_path / "pictures") == ["loss.png"]
    (chart,) = drawn([str(tmp_path)]).values()
    _, under_mouse = chart["layer"][1]["encoding"]["tooltip"]
    assert under_mouse["title"] == "</script><b>.[x]'\"\\, 2 ranks"
    assert under_mouse["field"] == "</script><b>\\.\\[x\\]\\'\\\"\\\\, 2 ranks"


WRONG = {
    "": "no OUT_DIR is given",
    "RUN": "add --html=FILE or --png=DIR",
    "RUN --html=runs.pdf": "html=runs.pdf must be the path of a file that ends with .html",
    "RUN --png=RUN/run.json": "run.json is a file",
    "RUN --htm=": "nothing to write",
    "RUN --speed=3": "unrecognized arguments: --speed=3",
    "RUN/nothing --html=RUN/x.html": "there is no folder RUN/nothing; give the out_dir of a run of train.py",
    "RUN/run.json --html=RUN/x.html": "there is no folder RUN/run.json; ",
    "RUN/run.json --html=RUN/x.html --watch": "there is no folder RUN/run.json; ",
    "RUN/nothing --wandb --project=gpt": "there is no folder RUN/nothing; ",
    "RUN RUN/folder --html=RUN/x.html": "cannot read RUN/folder/metrics.jsonl: Is a directory",
    "RUN/new --html=RUN/x.html": "there is no RUN/new/metrics.jsonl; give the out_dir of a run of train.py",
    "RUN/empty --html=RUN/x.html": "there are no figures yet in RUN/empty",
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_input_is_one_line(runs, line, monkeypatch, capsys):
    folder = runs[0]
    os.makedirs(os.path.join(folder, "folder", "metrics.jsonl"))
    for name in ("empty", "new"):
        os.mkdir(os.path.join(folder, name))
    append(os.path.join(folder, "empty"), "")
    code, error = ends(monkeypatch, capsys, *line.replace("RUN", folder).split())
    assert code == 2
    assert error.startswith("error: ")
    assert WRONG[line].replace("RUN", folder) in error
    assert not os.path.exists(os.path.join(folder, "x.html"))


def test_a_missing_library_is_named(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "altair", None)
    code, error = ends(monkeypatch, capsys, *runs, f"--html={tmp_path / 'x.html'}")
    assert (code, error) == (2, "error: pictures need altair and vl-convert-python; pip install -e '.[plots]'")


def test_the_old_page_stays_until_the_new_one_is_complete(runs, tmp_path, monkeypatch):
    page, replace, seen = tmp_path / "runs.html", os.replace, []
    page.write_text("old")

    def spy(source, target):
        with open(source) as file:
            seen.append((file.read().endswith("</html>\n"), page.read_text()))
        replace(source, target)

    monkeypatch.setattr(os, "replace", spy)
    dashboard.draw(runs, str(page), None)
    assert seen == [(True, "old")]
    assert page.read_text().endswith("</html>\n")


def sleeping(monkeypatch, *actions):
    """Each sleep of the watch does the next of the actions; the sleep after the last of them is Ctrl-C."""
    pending = iter(actions)

    def sleep(_):
        action = next(pending, None)
        if action is None:
            raise KeyboardInterrupt
        action()

    monkeypatch.setattr(dashboard.time, "sleep", sleep)


def test_the_watch_draws_once_for_each_change(runs, monkeypatch):
    count = []
    seen = []
    sleeping(
        monkeypatch,
        lambda: seen.append(len(count)),
        lambda: append(runs[1], '{"iter": 12, "iter/loss": 3.0}\n'),
        lambda: seen.append(len(count)),
        lambda: seen.append(len(count)),
        lambda: os.remove(os.path.join(runs[0], "run.json")),
    )
    dashboard.watch(runs, lambda: count.append(1))
    assert seen == [1, 2, 2]
    assert len(count) == 3


def test_a_watched_page_loads_itself_again_until_the_watch_ends(tmp_path, monkeypatch):
    page, seen = tmp_path / "runs.html", []
    append(tmp_path, "")

    def look():
        seen.append((page.read_text().count('"iter":1,'), "reload_ms = 5000;" in page.read_text()))

    sleeping(
        monkeypatch,
        lambda: seen.append(page.exists()),
        lambda: append(tmp_path, '{"iter": 0, "iter/loss": 2.0}\n'),
        look,
        lambda: append(tmp_path, '{"iter": 1, "iter/loss": 2.0}\n'),
        look,
    )
    monkeypatch.setattr(sys, "argv", ["dashboard.py", str(tmp_path), f"--html={page}", "--watch"])
    dashboard.main()
    assert seen == [False, (0, True), (1, True)]
    assert "reload_ms = null;" in page.read_text()


@pytest.mark.parametrize(
    "begins", [pytest.param(True, marks=pytest.mark.slow("the other case begins later, and waits as well", seconds=5)), False]
)
def test_the_watch_waits_for_a_folder_that_does_not_exist_yet(begins, tmp_path, monkeypatch, capsys):
    folder, page = tmp_path / "out", tmp_path / "runs.html"

    def begin():
        assert not page.exists()
        folder.mkdir()
        append(folder, '{"iter": 0, "iter/loss": 2.0}\n')

    sleeping(monkeypatch, lambda: None, *([begin] if begins else []))
    monkeypatch.setattr(sys, "argv", ["dashboard.py", str(folder), f"--html={page}", "--watch"])
    dashboard.main()
    first, last = capsys.readouterr().out.splitlines()
    assert first == f"watching {folder}; waiting for {folder} to appear; Ctrl-C ends this"
    assert last == (f"the page is in {page}" if begins else f"there are no figures yet in {folder}, so nothing is written")
    assert page.exists() == begins
    assert folder.exists() == begins


def test_what_wandb_would_get_is_written_into_the_folder_of_the_run(runs, monkeypatch, capsys):
    folder = runs[0]
    with open(os.path.join(folder, "run.json"), "w") as file:
        json.dump({"wandb_project": "gpt", "wandb_entity": "us"}, file)
    monkeypatch.setattr(dashboard.workspace, "publish", lambda *arguments: list(map(str, arguments)))
    cases = [(runs, "us", f"{folder}/wandb-gpt.json"), (["--project=gpt"], "None", "wandb-gpt.json")]
    cases += [([*runs, "--entity=you"], "you", f"{folder}/wandb-gpt.json")]
    for arguments, entity, path in cases:
        monkeypatch.setattr(sys, "argv", ["dashboard.py", *arguments, "--wandb"])
        dashboard.main()
        assert capsys.readouterr().out.splitlines() == ["gpt", entity, path]
