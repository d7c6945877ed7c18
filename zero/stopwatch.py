"""Time by name, where the work runs: on a GPU by events in its current stream, otherwise by the clock of the host."""

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any
from weakref import WeakSet

import torch
from torch.profiler import record_function

Mark = float | torch.cuda.Event  # a moment: seconds of the host's clock, or an event on a GPU


class Stopwatch:
    """Adds up time by name. The host never waits for a GPU, except in `read_ms`.

    `of_collectives`: the times are waits for collectives, see `awaited_collective`.
    """

    def __init__(self, of_collectives: bool = False) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._unread: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        if of_collectives:
            _OF_COLLECTIVES.add(self)

    @contextmanager
    def measure(self, name: str, device: torch.device) -> Iterator[None]:
        """Add the time of the block under `name`. If the block raises, its time is not counted."""
        begin = mark(device)
        yield
        self.add(name, begin, mark(device))

    def add(self, name: str, begin: Mark, end: Mark) -> None:
        """Add the time between two marks of one device under `name`."""
        if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
            self._unread.append((name, begin, end))
            while len(self._unread) > 1 and self._unread[0][2].query():
                self._read_first()
        else:
            assert isinstance(begin, float)
            assert isinstance(end, float)
            self._seconds[name] += end - begin

    def take(self) -> "Stopwatch":
        """Return the time so far as a stopwatch of its own, and begin anew."""
        taken = Stopwatch(self in _OF_COLLECTIVES)
        taken._seconds, self._seconds = self._seconds, taken._seconds
        taken._unread, self._unread = self._unread, taken._unread
        return taken

    def read_ms(self) -> dict[str, float]:
        """Return the time so far by name, in ms. Waits until a GPU has reached the last mark."""
        while self._unread:
            self._unread[0][2].synchronize()
            self._read_first()
        return {name: seconds * 1000 for name, seconds in self._seconds.items()}

    def _read_first(self) -> None:
        name, begin, end = self._unread.popleft()
        self._seconds[name] += begin.elapsed_time(end) / 1000


_OF_COLLECTIVES: WeakSet[Stopwatch] = WeakSet()


def awaited_collective() -> str:
    """Return the collective that a stream of a GPU waits for, or "". The host has gone on; any thread may ask."""
    with suppress(RuntimeError):  # another thread has just added a time
        for name, begin, end in [time_ for stopwatch in list(_OF_COLLECTIVES) for time_ in stopwatch._unread]:
            if begin.query() and not end.query():
                return name
    return ""


def mark(device: torch.device) -> Mark:
    """Return the current moment on a device. On a GPU, this is when its current stream arrives here."""
    if device.type != "cuda":
        return time.perf_counter()
    with torch.cuda.device(device):  # events belong to a device
        event = torch.cuda.Event(enable_timing=True)
        event.record()
    return event


def region(name: str) -> AbstractContextManager[Any]:
    """Return a context that names its block in a profile. Without a profiler it costs nothing, while record_function does."""
    return record_function(name) if torch.autograd.profiler._is_profiler_enabled else nullcontext()


def without_hooks(step: Any) -> Any:
    """Return the `step` of an optimizer class without the hooks and the profiler's range that torch puts around it."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step
