"""charts/workspace.py: what it saves on a server, which is simulated below the wandb packages."""

import itertools
import json
import os
import subprocess
import sys
import types

import pytest
import wandb
from conftest import ROOT

from charts import workspace
from run.metrics import METRICS, SECTIONS

pytestmark = pytest.mark.filterwarnings("ignore:Pydantic V1 style")  # in wandb_workspaces

# publish in a process that ends with exit code 3 when it opens a connection or starts the service of wandb
OFFLINE = """
import os, socket, subprocess
from charts import workspace

def end(*_, **__):
    os._exit(3)

socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = subprocess.Popen = end
workspace.publish("gpt", None)
"""


class Server:
    """What the wandb server does with views: it stores them by ID. It stands in for the service that sends the requests."""

    app_url = "https://wandb.test/"

    def __init__(self):
        self.views, self.new = {}, itertools.count()

    def execute_graphql(self, query, variables=None, **_):
        if "upsertView" in query:
            identity = variables.get("id") or f"id{next(self.new)}"
            assert identity in self.views or not variables.get("id")
            self.views[identity] = {**variables, "id": identity}
            project = {"id": "", "name": variables["projectName"], "entityName": variables["entityName"]}
            return {"upsertView": {"view": {**self.views[identity], "project": project}, "inserted": True}}
        if variables.get("project", variables.get("projectName")) != "gpt":  # two names for it in the two requests
            return {"project": None}
        entity, kind = variables.get("entity", variables.get("entityName")), variables.get("viewType", "runs")
        found = [view for view in self.views.values() if (view["entityName"], view["type"]) == (entity, kind)]
        found = [view for view in found if view["name"] == (variables.get("viewName") or view["name"])]
        return {"project": {"allViews": {"edges": [{"node": view, "cursor": ""} for view in found], "pageInfo": {}}}}

    def specs(self):
        """The workspace, its sections by name, and the panel grids of the report by their headings."""
        of_workspace, of_report = (json.loads(view["spec"]) for view in self.views.values())
        sections = of_workspace["section"]["panelBankConfig"]["sections"]
        blocks = of_report["blocks"]
        names = [block["children"][0]["text"] for block in blocks if block["type"] == "heading"]
        grids = [block["metadata"] for block in blocks if block["type"] == "panel-grid"]
        by_name = dict(zip(names, grids, strict=True))
        return of_workspace["section"], {section["name"]: section for section in sections}, by_name


@pytest.fixture
def server(monkeypatch):
    server = Server()

    class Api(wandb.Api):
        default_entity = "me"

        def __init__(self):
            self.settings, self._service_api, self._reports = {"entity": None, "project": None}, server, {}

        def projects(self, entity):
            return [types.SimpleNamespace(name="gpt")]

    monkeypatch.setattr(wandb, "login", lambda prompt, verify: not prompt)
    monkeypatch.setattr(wandb, "Api", Api)
    return server


def contents(panels):
    """Title, kind and keys of each panel."""
    found = []
    for panel in panels:
        config = panel["config"]
        keys = config.get("metrics") or [config["panel2Config"]["exp"]["fromOp"]["inputs"]["key"]["val"]]
        found.append((config.get("chartTitle"), panel["viewType"], keys))
    return found


def test_workspace_and_report_have_the_charts_of_the_metrics(server):
    workspace.publish("gpt", None)
    _, sections, grids = server.specs()
    found = {name: contents(section["panels"]) for name, section in sections.items()}
    assert found == {name: contents(grid["panelBankSectionConfig"]["panels"]) for name, grid in grids.items()}
    assert list(found) == [name for name in SECTIONS if name != "Others"]
    shown = {key for panels in found.values() for _, _, keys in panels for key in keys}
    assert shown - METRICS.keys() == set()
    assert {metric.key for metric in METRICS.values() if metric.chart} - shown == set()
    bars, lines = "Bar Chart", "Run History Line Plot"
    assert ("Peak memory, MB", bars, ["peak_memory_mb"]) in found["Summary"]
    both, state = ["memory/predicted_state_mb", "memory/measured_state_mb"], "memory/optimizer_state_mb"
    assert ("State, predicted and measured, MB", bars, both) in found["Memory"]
    assert ("Optimizer state of a rank, MB", lines, [state, f"{state}_min"]) in found["Memory"]
    points = [f"memory/{point}_mb" for point in ("after_init", "before_step", "after_step")]
    assert ("At three points of a step, MB", lines, points) in found["Memory"], "without the minima, which would be six lines"
    assert found["Samples"] == [(None, "Weave", ["sample/text"])]
    for section in sections.values():
        layout = section["flowConfig"]
        assert layout["columnsPerPage"] * layout["rowsPerPage"] >= len(section["panels"]), "all panels on the first page"
    for grid in grids.values():
        panels = grid["panelBankSectionConfig"]["panels"]
        assert len({(panel["layout"]["x"], panel["layout"]["y"]) for panel in panels}) == len(panels)


def test_lines_are_over_the_iterations_and_runs_grouped_and_coloured_by_implementation(server):
    workspace.publish("gpt", None)
    whole, sections, grids = server.specs()
    for settings in (whole["settings"], *(section["localPanelSettings"] for section in sections.values())):
        assert (settings["xAxis"], settings["smoothingType"], settings["smoothingWeight"]) == ("iter", "none", 0)
    panels = [panel for section in sections.values() for panel in section["panels"]]
    panels += [panel for grid in grids.values() for panel in grid["panelBankSectionConfig"]["panels"]]
    configs = [(panel["viewType"], panel["config"]) for panel in panels]
    lines = {(of["xAxis"], of["smoothingType"]) for kind, of in configs if kind == "Run History Line Plot"}
    assert lines == {("iter", "none")}
    assert {of["groupBy"] for kind, of in configs if kind == "Bar Chart"} == {"implementation.value"}
    for (runset,), colours in [(of["runSets"], of["customRunColors"]) for of in (whole, *grids.values())]:
        assert runset["grouping"] == [{"section": "config", "name": "implementation.value"}]
        assert len(set(colours.values())) == 3
        for name in ("adamw", "torch", "sharded"):
            assert [key for key in colours if name in key and runset["id"] in key], "the key has the group and its run set"


def test_both_are_updated_by_later_calls(server):
    first, second = workspace.publish("gpt", None)
    name = first.removeprefix("workspace: https://wandb.test/me/gpt?nw=")
    assert server.views["id0"]["name"] == f"nw-{name}-v"
    assert second == "report: https://wandb.test/me/gpt/reports/nanoGPT-with-ZeRO-1--id1"
    changed = json.loads(server.views["id0"]["spec"])
    changed["section"]["panelBankConfig"]["sections"] = []  # by hand
    server.views["id0"]["spec"], server.views["id1"]["spec"] = json.dumps(changed), "{}"
    assert workspace.publish("gpt", "me") == [first, second]
    assert len(server.views) == 2
    _, sections, grids = server.specs()
    assert sections.keys() == grids.keys()
    assert sections
    del server.views["id0"]
    again, second_again = workspace.publish("gpt", "me")
    assert (again != first, second_again) == (True, second), "the workspace was deleted, so there is a new one"
    assert workspace.publish("gpt", "me") == [again, second]
    other = workspace.publish("gpt", "team")
    assert all(line.partition("wandb.test/")[2].startswith("team/gpt") for line in other)


def test_a_report_with_another_title_stays(server):
    other = {"id": "other", "name": "x", "displayName": "My report", "type": "runs", "spec": "{}", "entityName": "me"}
    server.views["other"] = dict(other)
    workspace.publish("gpt", None)
    assert server.views["other"] == other
    assert len(server.views) == 3


def unreachable():
    raise wandb.errors.AuthenticationError("cannot connect\nin many lines")


@pytest.mark.parametrize(
    ("project", "changed", "message"),
    [
        (
            "gtp",
            {},
            r"^there is no project me/gtp in wandb; check --project and --entity, or first train with --wandb_log=True",
        ),
        ("gpt", {"login": lambda prompt, verify: prompt or verify}, "^there is no wandb login, or WANDB_MODE is offline; run "),
        ("gpt", {"Api": unreachable}, "^wandb: cannot connect; check the network and `wandb login`, then this command again$"),
    ],
)
def test_what_is_missing_is_named(project, changed, message, server, monkeypatch):
    for name, value in changed.items():
        monkeypatch.setattr(wandb, name, value)
    with pytest.raises(ValueError, match=message):
        workspace.publish(project, None)
    assert not server.views


@pytest.mark.parametrize(("login", "code"), [({}, 1), ({"WANDB_API_KEY": "a" * 40}, 3)])
def test_without_a_login_it_needs_no_network(login, code, tmp_path):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment = {**kept, "HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), **login}
    command = [sys.executable, "-c", OFFLINE]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert ("there is no wandb login" in done.stderr) == (code == 1)


@pytest.mark.parametrize("package", ["wandb", "wandb_workspaces"])
def test_a_missing_package_is_named(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"^--wandb needs wandb-workspaces \(.*\); pip install -e '\.\[dashboard\]'$"):
        workspace.publish("gpt", None)
