"""Files that are whole or not there: atomic replacement, fsync, checksums, and what a disk says when it fails."""

import os
import re
import shutil
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import NamedTuple

_READ_BYTES = 16_000_000


class FileSum(NamedTuple):
    """What a file must be like to be whole."""

    nbytes: int
    crc32: int


def corruption_message(path: str, reason: object) -> str:
    """One line on a file, or a folder, that cannot be read."""
    refused = re.search(r"GLOBAL ([\w.]+)", str(reason))
    if refused:
        return f"{path} asks for {refused[1]}; a checkpoint holds tensors and plain values only, so nothing of it was run"
    lines = [line for line in str(reason).splitlines() if line and not line.startswith("Weights only load failed")]
    return f"{path} is damaged, or not a checkpoint: {lines[0] if lines else type(reason).__name__}"


def find_corruption(folder: str, sums: dict[str, FileSum]) -> str | None:
    """What is wrong with the files of a folder, if anything; reads every byte."""
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
                    return f"the checksum of {path} does not hold"
        except OSError as error:
            return str(error)
    return None


def underlying_os_error(error: RuntimeError) -> BaseException:
    """What a file said when torch's zip writer failed on it, if that is why it failed."""
    reason: BaseException | None = error
    while reason is not None and not isinstance(reason, OSError):
        reason = reason.__context__
    return reason or error


def sync_folder(folder: str) -> None:
    """Have the names in a folder on the disk, too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_write(path: str) -> Iterator[str]:
    """A name to write to; what is there takes the place of `path` when the block has ended well, and goes when it has not."""
    temporary = path + ".tmp"
    try:
        yield temporary
        os.replace(temporary, path)
        sync_folder(os.path.dirname(path) or ".")
    finally:
        if os.path.lexists(temporary):
            os.remove(temporary)


def link_or_copy(path: str, other: str, link: bool = False) -> None:
    """Copy a file to another name, in place of what had it; or, where a file can have two names, give it that one as well."""
    with atomic_write(other) as temporary:
        if os.path.lexists(temporary):
            os.remove(temporary)  # it may be another name of a file that counts
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
