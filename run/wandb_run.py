"""The wandb run of a training job, on rank 0. A thread sends the figures, so that wandb never ends or slows the training."""

import atexit
import contextlib
import logging
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

from run.metrics import METRICS

T = TypeVar("T")

_QUEUE = 10_000  # number of calls that can wait for wandb
_FINISH_S = 60.0  # at the end of the run: how long to wait for the next figure to be sent
_UPLOAD_S = 3600  # and for the next checkpoint
_REST = 4  # pause after each event that is sent again, relative to the time that it took
_FREE_BYTES = 1_000_000  # an offline run needs them on the disk


class WandbError(RuntimeError):
    """There is no wandb run, for a reason that does not concern the training."""


class NoRun:
    """What `WandbRun` offers, where there is no run: nothing happens."""

    id = None

    def log(self, event: dict[str, Any]) -> None:
        pass

    def alert(self, title: str, text: str) -> None:
        pass

    def summarize(self, values: dict[str, Any]) -> None:
        pass

    def upload(self, path: str, iteration: int) -> None:
        pass

    def finish(self, exit_code: int = 0) -> None:
        pass


class WandbRun:
    """A wandb run. Create it on one rank only.

    Calls return at once: a daemon thread runs them. If one fails, a line says so, and nothing more is sent. Each iteration is
    one row of the run, and its step is the iteration. A WANDB_... variable of the environment (WANDB_PROJECT, WANDB_NAME,
    WANDB_RUN_GROUP, WANDB_JOB_TYPE, WANDB_RUN_ID, WANDB_RESUME, WANDB_ENTITY, WANDB_TAGS, WANDB_NOTES and those that wandb
    reads itself) overrides an argument.

    Args:
        mode: 'online' or 'offline'. An online run without a login or a network becomes an offline run: a folder on disk.
        project: wandb project.
        name: name of the run. None: wandb makes one.
        config: settings and facts of the run. `wandb_run_name` is the group that unites the runs to compare, without it `name`;
            `wandb_entity`, `wandb_tags` (separated by commas) and `wandb_notes` are used if they are not empty.
        job_type: type of the run within its group.
        run_id: ID of the run to continue. None: a new run.
        resume_at: iteration at which the run continues. Its rows from there on are removed (wandb calls it rewind); if the
            server refuses to, they stay, and the first new row is the one after them.
        history: earlier events of the run, in order, before `resume_at`. Those that the run lacks are sent again: to a new
            folder on disk, all of them. The thread reads them while training continues.

    Attributes:
        id: ID of the run.

    Raises:
        WandbError: if wandb is not installed or cannot start.
        ValueError: if wandb is not configured correctly. The messages are one line.
    """

    def __init__(
        self,
        mode: str,
        project: str,
        name: str | None,
        config: dict[str, Any],
        job_type: str,
        run_id: str | None = None,
        resume_at: int | None = None,
        history: Iterable[dict[str, Any]] = (),
    ) -> None:
        tags = [tag.strip() for tag in config.get("wandb_tags", "").split(",") if tag.strip()]
        try:
            import wandb
        except ImportError as error:
            raise WandbError(f"wandb is not installed ({error}); pip install wandb") from error
        self._wandb: Any = wandb
        for chatty in ("asyncio", "opentelemetry"):  # wandb uses them, and they repeat that a connection is lost
            logging.getLogger(chatty).addHandler(logging.NullHandler())
        arguments: dict[str, Any] = {
            "project": _unless_set("WANDB_PROJECT", project),
            "name": _unless_set("WANDB_NAME", name),
            "group": _unless_set("WANDB_RUN_GROUP", config.get("wandb_run_name", name)),
            "job_type": _unless_set("WANDB_JOB_TYPE", job_type),
            "entity": _unless_set("WANDB_ENTITY", config.get("wandb_entity") or None),
            "tags": _unless_set("WANDB_TAGS", tags or None),
            "notes": _unless_set("WANDB_NOTES", config.get("wandb_notes") or None),
            "config": config,
        }
        try:
            self._run = self._start(mode, arguments, os.environ.get("WANDB_RUN_ID") or run_id, resume_at)
        except (wandb.errors.UsageError, ValueError) as error:  # an invalid project name or WANDB_... variable
            raise ValueError(f"wandb does not start: {_line(error)}") from error
        except Exception as error:
            raise WandbError(f"wandb does not start: {_line(error)}") from error
        self.id: str = self._run.id
        self._first = self._run.starting_step  # the run has earlier rows already
        self._newest = -1  # iteration of the newest row
        self._sent = 0  # number of calls that the thread has made
        self._samples = wandb.Table(columns=["iter", "text"], log_mode="INCREMENTAL")
        self._queue: queue.Queue[Callable[[], Any] | None] = queue.Queue(_QUEUE)  # None: finish
        self._uploads: list[Any] = []  # artifacts that are on their way
        self._silence_s: float = _FINISH_S
        self._has_stopped = self._is_full = self._is_finished = False
        self._exit_code = 0
        self._is_ending = threading.Event()  # the training has ended
        self._thread = threading.Thread(target=self._work, args=(history,), name="wandb", daemon=True)
        self._thread.start()
        # made now, because an interpreter that is shutting down starts no thread
        self._give_up = threading.Event()
        self._ender = threading.Thread(target=self._tear_down_if_given_up, name="wandb end", daemon=True)
        self._ender.start()
        atexit.register(self.finish, exit_code=1)  # after an exception; it runs before wandb's own hook

    def log(self, event: dict[str, Any]) -> None:
        """Send an event. `event["iter"]` is its iteration; "sample/text" becomes a row of a table."""
        self._call(partial(self._send, event))

    def alert(self, title: str, text: str) -> None:
        """Send an alert, which wandb forwards by e-mail or Slack."""
        self._call(partial(self._run.alert, title, text))

    def summarize(self, values: dict[str, Any]) -> None:
        """Set figures that describe the whole run."""
        self._call(partial(self._run.summary.update, values))

    def upload(self, path: str, iteration: int) -> None:
        """Upload a checkpoint as a version of an artifact of the run. If a newer one replaces the file, that one follows."""
        self._silence_s = _UPLOAD_S
        self._call(partial(self._upload, path, iteration, _identity(path)))

    def finish(self, exit_code: int = 0) -> None:
        """Wait until everything has been sent, or nothing has been sent for 60 seconds (with checkpoints: an hour).

        Later calls do nothing.

        Args:
            exit_code: wandb shows the run as failed if it is not 0.
        """
        if self._is_finished:
            return
        self._is_finished, self._exit_code = True, exit_code
        atexit.unregister(self.finish)
        self._is_ending.set()
        end, sent, is_asked = time.monotonic() + self._silence_s, self._sent, False
        while self._thread.is_alive() and time.monotonic() < end:
            if not is_asked:
                with contextlib.suppress(queue.Full):  # try again when the thread has taken a call
                    self._queue.put_nowait(None)
                    is_asked = True
            self._thread.join(0.2)
            if self._sent > sent:
                end, sent = time.monotonic() + self._silence_s, self._sent
        if self._thread.is_alive():
            self._stop(f"it has not sent anything for {self._silence_s:.0f} s")
            self._give_up.set()
            self._ender.join(1.0)

    def _start(self, mode: str, arguments: dict[str, Any], run_id: str | None, resume_at: int | None) -> Any:
        """Start or continue the run with these arguments of `wandb.init`, and return wandb's run object."""
        why = ""
        if mode == "online":
            try:
                self._set_up()
                if self._wandb.login(prompt=False, verify=False):
                    run = self._start_online(arguments, run_id, resume_at)
                    print(f"wandb: {run.url}", flush=True)
                    return run
                why = " (there is no login)"
            except (self._wandb.errors.CommError, TimeoutError) as error:
                why = f" ({_line(error)})"
        self._set_up()
        run = self._wandb.init(**arguments, mode="offline", id=run_id)
        newest = "; the folder has all rows of the run: leave out its older folders" if resume_at else ""
        print(f"wandb records offline{why}; to upload later: wandb login && wandb sync {run.sync_dir}{newest}", flush=True)
        return run

    def _start_online(self, arguments: dict[str, Any], run_id: str | None, resume_at: int | None) -> Any:
        resume = _unless_set("WANDB_RESUME", "allow") if run_id else None
        refusal = None
        if resume and resume_at:
            try:
                return self._wandb.init(**arguments, mode="online", resume_from=f"{run_id}?_step={resume_at - 1}")
            except self._wandb.errors.CommError as error:
                if "deadline exceeded" in str(error):  # there is no server
                    raise
                refusal = _line(error)
                self._set_up()
        run = self._wandb.init(**arguments, mode="online", id=run_id, resume=resume)
        if resume_at and run.starting_step > resume_at:
            rows = f"{resume_at} to {run.starting_step - 1}"
            print(f"wandb keeps the rows of iterations {rows} as they are ({refusal or 'WANDB_RESUME is set'})", flush=True)
        return run

    def _set_up(self) -> None:
        """Start wandb's process, or restart it, because it keeps the run ID of an attempt that has failed."""
        self._wandb.teardown()
        self._wandb.setup(self._wandb.Settings(show_info=False))  # the first call decides what is printed: warnings
        self._wandb.setup(self._wandb.Settings(silent=True))  # runs and logins say nothing else

    def _call(self, call: Callable[[], Any]) -> None:
        if self._has_stopped:
            return
        try:
            self._queue.put_nowait(call)
        except queue.Full:
            if not self._is_full:
                print("WARNING: wandb is too slow and misses figures; metrics.jsonl has all of them", flush=True)
            self._is_full = True

    def _work(self, history: Iterable[dict[str, Any]]) -> None:
        """Send everything, then finish the run. Runs in the thread."""
        try:
            self._run.define_metric("iter")
            self._run.define_metric("*", step_metric="iter")
            for metric in METRICS.values():
                if metric.best:
                    self._run.define_metric(metric.key, step_metric="iter", summary=metric.best)
            begin = time.perf_counter()
            for event in history:
                self._send(event)
                self._sent += 1
                if self._queue.qsize() < _QUEUE // 2:  # leave most of the time to the thread that trains
                    self._is_ending.wait(_REST * (time.perf_counter() - begin))
                begin = time.perf_counter()
            while (call := self._queue.get()) is not None:
                call()
                self._sent += 1
        except Exception as error:
            self._stop(_line(error))
            while self._queue.get() is not None:
                pass
        try:
            try:
                for logged in self._uploads:
                    logged.wait(timeout=_UPLOAD_S)  # raises if the upload has failed
                    self._sent += 1
            finally:
                self._run.finish(self._exit_code)
        except Exception as error:
            self._stop(_line(error))
        self._tear_down()

    def _send(self, event: dict[str, Any]) -> None:
        """Send an event as a part of the row of its iteration, or, if it comes late, of the newest row."""
        if event["iter"] < self._first:
            return
        if self._run.offline and shutil.disk_usage(self._run.dir).free < _FREE_BYTES:
            raise OSError(f"less than {_FREE_BYTES / 1e6:.0f} MB are free in {self._run.dir}")  # wandb itself says nothing
        row = dict(event)
        if event["iter"] < self._newest:
            del row["iter"]
        else:
            self._newest = event["iter"]
        if "sample/text" in event:
            self._samples.add_data(event["iter"], event["sample/text"])
            row["sample/text"] = self._samples
        self._run.log(row, step=self._newest)

    def _upload(self, path: str, iteration: int, identity: tuple[int, int] | None) -> None:
        if identity is None or _identity(path) != identity:  # another file has taken its place
            return
        artifact = self._wandb.Artifact(f"checkpoint-{self.id}", type="model", metadata={"iter_num": iteration})
        artifact.add_file(path)  # a copy
        logged = self._run.log_artifact(artifact, aliases=["latest", f"iter-{iteration}"])
        self._uploads += [] if self._run.offline else [logged]

    def _stop(self, reason: str) -> None:
        """Send nothing more, and say why if it is the first reason."""
        if not self._has_stopped:
            rest = "" if self._is_finished else "training goes on, "
            print(f"WARNING: wandb has stopped: {reason}; {rest}metrics.jsonl has all figures", flush=True)
        self._has_stopped = True

    def _tear_down_if_given_up(self) -> None:
        self._give_up.wait()
        self._tear_down()

    def _tear_down(self) -> None:
        """End wandb's process, after its hook in `atexit` has been removed, which would wait for the process forever."""
        with contextlib.suppress(Exception, SystemExit):
            self._wandb.teardown(self._exit_code)


def mode_of(setting: str) -> str:
    """Return the mode of wandb: that of WANDB_MODE if the variable is set, otherwise the setting.

    Raises:
        ValueError: if WANDB_MODE has another value than 'online', 'offline' or 'disabled', or wandb's older names of them.
    """
    mode = os.environ.get("WANDB_MODE") or setting
    mode = {"run": "online", "dryrun": "offline"}.get(mode, mode)
    if mode not in ("online", "offline", "disabled"):
        raise ValueError(f"WANDB_MODE={mode} is not one of online, offline, disabled; change or unset the variable")
    return mode


def _unless_set(variable: str, value: T) -> T | None:
    """Return the value, or None if the environment has the variable: an argument of `wandb.init` would hide it."""
    return None if os.environ.get(variable) else value


def _identity(path: str) -> tuple[int, int] | None:
    """Return what tells a file from the one that replaces it, or None if there is no file."""
    with contextlib.suppress(FileNotFoundError):
        found = os.stat(path)
        return found.st_ino, found.st_mtime_ns
    return None


def _line(error: Exception) -> str:
    """Return the first line of an error's message, or its type if there is no message."""
    return next(iter(str(error).splitlines()), type(error).__name__)
