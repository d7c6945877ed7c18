"""charts/workspace.py: what it saves on a server, which is simulated below the wandb packages."""

import json
import sys
import types
from unittest import mock

import pytest
import wandb

from charts import workspace
from run.metrics import METRICS, SECTIONS

pytestmark = pytest.mark.filterwarnings("ignore:Pydantic V1 style")  # in wandb_workspaces


class Server:
    """What the wandb server does with views: it stores them. It stands in for the service that sends the requests."""

    app_url = "https://wandb.test/"

    def __init__(self):
        self.views = []

    def execute_graphql(self, query, variables=None, **_):
        assert "upsertView" in query
        self.views.append({**variables, "id": "id"})
        return {"upsertView": {"view": self.views[-1], "inserted": True}}

    def specs(self):
        """The workspace, and its sections by name."""
        (view,) = self.views
        whole = json.loads(view["spec"])
        return whole["section"], {section["name"]: section for section in whole["section"]["panelBankConfig"]["sections"]}


@pytest.fixture
def server(monkeypatch):
    server = Server()

    class Api(wandb.Api):
        default_entity = "me"

        def __init__(self):
            self.settings, self._service_api = {"entity": None, "project": None}, server

        def projects(self, entity):
            return [types.SimpleNamespace(name="gpt")]

    monkeypatch.setattr(wandb, "login", lambda prompt, verify: not prompt)
    monkeypatch.setattr(wandb, "Api", Api)
    return server


def contents(panels):
    """Title, kind and keys of each panel."""
    for panel in panels:
        config = panel["config"]
        keys = config.get("metrics") or [config["panel2Config"]["exp"]["fromOp"]["inputs"]["key"]["val"]]
        yield config.get("chartTitle"), panel["viewType"], keys


def test_the_workspace_has_the_charts_of_the_metrics_by_implementation(server):
    workspace.publish("gpt", None)
    whole, sections = server.specs()
    found = {name: list(contents(section["panels"])) for name, section in sections.items()}
    assert list(found) == [name for name, metrics in SECTIONS.items() if metrics]
    shown = {key for panels in found.values() for _, _, keys in panels for key in keys}
    assert shown - METRICS.keys() == set()
    assert {metric.key for metric in METRICS.values() if metric.chart} - shown == set()
    bars, lines = "Bar Chart", "Run History Line Plot"
    assert ("Peak memory, MB", bars, ["peak_memory_mb"]) in found["Summary"]
    all_three = [f"memory/{which}_state_mb" for which in ("predicted", "measured", "unsharded")]
    assert ("State before a step, MB", bars, all_three) in found["Memory"]
    with_least = [f"memory/optimizer_state_mb{end}" for end in ("", "_min")]
    assert ("Optimizer state of a rank, MB", lines, with_least) in found["Memory"]
    points = [f"memory/{point}_mb" for point in ("after_init", "before_step", "after_step")]
    assert ("At three points of a step, MB", lines, points) in found["Memory"], "without the minima, which would be six lines"
    assert found["Samples"] == [(None, "Weave", ["sample/text"])]
    for section in sections.values():
        layout = section["flowConfig"]
        assert layout["columnsPerPage"] * layout["rowsPerPage"] >= len(section["panels"]), "all panels on the first page"
    for settings in (whole["settings"], *(section["localPanelSettings"] for section in sections.values())):
        assert (settings["xAxis"], settings["smoothingType"], settings["smoothingWeight"]) == ("iter", "none", 0)
    configs = [(panel["viewType"], panel["config"]) for section in sections.values() for panel in section["panels"]]
    assert {(of["xAxis"], of["smoothingType"]) for kind, of in configs if kind == lines} == {("iter", "none")}
    assert {of["groupBy"] for kind, of in configs if kind == bars} == {"implementation.value"}
    (runset,), colours = whole["runSets"], whole["customRunColors"]
    assert runset["grouping"] == [{"section": "config", "name": "implementation.value"}]
    assert len(set(colours.values())) == 3
    for name in ("adamw", "torch", "sharded"):
        assert [key for key in colours if name in key and runset["id"] in key], "the key has the group and its run set"


def test_the_project_of_an_entity(server):
    for entity, owner in ((None, "me"), ("team", "team")):
        name = workspace.publish("gpt", entity).removeprefix(f"https://wandb.test/{owner}/gpt?nw=")
        assert [view["name"] for view in server.views if view["entityName"] == owner] == [f"nw-{name}-v"]


UNREACHABLE = mock.Mock(side_effect=wandb.errors.AuthenticationError("cannot connect\nin many lines"))


@pytest.mark.parametrize(
    ("project", "changed", "message"),
    [
        ("gtp", {}, "^there is no project me/gtp in wandb; check --project and --entity, or first train with --wandb_log="),
        ("gpt", {"login": lambda prompt, verify: prompt or verify}, "^there is no wandb login, or WANDB_MODE is offline; run "),
        ("gpt", {"Api": UNREACHABLE}, "^wandb: cannot connect; check the network and `wandb login`, then this command again$"),
    ],
)
def test_what_is_missing_is_named(project, changed, message, server, monkeypatch):
    for name, value in changed.items():
        monkeypatch.setattr(wandb, name, value)
    with pytest.raises(ValueError, match=message):
        workspace.publish(project, None)
    assert not server.views


@pytest.mark.parametrize("package", ["wandb", "wandb_workspaces"])
def test_a_missing_package_is_named(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"^--wandb needs wandb-workspaces \(.*\); pip install -e '\.\[dashboard\]'$"):
        workspace.publish("gpt", None)
