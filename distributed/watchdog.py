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

from distributed.heartbeat import position
from zero.collectives import Communicator
from zero.stopwatch import awaited_collective

_BEAT_S = 1.0  # seconds between two heartbeats (signs of life) of a rank
_GRACE_S = 1.0  # torchrun ends all ranks when the first one ends: until then the others can print their lines, too
_STORE_TIMEOUT_S = 5.0  # the shortest; a store that takes longer to answer counts as lost


class Watchdog:
    """Ends this rank if no rank has moved for `timeout_s`, or if this rank waits and another one shows no sign of life.

    Needs to be created on all ranks, in the main thread. A thread posts the position of the main thread to the store of the
    process group every second, which also serves as a heartbeat. When the main thread has not moved for half of the timeout,
    it reads the posts of all ranks. While a rank does something that may take long, for example a save, and before the
    first iteration, only a rank that shows no sign of life ends the others. A second thread decides, because a call of the
    store may never return when the host of the store is lost. The exit code is 1.

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
        self._beats, self._moves, self._moved_at = 0, -1, time.monotonic()
        self._peers: list[_Peer] = []  # by rank, while this rank does not move
        self._posts: list[_Post] = []  # the last ones that were read, by rank
        self._must_read, self._answered_at = False, time.monotonic()
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
            if message := self._reason_to_end(time.monotonic()):
                self._end(message)

    def _pause(self) -> None:
        time.sleep(min(_BEAT_S, self._timeout_s / 10))

    def _post(self) -> None:
        """Post a heartbeat, and read those of the other ranks if this rank does not move."""
        self._beats += 1
        self._store.set(self._keys[self._rank], json.dumps(self._own()))
        if self._must_read:
            self._posts = [_Post(*json.loads(post)) for post in self._store.multi_get(self._keys)]
        self._answered_at = time.monotonic()

    def _own(self) -> "_Post":
        is_patient = position.is_patient or position.iteration < 0
        return _Post(self._beats, position.moves, is_patient, str(position), self._collective())

    def _reason_to_end(self, now: float) -> str | None:
        """Return the reason to end this rank, or None."""
        own = self._own()
        if own.moves != self._moves:
            self._moves, self._moved_at, self._peers, self._posts = own.moves, now, [], []
        still_s = now - self._moved_at
        self._must_read = still_s > self._timeout_s / 2
        if self._posts:
            self._note_signs_of_life(self._posts, now)
        if still_s < self._timeout_s:
            return None
        if now - self._answered_at > self._timeout_s / 2:
            is_busy = own.is_patient and not own.collective
            return None if is_busy else f"{self._waits(own, still_s)}; the store of the ranks does not answer"
        return self._describe_hang(self._waits(own, still_s), now) if self._peers else None

    def _note_signs_of_life(self, posts: list["_Post"], now: float) -> None:
        """Note which ranks have shown a sign of life or have moved since the last call."""
        if not self._peers:
            self._peers = [_Peer(post, now, now) for post in posts]
        for rank, (post, peer) in enumerate(zip(posts, self._peers, strict=True)):
            alive_at = now if post.beats != peer.post.beats else peer.alive_at
            self._peers[rank] = _Peer(post, alive_at, now if post.moves != peer.post.moves else peer.moved_at)

    def _describe_hang(self, waits: str, now: float) -> str | None:
        """Return the message if a rank is lost or all ranks stand still, otherwise None."""
        silent = now - self._timeout_s / 2
        lost = [f"{rank}, last seen at {peer.post.place}" for rank, peer in enumerate(self._peers) if peer.alive_at < silent]
        if lost:
            return f"{waits}; no sign of life from rank {'; nor from rank '.join(lost)}"
        if any(peer.post.is_patient or peer.moved_at > silent for peer in self._peers):
            return None
        others = [(rank, peer.post) for rank, peer in enumerate(self._peers) if rank != self._rank]
        busy = [f"rank {rank} is at {post.place}" for rank, post in others if not post.collective]
        waiting = [f"rank {rank} waits for {post.collective} at {post.place}" for rank, post in others]
        return "; ".join([waits, *(busy or waiting)])

    def _waits(self, own: "_Post", still_s: float) -> str:
        if own.collective:
            return f"rank {self._rank} has waited {still_s:.0f} s for {own.collective} at {own.place}"
        return f"rank {self._rank} has been at {own.place} for {still_s:.0f} s"

    def _collective(self) -> str:
        frame = sys._current_frames().get(self._main_thread)
        return _collective(frame for frame, _ in traceback.walk_stack(frame)) or (self._awaited and f"the {self._awaited}")

    def _end(self, message: str) -> None:
        sys.stderr.write(f"error: {message}\n")  # one write: the lines of two ranks do not mix
        sys.stderr.flush()
        time.sleep(_GRACE_S)
        os._exit(1)

    def _explain(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print the traceback and, if a collective has raised, a line about the position."""
        self._show_traceback(kind, error, trace)
        if collective := _collective(frame for frame, _ in reversed(list(traceback.walk_tb(trace)))):
            sys.stderr.write(f"error: rank {self._rank} lost {collective} at {position}: {' '.join(str(error).split())}\n")


class _Post(NamedTuple):
    """What a rank posts every second."""

    beats: int
    moves: int
    is_patient: bool
    place: str
    collective: str  # what it waits for, or ""


class _Peer(NamedTuple):
    """The last post of a rank, and when (in seconds) its `beats` and its `moves` have last changed."""

    post: _Post
    alive_at: float
    moved_at: float


def _collective(frames: Iterable[FrameType]) -> str:
    """Return the collective that the frames, innermost first, wait for, such as "the all-reduce", or "" if there is none."""
    for frame in frames:
        if frame.f_code is Communicator.wait.__code__:
            return f"the {frame.f_locals['kind']}"
        if frame.f_globals.get("__name__") == distributed_c10d.__name__:
            return f"the {frame.f_code.co_name.replace('_', '-')}"
    return ""
