"""dashboard.py and charts/page.py: what is read, the states of runs, the table and the page, pictures, what is refused."""

import html
import json
import os
import re
import sys
from datetime import datetime
from pathlib import Path
from unittest import mock

import pytest
from logged import MB, events, write_run

import dashboard
from charts import page
from charts.runs import sections
from run.out_folder import take

SECTIONS = ["Loss", "Throughput", "Memory", "Communication", "Checkpoints"]
SAME = {"dataset": "d", "world_size": 2, "max_iters": 11, "state": "ended"}


@pytest.fixture
def runs(tmp_path):
    """The folders of two runs."""
    return [write_run(tmp_path / f"out-{name}", events(name), implementation=name, **SAME) for name in MB]


def append(folder, text):
    with open(os.path.join(folder, "metrics.jsonl"), "a", encoding="latin-1") as file:
        file.write(text)


def ends(monkeypatch, capsys, *arguments):
    """The exit code of dashboard.py and its error line."""
    monkeypatch.setattr(sys, "argv", ["dashboard.py", *arguments])
    with pytest.raises(SystemExit) as end:
        dashboard.main()
    (line,) = capsys.readouterr().err.splitlines()
    return end.value.code, line


def test_it_writes_a_page_and_the_pictures(runs, tmp_path, monkeypatch, capsys):
    page, pictures = tmp_path / "new" / "runs.html", tmp_path / "pictures"
    page.parent.mkdir()
    page.write_text("old")
    replace, seen = os.replace, []

    def spy(source, target):
        seen.append(page.read_text()[-8:])
        replace(source, target)

    monkeypatch.setattr(os, "replace", spy)
    monkeypatch.setattr(sys, "argv", ["dashboard.py", *runs, f"--html={page}", f"--png={pictures}"])
    dashboard.main()
    assert capsys.readouterr().out.splitlines() == [f"the page is in {page}", f"the pictures are in {pictures}"]
    assert sorted(os.listdir(pictures)) == sorted(f"{name.lower()}.png" for name in SECTIONS)
    assert all(path.read_bytes().startswith(b"\x89PNG\r\n") for path in pictures.iterdir())
    assert not re.search(r"<script src|<link|cdn\.", page.read_text()), "the page needs the network"
    assert seen[:2] == ["old", "</html>\n"], "the old page stays until the new one is complete"
    assert os.listdir(page.parent) == ["runs.html"]


FOREIGN = ['{"iter": 12, "iter/lo', "", "[1]", "null", "3", '{"iter/loss": 1.0}', '{"iter": "x", "iter/loss": 1.0}', "\xff"]
FOREIGN += ['{"iter": 12, "iter/loss": null}', '{"iter": 12, "iter/loss": NaN}', '{"iter": 12, "iter/loss": "1"}']
FOREIGN += ['{"iter": null, "iter/loss": 1.0}', f'{{"iter": 12, "iter/loss": {10**400}}}', '{"iter": NaN, "iter/loss": 1.0}']


def test_lines_without_a_figure_are_skipped(runs):
    before = dashboard.read_metrics(runs[0])["iter/loss"]
    for line in FOREIGN:
        append(runs[0], f"{line}\n")
    append(runs[0], f'{{"iter": 13, "iter/loss": 3.5}}\n{FOREIGN[0]}')
    assert dashboard.read_metrics(runs[0])["iter/loss"] == [*before, (13, 3.5)]


def test_the_state_of_a_run(tmp_path):
    """A run that was killed has written neither that it has ended nor that it is over; its lock is free."""
    for known in ("ended", "stopped", "failed"):
        assert dashboard.read_facts(write_run(tmp_path / known, state=known)) == {"state": known}
    folder = write_run(tmp_path / "out", state="running")
    lock = take(folder)
    assert dashboard.read_facts(folder) == {"state": "running"}
    lock.close()
    assert dashboard.read_facts(folder) == {"state": "killed"}
    os.remove(os.path.join(folder, "run.lock"))  # a copy
    assert dashboard.read_facts(folder) == {"state": "running"}, "it does not tell"


def test_a_run_json_that_cannot_be_read_has_no_facts(tmp_path):
    for text in ("", "[]", '{"implementation"', None):
        folder = write_run(tmp_path / f"x{text}", [{"iter": 0, "iter/loss": 1.0}])
        path = Path(folder, "run.json")
        path.unlink() if text is None else path.write_text(text)
        (found,) = dashboard.read([folder])
        assert (found.name, found.facts) == (folder, {})


WRONG = {
    "": "no OUT_DIR is given",
    "RUN": "add --html=FILE or --png=DIR",
    "RUN --html=runs.pdf": "html=runs.pdf must be the path of a file that ends with .html",
    "RUN --png=RUN/run.json": "run.json is a file",
    "RUN --htm=": "nothing to write",
    "RUN --speed=3": "unrecognized arguments: --speed=3",
    "RUN/nothing --html=RUN/x.html": "there is no folder RUN/nothing; give the out_dir of a run of train.py",
    "RUN/run.json --html=RUN/x.html": "there is no folder RUN/run.json; ",
    "RUN --wandb": "--wandb needs --project=NAME, or the OUT_DIR of a run of the project",
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
    assert (code, error[:7]) == (2, "error: ")
    assert WRONG[line].replace("RUN", folder) in error
    assert not os.path.exists(os.path.join(folder, "x.html"))


@pytest.mark.parametrize("library", ["altair", "vl_convert"])
def test_a_missing_library_is_named(library, runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, library, None)
    code, error = ends(monkeypatch, capsys, *runs, f"--html={tmp_path / 'x.html'}")
    assert (code, error) == (2, "error: pictures need altair and vl-convert-python; pip install -e '.[plots]'")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["RUN"], ("gpt", None)), (["--project=x", "--entity=us"], ("x", "us")), (["RUN", "--project=x"], ("x", None))],
)
def test_the_workspace_is_that_of_the_project_of_the_run(arguments, expected, tmp_path, monkeypatch, capsys):
    folder = write_run(tmp_path / "out", wandb_project="gpt")
    monkeypatch.setattr(dashboard.workspace, "publish", lambda *arguments: arguments)
    monkeypatch.setattr(sys, "argv", ["dashboard.py", *(text.replace("RUN", folder) for text in arguments), "--wandb"])
    dashboard.main()
    assert capsys.readouterr().out == f"the workspace is at {expected}\n"


def whole(folders):
    """The page without the library that draws, which takes seconds."""
    found = dashboard.read(folders)
    with mock.patch.object(page, "_library", return_value=""):
        return page.page(found, sections(found))


def table(folders):
    """The rows of the table, each by the names of the columns; the best cells end with a star."""
    lines = re.findall(r"<tr.*?</tr>", page.table(dashboard.read(folders)))
    cells = [re.findall(r"<t[hd]( class=\"[^\"]*\")?>(.*?)</t[hd]>", line) for line in lines]
    texts = [[html.unescape(re.sub("<.*?>", "", cell)) + "*" * ("best" in of) for of, cell in row] for row in cells]
    return [dict(zip(texts[0], row, strict=True)) for row in texts[1:]]


def embedded(text):
    return json.loads(re.search(r"^const page = (.*);$", text, re.MULTILINE).group(1))


def test_the_table_says_what_the_files_say(runs):
    same = {"state": "ended", "best validation loss": "4.2000", "tokens per second": "10,000", "wall time": "0:00:08"}
    adamw, sharded = runs
    assert table(runs) == [
        {"run": adamw, "what differs": "adamw", "peak": "2.71 GB", "saved": "0 MB", **same},
        {"run": sharded, "what differs": "sharded", "peak": "2.31 GB*", "saved": "400 MB*", **same},
    ]
    assert "what differs" not in table(runs[:1])[0]


@pytest.mark.parametrize("data", ["d", "e"])
def test_the_best_cell_is_marked_and_a_column_of_zeros_left_out(data, tmp_path):
    losses = {"a": (3.5, "d"), "b": (3.25, "d"), "c": (3.75, data)}
    folders = [
        write_run(tmp_path / name, [{"iter": 0, "val/loss": loss, "memory/saved_mb": 0.0}], **SAME | {"dataset": of})
        for name, (loss, of) in losses.items()
    ]
    best = "3.2500*" if data == "d" else "3.2500"  # losses on other data do not compare
    assert [row["best validation loss"] for row in table(folders)] == ["3.5000", best, "3.7500"]
    assert "saved" not in table(folders)[0]


def test_a_run_says_how_far_it_is(tmp_path):
    texts = {"running": "running at 11 of 1,100", "stopped": "stopped at 11 of 1,100", "ended": "ended"}
    folders = [write_run(tmp_path / state, events("adamw"), **SAME | {"max_iters": 1100, "state": state}) for state in texts]
    assert [row["state"] for row in table(folders)] == list(texts.values())


def test_the_page_says_what_it_is_of_and_its_charts_share_what_is_highlighted(runs):
    text = whole(runs)
    assert "<h1>2 runs</h1>" in text
    assert f"<p>d, 2 ranks, drawn {datetime.now():%Y-%m-%d}" in text
    assert f"<h1>{runs[0]}</h1>" in whole(runs[:1])
    content = embedded(text)
    for chart in (chart for row in sections(dashboard.read(runs)).values() for chart in row):
        chart.to_dict()  # is it Vega-Lite?
    assert content["names"] == ["adamw", "sharded"]
    assert len(content["charts"]) == text.count('<div id="chart')
    for chart in content["charts"]:
        assert chart["width"] == "container"
        params, rows = {param["name"]: param for param in chart["params"]}, chart["datasets"][chart["data"]["name"]]
        assert params["picked"]["value"] == []
        over_iterations = any("iter" in row for row in rows)
        assert ("zoom" in params) == over_iterations
        if over_iterations:
            (rule,) = (layer for layer in chart["layer"] if layer["mark"]["type"] == "rule")
            assert params["zoom"]["views"] == [chart["layer"][0]["name"]]
            assert params["hovered"]["views"] == [rule["name"]]
            shown = [of.get("field") for of in rule["encoding"]["tooltip"][1:]]
            assert sorted(shown) == sorted({f"{row['kind']} {row['run']}" for row in rows})


def test_names_cannot_break_the_page(tmp_path):
    name = "</script><b>$x`${y}\"'\\"
    facts = SAME | {"state": "<i>"}
    text = whole([write_run(tmp_path / of, events("adamw"), implementation=of + name, **facts) for of in ("<td>", "<u>")])
    assert text.count("<b>") == text.count("<i>") == text.count("<td></") == text.count("<u>") == 0
    assert embedded(text)["names"] == [f"<td>{name}", f"<u>{name}"]
    assert html.escape(name) in text
