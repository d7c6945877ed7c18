"""Where figures go besides the console: `metrics.jsonl` in the output folder and, when asked for, wandb."""

import json
import os
from typing import Any


class Logger:
    """Writes one event to every place. One rank only.

    Args:
        out_dir: folder of `metrics.jsonl`, one JSON object per event with the keys that wandb gets.
        resume: go on with the file there; otherwise begin a new one.
        wandb_log: also log to wandb, imported only then.
        project, name, config: for `wandb.init`.

    Raises:
        ImportError: if wandb is asked for and not installed.
    """

    def __init__(self, out_dir: str, resume: bool, wandb_log: bool, project: str, name: str, config: dict[str, Any]):
        self.file = open(os.path.join(out_dir, "metrics.jsonl"), "a" if resume else "w", buffering=1)  # by the line
        self.run = _wandb_run(project, name, config) if wandb_log else None

    def log(self, event: dict[str, Any]) -> None:
        self.file.write(json.dumps(event) + "\n")
        if self.run:
            self.run.log(event)

    def finish(self) -> None:
        self.file.close()
        if self.run:
            self.run.finish()


def _wandb_run(project: str, name: str, config: dict[str, Any]) -> Any:
    """A wandb run: online if there is a login and a network (or WANDB_MODE says so), otherwise recorded on disk."""
    import wandb

    mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline")
    try:
        run = wandb.init(project=project, name=name, config=config, mode=mode)
    except wandb.errors.CommError as error:
        print(f"wandb cannot be reached ({str(error).splitlines()[0]})")
        run = wandb.init(project=project, name=name, config=config, mode="offline")
    if run.offline:
        print(f"wandb records offline; to upload later: wandb login && wandb sync {os.path.dirname(run.dir)}")
    return run
