"""The output folder: one run at a time writes to it, and a new run gives the folder of an earlier one another name."""

import errno
import fcntl
import glob
import os
import re
import socket
import time
from contextlib import suppress
from typing import TextIO

from distributed.ranks import print0
from run import checkpoint_folder
from run.logger import FACTS, METRICS_FILE

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


def take(folder: str) -> TextIO:
    """Lock a folder until the file that this returns is closed, or until this process ends for any reason.

    The kernel ties the lock to the open file. The file stays in the folder, because a process that removed it could remove the
    file of the next run. The text in the file is for people. It has no meaning after the end of the run. Child processes
    do not inherit the lock.

    Raises ValueError if another run holds the lock, or the folder cannot be created or written to.
    """
    path = os.path.realpath(folder)  # a link to a folder that was renamed stays
    try:
        os.makedirs(path, exist_ok=True)
        file = open(os.path.join(path, NAME), "a+")
        if not _lock(file):
            time.sleep(0.2)  # `is_held` takes the lock for a moment; another run may not have written its text yet
            if not _lock(file):
                file.seek(0)
                holder = file.read().strip() or "its process is unknown"
                raise ValueError(
                    f"out_dir={folder} is in use by another run: {holder}; wait until it ends, or use another --out_dir"
                )
        file.truncate(0)
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {since}\n")
        file.flush()
    except OSError as error:
        raise ValueError(f"cannot write to out_dir={folder}: {error.strerror or error}; use another --out_dir") from error
    return file


def earlier(folder: str) -> dict[int, str]:
    """Return the folders of runs that were in a folder before, by number: `out.before-1` and so on."""
    paths = glob.glob(glob.escape(os.path.realpath(folder)) + ".before-*")
    return {int(found[1]): path for path in paths if (found := re.search(r"\.before-(\d+)$", path))}


def set_aside(folder: str, lock: TextIO) -> TextIO:
    """Rename the folder of an earlier run, see `earlier`. Return the lock on the folder that the new run uses.

    `lock`: on the folder. Call it on one process only. After a kill, the earlier run is whole in one of the two folders.

    Raises ValueError if the folder cannot be renamed, and so is as it was, or if another run has just taken its name.
    """
    path, runs = os.path.realpath(folder), earlier(folder)
    checkpoints = checkpoint_folder.names(path)
    if not checkpoints and not any(os.path.exists(os.path.join(path, name)) for name in (METRICS_FILE, FACTS)):
        return lock
    target = f"{path}.before-{max(runs, default=0) + 1}"
    in_use = (
        os.getcwd(),
        __file__,
        "/dev/stdout",
        "/dev/stderr",
        *map(os.path.dirname, glob.glob(f"{glob.escape(path)}/*/{NAME}")),
    )
    try:
        if inside := [each for each in in_use if os.path.commonpath([os.path.realpath(each), path]) == path]:
            raise OSError(f"{inside[0]} is in it")
        os.rename(path, target)
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(
            f"out_dir={folder} holds another run, and cannot be renamed: {reason}; use another --out_dir"
        ) from error
    resumes = any(name in checkpoints for name in checkpoint_folder.NEWEST)
    print0(
        f"note: out_dir={folder} held another run, which is now in {target}"
        f"{f'; to continue that run, use --init_from=resume --out_dir={target}' if resumes else ''}"
    )
    with lock:  # which has moved, too
        return take(folder)


def _lock(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))  # not if its folder was renamed meanwhile
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        print(f"WARNING: {file.name} cannot be locked: {error}; make sure no other run uses this folder", flush=True)
    return True
