"""Files that are either complete or absent: atomic replacement, fsync, checksums, and one line for each error."""

import os
import re
import shutil
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import NamedTuple

from zero.checkpoint.state import CheckpointError

_READ_BYTES = 16_000_000


class FileSum(NamedTuple):
    """Size and checksum of a complete file."""

    nbytes: int
    crc32: int


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


def find_corruption(folder: str, sums: dict[str, FileSum]) -> str | None:
    """Return a description of the first wrong file of a folder, or None. Reads every byte."""
    paths = [os.path.join(folder, name) for name in sums]
    for path, (nbytes, _) in zip(paths, sums.values(), strict=True):
        if not os.path.exists(path):
            return f"there is no {path}"
        if os.path.getsize(path) != nbytes:
            return f"{path} has {os.path.getsize(path)} bytes instead of {nbytes}"
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            for path, found, expected in zip(paths, pool.map(file_sum, paths), sums.values(), strict=True):
                if found != expected:
                    return f"the checksum of {path} does not match"
        except OSError as error:
            return str(error)
    return None


def underlying_os_error(error: RuntimeError) -> BaseException:
    """Return the OSError that made torch's zip writer fail, or `error` itself if there is none."""
    reason: BaseException | None = error
    while reason is not None and not isinstance(reason, OSError):
        reason = reason.__context__
    return reason or error


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


def link_or_copy(path: str, other: str, link: bool = False) -> None:
    """Copy a file to another name and replace any file there. With `link`, make a hard link instead, if possible."""
    with atomic_write(other) as temporary:
        if os.path.lexists(temporary):
            os.remove(temporary)  # it may be a hard link to a checkpoint
        if link:
            with suppress(OSError):
                os.link(path, temporary)
        if not os.path.lexists(temporary):
            shutil.copyfile(path, temporary)
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())


def file_sum(path: str) -> FileSum:
    nbytes = crc32 = 0
    with open(path, "rb") as file:
        while block := file.read(_READ_BYTES):
            nbytes += len(block)
            crc32 = zlib.crc32(block, crc32)
    return FileSum(nbytes, crc32)
