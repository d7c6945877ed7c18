"""The run in wandb."""

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from distributed.ranks import print0
from run.metrics import METRICS
from zero.host_comm import is_rank_0

_FINISH_S = 60.0  # how long the end of a run waits for wandb


class WandbRun:
    """The run in wandb, if the settings ask for one; on other ranks than 0, there is none.

    Its process, resuming, recording offline, its variables: wandb does that itself. A wandb that is missing or fails does not
    end the training: a line says so. Each iteration is one row, and its step is the iteration.

    Args:
        config: settings and facts of the run, which wandb shows.
        run_id: ID of the run to continue. None: a new run.

    Raises ValueError if the settings or a variable are wrong.
    """

    run: Any = None  # wandb's

    def __init__(self, config: dict[str, Any], run_id: str | None = None) -> None:
        self.id: str | None = None  # of the run
        # offline, a resumed run has a new folder, which needs the earlier rows: `wandb sync` stops at that of a killed process
        self.lacks_history = False
        self._newest = -1  # iteration of the newest row
        if not config["wandb_log"] or not is_rank_0():
            return
        try:
            import wandb

            run = _start(wandb, config, run_id)
        except ValueError as error:
            raise ValueError(f"wandb does not start: {error}") from error
        except Exception as error:
            print0(f"WARNING: wandb does not start: {_first_line(error)}; training goes on, metrics.jsonl has all figures")
            return
        if not run.disabled:
            self._wandb, self.run, self.id = wandb, run, run.id
            self._first = run.starting_step  # the server has earlier rows, which stay as they are
            self.lacks_history = run.offline and run_id is not None
            self._samples = wandb.Table(columns=["iter", "text"], log_mode="INCREMENTAL")

    def log(self, event: dict[str, Any]) -> None:
        """Send an event as a part of the row of its iteration, or, if it comes late, of the newest row."""
        if self.run is None or event["iter"] < self._first:
            return
        row = dict(event)
        if event["iter"] < self._newest:
            del row["iter"]
        self._newest = max(self._newest, event["iter"])
        if "sample/text" in event:
            self._samples.add_data(event["iter"], event["sample/text"])
            row["sample/text"] = self._samples
        self._do(lambda run: run.log(row, step=self._newest))

    def alert(self, title: str, text: str) -> None:
        """Send an alert, which wandb forwards by e-mail or Slack."""
        self._do(lambda run: run.alert(title, text))

    def summarize(self, values: dict[str, Any]) -> None:
        """Set figures that describe the whole run."""
        self._do(lambda run: run.summary.update(values))

    def finish(self, figures: dict[str, float], exit_code: int = 0) -> None:
        """Set these figures and end the run, which wandb shows as failed if the code is not 0. Waits a minute for wandb."""
        self.summarize(figures)
        self._do(lambda run: run.finish(exit_code))
        if self.id is not None:
            with suppress(Exception, SystemExit):  # wandb's process may be dead; its own hook would print a traceback
                self._wandb.teardown(exit_code)

    def _do(self, action: Callable[[Any], Any]) -> None:
        """Do something with wandb's run, if there is one. After an error, which a line says, there is none."""
        if self.run is not None:
            try:
                action(self.run)
            except Exception as error:
                self.run = None
                print0(f"WARNING: wandb has stopped: {_first_line(error)}; metrics.jsonl has all figures")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _start(wandb: Any, config: dict[str, Any], run_id: str | None) -> Any:
    """Return wandb's run object, online if there is a login and a server, and print where the run is."""
    group, folder = config["wandb_run_name"], os.path.basename(os.path.abspath(config["out_dir"]))
    given = {  # by argument of wandb.init: the variable of wandb that comes before it, and the argument
        "project": ("WANDB_PROJECT", config["wandb_project"]),
        "group": ("WANDB_RUN_GROUP", group),
        "job_type": ("WANDB_JOB_TYPE", config["implementation"]),
        # wandb itself names the runs of a sweep
        "name": ("WANDB_NAME", None if os.environ.get("WANDB_SWEEP_ID") else f"{group} {folder}"),
        "id": ("WANDB_RUN_ID", run_id),
        "resume": ("WANDB_RESUME", "allow" if run_id else None),
    }
    arguments = {key: value for key, (variable, value) in given.items() if not os.environ.get(variable)}
    finish_s = float(os.environ.get("WANDB_FINISH_TIMEOUT", _FINISH_S))
    settings = wandb.Settings(finish_timeout=finish_s, finish_timeout_raises=True)
    why = ""  # there is no server to send to
    try:
        if wandb.setup(wandb.Settings(silent=True)).settings.mode == "online" and not wandb.login(prompt=False):
            why = " (there is no login)"
    except wandb.errors.CommError as error:
        why = f" ({_first_line(error)})"
    try:
        run = wandb.init(**arguments, mode="offline" if why else None, config=config, settings=settings)
    except wandb.errors.UsageError as error:  # an invalid project name
        raise ValueError(error) from error
    run.define_metric("iter")
    run.define_metric("*", step_metric="iter")
    for metric in METRICS.values():
        if metric.best:
            run.define_metric(metric.key, step_metric="iter", summary=metric.best)
    if run.offline:
        newest = "; this folder has all rows of the run: leave out its older ones" if run_id else ""
        print0(f"wandb records offline{why}; to upload later: wandb login && wandb sync {run.sync_dir}{newest}")
    elif not run.disabled:
        print0(f"wandb: {run.url}")
    return run
