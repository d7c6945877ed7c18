"""dashboard.py: what is read, the states of runs, the page and the pictures as files, and what is refused."""

import os
import re
import sys
from pathlib import Path

import pytest
from logged import MB, events, write_run

import dashboard
from run.out_folder import take

SECTIONS = ["Loss", "Throughput", "Memory", "Communication", "Checkpoints"]


@pytest.fixture
def runs(tmp_path):
    """The folders of two runs."""
    return [write_run(tmp_path / f"out-{name}", events(name), implementation=name, world_size=2) for name in MB]


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
