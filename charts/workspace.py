"""A workspace in wandb that compares the runs of a project by implementation of the optimizer.

It has the charts that run/metrics.py names. wandb-workspaces is an optional dependency, `pip install -e '.[dashboard]'`,
imported when a function needs it.
"""

import math
from typing import Any

from forecast.modes import MODES
from run.metrics import METRICS, SECTIONS, Metric

NAME, X_AXIS = "nanoGPT with ZeRO-1", "iter"  # NAME is the title of the workspace
_COLOURS = {name: MODES[name].colour for name in ("adamw", "torch", "sharded")}  # of the runs of an implementation


def publish(project: str, entity: str | None) -> str:
    """Save a new workspace in wandb, and return its URL.

    This never prompts. It can take half a minute to find that there is no network.

    Args:
        project: wandb project of the runs.
        entity: user or team that owns the project. None: the default of the login.

    Raises:
        ImportError: if wandb or wandb-workspaces is not installed.
        ValueError: if there is no login, no network, no such project, or no default entity.
    """
    try:
        import wandb
        import wandb_workspaces.reports.v2 as wr
        import wandb_workspaces.workspaces as ws
        from wandb_workspaces import expr
    except ImportError as error:
        raise ImportError(f"--wandb needs wandb-workspaces ({error}); pip install -e '.[dashboard]'") from error
    workspace = ws.Workspace(entity=_owner(wandb, project, entity), project=project, name=NAME)
    panels = {name: _panels(wr, name) for name, metrics in SECTIONS.items() if metrics}
    workspace.sections = [
        ws.Section(
            name=name,
            panels=of_section,
            is_open=True,
            layout_settings=ws.SectionLayoutSettings(columns=3, rows=math.ceil(len(of_section) / 3)),
            panel_settings=ws.SectionPanelSettings(x_axis=X_AXIS, smoothing_type="none"),
        )
        for name, of_section in panels.items()
    ]
    workspace.settings = ws.WorkspaceSettings(x_axis=X_AXIS, smoothing_type="none")
    workspace.runset_settings = ws.RunsetSettings(groupby=[expr.Config("implementation")], group_colors=_COLOURS)
    return workspace.save().url


def _owner(wandb: Any, project: str, entity: str | None) -> str:
    """Return the user or team that owns the project."""
    try:
        if not wandb.login(prompt=False, verify=False):
            raise ValueError("there is no wandb login, or WANDB_MODE is offline; run `wandb login`, then this command again")
        api = wandb.Api()
        entity = entity or api.settings["entity"] or api.default_entity
        if entity is None:
            raise ValueError("the wandb login has no default entity; add --entity=USER_OR_TEAM")
        if project not in (found.name for found in api.projects(entity)):
            raise ValueError(
                f"there is no project {entity}/{project} in wandb; check --project and --entity, or first train with "
                f"--wandb_log=True --wandb_project={project}"
            )
    except ValueError:
        raise
    except Exception as error:  # wandb's errors have no class in common
        line = str(error).partition("\n")[0]
        raise ValueError(f"wandb: {line}; check the network and `wandb login`, then this command again") from error
    return entity


def _panels(wr: Any, name: str) -> list[Any]:
    """Return the panels of a section: curves over the iterations, bars of what a run logs once, or a table of texts."""
    charts: dict[str, list[Metric]] = {}  # by their titles
    for metric in SECTIONS[name]:
        if metric.chart:
            charts.setdefault(metric.chart, []).append(metric)
    if name == "Summary":
        charts["Optimizer state, MB"] = [METRICS["memory/optimizer_state_mb"]]
    found: list[Any] = []
    for title, metrics in charts.items():
        keys: list[Any] = [metric.key for metric in metrics]
        if metrics[0].unit == "text":
            found.append(wr.WeavePanelSummaryTable(table_name=keys[0], layout=wr.Layout(w=24, h=12)))
        elif name == "Summary" or metrics[0].when == "start":
            found.append(wr.BarPlot(title=title, metrics=keys, groupby=wr.Config("implementation"), groupby_aggfunc="mean"))
        else:
            maxima = [metric.key for metric in metrics if metric.is_maximum]
            keys += [f"{key}_min" for key in maxima if len(maxima) == 1]
            found.append(wr.LinePlot(title=title, x=X_AXIS, y=keys, smoothing_type="none"))
    return found
