"""Files that are either complete or absent: atomic replacement, fsync, and one line for each error."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from zero.checkpoint.state import CheckpointError


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Raise CheckpointError, with one line about `path`, for any error in the block: damaged bytes can raise any error."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        if isinstance(error, FileNotFoundError) and error.filename == path:
            raise CheckpointError(f"there is no checkpoint {path}") from error
        raise CheckpointError(corruption_message(path, error)) from error


def corruption_message(path: str, reason: object) -> str:
    """Return one line about a file or a folder that cannot be read."""
    if refused := re.search(r"GLOBAL ([\w.]+)", str(reason)):
        return f"{path} asks for {refused[1]}; a checkpoint holds tensors and plain values only, so none of its code was run"
    lines = [line for line in str(reason).splitlines() if line and not line.startswith("Weights only load failed")]
    return f"{path} is damaged, or not a checkpoint: {lines[0] if lines else type(reason).__name__}"


def sync_folder(folder: str) -> None:
    """Sync a folder, so that its file names are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_write(path: str) -> Iterator[str]:
    """Yield a temporary name to write to. If the block succeeds, the file replaces `path`; otherwise it is removed."""
    temporary = path + ".tmp"
    try:
        yield temporary
        os.replace(temporary, path)
        sync_folder(os.path.dirname(path) or ".")
    finally:
        if os.path.lexists(temporary):
            os.remove(temporary)
