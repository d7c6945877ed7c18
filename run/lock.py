"""A lock on a folder: only one run at a time writes to it."""

import errno
import fcntl
import os
import socket
import time
from contextlib import suppress
from typing import TextIO

NAME = "run.lock"
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # raised by network file systems without locks


def is_held(folder: str) -> bool | None:
    """Return whether a run holds the lock on a folder. None: a copied folder, or a file system without locks, does not tell.

    On another machine than that of the run, a lock that looks free does not tell either: not every file system shares locks.
    """
    with suppress(OSError), open(os.path.join(folder, NAME)) as file:
        holder = file.read()
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # until the file is closed; a run that starts now tries again
        except BlockingIOError:
            return True
        return False if f" on {socket.gethostname()}," in holder else None
    return None


def read_holder(folder: str) -> str:
    """Return the text of the last lock on a folder: process, host and time; '' if it cannot be read."""
    with suppress(OSError), open(os.path.join(folder, NAME)) as file:
        return file.read().strip()
    return ""


def take(folder: str) -> TextIO:
    """Lock a folder until the file that this returns is closed, or until this process ends for any reason.

    The kernel ties the lock to the open file. The file stays in the folder, because a process that removed it could remove the
    file of the next run. The text in the file is for people. It has no meaning after the end of the run. Child processes
    do not inherit the lock.

    Raises ValueError if another run holds the lock, or the folder cannot be created or written to.
    """

    try:
        os.makedirs(folder, exist_ok=True)
        file = open(os.path.join(folder, NAME), "a+")
        if not _lock(file):
            time.sleep(0.2)  # `is_held` takes the lock for a moment; another run may not have written its text yet
            if not _lock(file):
                holder = read_holder(folder) or "its process is unknown"
                raise ValueError(
                    f"out_dir={folder} is in use by another run: {holder}; wait until it ends, or use another --out_dir"
                )
        file.truncate(0)
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {since}\n")
        file.flush()
    except OSError as error:
        raise ValueError(f"cannot write to out_dir={folder}: {error}") from error
    return file


def _lock(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        print(f"WARNING: {file.name} cannot be locked: {error}; make sure no other run uses this folder", flush=True)
    return True
