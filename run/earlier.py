"""An earlier run in the output folder: its files move aside when another run starts there."""

import glob
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from distributed.ranks import print0
from run import logger, profiling, report, sinks
from zero.checkpoint import store

_LOGS = (sinks.METRICS_FILE, logger.FACTS, report.NAME, report.EVALUATION, profiling.FOLDER)


@contextmanager
def moved_aside(folder: str) -> Iterator[None]:
    """Move the files of earlier runs in `folder` to a new folder there, `before-<time in UTC>`. At the end, print its path.

    Other files stay; without files of a run, do nothing. The new folder ends in `.tmp` until the block has ended: `put_back`
    undoes the move at once if the block raises ValueError, or at the next start after a kill. ckpt.pt moves last. Call it on
    one process only.

    Raises ValueError if a file cannot be moved.
    """
    target = os.path.join(folder, time.strftime("before-%Y%m%d-%H%M%SZ", time.gmtime()))
    while os.path.exists(target):  # two starts in the same second
        target += "+"
    names = [name for name in _LOGS if os.path.lexists(os.path.join(folder, name))] + store.names(folder)
    if not names:
        yield
        return
    try:
        os.mkdir(target + ".tmp")
        for name in names:
            os.rename(os.path.join(folder, name), os.path.join(target + ".tmp", name))
    except OSError as error:
        raise ValueError(f"cannot move the run in out_dir={folder} aside: {error}; use another --out_dir") from error
    try:
        yield
    except ValueError:
        put_back(folder)
        raise
    os.rename(target + ".tmp", target)
    resumes = store.NAME in names or store.PREVIOUS in names
    print0(
        f"note: out_dir={folder} held another run; its checkpoints and logs, {len(names)} files and folders, are now in "
        f"{target}{f'; to continue that run, use --init_from=resume --out_dir={target}' if resumes else ''}"
    )


def newest(folder: str) -> str | None:
    """Return the folder with the run that was moved aside last, or None."""
    found = glob.glob(os.path.join(glob.escape(folder), "before-*Z*"))
    return max((path for path in found if not path.endswith(".tmp")), default=None)


def put_back(folder: str) -> None:
    """Undo an unfinished `moved_aside`. Call it on one process only."""
    for unfinished in glob.glob(os.path.join(glob.escape(folder), "before-*Z*.tmp")):
        for name in os.listdir(unfinished):
            os.rename(os.path.join(unfinished, name), os.path.join(folder, name))
        os.rmdir(unfinished)
