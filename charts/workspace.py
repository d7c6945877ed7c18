"""A workspace and a report in wandb that compare the runs of a project by implementation of the optimizer.

`publish` saves both. `SECTIONS` says what they show: to show a new metric, add its key there. wandb-workspaces is an optional
dependency, `pip install -e '.[dashboard]'`. It is imported when a function needs it.
"""

import contextlib
import json
import math
import os
from typing import Any, Literal, NamedTuple

from charts.runs import COLLECTIVES, PARTS

NAME = "nanoGPT with ZeRO-1"  # title of the workspace and of the report
X_AXIS = "iter"

# Implementation: colour of its runs. The palette is that of Okabe and Ito, which the colour-blind can tell apart.
_COLOURS = {"adamw": "#0072B2", "torch": "#E69F00", "sharded": "#009E73"}
_ID = "nanogptzero"  # of the workspace, in its URL; a later call finds the workspace by it


class Panel(NamedTuple):
    """One chart."""

    title: str
    keys: tuple[str, ...]  # metrics, all in one chart
    kind: Literal["lines", "bars", "table"] = "lines"  # over the iterations; the latest value of each run; a table per run


class Section(NamedTuple):
    """Charts about one subject."""

    name: str
    text: str  # how to read the charts; the report shows it
    panels: tuple[Panel, ...]


SECTIONS = (
    Section(
        "Loss",
        "With the same settings, the curves of all implementations lie on each other.",
        (
            Panel("Loss of the global batch", ("iter/loss",)),
            Panel("Validation loss", ("val/loss",)),
            Panel("Training loss at evaluations", ("train/loss",)),
            Panel("Gradient norm before clipping", ("iter/grad_norm",)),
            Panel("Learning rate", ("lr",)),
            Panel("Largest loss of a rank", ("iter/loss_max_rank",)),
        ),
    ),
    Section(
        "Summary",
        "One bar per implementation, the mean over its runs. The memory is that of the rank with the largest amount.",
        (
            Panel("Peak memory, MB", ("peak_memory_mb",), "bars"),
            Panel("Optimizer state, MB", ("memory/optimizer_state_mb",), "bars"),
            Panel("Median tokens per second", ("median_tokens_per_second",), "bars"),
            Panel("Best validation loss", ("best_val_loss",), "bars"),
        ),
    ),
    Section(
        "Memory",
        "The lines are the maximum over the ranks, and with _min the minimum. The implementations differ in the optimizer "
        "state. The bars compare the prediction with the measurement after the third iteration.",
        (
            Panel(
                "At three points of a step, MB",
                ("memory/after_init_mb", "memory/before_step_mb", "memory/after_step_mb"),
            ),
            Panel("Peak, MB", ("memory/peak_mb", "memory/peak_mb_min")),
            Panel("Optimizer state of a rank, MB", ("memory/optimizer_state_mb", "memory/optimizer_state_mb_min")),
            Panel("Peak and its prediction, MB (on a CPU the peak includes Python)", ("memory/predicted_mb", "memory/peak_mb")),
            Panel("Less than without sharding, gradients included, MB", ("memory/saved_mb",)),
            Panel("Predicted peak, MB", ("memory/predicted_peak_mb",), "bars"),
            Panel("Activations, predicted, MB", ("memory/predicted_activations_mb",), "bars"),
            *(
                Panel(
                    f"{part.capitalize()}, predicted and measured, MB",
                    (f"memory/predicted_{part}_mb", f"memory/measured_{part}_mb"),
                    "bars",
                )
                for part in PARTS
            ),
        ),
    ),
    Section(
        "Throughput",
        "Compare runs on the same devices with the same number of ranks. The rank spread is the time between the fastest and "
        "the slowest rank.",
        (
            Panel("Tokens per second", ("throughput/tokens_per_second",)),
            Panel("Tokens per second per rank", ("throughput/tokens_per_second_per_rank",)),
            Panel("TFLOP/s per rank", ("throughput/tflops_per_rank",)),
            Panel("Step, ms", ("time/step_ms",)),
            Panel("Parts of a step, ms", ("time/data_ms", "time/forward_backward_ms", "time/optimizer_ms")),
            Panel("MFU, %", ("mfu",)),
            Panel("Time to the end of the run, hours", ("throughput/eta_hours",)),
            Panel("Rank spread, ms", ("time/rank_spread_ms",)),
        ),
    ),
    Section(
        "Communication",
        "Exposed communication is the time that the computation waits for a collective. The bytes are those that one rank "
        "sends.",
        (
            Panel("Exposed, % of a step", ("comm/exposed_percent",)),
            Panel("Exposed, by kind, ms", ("comm/exposed_ms", *(f"comm/exposed_{kind}_ms" for kind in COLLECTIVES))),
            Panel(
                "Sent per step, by kind, MB",
                ("comm/sent_mb_per_step", *(f"comm/sent_{kind}_mb_per_step" for kind in COLLECTIVES)),
            ),
        ),
    ),
    Section(
        "Checkpoints",
        "To consolidate is to gather the whole state on rank 0. The training waits for the blocked time only.",
        (
            Panel("Consolidate, s", ("checkpoint/consolidate_s",)),
            Panel("Write, s", ("checkpoint/write_s",)),
            Panel("Training blocked, s", ("checkpoint/blocked_s",)),
            Panel("Bytes", ("checkpoint/bytes",)),
        ),
    ),
    Section("Samples", "Text from the latest sample of each run.", (Panel("Samples", ("sample/text",), "table"),)),
)


def publish(project: str, entity: str | None, path: str) -> list[str]:
    """Save the workspace and the report in wandb. Those from an earlier call are replaced, including all changes made by hand.

    Without a login or a network, write to a file what would be sent. This never prompts. With a login, it can take half a
    minute to find out that there is no network.

    Args:
        project: wandb project of the runs.
        entity: user or team that owns the project. None: the default of the login.
        path: JSON file for the case without a login or a network. It has two keys, "workspace" and "report".

    Returns:
        The lines to print: the two URLs, or the reason why there are none and what to do.

    Raises:
        ImportError: if wandb or wandb-workspaces is not installed.
        ValueError: if there is a login, but no such project, or no default entity.
        OSError: if the file cannot be written.
    """
    try:
        import wandb
        import wandb_workspaces.reports.v2
        import wandb_workspaces.workspaces  # noqa: F401
        from wandb.sdk.lib.service.service_connection import WandbApiFailedError
    except ImportError as error:
        raise ImportError(f"--wandb needs wandb-workspaces ({error}); pip install -e '.[dashboard]'") from error
    try:
        if wandb.login(prompt=False, verify=False):
            return _save(project, entity)
        missing = "no login, or WANDB_MODE is offline; run `wandb login`"
    except (wandb.errors.Error, WandbApiFailedError) as error:
        missing = f"{str(error).partition(chr(10))[0]}; check the network and `wandb login`"
    models = {"workspace": _workspace(project, entity or ""), "report": _report(project, entity or "")}
    specification = {
        name: model._to_model().model_dump(mode="json", by_alias=True, exclude_none=True) for name, model in models.items()
    }
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "w") as file:
        json.dump(specification, file, indent=1)
    return [f"wandb: {missing}, then use this command again; {path} has the workspace and the report that it will save"]


def _save(project: str, entity: str | None) -> list[str]:
    import wandb
    from wandb_workspaces.workspaces.internal import get_view_dict

    api = wandb.Api()  # checks the login
    entity = entity or api.settings["entity"] or api.default_entity
    if entity is None:
        raise ValueError("the wandb login has no default entity; add --entity=USER_OR_TEAM")
    try:
        saved_reports = [report.id for report in api.reports(f"{entity}/{project}") if report.display_name == NAME]
    except ValueError as error:
        raise ValueError(
            f"there is no project {entity}/{project} in wandb; check --project and --entity, or first train with "
            f"--wandb_log=True --wandb_project={project}"
        ) from error
    workspace, report = _workspace(project, entity), _report(project, entity)
    with contextlib.suppress(ValueError):  # not yet saved
        workspace._internal_id = get_view_dict(entity, project, _ID)["id"]
    if saved_reports:
        report.id = saved_reports[0]
    workspace.save()
    report.save()
    return [f"workspace: {workspace.url}", f"report: {report.url}"]


def _workspace(project: str, entity: str) -> Any:
    import wandb_workspaces.workspaces as ws
    from wandb_workspaces import expr
    from wandb_workspaces.workspaces.internal import _url_query_str_to_internal_name

    workspace = ws.Workspace(
        entity=entity,
        project=project,
        name=NAME,
        sections=[
            ws.Section(
                name=section.name,
                panels=_panels(section),
                is_open=True,
                layout_settings=ws.SectionLayoutSettings(columns=3, rows=math.ceil(len(section.panels) / 3)),
                panel_settings=ws.SectionPanelSettings(x_axis=X_AXIS, smoothing_type="none"),
            )
            for section in SECTIONS
        ],
        settings=ws.WorkspaceSettings(x_axis=X_AXIS, smoothing_type="none"),
        runset_settings=ws.RunsetSettings(groupby=[expr.Config("implementation")], group_colors=dict(_COLOURS.items())),
    )
    workspace._internal_name = _url_query_str_to_internal_name(_ID)
    workspace._internal_runset_id = _ID
    return workspace


def _report(project: str, entity: str) -> Any:
    import wandb_workspaces.reports.v2 as wr

    def grid(section: Section) -> Any:
        # a run set without a project is that of the report; with one, it would ask the server for it
        runset = wr.Runset(name=section.name, groupby=["config.implementation"])
        runset._id = f"{_ID}{section.name}"
        keys = {name: (wr.RunsetGroupKey(wr.Config("implementation"), name),) for name in _COLOURS}
        return wr.PanelGrid(
            runsets=[runset],
            panels=_panels(section),
            custom_run_colors={wr.RunsetGroup(section.name, keys[name]): colour for name, colour in _COLOURS.items()},
        )

    blocks = [block for section in SECTIONS for block in (wr.H2(section.name), wr.P(section.text), grid(section))]
    return wr.Report(
        project=project,
        entity=entity,
        title=NAME,
        description="The runs of this project, compared by the implementation of the optimizer.",
        blocks=[
            wr.P(
                "adamw is plain AdamW with the whole optimizer state on each rank. torch is PyTorch's ZeroRedundancyOptimizer. "
                "sharded is the implementation of this repository. Runs with the same implementation form one group. A line is "
                "their mean, and the area around it goes from their minimum to their maximum. To compare the runs of one "
                "model, filter the run sets, for example by n_layer and world_size."
            ),
            *blocks,
        ],
        width="fluid",
    )


def _panels(section: Section) -> list[Any]:
    import wandb_workspaces.reports.v2 as wr

    def of(panel: Panel) -> Any:
        if panel.kind == "table":
            return wr.WeavePanelSummaryTable(table_name=panel.keys[0], layout=wr.Layout(w=24, h=12))
        if panel.kind == "bars":
            by = wr.Config("implementation")
            return wr.BarPlot(title=panel.title, metrics=list(panel.keys), groupby=by, groupby_aggfunc="mean")
        return wr.LinePlot(title=panel.title, x=X_AXIS, y=list(panel.keys), smoothing_type="none")

    panels = [of(panel) for panel in section.panels]
    for number, panel in enumerate(panels):
        panel._id = f"{section.name}{number}"  # instead of a random ID
    return panels
