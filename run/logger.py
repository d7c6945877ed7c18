"""Where the metrics of a run go: the console, `metrics.jsonl`, and optionally wandb."""

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Literal

from distributed.ranks import print0
from distributed.watchdog import position
from run import report
from run.metrics import METRICS
from run.summary import Summary
from run.wandb_run import WandbRun
from zero.checkpoint.files import atomic_write
from zero.host_comm import is_rank_0

METRICS_FILE, FACTS = "metrics.jsonl", "run.json"  # in out_dir


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

    `starts` has the iterations at which they began, `parts` their implementations and world sizes, `data` their datasets, each
    only where it changes.
    """
    before, at = dict[str, Any](), resume_at or 0
    if resume_at is not None:
        with suppress(OSError, ValueError, RecursionError), open(os.path.join(folder, FACTS)) as file:
            before = json.load(file)

    def continued(name: str, *keys: str, **more: Any) -> list[dict[str, Any]]:
        """Return a list of what was before, and of now if it differs in the values of these keys."""
        now, kept = {key: config[key] for key in keys if key in config}, []
        with suppress(KeyError, TypeError, AttributeError):  # damaged
            kept = [part for part in before[name] if part["from_iter"] < at and part.keys() >= {*now, *more}]
        is_same = kept and {key: kept[-1].get(key) for key in now} == now
        more = more if kept else dict.fromkeys(more, 0)  # all that is known to have been before
        return kept if is_same else [*kept, {"from_iter": at, **now, **more}]

    starts = [] if resume_at is None else [0]
    with suppress(KeyError, TypeError):
        starts = [start for start in before["starts"] if start <= at]
    lists = {
        "parts": continued("parts", "implementation", "world_size"),
        "data": continued("data", "dataset", "train_tokens", from_tokens=config.get("from_tokens", 0)),
    }
    return {**config, **lists, "starts": [*starts, at], "state": "running"}


def _write_facts(folder: str, facts: dict[str, Any]) -> None:
    """Write run.json. The file of a run that is killed goes on saying that it is running."""
    try:
        with atomic_write(os.path.join(folder, FACTS)) as temporary, open(temporary, "w") as file:
            json.dump(facts, file, indent=1)
            file.write("\n")
    except OSError as error:  # the disk is full; training does not need the file
        print0(f"WARNING: run.json is not written: {error}")


class MetricsFile:
    """`metrics.jsonl`: one JSON object per event. A run that resumes keeps what was written before its iteration.

    Args:
        folder: created if it is missing.
        resume_at: iteration at which the run continues. None: `rewind` empties the file.
        evaluates: the run evaluates at this iteration, perhaps for the second time.

    Raises OSError if the folder cannot be created, or the file cannot be read or written.
    """

    def __init__(self, folder: str, resume_at: int | None, evaluates: bool) -> None:
        os.makedirs(folder, exist_ok=True)
        self.folder, self._path = folder, os.path.join(folder, METRICS_FILE)
        self._resume_at, self._evaluates = resume_at, evaluates
        self._file = open(self._path, "ab", buffering=0)
        self._end, self._late = 0, list[bytes]()  # `rewind` keeps so many bytes, and these later lines
        self._warned = False

    def kept(self) -> Iterator[dict[str, Any]]:
        """Yield the events that stay in the file.

        These are the lines before the first one that is incomplete (of a killed run) or of iteration `resume_at` or later. Two
        kinds of later lines stay: those about checkpoints up to `resume_at`, which are written when the checkpoint is on the
        disk, and the evaluation at `resume_at` if it is not repeated.
        """
        self._end, self._late, iteration, found = 0, [], self._resume_at, False
        if iteration is None:
            return
        with open(self._path, "rb") as file:
            for line in file:
                event, is_whole = event_of(line), line.endswith(b"\n")
                found = found or event["iter"] >= iteration or not is_whole
                is_checkpoint = any(key.startswith("checkpoint/") for key in event)
                is_evaluation = "val/loss" in event and event["iter"] == iteration and not self._evaluates
                is_late = is_whole and event["iter"] <= iteration and (is_checkpoint or is_evaluation)
                if not found:
                    self._end += len(line)
                elif is_late:
                    self._late.append(line)
                if event["iter"] >= 0 and (is_late or not found):
                    yield event

    def rewind(self) -> None:
        """Truncate the file to what `kept` has yielded. It has whole lines before and after this, even if the disk is full."""
        self._file.truncate(self._end)
        self._file.seek(0, os.SEEK_END)
        self._file.write(b"".join(self._late))

    def log(self, event: dict[str, Any]) -> None:
        """Append an event, with null for numbers that are not finite. If the disk is full, warn once and continue."""
        values = {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in event.items()}
        line, begin = json.dumps(values, allow_nan=False).encode() + b"\n", self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(line) < len(line):
                raise OSError("the disk is full")
            self._warned = False
        except OSError as error:
            self._file.truncate(begin)  # remove the incomplete line
            if not self._warned:
                print0(f"WARNING: figures are missing from {self._file.name}: {error}")
            self._warned = True


def event_of(line: bytes) -> dict[str, Any]:
    """Return the event of a line, whose "iter" is an integer. That of a line which is not from this program is -1."""
    try:
        event = json.loads(line)
        return {key: value for key, value in event.items() if _fits(key, value)} | {"iter": int(event["iter"])}
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return {"iter": -1}


def _fits(key: str, value: Any) -> bool:
    """Return whether a value can be that of a metric: a finite number or nothing, or if it is none of our numbers, a text."""
    if isinstance(value, str):
        return key not in METRICS or METRICS[key].unit == "text"
    return value is None or (type(value) in (int, float) and abs(value) <= sys.float_info.max)
