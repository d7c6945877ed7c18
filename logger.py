"""Where figures go besides the console: `metrics.jsonl` in the output folder and, when asked for, wandb."""

import json
import math
import os
from typing import Any


class LoggerError(ValueError):
    """The folder or wandb cannot be written to; the message says why."""


class Logger:
    """Writes one event to every place. One rank only.

    Args:
        out_dir: folder of `metrics.jsonl`, made if it is missing; one JSON object per event with the keys that wandb gets,
            and null in place of numbers that are not finite, which JSON has not. None: no file.
        resume_at: go on with the file there, as it was when this iteration began, and with what tells of the checkpoint
            written then; None: begin a new one.
        wandb_log: also log to wandb, imported only then.
        project, name, config: for `wandb.init`.
        run_id: of the wandb run to go on with, if any.

    Raises:
        LoggerError: if the folder cannot be made, or wandb is asked for and not installed or wrongly set up.
    """

    def __init__(
        self,
        out_dir: str | None,
        resume_at: int | None,
        wandb_log: bool,
        project: str,
        name: str,
        config: dict[str, Any],
        run_id: str | None = None,
    ) -> None:
        self.file = None
        self.run = _wandb_run(project, name, config, run_id) if wandb_log else None
        try:
            if out_dir is not None:
                os.makedirs(out_dir, exist_ok=True)
                self.file = open(os.path.join(out_dir, "metrics.jsonl"), "wb" if resume_at is None else "ab", buffering=0)
                # in place: whole lines before or whole lines after, also where the disk is full
                end, kept = (0, []) if resume_at is None else _lines_before(resume_at, self.file.name)
                self.file.truncate(end)
                self.file.seek(0, os.SEEK_END)
                self.file.write(b"".join(kept))
        except OSError as error:
            raise LoggerError(f"cannot write to out_dir={out_dir}: {error}") from error
        self.complained = False

    @property
    def run_id(self) -> str | None:
        """Of the wandb run, or None."""
        return self.run.id if self.run else None

    def log(self, event: dict[str, Any]) -> None:
        """Write an event; where the disk is full say so, once, and go on."""
        if self.run:
            self.run.log(event)
        if self.file is None:
            return
        finite = {key: None if _is_no_json(value) else value for key, value in event.items()}
        line, begin = json.dumps(finite, allow_nan=False).encode() + b"\n", self.file.tell()
        try:
            if self.file.write(line) < len(line):
                raise OSError("the disk is full")
            self.complained = False
        except OSError as error:
            self.file.truncate(begin)  # no torn lines
            if not self.complained:
                print(f"WARNING: figures are missing from {self.file.name}: {error}", flush=True)
            self.complained = True

    def finish(self) -> None:
        if self.file:
            self.file.close()
        if self.run:
            self.run.finish()


def _lines_before(iteration: int, path: str) -> tuple[int, list[bytes]]:
    """Where a file ends without what a run has logged from `iteration` on, nor a line that a kill has cut off, in bytes.

    Also the lines after that which tell of checkpoints up to that iteration: they are written when the disk has them.
    """
    end, kept, found = 0, [], False
    with open(path, "rb") as file:
        for line in file:
            at, tells_of_checkpoint = _iteration(line)
            found = found or at >= iteration or not line.endswith(b"\n")
            if not found:
                end += len(line)
            elif tells_of_checkpoint and at <= iteration and line.endswith(b"\n"):
                kept.append(line)
    return end, kept


def _iteration(line: bytes) -> tuple[int, bool]:
    """What iteration a line belongs to, and whether it tells of its checkpoint."""
    try:
        event = json.loads(line)
        return int(event["iter"]), any(key.startswith("checkpoint/") for key in event)
    except (ValueError, TypeError, KeyError, OverflowError):  # somebody else's line, of no iteration
        return -1, False


def _is_no_json(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _wandb_run(project: str, name: str, config: dict[str, Any], run_id: str | None) -> Any:
    """A wandb run: online if there is a login and a network (or WANDB_MODE says so), otherwise recorded on disk."""
    try:
        import wandb
    except ImportError as error:
        raise LoggerError(f"wandb_log=True needs wandb ({error}); pip install wandb, or use --wandb_log=False") from error

    def start(mode: str) -> Any:
        return wandb.init(project=project, name=name, config=config, mode=mode, id=run_id, resume="allow" if run_id else None)

    try:
        try:
            run = start(os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False, verify=False) else "offline"))
        except wandb.errors.CommError as error:
            print(f"wandb cannot be reached: {str(error).splitlines()[0]}")
            run = start("offline")
    except (wandb.errors.Error, ValueError) as error:  # a project name or a WANDB_... variable that it does not take
        raise LoggerError(f"wandb refuses to start: {error}") from error
    if run.offline:
        print(f"wandb records offline; to upload later: wandb login && wandb sync {os.path.dirname(run.dir)}")
    return run
