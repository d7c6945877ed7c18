"""charts/page.py: the table at the top, the sentence about the best run, and the charts as they are embedded."""

import html
import json
import re
import shutil
import subprocess
from datetime import datetime

import pytest
from logged import MB, events, write_run

import dashboard
from charts import page
from charts.runs import sections

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
SAME = {"dataset": "d", "world_size": 2, "max_iters": 11, "state": "ended"}


@pytest.fixture
def runs(tmp_path):
    return [write_run(tmp_path / f"out-{name}", events(name), implementation=name, **SAME) for name in MB]


def whole(folders):
    found = dashboard.read(folders)
    return page.page(found, sections(found), None)


def body(folders):
    """The page after its library."""
    return (text := whole(folders))[text.index("<body>") :]


def verdict(folders):
    return re.sub("<.*?>", "", page.verdict(dashboard.read(folders)))


def table(folders):
    """The rows of the table, each by the names of the columns; the best cells end with a star."""
    lines = re.findall(r"<tr.*?</tr>", page.table(dashboard.read(folders)))
    cells = [re.findall(r"<t[hd]( class=\"[^\"]*\")?>(.*?)</t[hd]>", line) for line in lines]
    texts = [[html.unescape(re.sub("<.*?>", "", cell)) + "*" * ("best" in of) for of, cell in row] for row in cells]
    return [dict(zip(texts[0], row, strict=True)) for row in texts[1:]]


def embedded(text):
    return json.loads(re.search(r"^const page = (.*);$", text, re.MULTILINE).group(1))


def test_the_table_says_what_the_files_say(runs):
    wall = "0:00:08"
    assert table(runs) == [
        {
            **{"run": "out-adamw", "what differs": "adamw", "state": "ended", "best validation loss": "4.2000"},
            **{"tokens per second": "10,000", "tensors, peak": "2.71 GB", "saved": "0 MB", "wall time": wall},
        },
        {
            **{"run": "out-sharded", "what differs": "sharded", "state": "ended", "best validation loss": "4.2000"},
            **{"tokens per second": "10,000", "tensors, peak": "2.31 GB*", "saved": "400 MB*", "wall time": wall},
        },
    ]
    assert verdict(runs) == "All runs have the same best validation loss, 4.2000."
    assert "what differs" not in table(runs[:1])[0]
    assert verdict(runs[:1]) == ""


VERDICTS = {  # name of a run: its best validation loss, its tokens, its dataset
    (("a", 1.5, 2000, "d"), ("b", 1.50001, 2000, "d")): "All runs have the same best validation loss, 1.5000.",
    (("a", 1.5, 2000, "d"), ("b", 1.50001, 2000, "d"), ("c", 1.75, 2000, "d")): (
        "Lowest validation loss: 1.5000, a; b. Next: 1.7500 (+0.2500), c."
    ),
    (("c", 1.75, 2000, "d"), ("d", 2.0, 1000, "d")): "Lowest validation loss: 1.7500, c, at iteration 0. "
    "Next: 2.0000 (+0.2500), d. The runs have not seen the same number of tokens: 1,000 to 2,000.",
    (("a", 1.0, 2000, "d"), ("b", 2.0, 2000, "e")): "The runs have different datasets, so their losses do not compare.",
    (("a", 1.0, 2000, "d"),): "",
}


@pytest.mark.parametrize("of", VERDICTS, ids=lambda of: " ".join(map(str, sum(of, ()))))
def test_the_sentence_says_which_runs_are_best_as_far_as_they_compare(of, tmp_path):
    folders = []
    for name, loss, tokens, dataset in of:
        logged = [{"iter": 0, "val/loss": loss}, {"iter": 1, "val/loss": loss + 0.1}, {"iter": 1, "iter/tokens": tokens}]
        folders.append(write_run(tmp_path / name, logged, **SAME | {"dataset": dataset}))
    assert verdict(folders) == VERDICTS[of]
    losses = [row["best validation loss"].removesuffix("*") for row in table(folders)]
    assert losses == [f"{loss:.4f}" for _, loss, _, _ in of]


def test_the_best_cell_is_marked_and_a_column_of_zeros_left_out(tmp_path):
    folders = [
        write_run(tmp_path / f"lr{place}", [{"iter": 0, "val/loss": loss, "memory/saved_mb": 0.0}], **SAME, learning_rate=place)
        for place, loss in enumerate((3.5, 3.25, 3.75))
    ]
    assert [row["best validation loss"] for row in table(folders)] == ["3.5000", "3.2500*", "3.7500"]
    assert "saved" not in table(folders)[0]
    assert verdict(folders).startswith("Lowest validation loss: 3.2500, learning_rate=1, lr1, at iteration 0. Next: 3.5000")


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"state": "running"}, "running, 1%, 0:30:00 left"),
        ({"state": "stopped"}, "stopped at 11 of 1,100, checkpoint at 10"),
        ({"state": "failed"}, "failed at 11 of 1,100, checkpoint at 10"),
        ({"state": "ended"}, "ended"),
        ({"state": "ended", "starts": [0, 7]}, "ended, 1 restart"),
        ({"state": "ended", "starts": [0, 7, 9]}, "ended, 2 restarts"),
    ],
    ids=str,
)
def test_a_run_says_how_far_it_is(facts, text, tmp_path):
    of_run = {"implementation": "adamw", "max_iters": 1100, "dist_timeout_s": 600.0}
    assert table([write_run(tmp_path / "out", events("adamw"), **SAME | of_run | facts)])[0]["state"] == text


def test_the_page_says_what_it_is_of(runs, tmp_path):
    text = body(runs)
    assert "<h1>2 runs</h1>" in text
    assert f"<p>d, 2 ranks, drawn {datetime.now():%Y-%m-%d}" in text
    assert "the process" not in text, "the runs were on a GPU"
    on_cpu = body([write_run(tmp_path / "cpu", events("adamw", on_gpu=False), **SAME, implementation="adamw")])
    assert "<h1>adamw, 2 ranks, cpu</h1>" in on_cpu
    assert "peak: on a CPU it is that of the process, with Python and its libraries" in on_cpu


def test_every_chart_is_as_wide_as_its_place_and_shares_what_is_highlighted(runs):
    text = body(runs)
    content = embedded(text)
    for row in sections(dashboard.read(runs)).values():
        for panel in row:
            panel.chart.to_dict()  # is it Vega-Lite?
    assert content["names"] == ["adamw", "sharded"]
    assert len(content["charts"]) == text.count('<div id="chart')
    for chart in content["charts"]:
        assert chart["width"] == "container"
        params = {param["name"]: param for param in chart["params"]}
        assert params["picked"]["value"] == []
        over_iterations = any(layer.get("name") == "curves" for layer in chart["layer"])
        assert ("zoom" in params) == over_iterations
        if over_iterations:
            assert params["zoom"]["views"] == ["curves"]
            (rule,) = (layer for layer in chart["layer"] if layer.get("name") == "rule")
            shown = [of.get("field") for of in rule["encoding"]["tooltip"][1:]]
            assert sorted(shown) == sorted({f"{row['kind']} {row['run']}" for row in chart["datasets"][chart["data"]["name"]]})
    assert text.count('class="wide"') == 1


def test_names_cannot_break_the_page(tmp_path):
    name = "</script><b>$x`${y}\"'\\"
    folder = write_run(tmp_path / "</td>", events("adamw"), **SAME | {"implementation": name, "state": "<i>"})
    text = body([folder])
    assert text.count("<b>") == text.count("</td></td>") == text.count("<i>") == 0
    assert embedded(text)["names"] == [f"{name}, 2 ranks"]
    assert html.escape(name) in text


SCRIPT = """<script>
setTimeout(async () => {
  const canvas = document.querySelector("canvas"), box = canvas.getBoundingClientRect();
  const found = JSON.parse(sessionStorage.getItem("found")) ?? {pictures: []};
  found.pictures.push(canvas.toDataURL());
  if (found.pictures.length == 1) {
    document.querySelector("tr[data-run='1'] button").click();
    const middle = {clientX: box.x + box.width / 2, clientY: box.y + box.height / 2, bubbles: true};
    canvas.dispatchEvent(new PointerEvent("pointermove", middle));
    canvas.dispatchEvent(new WheelEvent("wheel", {ctrlKey: true, deltaY: -300, ...middle}));
    canvas.dispatchEvent(new PointerEvent("pointerout", middle));
    await new Promise(resolve => setTimeout(resolve, 1000));
    found.pictures.push(canvas.toDataURL());
    sessionStorage.setItem("found", JSON.stringify(found));
    location.reload();
  } else {
    const [before, zoomed, after] = found.pictures;
    const picked = [...document.querySelectorAll("tr.picked")].map(row => row.dataset.run);
    const charts = document.querySelectorAll("canvas").length;
    document.title = JSON.stringify({picked, charts, changed: before != zoomed && kept.zoom != null, kept: zoomed == after});
  }
}, 2000);
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_a_page_that_loads_itself_again_keeps_what_is_highlighted_and_zoomed(runs, tmp_path):
    text = whole(runs)
    (tmp_path / "page.html").write_text(text.removesuffix("</body>\n</html>\n") + SCRIPT)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--virtual-time-budget=10000"]
    command = [BROWSER, *flags, "--dump-dom", f"file://{tmp_path}/page.html"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    found = json.loads(html.unescape(re.search("<title>(.*?)</title>", dom)[1]))
    assert found == {"picked": ["1"], "charts": len(embedded(text)["charts"]), "changed": True, "kept": True}
