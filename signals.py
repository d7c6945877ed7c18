"""SIGTERM and SIGINT end a run after the step at hand, SIGUSR1 has it saved; all ranks decide together."""

import enum
import os
import signal
import time
from types import FrameType

import torch
import torch.distributed as dist

_SAME_KEYSTROKE_S = 1.0  # torchrun passes a Ctrl-C on to the ranks, which the terminal has sent it to already


class Wish(enum.IntEnum):
    """What is to happen at the next step boundary; the larger one wins."""

    NOTHING = 0
    SAVE = 1
    SAVE_AND_STOP = 2


class Signals:
    """Turns signals to any rank into a decision of all ranks. Needs to be made on all ranks.

    A second SIGINT, more than a second after the first one, ends this process at once.
    """

    def __init__(self) -> None:
        self.wish = Wish.NOTHING
        self._interrupted: float | None = None  # when SIGINT came first, in seconds
        # on the CPU, whatever the backend of the run: deciding must not wait for a GPU
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._on_signal)

    def decide(self) -> Wish:
        """What all ranks are to do now. Needs to be called on all ranks."""
        decision = torch.tensor(int(self.wish))
        self.wish = Wish.NOTHING
        if self._group is not None:
            dist.all_reduce(decision, op=dist.ReduceOp.MAX, group=self._group)
        return Wish(decision.item())

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted is not None and now - self._interrupted > _SAME_KEYSTROKE_S:
                os._exit(128 + signal.SIGINT)
            self._interrupted = self._interrupted or now
        self.wish = max(self.wish, Wish.SAVE if number == signal.SIGUSR1 else Wish.SAVE_AND_STOP)
