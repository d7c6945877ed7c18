"""The memory of a rank at the points of a step, its peak, and the allocator's counters."""

import resource
import sys
from contextlib import suppress
from typing import Literal

import torch

from zero.memory import held_bytes

Point = Literal["after_init", "before_step", "after_step"]


class MemoryMeter:
    """Measures the memory of this rank. No method waits for the device or for another rank.

    On a GPU, the memory at a point is what the allocator has handed out. On a CPU, it is the bytes of the model, its optimizer
    and its communication (`zero.memory.held_bytes`), because the memory of the process also holds what the system's allocator
    has not given back. The peak is that of the allocator on a GPU, and of the process on a CPU.

    Args:
        model, optimizer: what `zero.build.build` returned.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.device = next(model.parameters()).device
        self.held_before_step = 0  # bytes of the model, its optimizer and its communication
        self._state = 0  # bytes of optimizer state, with float32 masters
        self._points: dict[Point, int] = {"after_init": 0, "before_step": 0, "after_step": 0}
        self._largest_peak = 0
        self.measure("after_init")

    def measure(self, point: Point) -> None:
        """Measure what this rank holds now.

        Args:
            point: `after_init`: before the first step. `before_step`: all gradients are there. `after_step`: gradients are
                dropped, parameters may still be in flight.
        """
        on_gpu = self.device.type == "cuda"
        held = {} if on_gpu and point != "before_step" else held_bytes(self.optimizer, self.model)
        if point == "before_step":
            self.held_before_step = sum(held.values())
            self._state = held["state"] + held["master"]
        self._points[point] = torch.cuda.memory_allocated(self.device) if on_gpu else sum(held.values())

    def peak(self) -> int:
        """Returns the peak in bytes since the process started."""
        return max(self._largest_peak, peak_bytes(self.device))

    def forget_peak(self) -> None:
        """Begin a new peak: what the process took until now was not the run."""
        self._largest_peak = 0
        reset_peak(self.device)

    def take(self) -> dict[str, float]:
        """Returns the figures by name, and begins a new peak."""
        peak, self._largest_peak = peak_bytes(self.device), self.peak()
        reset_peak(self.device)
        figures = {f"{point}_mb": count / 1e6 for point, count in self._points.items()}
        figures |= {"peak_mb": peak / 1e6, "optimizer_state_mb": self._state / 1e6}
        if self.device.type == "cuda":
            counters = torch.cuda.memory_stats(self.device)
            figures["reserved_mb"] = torch.cuda.memory_reserved(self.device) / 1e6
            figures |= {"alloc_retries": counters.get("num_alloc_retries", 0), "ooms": counters.get("num_ooms", 0)}
        return figures


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: allocated memory on a GPU, the resident set size on a CPU.

    It is the peak since the last `reset_peak`, or since the process started.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux reports KiB


def reset_peak(device: torch.device) -> None:
    """Begin a new peak, where the system can: on a GPU, and on Linux."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        with suppress(OSError), open("/proc/self/clear_refs", "w") as file:  # not writable in every container
            file.write("5")  # man 5 proc: resets the peak resident set size
