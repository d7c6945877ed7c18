"""The metrics of a run. `Meter` measures them, `Logger` writes them to the console, `metrics.jsonl` and optionally wandb."""

import json
import math
import os
import time
from typing import Any

import torch

import hardware
from zero.memory import peak_bytes

# keys of an event that the console shows, in this order; metrics.jsonl and wandb receive all keys
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
    """The output folder cannot be written to, or wandb does not start. The message gives the reason."""


class Logger:
    """Writes events to the console, `metrics.jsonl` and wandb on rank 0. On other ranks it does nothing.

    Args:
        out_dir: folder of `metrics.jsonl`, created if it is missing. The file has one JSON object per event, with the same
            keys as in wandb. A number that is not finite becomes null, because JSON has no such number. None: no file.
        resume_at: continue the existing file as it was at the start of this iteration, and keep the lines about checkpoints
            up to it. None: start a new file.
        wandb_log: also log to wandb, which is imported only in this case.
        project, name, config: arguments of `wandb.init`.
        run_id: ID of the wandb run to continue, or None.
        rank: rank of this process.

    Raises:
        LoggerError: if the folder cannot be created or written to, or if wandb is requested but not installed or not
            configured correctly.
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
        self.warned = False
        if rank > 0:
            return
        self.run = _wandb_run(project, name, config, run_id) if wandb_log else None
        try:
            if out_dir is not None:
                os.makedirs(out_dir, exist_ok=True)
                self.file = open(os.path.join(out_dir, "metrics.jsonl"), "wb" if resume_at is None else "ab", buffering=0)
                # edit in place: the file has whole lines before and after this, even if the disk is full
                end, kept = (0, []) if resume_at is None else _lines_before(resume_at, self.file.name)
                self.file.truncate(end)
                self.file.seek(0, os.SEEK_END)
                self.file.write(b"".join(kept))
        except OSError as error:
            raise LoggerError(f"cannot write to out_dir={out_dir}: {error}") from error

    @property
    def run_id(self) -> str | None:
        """The ID of the wandb run, or None."""
        return self.run.id if self.run else None

    def log(self, event: dict[str, Any], console: str | None = None) -> None:
        """Write an event. If the disk is full, print a warning once and continue.

        Args:
            event: the metrics by key; "iter" is the iteration.
            console: "step" or "iter": also print a line that starts with this word. None: print nothing.
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
            self.warned = False
        except OSError as error:
            self.file.truncate(begin)  # remove the incomplete line
            if not self.warned:
                print(f"WARNING: figures are missing from {self.file.name}: {error}", flush=True)
            self.warned = True

    def finish(self) -> None:
        if self.file:
            self.file.close()
        if self.run:
            self.run.finish()


class Meter:
    """Measures the time of iterations, tokens per second and MFU. Needs to be created on all ranks.

    To add a metric, add it to the event in `log_iteration` or `log_evaluation`. To show it on the console as well, add it
    to `_CONSOLE`.

    Args:
        log: logger that receives the metrics.
        tokens_per_iter: tokens per iteration, all ranks together.
        flops_per_iter: FLOPs per iteration of one rank.
        device, dtype: device and dtype of the computation on this rank.
    """

    _WARM_UP = 5  # number of first iterations that do not count for the MFU

    def __init__(self, log: Logger, tokens_per_iter: int, flops_per_iter: float, device: torch.device, dtype: str) -> None:
        self.log, self.device = log, device
        self.tokens_per_iter, self.flops_per_iter = tokens_per_iter, flops_per_iter
        self.peak_flops = hardware.peak_flops(device, hardware.DTYPES[dtype])  # FLOP/s of this rank
        if log.rank == 0:
            print(f"mfu is relative to {self.peak_flops / 1e12:.3g} TFLOP/s per rank in {dtype}")
        self.mfu = -1.0  # running mean; -1: not measured yet, as in nanoGPT
        self._iterations = 0  # number of iterations since construction
        self.restart()

    def restart(self) -> None:
        """Restart the clock. The time since the last restart or log is not counted."""
        self._begin, self._timed = time.perf_counter(), 0

    def count_iteration(self) -> None:
        """Count an iteration that has ended."""
        self._iterations += 1
        self._timed += 1

    def log_iteration(self, iteration: int, loss: float, lr: float) -> None:
        """Log the metrics of an iteration. Times are means over the iterations since the last restart or log."""
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
        """Log the losses of an evaluation.

        Args:
            iteration: iteration before which the evaluation ran.
            losses: loss by split.
            lr: learning rate.
        """
        event = {
            "iter": iteration,
            **{f"{split}/loss": loss for split, loss in losses.items()},
            "lr": lr,
            "mfu": self.mfu * 100,
        }
        self.log.log(event, console="step")


def _lines_before(iteration: int, path: str) -> tuple[int, list[bytes]]:
    """Returns how much of `metrics.jsonl` a run keeps when it resumes at `iteration`.

    Returns:
        The length in bytes of the lines before the first line of `iteration` or later, or before the first incomplete line
        (from a killed run). And the later lines about checkpoints up to `iteration`: such a line is written late, when the
        checkpoint is on the disk.
    """
    end, kept, found = 0, [], False
    with open(path, "rb") as file:
        for line in file:
            at, is_about_checkpoint = _iteration(line)
            found = found or at >= iteration or not line.endswith(b"\n")
            if not found:
                end += len(line)
            elif is_about_checkpoint and at <= iteration and line.endswith(b"\n"):
                kept.append(line)
    return end, kept


def _iteration(line: bytes) -> tuple[int, bool]:
    """Returns the iteration of a line, and whether the line is about a checkpoint. The iteration of a foreign line is -1."""
    try:
        event = json.loads(line)
        return int(event["iter"]), any(key.startswith("checkpoint/") for key in event)
    except (ValueError, TypeError, KeyError, OverflowError):  # the line is not from this program
        return -1, False


def _is_no_json(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _wandb_run(project: str, name: str, config: dict[str, Any], run_id: str | None) -> Any:
    """Start a wandb run. WANDB_MODE chooses the mode; without it, the run is online if there is a login, otherwise offline.

    An offline run is recorded on disk. A run is also offline if wandb cannot be reached.
    """
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
    except (wandb.errors.Error, ValueError) as error:  # invalid project name or WANDB_... variable
        raise LoggerError(f"wandb does not start: {error}") from error
    if run.offline:
        print(f"wandb records offline; to upload later: wandb login && wandb sync {os.path.dirname(run.dir)}")
    return run
