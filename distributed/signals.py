"""Signal handling. SIGTERM, SIGINT and others save and stop a run after a step, SIGUSR1 saves. All ranks decide together."""

import enum
import os
import signal
import threading
import time

import torch.distributed as dist
from tqdm import tqdm

from zero.host_comm import LONG_TIMEOUT, extremes

_SAME_KEYSTROKE_S = 1.0  # a launcher may forward a Ctrl-C that the terminal has also sent to this process


class Action(enum.IntEnum):
    """The action at the next step boundary. The largest value wins."""

    CONTINUE = 0
    SAVE = 1
    SAVE_AND_STOP = 2
    FAIL = 3  # stop without saving


_ACTIONS: dict[int, Action] = {
    signal.SIGTERM: Action.SAVE_AND_STOP,
    signal.SIGINT: Action.SAVE_AND_STOP,
    signal.SIGHUP: Action.SAVE_AND_STOP,  # the terminal is closed; torchrun passes it on, also under nohup
    signal.SIGUSR2: Action.SAVE_AND_STOP,  # the last two warn of a time limit: of Grid Engine, and of the CPU time
    signal.SIGXCPU: Action.SAVE_AND_STOP,
    signal.SIGUSR1: Action.SAVE,
}


class Signals:
    """Turns a signal to any rank into an action of all ranks. Needs to be created on all ranks, in the main thread.

    A second SIGINT, more than a second after the first one, ends this process at once. A thread receives the signals, because
    a Python signal handler would have to wait until the main thread returns from a collective, which may never happen.
    """

    def __init__(self) -> None:
        self._action = Action.CONTINUE
        self._lock = threading.Lock()
        # always gloo, because `agree` must not wait for a GPU
        self._group = dist.new_group(backend="gloo", timeout=LONG_TIMEOUT) if dist.is_initialized() else None
        self._inbox, outbox = os.pipe()
        os.set_blocking(outbox, False)
        signal.set_wakeup_fd(outbox)
        for number in _ACTIONS:
            if number in (signal.SIGTERM, signal.SIGINT) or signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                signal.signal(number, lambda *_: None)  # replaces the default action; the signal number goes to the inbox
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def agree(self, action: Action = Action.CONTINUE) -> Action:
        """Return the largest of `action` of every rank and the signals to every rank. Needs to be called on all ranks."""
        with self._lock:
            own, self._action = max(action, self._action), Action.CONTINUE
        ((_, largest),) = extremes([own], self._group)
        return Action(int(largest))

    def _listen(self) -> None:
        interrupted = None  # time of the first SIGINT, in seconds
        while True:
            for number in os.read(self._inbox, 64):
                if number == signal.SIGINT:
                    now = time.monotonic()
                    if interrupted is not None and now - interrupted > _SAME_KEYSTROKE_S:
                        if os.isatty(1):
                            os.write(1, b"\n")  # the terminal's last line may show the progress
                        os._exit(128 + signal.SIGINT)
                    interrupted = interrupted or now
                action = _ACTIONS.get(number, Action.CONTINUE)
                with self._lock:
                    is_new, self._action = action > self._action, max(action, self._action)
                if is_new:
                    what = "saving" if action == Action.SAVE else "saving and stopping"
                    with tqdm.external_write_mode():  # above the progress
                        print(f"{signal.Signals(number).name}: {what} at the next step boundary", flush=True)
