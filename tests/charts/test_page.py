"""charts/page.py: the table at the top, and the charts as they are embedded."""

import html
import json
import re
from datetime import datetime

import pytest
from logged import MB, events, write_run

import dashboard
from charts import page
from charts.runs import sections

SAME = {"dataset": "d", "world_size": 2, "max_iters": 11, "state": "ended"}


@pytest.fixture(autouse=True)
def without_the_library(monkeypatch):
    """It takes seconds; test_dashboard.py writes a whole page."""
    monkeypatch.setattr(page, "_library", lambda: "")


@pytest.fixture
def runs(tmp_path):
    return [write_run(tmp_path / f"out-{name}", events(name), implementation=name, **SAME) for name in MB]


def whole(folders):
    found = dashboard.read(folders)
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
    folders = [write_run(tmp_path / of, events("adamw"), implementation=of + name, **facts) for of in ("<td>", "<u>")]
    text = whole(folders)
    assert text.count("<b>") == text.count("<i>") == text.count("<td></") == text.count("<u>") == 0
    assert embedded(text)["names"] == [f"<td>{name}", f"<u>{name}"]
    assert html.escape(name) in text
