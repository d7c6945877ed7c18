"""Traces of a few iterations by torch.profiler, and snapshots of the memory of a GPU."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from distributed.ranks import print0
from distributed.watchdog import position

WAIT, WARM_UP, ACTIVE = 5, 2, 3  # iterations: to skip, to record in vain, because a profiler begins slowly, and of the trace


class Profiler:
    """Records a few iterations of a run. Every rank writes its own files; nothing here is a collective.

    The files are `rank<r>.json.gz`, a trace with allocations for https://ui.perfetto.dev or chrome://tracing, and on a GPU also
    `rank<r>_memory.pickle`, a snapshot for https://docs.pytorch.org/memory_viz. Both are written after the last recorded
    iteration. The snapshot shows the allocations since construction, at most the last 100,000, and all memory in use. Unless
    the profiler is `enabled`, all methods do nothing.
    """

    def __init__(self, folder: str, rank: int, device: torch.device, enabled: bool) -> None:
        self._folder, self._rank, self._on_gpu = folder, rank, device.type == "cuda"
        # waits for communication in flight, before the recording ends: torch would write the end of it to freed memory
        self.wait: Callable[[], Any] = lambda: None
        self._profile: profile | None = None
        if not enabled:
            return
        if self._on_gpu:
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=100_000)
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])],
            schedule=schedule(wait=WAIT, warmup=WARM_UP, active=ACTIVE, repeat=1),
            on_trace_ready=self._write,
            profile_memory=True,
        )
        self._profile.start()

    def step(self) -> bool:
        """Count an iteration that has ended, and return whether this took long because the files were written."""
        if self._profile is None:
            return False
        is_last = self._profile.step_num + 1 == WAIT + WARM_UP + ACTIVE
        with position.at("profiling", patient=True):
            if is_last:
                self.finish()
            else:
                self._profile.step()
        return is_last

    def finish(self) -> None:
        """Stop recording. If the run has ended within the recorded iterations, write those that there are."""
        if self._profile is None:
            return
        self.wait()
        self._profile.stop()
        if self._profile.step_num < WAIT + WARM_UP:
            print0(f"WARNING: no profile was written: the run has ended within its first {WAIT + WARM_UP} iterations")
        self._profile = None

    def _write(self, profiler: profile) -> None:
        try:
            os.makedirs(self._folder, exist_ok=True)
            path = os.path.join(self._folder, f"rank{self._rank}")
            profiler.export_chrome_trace(f"{path}.json.gz")
            if self._on_gpu:
                torch.cuda.memory._dump_snapshot(f"{path}_memory.pickle")
        except OSError as error:  # for example, the disk is full
            print(f"WARNING: rank {self._rank} cannot write its profile: {error}", flush=True)
            return
        finally:
            if self._on_gpu:
                torch.cuda.memory._record_memory_history(enabled=None)
        if self._rank == 0:
            by = "self_device_time_total" if self._on_gpu else "self_cpu_time_total"
            print(profiler.key_averages().table(sort_by=by, row_limit=10, max_name_column_width=40))
            print(f"wrote the profile of each rank to {self._folder}", flush=True)
