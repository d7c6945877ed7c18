"""A workspace and a report in wandb that compare the runs of a project by implementation of the optimizer.

They have the charts that run/metrics.py names. wandb-workspaces is an optional dependency, `pip install -e '.[dashboard]'`,
imported when a function needs it.
"""

import contextlib
import math
import re
from typing import Any

from run.metrics import METRICS, SECTIONS, Metric

NAME, X_AXIS = "nanoGPT with ZeRO-1", "iter"  # NAME is the title of the workspace and of the report
# Implementation: colour of its runs. The palette is that of Okabe and Ito, which the colour-blind can tell apart.
_COLOURS = {"adamw": "#0072B2", "torch": "#E69F00", "sharded": "#009E73"}
_TEXTS = {  # how to read the charts of a section; the report shows it
    "Loss": "With the same settings, the curves of all implementations lie on each other.",
    "Summary": "One bar per implementation, the mean over its runs. The memory is that of the rank with the largest amount.",
    "Memory": "The lines are the maximum over the ranks, and with _min the minimum. The implementations differ in the "
    "optimizer state. The bars compare the prediction with the measurement after the third iteration.",
    "Throughput": "Compare runs on the same devices with the same number of ranks. The rank spread is the time between the "
    "fastest and the slowest rank.",
    "Communication": "Exposed communication is the time that the computation waits for a collective. The bytes are those that "
    "one rank sends.",
    "Checkpoints": "To consolidate is to gather the whole state on rank 0. The training waits for the blocked time only.",
    "Samples": "Text from the latest sample of each run.",
    "Others": "What a changed program logs.",
}


def panels_of(section: str) -> dict[str, list[Metric]]:
    """Return the titles of the panels of a section, and the metrics of each."""
    found: dict[str, list[Metric]] = {}
    for metric in SECTIONS[section]:
        if metric.chart:
            found.setdefault(metric.chart, []).append(metric)
    return found | ({"Optimizer state, MB": [METRICS["memory/optimizer_state_mb"]]} if section == "Summary" else {})


def publish(project: str, entity: str | None) -> list[str]:
    """Save the workspace and the report in wandb, and return a line with the URL of each.

    Those from an earlier call are replaced, including all changes made by hand: the report is found by its title, and its
    description has the URL of the workspace. This never prompts. It can take half a minute to find that there is no network.

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
    entity, saved = _saved_report(wandb, project, entity)
    workspace = ws.Workspace(entity=entity, project=project, name=NAME)
    for url in re.findall(r"http\S+\?nw=\S+", saved.description or "" if saved else ""):
        with contextlib.suppress(ValueError):  # it has been deleted
            workspace = ws.Workspace.from_url(url)
    names = [name for name, metrics in SECTIONS.items() if metrics]
    workspace.sections = [
        ws.Section(
            name=name,
            panels=_panels(wr, name),
            is_open=True,
            layout_settings=ws.SectionLayoutSettings(columns=3, rows=math.ceil(len(panels_of(name)) / 3)),
            panel_settings=ws.SectionPanelSettings(x_axis=X_AXIS, smoothing_type="none"),
        )
        for name in names
    ]
    workspace.settings = ws.WorkspaceSettings(x_axis=X_AXIS, smoothing_type="none")
    workspace.runset_settings = ws.RunsetSettings(groupby=[expr.Config("implementation")], group_colors=dict(_COLOURS.items()))
    workspace.save()
    report = wr.Report(
        project=project,
        entity=entity,
        title=NAME,
        description=f"The runs of this project, compared by the implementation of the optimizer. Workspace: {workspace.url}",
        blocks=[
            wr.P(
                "adamw is plain AdamW with the whole optimizer state on each rank. torch is PyTorch's ZeroRedundancyOptimizer. "
                "sharded is the implementation of this repository. Runs with the same implementation form one group. A line is "
                "their mean, and the area around it goes from their minimum to their maximum. To compare the runs of one "
                "model, filter the run sets, for example by n_layer and world_size."
            ),
            *(block for name in names for block in (wr.H2(name), wr.P(_TEXTS[name]), _grid(wr, name))),
        ],
        width="fluid",
    )
    report.id = saved.id if saved else ""
    report.save()
    return [f"workspace: {workspace.url}", f"report: {report.url}"]


def _saved_report(wandb: Any, project: str, entity: str | None) -> tuple[str, Any]:
    """Return the entity, and the report that an earlier call has saved, or None."""
    try:
        if not wandb.login(prompt=False, verify=False):
            raise ValueError("there is no wandb login, or WANDB_MODE is offline; run `wandb login`, then this command again")
        api = wandb.Api()
        entity = entity or api.settings["entity"] or api.default_entity
        if entity is None:
            raise ValueError("the wandb login has no default entity; add --entity=USER_OR_TEAM")
        try:
            reports = list(api.reports(f"{entity}/{project}"))
        except ValueError as error:
            raise ValueError(
                f"there is no project {entity}/{project} in wandb; check --project and --entity, or first train with "
                f"--wandb_log=True --wandb_project={project}"
            ) from error
    except ValueError:
        raise
    except Exception as error:  # wandb's errors have no class in common
        line = str(error).partition("\n")[0]
        raise ValueError(f"wandb: {line}; check the network and `wandb login`, then this command again") from error
    return entity, next((report for report in reports if report.display_name == NAME), None)


def _grid(wr: Any, name: str) -> Any:
    """Return the panels of a section for the report, with the colours of their groups of runs."""
    keys = {of: (wr.RunsetGroupKey(wr.Config("implementation"), of),) for of in _COLOURS}
    return wr.PanelGrid(
        # a run set without a project is that of the report; with one, it would ask the server for it
        runsets=[wr.Runset(name=name, groupby=["config.implementation"])],
        panels=_panels(wr, name),
        custom_run_colors={wr.RunsetGroup(name, keys[of]): colour for of, colour in _COLOURS.items()},
    )


def _panels(wr: Any, name: str) -> list[Any]:
    """Return the panels of a section: curves over the iterations, bars of what a run logs once, or a table of texts."""
    found: list[Any] = []
    for title, metrics in panels_of(name).items():
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
