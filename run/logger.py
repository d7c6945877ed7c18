"""Where the metrics of a run go: the console, `metrics.jsonl`, and optionally wandb."""

import contextlib
import json
import os
from typing import Any, Literal

from distributed.ranks import print0
from distributed.watchdog import position
from run import report
from run.sinks import MetricsFile, WandbRun
from run.summary import Summary
from zero.checkpoint.files import atomic_write
from zero.host_comm import is_rank_0

FACTS = "run.json"  # in out_dir


class Logger:
    """Writes events to the console, `metrics.jsonl` and wandb on rank 0; on others, nothing.

    Args:
        out_dir: folder of `metrics.jsonl` and `run.json`, created if it is missing. None: no files, and a new wandb run.
        resume_at: continue the existing file as it was at the start of this iteration, see `MetricsFile`. None: a new file.
        config: settings of the run and facts about it, all of which `run.json` and wandb get. `wandb_...` choose the wandb run.
            `eval_interval` says whether a resumed run repeats the evaluation at `resume_at`.
        run_id: ID of the wandb run to continue, or None.

    Raises ValueError if the folder cannot be written to, or the settings of wandb are wrong.
    """

    def __init__(self, out_dir: str | None, resume_at: int | None, config: dict[str, Any], run_id: str | None = None) -> None:
        self._is_finished = False
        self.file: MetricsFile | None = None
        if out_dir is None or not is_rank_0():
            self.summary, self.wandb = Summary(config), WandbRun(config)
            return
        self.summary = Summary(_all_facts(out_dir, config, resume_at))
        try:
            evaluates = resume_at is not None and resume_at % config["eval_interval"] == 0
            self.file = MetricsFile(out_dir, resume_at, evaluates)
            for event in self.file.kept():
                self.summary.add(event)
            self.wandb = WandbRun(config, run_id)  # wrong settings end the run before the file is cut
            for event in self.file.kept() if self.wandb.lacks_history else ():
                self.wandb.log(event)
            self.file.rewind()
        except OSError as error:
            raise ValueError(f"cannot write to out_dir={out_dir}: {error}") from error
        _write_facts(out_dir, self.summary.facts)

    def log(self, event: dict[str, Any], line: str | None = None) -> None:
        """Write an event to wandb and `metrics.jsonl`, then print the line.

        `event` has metrics by key, numbers or texts; "iter" is the iteration, by default the current one.
        """
        if not is_rank_0():
            return
        event = {"iter": max(0, position.iteration), **event}
        self.summary.add(event)
        self.wandb.log(event)
        if self.file:
            self.file.log(event)
        if "val/loss" in event:
            self.wandb.summarize(self.summary.figures())
        if line is not None:
            print0(line)

    def warn(self, text: str, values: dict[str, Any] | None = None) -> None:
        """Print a warning and log it, in one event with `values`."""
        self.log({"warning": text, **(values or {})}, f"WARNING: {text}")

    def alert(self, title: str, text: str, iteration: int) -> None:
        """Log a warning that has been printed, and send it as an alert through wandb, if there is a run."""
        self.wandb.alert(title, text)
        self.log({"iter": iteration, "warning": f"{title}: {text}"})

    def finish(self, state: Literal["ended", "stopped", "failed"] = "ended", outcome: str = "") -> None:
        """Write run.json and the report card, and end the wandb run. Later calls do nothing.

        Args:
            state: how the run has ended, for run.json: "stopped" by a signal; wandb shows a run that "failed" as such.
            outcome: the same for the card, in more words. Without it, or without a folder, there is no card.
        """
        if self._is_finished:
            return
        self._is_finished = True
        if self.file:
            _write_facts(self.file.folder, self.summary.facts | {"state": state})
            if outcome:
                report.write(outcome, self.summary)
        with position.at("ending the wandb run", patient=True):
            self.wandb.finish(self.summary.figures(), int(state == "failed"))


def _all_facts(folder: str, config: dict[str, Any], resume_at: int | None) -> dict[str, Any]:
    """Return the content of run.json: the settings, the facts, and what it has of earlier processes of the run.

    `starts` has the iterations at which they began. If a resumed run continues with another implementation or world size,
    `parts` lists all of them.
    """
    now: dict[str, Any] = {key: config[key] for key in ("implementation", "world_size") if key in config}
    parts, starts = list[dict[str, Any]](), [] if resume_at is None else [0]
    damaged = OSError, ValueError, KeyError, TypeError, RecursionError
    if resume_at is not None:
        with contextlib.suppress(*damaged), open(os.path.join(folder, FACTS)) as file:
            before = json.load(file)
            parts = [part for part in before["parts"] if part["from_iter"] < resume_at and part.keys() >= now.keys()]
            starts = [start for start in before.get("starts", [0]) if start <= resume_at]
    if not parts or {key: parts[-1].get(key) for key in now} != now:
        parts.append({"from_iter": resume_at or 0, **now})
    return {**config, "parts": parts, "starts": [*starts, resume_at or 0], "state": "running"}


def _write_facts(folder: str, facts: dict[str, Any]) -> None:
    """Write run.json. The file of a run that is killed goes on saying that it is running."""
    try:
        with atomic_write(os.path.join(folder, FACTS)) as temporary, open(temporary, "w") as file:
            json.dump(facts, file, indent=1)
            file.write("\n")
    except OSError as error:  # the disk is full; training does not need the file
        print0(f"WARNING: run.json is not written: {error}")
