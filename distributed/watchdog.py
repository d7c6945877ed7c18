"""Ends a rank of a run that hangs, with one line that says which rank waits for what, and for which rank the others wait."""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from types import FrameType, TracebackType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from distributed.exits import print_error
from distributed.heartbeat import position
from zero.collectives import Communicator
from zero.stopwatch import awaited_collective

_BEAT_S = 1.0  # seconds between two posts of a rank
_GRACE_S = 1.0  # torchrun ends all ranks when the first one ends: until then the others can print their lines, too
_STORE_TIMEOUT_S = 5.0  # the shortest; a store that takes longer to answer counts as lost


class Post(NamedTuple):
    """What a rank posts every second. Two posts differ, so a new one is a sign of life."""

    still_s: float  # how long its main thread has not moved
    is_patient: bool
    place: str
    collective: str  # what it waits for, or ""


class Watchdog:
    """Ends this rank if no rank has moved for `timeout_s`, or if this rank waits and another one shows no sign of life.

    Needs to be created on all ranks, in the main thread. A thread posts the position of the main thread to the store of the
    process group every second. When the main thread has not moved for half of the timeout, it reads the posts of all ranks.
    While a rank does something that may take long, for example a save, and before the first iteration, only a rank that shows
    no sign of life ends the others. A second thread decides, because a call of the store may never return when the host of the
    store is lost. The exit code is 1.

    A collective that raises, because another rank has ended, gets a line about the position below its traceback.

    Without several ranks, this class does nothing.
    """

    def __init__(self, timeout_s: float) -> None:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        self._timeout_s, self._rank = timeout_s, dist.get_rank()
        self._keys = [str(rank) for rank in range(dist.get_world_size())]
        # its own connection, because the main thread may wait in a call of the store
        connection = distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        self._store = dist.PrefixStore("watchdog", connection)
        self._store.set_timeout(timedelta(seconds=max(_STORE_TIMEOUT_S, timeout_s / 4)))
        self._main_thread, self._awaited = threading.get_ident(), ""  # what `awaited_collective` has last returned
        self._gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
        # by rank, while this one does not move: the last post, and when (in seconds) it was new
        self._posts: list[tuple[bytes, float]] = []
        self._answered_at = time.monotonic()
        self._post()
        dist.barrier()  # now every rank has posted
        self._show_traceback, sys.excepthook = sys.excepthook, self._explain
        for work in (self._keep_posting, self._watch):
            threading.Thread(target=work, name="watchdog", daemon=True).start()

    def _keep_posting(self) -> None:
        torch.cuda.set_device(self._gpu)  # a thread begins with GPU 0, and takes memory there when it asks for an event
        while True:
            self._pause()
            self._awaited = awaited_collective()
            with suppress(RuntimeError):  # the store does not answer; the other thread decides
                self._post()

    def _watch(self) -> None:
        while True:
            self._pause()
            if message := self._reason_to_end():
                print_error(message)
                time.sleep(_GRACE_S)
                os._exit(1)

    def _pause(self) -> None:
        time.sleep(min(_BEAT_S, self._timeout_s / 10))

    def _post(self) -> None:
        """Post where this rank is, and read the posts of all ranks if it does not move."""
        own = self._own()
        self._store.set(self._keys[self._rank], json.dumps(own))
        if own.still_s < self._timeout_s / 2:
            self._posts = []
        else:
            found, now = self._store.multi_get(self._keys), time.monotonic()
            before = self._posts or [(b"", now)] * len(found)
            self._posts = [old if text == old[0] else (text, now) for text, old in zip(found, before, strict=True)]
        self._answered_at = time.monotonic()

    def _own(self) -> Post:
        is_patient = position.is_patient or position.iteration < 0
        return Post(time.monotonic() - position.moved_at, is_patient, str(position), self._collective())

    def _reason_to_end(self) -> str | None:
        """Return the reason to end this rank, or None: a rank is lost, or all ranks stand still."""
        own, rank, now = self._own(), self._rank, time.monotonic()
        if own.still_s < self._timeout_s:
            return None
        waits = f"rank {rank} has been at {own.place} for {own.still_s:.0f} s"
        if own.collective:
            waits = f"rank {rank} has waited {own.still_s:.0f} s for {own.collective} at {own.place}"
        long_s = self._timeout_s / 2
        if now - self._answered_at > long_s:
            is_busy = own.is_patient and not own.collective
            return None if is_busy else f"{waits}; the store of the ranks does not answer"
        posts = [(other, Post(*json.loads(text)), new_at) for other, (text, new_at) in enumerate(self._posts)]
        if lost := [f"{other}, last seen at {post.place}" for other, post, new_at in posts if new_at < now - long_s]:
            return f"{waits}; no sign of life from rank {'; nor from rank '.join(lost)}"
        if not posts or any(post.is_patient or post.still_s < long_s for _, post, _ in posts):
            return None
        others = [(other, post) for other, post, _ in posts if other != rank]
        busy = [f"rank {other} is at {post.place}" for other, post in others if not post.collective]
        waiting = [f"rank {other} waits for {post.collective} at {post.place}" for other, post in others]
        return "; ".join([waits, *(busy or waiting)])

    def _collective(self) -> str:
        frame = sys._current_frames().get(self._main_thread)
        return _collective(frame for frame, _ in traceback.walk_stack(frame)) or (self._awaited and f"the {self._awaited}")

    def _explain(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print the traceback and, if a collective has raised, a line about the position."""
        self._show_traceback(kind, error, trace)
        if collective := _collective(frame for frame, _ in reversed(list(traceback.walk_tb(trace)))):
            print_error(f"rank {self._rank} lost {collective} at {position}: {error}")


def _collective(frames: Iterable[FrameType]) -> str:
    """Return the collective that the frames, innermost first, wait for, such as "the all-reduce", or "" if there is none."""
    for frame in frames:
        if frame.f_code is Communicator.wait.__code__:
            return f"the {frame.f_locals['kind']}"
        if frame.f_globals.get("__name__") == distributed_c10d.__name__:
            return f"the {frame.f_code.co_name.replace('_', '-')}"
    return ""
