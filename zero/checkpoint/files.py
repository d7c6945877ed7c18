"""Files that are replaced as a whole, and one line for each error in one that is read."""

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
        if refused := re.search(r"GLOBAL ([\w.]+)", str(error)):
            rule = "a checkpoint holds tensors and plain values only, so none of its code was run"
            raise CheckpointError(f"{path} asks for {refused[1]}; {rule}") from error
        lines = [line for line in str(error).splitlines() if line and not line.startswith("Weights only load failed")]
        reason = lines[0] if lines else type(error).__name__
        raise CheckpointError(f"{path} is damaged, or not a checkpoint: {reason}") from error


@contextmanager
def atomic_write(path: str) -> Iterator[str]:
    """Yield a temporary name to write to. If the block succeeds, the file replaces `path`; otherwise it is removed."""
    temporary = path + ".tmp"
    try:
        yield temporary
        os.replace(temporary, path)
        descriptor = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
        try:
            os.fsync(descriptor)  # so that the name is on the disk
        finally:
            os.close(descriptor)
    finally:
        if os.path.lexists(temporary):
            os.remove(temporary)
