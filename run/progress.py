"""One line at the bottom of a terminal that shows how far a run is. To a file or a pipe, this module writes nothing."""

import atexit
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TextIO, TypeVar

from distributed.heartbeat import position

T = TypeVar("T")

# metrics that the line shows, in this order; a narrow terminal shows the first ones only
_FIGURES = {
    "iter/loss": "loss {:.4f}",
    "throughput/tokens_per_second": "{:,.0f} tok/s",
    "memory/peak_mb": "{:,.0f} MB",
}
_ERASE = "\r\x1b[K"  # go to column 0 and erase the line
_REDRAW_S = 0.5
_SMALLEST_BAR = 5  # columns


@dataclass
class Task:
    """What the line shows: a part of the run, and its progress."""

    description: str
    total: int | None  # None: not known, the line shows only the time
    first: int = 0
    done: int = 0
    begin: float = field(default_factory=time.monotonic)

    def update(self, count: int = 1) -> None:
        """Count what has been done since the last call."""
        self.done += count


class Progress:
    """The line at the bottom of the terminal. Only rank 0 draws it, and nothing here is a collective.

    tqdm formats the line. Its own `write` keeps a line below what is printed only for code that calls it; PyTorch, wandb and
    the other ranks do not, and its monitor redraws a bar only when it is updated.

    A thread draws the line twice per second. Before a rank prints anything else on stdout or stderr, it erases the line. So
    what the run and its libraries print scrolls above the line. Without a terminal on stdout, or without tqdm, nothing is
    drawn or erased.

    Args:
        total: the last iteration of the run.
        rank: rank of this process.
    """

    def __init__(self, total: int, rank: int) -> None:
        self._rank = rank
        self._run = Task("iter", total, first=-1)
        self._figures: dict[str, Any] = {}
        self._task: Task | None = None  # what the line shows now
        self._lock = threading.RLock()
        self._at_begin = True  # False: a part of a line has been printed
        self._must_erase = rank > 0  # the terminal's last line shows the progress line, or with rank > 0 can show it
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
            return
        try:
            from tqdm import tqdm
        except ImportError:
            return
        self._format = tqdm.format_meter
        self._out, self._write = sys.stdout, sys.stdout.write
        for stream in (sys.stdout, sys.stderr):
            if stream.isatty():
                self._erase_before_writes_to(stream)
        if rank == 0:
            self._thread = threading.Thread(target=self._draw_until_closed, name="progress", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    def show(self, figures: dict[str, Any]) -> None:
        """Show new metrics, by key, with the next update."""
        self._figures.update(figures)

    def update(self, iteration: int) -> None:
        """Show that this iteration has ended."""
        if self._run.first < 0:  # the first iteration is not typical; the remaining time is estimated from the others
            self._run.first, self._run.begin = iteration, time.monotonic()
        self._run.done = iteration
        self._task = self._run
        if not self._must_erase:
            self._draw()

    @contextmanager
    def task(self, description: str, total: int | None = None) -> Iterator[Task]:
        """Show a part of the run that takes long. `update` of the yielded task counts up to `total`."""
        before, self._task = self._task, Task(description, total)
        try:
            with position.at(description):
                yield self._task
        finally:
            with self._lock:
                self._task = before
                self._erase()

    def track(self, items: Sequence[T], description: str) -> Iterator[T]:
        """Yield the items, and show how many have been worked on."""
        with self.task(description, len(items)) as task:
            for item in items:
                yield item
                task.update()
                position.move()

    def close(self) -> None:
        """Remove the line permanently."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            self._erase()

    def _erase_before_writes_to(self, stream: TextIO) -> None:
        """Replace the method, not the stream: other code, for example logging, may hold the stream already."""
        write = stream.write

        def write_above(text: str) -> int:
            with self._lock:
                if self._must_erase:
                    write(_ERASE)
                self._at_begin = text.endswith("\n")
                self._must_erase = self._rank > 0 and self._at_begin
                return write(text)

        stream.write = write_above  # type: ignore[method-assign]

    def _draw_until_closed(self) -> None:
        while not self._closed.wait(_REDRAW_S):
            self._draw()

    def _draw(self) -> None:
        with self._lock:
            if self._thread is not None and self._task is not None and self._at_begin and not self._closed.is_set():
                self._write(_ERASE + self._line(self._task))
                self._out.flush()
                self._must_erase = True

    def _erase(self) -> None:
        with self._lock:
            if self._thread is not None and self._must_erase:
                self._write(_ERASE)
                self._out.flush()
                self._must_erase = False

    def _line(self, task: Task) -> str:
        columns = (os.get_terminal_size(self._out.fileno()).columns or 80) - 3  # a terminal shows ^C after the line
        known = self._figures if task is self._run else {}
        figures = [text.format(known[key]) for key, text in _FIGURES.items() if key in known]
        seconds = time.monotonic() - task.begin
        meter = partial(self._format, task.done, task.total, seconds, prefix=task.description, initial=task.first, ascii=" #")
        if not task.total:
            return meter(bar_format="{desc} {elapsed}")[:columns]
        left, right = "{desc} {n}/{total} |", "| {remaining} left{postfix}"
        while figures and len(meter(bar_format=left + right, postfix=", ".join(figures))) + _SMALLEST_BAR > columns:
            figures.pop()
        return meter(bar_format=left + "{bar}" + right, postfix=", ".join(figures), ncols=columns)
