"""One run at a time writes to a folder."""

import errno
import fcntl
import os
import socket
import time

NAME = "run.lock"
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # by some network file systems


class LockError(ValueError):
    """Another run writes to the folder, or nobody can; the message says which."""


class Lock:
    """Held from construction until `release`, or until this process is gone, however it ended.

    The kernel holds it for the open file, which stays in the folder: whoever removed it might remove the next one's. What
    it says is for people; of a run that has ended it means nothing. Programs that this one starts do not inherit it.

    Raises:
        LockError: if another run has it, or the folder cannot be made or written to.
    """

    def __init__(self, folder: str) -> None:
        try:
            os.makedirs(folder, exist_ok=True)
            self._file = open(os.path.join(folder, NAME), "a+")
            if not self._take():
                time.sleep(0.2)  # the other one may have begun this instant, and not written who it is
                self._file.seek(0)
                holder = self._file.read().strip() or "it does not say who it is"
                raise LockError(
                    f"out_dir={folder} is in use by another run: {holder}; wait for its end, or use another --out_dir"
                )
            self._file.truncate(0)
            since = time.strftime("%Y-%m-%d %H:%M:%S %z")
            self._file.write(f"process {os.getpid()} on {socket.gethostname()}, since {since}\n")
            self._file.flush()
        except OSError as error:
            raise LockError(f"cannot write to out_dir={folder}: {error}") from error

    def release(self) -> None:
        """Let others write there."""
        self._file.close()

    def _take(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            print(
                f"WARNING: {self._file.name} cannot be locked: {error}; see to it that no other run uses its folder", flush=True
            )
        return True
