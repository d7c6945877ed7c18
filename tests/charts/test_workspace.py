"""charts/workspace.py: what it writes without wandb, and saves on a server, which is simulated below the wandb packages."""

import json
import os
import re
import subprocess
import sys
import types

import pytest
import wandb
from conftest import ROOT

from charts import workspace

pytestmark = pytest.mark.filterwarnings("ignore:Pydantic V1 style")  # in wandb_workspaces

# publish in a process that ends with exit code 3 when it opens a connection or starts the service of wandb
OFFLINE = """
import os, socket, subprocess, sys
from charts import workspace

def end(*_, **__):
    os._exit(3)

socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = subprocess.Popen = end
print(*workspace.publish("gpt", None, sys.argv[1]), sep="\\n")
"""
TITLES = {section.name: [panel.title for panel in section.panels if panel.kind != "table"] for section in workspace.SECTIONS}
KEYS = {section.name: [list(panel.keys) for panel in section.panels] for section in workspace.SECTIONS}


def publish_offline(path, **variables):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment = {**kept, "HOME": str(path.parent), "NETRC": str(path.parent / "netrc"), **variables}
    command = [sys.executable, "-c", OFFLINE, str(path)]
    return subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)


@pytest.fixture
def no_login(monkeypatch):
    monkeypatch.setattr(wandb, "login", lambda prompt, verify: prompt or verify)


@pytest.fixture
def specification(no_login, tmp_path):
    path = tmp_path / "new folder" / "wandb.json"
    workspace.publish("gpt", None, str(path))
    return json.loads(path.read_text())


def keys_of(panel):
    if panel["viewType"] == "Weave":
        return [panel["config"]["panel2Config"]["exp"]["fromOp"]["inputs"]["key"]["val"]]
    return panel["config"]["metrics"]


def titles_of(panels):
    return [panel["config"]["chartTitle"] for panel in panels if "chartTitle" in panel["config"]]


def grids(specification):
    """Run set and panels of each panel grid of the report."""
    grids = [block["metadata"] for block in specification["report"]["spec"]["blocks"] if block["type"] == "panel-grid"]
    return [(*grid["runSets"], grid["panelBankSectionConfig"]["panels"], grid) for grid in grids]


def test_without_a_login_it_needs_no_network_and_says_what_is_missing(tmp_path, specification):
    done = publish_offline(tmp_path / "wandb.json")
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    assert "run `wandb login`, then use this command again" in line
    assert str(tmp_path / "wandb.json") in line
    assert json.loads((tmp_path / "wandb.json").read_text()) == specification, "the same in every process"


def test_with_a_login_it_would_need_the_network(tmp_path):
    assert publish_offline(tmp_path / "wandb.json", WANDB_API_KEY="a" * 40).returncode == 3


def test_the_workspace_has_every_panel_of_every_section(specification):
    sections = specification["workspace"]["spec"]["section"]["panelBankConfig"]["sections"]
    assert {section["name"]: titles_of(section["panels"]) for section in sections} == TITLES
    assert {section["name"]: [keys_of(panel) for panel in section["panels"]] for section in sections} == KEYS
    for section in sections:
        layout = section["flowConfig"]
        assert layout["columnsPerPage"] * layout["rowsPerPage"] >= len(section["panels"]), "all panels on the first page"


def test_the_report_has_every_panel_in_a_place_of_its_own(specification):
    headings = [block for block in specification["report"]["spec"]["blocks"] if block["type"] == "heading"]
    names = [heading["children"][0]["text"] for heading in headings]
    panels = dict(zip(names, (panels for _, panels, _ in grids(specification)), strict=True))
    assert {name: titles_of(panels) for name, panels in panels.items()} == TITLES
    assert {name: [keys_of(panel) for panel in panels] for name, panels in panels.items()} == KEYS
    for of_section in panels.values():
        assert len({(panel["layout"]["x"], panel["layout"]["y"]) for panel in of_section}) == len(of_section)


def test_lines_are_over_the_iterations_and_not_smoothed(specification):
    section = specification["workspace"]["spec"]["section"]
    for settings in (section["settings"], *(part["localPanelSettings"] for part in section["panelBankConfig"]["sections"])):
        assert (settings["xAxis"], settings["smoothingType"], settings["smoothingWeight"]) == ("iter", "none", 0)
    panels = [panel for part in section["panelBankConfig"]["sections"] for panel in part["panels"]]
    lines = [panel for panel in panels if panel["viewType"] == "Run History Line Plot"]
    assert lines
    for _, panels, _ in grids(specification):
        lines += [panel for panel in panels if panel["viewType"] == "Run History Line Plot"]
    assert {(line["config"]["xAxis"], line["config"]["smoothingType"]) for line in lines} == {("iter", "none")}


def test_runs_are_grouped_and_coloured_by_implementation(specification):
    section = specification["workspace"]["spec"]["section"]
    report = [(runset, grid["customRunColors"]) for runset, _, grid in grids(specification)]
    for runset, colours in [(*section["runSets"], section["customRunColors"]), *report]:
        assert runset["grouping"] == [{"section": "config", "name": "implementation.value"}]
        assert len(set(colours.values())) == 3
        for name in ("adamw", "torch", "sharded"):
            assert [key for key in colours if name in key and runset["id"] in key], "the key has the group and its run set"
    bars = [panel for _, panels, _ in grids(specification) for panel in panels if panel["viewType"] == "Bar Chart"]
    assert {bar["config"]["groupBy"] for bar in bars} == {"implementation.value"}


def test_every_key_is_documented():
    with open(os.path.join(ROOT, "docs", "metrics.md")) as file:
        first_cells = [line.split("|")[1] for line in file if line.startswith("|")]
    documented = {key for cell in first_cells for key in re.findall("`([^`]+)`", cell)}
    shown = {key.removesuffix("_min") for section in KEYS.values() for keys in section for key in keys}
    assert shown - documented == set()


class Server:
    """What the wandb server does with views: it stores them by ID. It stands in for the service that sends the requests."""

    app_url = "https://wandb.test/"

    def __init__(self):
        self.views = {}

    def execute_graphql(self, query, variables=None, **_):
        if "upsertView" in query:
            identity = variables.get("id") or f"id{len(self.views)}"
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


def test_with_a_login_both_are_saved_and_later_updated(specification, server, tmp_path):
    path = tmp_path / "none.json"
    lines = workspace.publish("gpt", None, str(path))
    assert lines == [
        "workspace: https://wandb.test/me/gpt?nw=nanogptzero",
        "report: https://wandb.test/me/gpt/reports/nanoGPT-with-ZeRO-1--id1",
    ]
    assert [json.loads(view["spec"]) for view in server.views.values()] == [
        specification["workspace"]["spec"],
        specification["report"]["spec"],
    ]
    for view in server.views.values():
        view["spec"] = "{}"  # a change by hand
    assert workspace.publish("gpt", "me", str(path)) == lines
    assert len(server.views) == 2
    assert json.loads(server.views["id0"]["spec"]) == specification["workspace"]["spec"]
    assert json.loads(server.views["id1"]["spec"]) == specification["report"]["spec"]
    assert workspace.publish("gpt", "team", str(path)) == [
        "workspace: https://wandb.test/team/gpt?nw=nanogptzero",
        "report: https://wandb.test/team/gpt/reports/nanoGPT-with-ZeRO-1--id3",
    ]
    assert not path.exists()


def test_a_report_with_another_title_stays(server, tmp_path):
    other = {"id": "other", "name": "x", "displayName": "My report", "type": "runs", "spec": "{}", "entityName": "me"}
    server.views["other"] = dict(other)
    workspace.publish("gpt", None, str(tmp_path / "none.json"))
    assert server.views["other"] == other
    assert len(server.views) == 3


def test_a_project_that_does_not_exist_is_refused(server, tmp_path):
    with pytest.raises(ValueError, match=r"^there is no project me/gtp in wandb; check --project and --entity, or first train"):
        workspace.publish("gtp", None, str(tmp_path / "none.json"))
    assert not server.views


def test_without_a_network_the_reason_is_printed(monkeypatch, tmp_path, specification):
    def unreachable():
        raise wandb.errors.AuthenticationError("cannot connect\nin many lines")

    monkeypatch.setattr(wandb, "login", lambda prompt, verify: not prompt)
    monkeypatch.setattr(wandb, "Api", unreachable)
    path = tmp_path / "wandb.json"
    (line,) = workspace.publish("gpt", None, str(path))
    assert line.startswith("wandb: cannot connect; check the network and `wandb login`, then use this command again; ")
    assert json.loads(path.read_text()) == specification


@pytest.mark.parametrize("package", ["wandb", "wandb_workspaces"])
def test_a_missing_package_is_named(package, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"^--wandb needs wandb-workspaces \(.*\); pip install -e '\.\[dashboard\]'$"):
        workspace.publish("gpt", None, str(tmp_path / "wandb.json"))
