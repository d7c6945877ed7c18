"""The metrics of a run as event files of TensorBoard. tensorboard is an optional dependency, imported when it is asked for."""

import json
import math
import os
from collections.abc import Iterable
from typing import Any

FOLDER = "tensorboard"  # in out_dir


def check() -> None:
    """Raise ValueError if tensorboard is not installed."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise ValueError(f"log_to=tensorboard needs tensorboard ({error}); pip install tensorboard") from error


class TensorBoardRun:
    """Writes the events of a run to `out_dir/tensorboard`, on one rank only. If it fails, the run goes on without it.

    Args:
        out_dir: folder of the run.
        resume_at: iteration at which the run continues; TensorBoard hides what is there from it on. 0: a new run.
        facts: settings and facts of the run, shown as a text.
        late: events of this iteration or later that stay, which are written again.

    Raises:
        ImportError: if tensorboard is not installed, see `check`.
        OSError: if the folder cannot be created.
    """

    def __init__(self, out_dir: str, resume_at: int, facts: dict[str, Any], late: Iterable[dict[str, Any]] = ()) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = os.path.join(out_dir, FOLDER)
        self._writer = SummaryWriter(folder, purge_step=resume_at, flush_secs=5)
        self._has_stopped = False
        text = json.dumps(facts, indent=1).replace("\n", "\n    ")  # four spaces: code in markdown
        self._writer.add_text("run.json", f"    {text}", resume_at)
        for event in late:
            self.log(event)
        print(f"TensorBoard: tensorboard --logdir={out_dir}", flush=True)

    def log(self, event: dict[str, Any]) -> None:
        """Write an event. `event["iter"]` is its iteration."""
        if self._has_stopped:
            return
        try:
            for key, value in event.items():
                if isinstance(value, str):
                    self._writer.add_text(key, value, event["iter"])
                elif key != "iter" and value is not None:
                    self._writer.add_scalar(key, value, event["iter"])
        except Exception as error:  # its thread passes errors on to the next call
            self._stop(error)

    def finish(self, figures: dict[str, float]) -> None:
        """Write the figures of the whole run as a text, and close the file."""
        if self._has_stopped:
            return
        lines = [f"| {name} | {figure:.6g} |" for name, figure in figures.items() if math.isfinite(figure)]
        try:
            self._writer.add_text("summary", "\n".join(["| | |", "|---|---|", *lines]))
            self._writer.close()
        except Exception as error:
            self._stop(error)

    def _stop(self, error: Exception) -> None:
        print(f"WARNING: TensorBoard has stopped: {error}; training goes on, metrics.jsonl has all figures", flush=True)
        self._has_stopped = True
