"""The metrics of a run as event files of TensorBoard. tensorboard is an optional dependency, imported when it is asked for."""

import json
import math
import os
from typing import Any

from distributed.ranks import print0
from run.output import Output, while_it_works

FOLDER = "tensorboard"  # in out_dir


class TensorBoardRun(Output):
    """Writes the events of a run to `out_dir/tensorboard`, if there is a folder and the settings ask for it.

    Args:
        resume_at: iteration at which the run continues; TensorBoard hides what is there from it on. 0: a new run.
        config: settings and facts of the run, shown as a text.

    Raises:
        ValueError: if tensorboard is not installed.
        OSError: if the folder cannot be created.
    """

    name = "TensorBoard"

    def __init__(self, out_dir: str | None, resume_at: int, config: dict[str, Any]) -> None:
        if out_dir is None or config.get("log_to") != "tensorboard":
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(f"log_to=tensorboard needs tensorboard ({error}); pip install tensorboard") from error
        self.sink = SummaryWriter(os.path.join(out_dir, FOLDER), purge_step=resume_at, flush_secs=5)
        text = json.dumps(config, indent=1).replace("\n", "\n    ")  # four spaces: code in markdown
        self.sink.add_text("run.json", f"    {text}", resume_at)
        print0(f"TensorBoard: tensorboard --logdir={out_dir}")

    @while_it_works
    def log(self, event: dict[str, Any]) -> None:
        """Write an event. `event["iter"]` is its iteration."""
        for key, value in event.items():
            if isinstance(value, str):
                self.sink.add_text(key, value, event["iter"])
            elif key != "iter" and value is not None:
                self.sink.add_scalar(key, value, event["iter"])

    @while_it_works
    def finish(self, figures: dict[str, float]) -> None:
        """Write the figures of the whole run as a text, and close the file."""
        lines = [f"| {name} | {figure:.6g} |" for name, figure in figures.items() if math.isfinite(figure)]
        self.sink.add_text("summary", "\n".join(["| | |", "|---|---|", *lines]))
        self.sink.close()
