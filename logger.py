"""The figures of a run: measured by the meter; logged to the console, to `metrics.jsonl` and, when asked for, to wandb."""

import json
import math
import os
import time
from typing import Any

import torch

import hardware
from zero.memory import peak_bytes

# what the console shows of an event, in this order; metrics.jsonl and wandb get all of it
_CONSOLE = {
    "step": {"train/loss": "train loss {:.4f}", "val/loss": "val loss {:.4f}"},
    "iter": {
        "iter/loss": "loss {:.4f}",
        "iter/time_ms": "time {:.2f}ms",
        "mfu": "mfu {:.2f}%",
        "iter/tokens_per_second": "{:,.0f} tok/s",
        "iter/peak_memory_gb": "peak memory {:.2f} GB",
    },
}


class LoggerError(ValueError):
    """The folder or wandb cannot be written to; the message says why."""


class Logger:
    """Writes an event to every place, on rank 0. On other ranks it does nothing.

    Args:
        out_dir: folder of `metrics.jsonl`, made if it is missing; one JSON object per event with the keys that wandb gets,
            and null in place of numbers that are not finite, which JSON has not. None: no file.
        resume_at: go on with the file there, as it was when this iteration began, and with what tells of the checkpoint
            written then; None: begin a new one.
        wandb_log: also log to wandb, imported only then.
        project, name, config: for `wandb.init`.
        run_id: of the wandb run to go on with, if any.
        rank: of this process.

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
        rank: int = 0,
    ) -> None:
        self.file = self.run = None
        self.rank = rank
        self.complained = False
        if rank > 0:
            return
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

    @property
    def run_id(self) -> str | None:
        """Of the wandb run, or None."""
        return self.run.id if self.run else None

    def log(self, event: dict[str, Any], console: str | None = None) -> None:
        """Write an event. If the disk is full, print that once and go on.

        Args:
            console: "step" or "iter": print a line that begins with this word.
        """
        if console is not None and self.rank == 0:
            shown = [text.format(event[key]) for key, text in _CONSOLE[console].items() if key in event]
            print(f"{console} {event['iter']}: {', '.join(shown)}", flush=True)
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


class Meter:
    """The clock of a run: how long an iteration takes, and what follows from that. Needs to be made on all ranks.

    To add a metric, add it to the event of `log_iteration` or `log_evaluation`; to show it on the console as well, add it
    to `_CONSOLE`.

    Args:
        log: where the figures go.
        tokens_per_iter: of all ranks together.
        flops_per_iter: of one rank.
        device, dtype: what this rank computes on and in.
    """

    _WARM_UP = 5  # iterations that do not count for the MFU

    def __init__(self, log: Logger, tokens_per_iter: int, flops_per_iter: float, device: torch.device, dtype: str) -> None:
        self.log, self.device = log, device
        self.tokens_per_iter, self.flops_per_iter = tokens_per_iter, flops_per_iter
        self.peak_flops = hardware.peak_flops(device, hardware.DTYPES[dtype])  # per second
        if log.rank == 0:
            print(f"mfu is relative to {self.peak_flops / 1e12:.3g} TFLOP/s per rank in {dtype}")
        self.mfu = -1.0  # running mean; -1: not measured yet, as in nanoGPT
        self._iterations = 0  # in all
        self.restart()

    def restart(self) -> None:
        """Begin to measure here: what took time until now was no iteration."""
        self._begin, self._timed = time.perf_counter(), 0

    def count_iteration(self) -> None:
        """An iteration has ended."""
        self._iterations += 1
        self._timed += 1

    def log_iteration(self, iteration: int, loss: float, lr: float) -> None:
        """Log the mean of the iterations since the last restart or log."""
        seconds = (time.perf_counter() - self._begin) / self._timed
        if self._iterations > self._WARM_UP:
            mfu = self.flops_per_iter / seconds / self.peak_flops
            self.mfu = mfu if self.mfu == -1.0 else 0.9 * self.mfu + 0.1 * mfu
        event = {
            "iter": iteration,
            "iter/loss": loss,
            "iter/time_ms": seconds * 1000,
            "iter/tokens_per_second": self.tokens_per_iter / seconds,
            "iter/peak_memory_gb": peak_bytes(self.device) / 1e9,
            "lr": lr,
            "mfu": self.mfu * 100,
        }
        self.log.log(event, console="iter")
        self.restart()

    def log_evaluation(self, iteration: int, losses: dict[str, float], lr: float) -> None:
        """Log the losses by split."""
        event = {
            "iter": iteration,
            **{f"{split}/loss": loss for split, loss in losses.items()},
            "lr": lr,
            "mfu": self.mfu * 100,
        }
        self.log.log(event, console="step")


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

    def start(mode: Any) -> Any:
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
