"""The position of the main thread in a run: the training code sets it, the watchdog's thread and the log read it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Position:
    def __init__(self) -> None:
        self.iteration = -1  # -1: the training has not begun
        self.doing = ""  # for example "backward"
        self.is_patient = False  # it may take longer than the timeout, for example on a slow disk
        self.moved_at = time.monotonic()  # seconds: when the main thread has last made progress

    def begin_iteration(self, iteration: int) -> None:
        """Mark that an iteration begins."""
        self.iteration = iteration
        self.move()

    def move(self) -> None:
        """Mark that the main thread has made progress."""
        self.moved_at = time.monotonic()

    @contextmanager
    def at(self, doing: str, patient: bool = False) -> Iterator[None]:
        """Mark what the block does, and whether it may take longer than the timeout. If the block raises, the mark stays."""
        before, self.doing, self.is_patient = (self.doing, self.is_patient), doing, patient or self.is_patient
        self.move()
        yield
        self.doing, self.is_patient = before
        self.move()

    def __str__(self) -> str:
        iteration = f"iteration {self.iteration}" if self.iteration >= 0 else "the start"
        return f"{iteration}, {self.doing}" if self.doing else iteration


position = Position()
