"""Where the metrics of a run go: the console, `metrics.jsonl`, and optionally wandb and TensorBoard."""

import contextlib
import json
import math
import os
from collections.abc import Iterator
from typing import Any, Literal

from distributed.heartbeat import position
from run import report, tensorboard_run
from run.alerts import Alerts
from run.tensorboard_run import TensorBoardRun
from run.wandb_run import NoRun, WandbError, WandbRun, mode_of
from zero.checkpoint.files import atomic_write
from zero.host_comm import is_rank_0

METRICS, FACTS = "metrics.jsonl", "run.json"  # in out_dir


class LoggerError(ValueError):
    """The output folder cannot be written to. The message gives the reason."""


class Logger:
    """Writes events to the console, `metrics.jsonl`, wandb and TensorBoard on rank 0. On other ranks it does nothing.

    Args:
        out_dir: folder of `metrics.jsonl` and `run.json`, created if it is missing. `metrics.jsonl` has one JSON object per
            event, with the same keys as in wandb. A number that is not finite becomes null, because JSON has no such number.
            None: no files, and a new wandb run.
        resume_at: continue the existing file as it was at the start of this iteration, see `_lines_before`. None: start a new
            file.
        config: settings of the run and facts about it. `run.json` and wandb get all of them. `wandb_log`,
            `wandb_project`, `wandb_run_name` and `implementation` choose the wandb run, `log_to` TensorBoard.
            `eval_interval` says whether a resumed run repeats the evaluation at `resume_at`.
        run_id: ID of the wandb run to continue, or None.

    Raises:
        ValueError: if the folder cannot be created or written to, wandb is not configured correctly, or tensorboard is missing.
    """

    def __init__(self, out_dir: str | None, resume_at: int | None, config: dict[str, Any], run_id: str | None = None) -> None:
        self.file: MetricsFile | None = None
        self.run: WandbRun | NoRun = NoRun()
        self._tensorboard: TensorBoardRun | None = None
        self._alerts, self._summary = Alerts(), report.Summary(config)
        self._is_finished = False
        if not is_rank_0():
            return
        has_tensorboard = out_dir is not None and config.get("log_to") == "tensorboard"
        if has_tensorboard:
            tensorboard_run.check()
        if out_dir is not None:
            with _can_write(out_dir):
                evaluates = resume_at is not None and resume_at % config["eval_interval"] == 0
                self.file = MetricsFile(out_dir, resume_at, evaluates)
        self.run = _start_wandb(config, run_id, resume_at, self.file)  # wrong settings end the run before truncation
        if self.file is not None:
            if has_tensorboard:
                late = (event for event in self.file.late() if event["iter"] >= (resume_at or 0))
                with _can_write(self.file.folder):
                    self._tensorboard = TensorBoardRun(self.file.folder, resume_at or 0, config, late)
            for event in self.file.kept():
                self._summary.add(event)
            with _can_write(self.file.folder):
                self.file.rewind()
                if resume_at is None:
                    with contextlib.suppress(FileNotFoundError):
                        os.remove(os.path.join(self.file.folder, report.NAME))  # of the run that this one replaces
            self._summary.facts = _all_facts(self.file.folder, config, resume_at)
            _write_facts(self.file.folder, self._summary.facts)

    @property
    def run_id(self) -> str | None:
        """The ID of the wandb run, or None."""
        return self.run.id

    def log(self, event: dict[str, Any], line: str | None = None) -> None:
        """Write an event. If the disk is full, print a warning once and continue.

        Args:
            event: the metrics by key, numbers or texts; "iter" is the iteration, by default the current one.
            line: also print this line.
        """
        if not is_rank_0():
            return
        event = {"iter": max(0, position.iteration), **event}
        if line is not None:
            print(line, flush=True)
        alerts = self._alerts.check(event)
        self._summary.add(event)
        self.run.log(event)
        if self._tensorboard is not None:
            self._tensorboard.log(event)
        if "val/loss" in event:
            self.run.summarize(self._summary.figures())
        if self.file is not None:
            self.file.write(event)
        for title, text in alerts:
            print(f"WARNING: {title.lower()}: {text}", flush=True)
            self.alert(title, text)

    def warn(self, text: str, values: dict[str, Any] | None = None) -> None:
        """Print a warning and log it, in one event with `values`."""
        if is_rank_0():
            print(f"WARNING: {text}", flush=True)
            self.log({"warning": text, **(values or {})})

    def checkpoint(self, path: str, iteration: int) -> None:
        """Upload a checkpoint that has been written to wandb, if the settings ask for it."""
        if self._summary.facts.get("wandb_log_checkpoints"):
            self.run.upload(path, iteration)

    def alert(self, title: str, text: str) -> None:
        """Log a warning that has been printed, and send it as an alert through wandb, if there is a run."""
        self.run.alert(title, text)
        self.log({"warning": f"{title}: {text}"})

    def finish(self, state: Literal["ended", "stopped", "failed"] = "ended", outcome: str = "") -> None:
        """Write run.json and the report card, and close the file and the wandb run. Later calls do nothing.

        Args:
            state: how the run has ended, for run.json: "stopped" by a signal; wandb shows a run that "failed" as such.
            outcome: the same for the card, in more words. Without it, or without a folder, there is no card.
        """
        if self._is_finished:
            return
        self._is_finished = True
        if self.file:
            self.file.close()
            _write_facts(self.file.folder, self._summary.facts | {"state": state})
            if outcome:
                report.write(outcome, self._summary)
                print(report.on_console(outcome, self._summary), flush=True)
        if self._tensorboard is not None:
            self._tensorboard.finish(self._summary.figures())
        self.run.summarize(self._summary.figures())
        with position.at("ending the wandb run", patient=True):
            self.run.finish(int(state == "failed"))


class MetricsFile:
    """`metrics.jsonl`: one JSON object per event. A run that resumes keeps what was written before its iteration.

    Args:
        folder: created if it is missing.
        resume_at: iteration at which the run continues. None: `rewind` empties the file.
        evaluates: the run evaluates at this iteration, perhaps for the second time.

    Raises:
        OSError: if the folder cannot be created, or the file cannot be read or written.
    """

    def __init__(self, folder: str, resume_at: int | None, evaluates: bool) -> None:
        os.makedirs(folder, exist_ok=True)
        self.folder, self._path = folder, os.path.join(folder, METRICS)
        self._file = open(self._path, "ab", buffering=0)
        self._end, self._late = (0, list[bytes]()) if resume_at is None else _lines_before(resume_at, self._path, evaluates)
        self._warned = False

    def kept(self) -> Iterator[dict[str, Any]]:
        """Yield the events that `rewind` keeps."""
        return _events(self._path, self._end, self._late)

    def late(self) -> Iterator[dict[str, Any]]:
        """Yield those of them that were written late, see `_lines_before`."""
        return map(_event, self._late)

    def rewind(self) -> None:
        """Truncate the file where the run continues. It has whole lines before and after this, even if the disk is full."""
        self._file.truncate(self._end)
        self._file.seek(0, os.SEEK_END)
        self._file.write(b"".join(self._late))

    def write(self, event: dict[str, Any]) -> None:
        """Append an event, with null for numbers that are not finite. If the disk is full, warn once and continue."""
        values = {key: None if _is_no_json(value) else value for key, value in event.items()}
        line, begin = json.dumps(values, allow_nan=False).encode() + b"\n", self._file.tell()
        try:
            if self._file.write(line) < len(line):
                raise OSError("the disk is full")
            self._warned = False
        except OSError as error:
            self._file.truncate(begin)  # remove the incomplete line
            if not self._warned:
                print(f"WARNING: figures are missing from {self._file.name}: {error}", flush=True)
            self._warned = True

    def close(self) -> None:
        self._file.close()


@contextlib.contextmanager
def _can_write(out_dir: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LoggerError(f"cannot write to out_dir={out_dir}: {error}") from error


def _start_wandb(
    config: dict[str, Any], run_id: str | None, resume_at: int | None, file: MetricsFile | None
) -> WandbRun | NoRun:
    """Return the wandb run that the settings ask for. Without a file, it is a new one."""
    mode = mode_of("online") if config["wandb_log"] else "disabled"
    uploads = config.get("wandb_log_checkpoints")
    if uploads and not config["wandb_log"]:
        raise ValueError("wandb_log_checkpoints=True uploads to wandb; use it with --wandb_log=True")
    if mode == "disabled":
        return NoRun()
    if uploads and config["checkpoint_format"] == "sharded":
        raise ValueError("wandb_log_checkpoints=True uploads whole files; use it with --checkpoint_format=consolidated")
    project, name, job_type = config["wandb_project"], _run_name(config), config["implementation"]
    continued = (None, None, ()) if file is None else (run_id, resume_at, file.kept())
    try:
        return WandbRun(mode, project, name, config, job_type, *continued)
    except WandbError as error:
        print(f"WARNING: {error}; training goes on, metrics.jsonl has all figures", flush=True)
        return NoRun()


def _run_name(config: dict[str, Any]) -> str | None:
    """Return the name of the wandb run: the setting, which several runs may share, and the folder. In a sweep: None."""
    if os.environ.get("WANDB_SWEEP_ID"):
        return None
    return f"{config['wandb_run_name']} {os.path.basename(os.path.abspath(config['out_dir']))}"


def _all_facts(folder: str, config: dict[str, Any], resume_at: int | None) -> dict[str, Any]:
    """Return the content of run.json: the settings, the facts, and what it has of earlier processes of the run.

    `starts` has the iterations at which they began. If a resumed run continues with another implementation or world size,
    `parts` lists all of them.
    """
    now: dict[str, Any] = {key: config[key] for key in ("implementation", "world_size") if key in config}
    parts: list[dict[str, Any]] = []
    starts: list[int] = []
    if resume_at is not None:
        starts = [0]
        with contextlib.suppress(OSError, ValueError, KeyError), open(os.path.join(folder, FACTS)) as file:
            before = json.load(file)
            parts = [part for part in before["parts"] if part["from_iter"] < resume_at]
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
        print(f"WARNING: run.json is not written: {error}", flush=True)


def _lines_before(iteration: int, path: str, evaluates: bool) -> tuple[int, list[bytes]]:
    """Return how much of `metrics.jsonl` a run keeps when it resumes at `iteration`, and whether it `evaluates` there again.

    Returns:
        The length in bytes of the lines before the first line of `iteration` or later, or before the first incomplete line
        (from a killed run). And of the later lines those about checkpoints up to `iteration`, which are written late, when the
        checkpoint is on the disk, and the evaluation at `iteration` if it is not repeated.
    """
    end, kept, found = 0, [], False
    with open(path, "rb") as file:
        for line in file:
            event = _event(line)
            found = found or event["iter"] >= iteration or not line.endswith(b"\n")
            if not found:
                end += len(line)
            elif event["iter"] <= iteration and line.endswith(b"\n"):
                is_about_checkpoint = any(key.startswith("checkpoint/") for key in event)
                if is_about_checkpoint or ("val/loss" in event and event["iter"] == iteration and not evaluates):
                    kept.append(line)
    return end, kept


def _events(path: str, end: int, late: list[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the events in the first `end` bytes of `metrics.jsonl`, then those of the lines `late`."""
    if end:
        with open(path, "rb") as file:
            while file.tell() < end:
                event = _event(file.readline())
                if event["iter"] >= 0:
                    yield event
    yield from map(_event, late)


def _event(line: bytes) -> dict[str, Any]:
    """Return the event of a line, whose "iter" is an integer. That of a line which is not from this program is -1."""
    try:
        event = json.loads(line)
        return {**event, "iter": int(event["iter"])}
    except (ValueError, TypeError, KeyError, OverflowError):
        return {"iter": -1}


def _is_no_json(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
