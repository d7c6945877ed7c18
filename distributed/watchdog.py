"""Where a rank is, and the end of a run that hangs: a line names the rank that waits, its collective, and who is missing."""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from distributed.exits import print_error
from zero.collectives import Communicator
from zero.stopwatch import awaited_collective

_BEAT_S = 1.0  # seconds between two posts of a rank
_GRACE_S = 1.0  # torchrun ends all ranks when the first one ends: until then the others can print their lines, too
_STORE_TIMEOUT_S = 5.0  # the shortest; a store that takes longer to answer counts as lost


class Position:
    """The position of the main thread: the training code sets it, the watchdog and the log read it."""

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
    While a rank does something that may take long, for example a save, or before the first iteration anything but a collective,
    only a rank that shows no sign of life ends the others. The exit code is 1. Without several ranks, this class does nothing.
    """

    def __init__(self, timeout_s: float) -> None:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        self._timeout_s, self._rank = timeout_s, dist.get_rank()
        self._keys = [str(rank) for rank in range(dist.get_world_size())]
        # its own connection, because the main thread may wait in a call of the store
        connection = distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        self._store = dist.PrefixStore("watchdog", connection)
        # a call of the store may never return when its host is lost
        self._calls = ThreadPoolExecutor(max_workers=1, thread_name_prefix="watchdog's store")
        self._main_thread = threading.get_ident()
        self._gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
        # by rank, while this one does not move: the last post, and when (in seconds) it was new
        self._posts: list[tuple[bytes, float]] = []
        self._store.set(self._keys[self._rank], json.dumps(self._own()))
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        dist.barrier()  # now every rank has posted

    def _watch(self) -> None:
        torch.cuda.set_device(self._gpu)  # a thread begins with GPU 0, and takes memory there when it asks for an event
        while True:
            began = time.monotonic()
            time.sleep(beat_s := min(_BEAT_S, self._timeout_s / 10))
            if (late_s := time.monotonic() - began - beat_s) > 1:  # this process was stopped, which does not count
                position.moved_at += late_s
            if message := self._reason_to_end(self._own()):
                print_error(message)
                time.sleep(_GRACE_S)
                os._exit(1)

    def _own(self) -> Post:
        collective = self._collective()
        is_patient = position.is_patient or (position.iteration < 0 and not collective)
        return Post(time.monotonic() - position.moved_at, is_patient, str(position), collective)

    def _reason_to_end(self, own: Post) -> str | None:
        """Return the reason to end this rank, or None: a rank is lost, or all ranks stand still. Posts where this one is."""
        rank, long_s = self._rank, self._timeout_s / 2
        waits = f"rank {rank} has been at {own.place} for {own.still_s:.0f} s"
        if own.collective:
            waits = f"rank {rank} has waited {own.still_s:.0f} s for {own.collective} at {own.place}"
        try:
            found = self._calls.submit(self._exchange, own).result(max(_STORE_TIMEOUT_S, self._timeout_s / 4))
        except (TimeoutError, RuntimeError):
            is_busy = own.still_s < self._timeout_s or (own.is_patient and not own.collective)
            return None if is_busy else f"{waits}; the store of the ranks does not answer"
        now = time.monotonic()
        before = self._posts if self._posts and found else [(b"", now)] * len(found)
        self._posts = [old if text == old[0] else (text, now) for text, old in zip(found, before, strict=True)]
        posts = [(other, Post(*json.loads(text)), new_at) for other, (text, new_at) in enumerate(self._posts)]
        if own.still_s < self._timeout_s:
            return None
        if lost := [f"{other}, last seen at {post.place}" for other, post, new_at in posts if new_at < now - long_s]:
            return f"{waits}; no sign of life from rank {'; nor from rank '.join(lost)}"
        if any(post.is_patient or post.still_s < long_s for _, post, _ in posts):
            return None
        others = [(other, post) for other, post, _ in posts if other != rank]
        busy = [f"rank {other} is at {post.place}" for other, post in others if not post.collective]
        waiting = [f"rank {other} waits for {post.collective} at {post.place}" for other, post in others]
        return "; ".join([waits, *(busy or waiting)])

    def _exchange(self, own: Post) -> list[bytes]:
        """Post where this rank is. Return the posts of all ranks, or nothing if this one moves."""
        self._store.set(self._keys[self._rank], json.dumps(own))
        return self._store.multi_get(self._keys) if own.still_s >= self._timeout_s / 2 else []

    def _collective(self) -> str:
        """Return the collective that the main thread or its GPU waits for, such as "the all-reduce", or "" for none."""
        for frame, _ in traceback.walk_stack(sys._current_frames().get(self._main_thread)):
            if frame.f_code is Communicator.wait.__code__:
                return f"the {frame.f_locals['kind']}"
            if frame.f_globals.get("__name__") == distributed_c10d.__name__:
                return f"the {frame.f_code.co_name.replace('_', '-')}"
        return f"the {awaited}" if (awaited := awaited_collective()) else ""
