"""Memory at each point of a step: what is alive, what it consists of, and what was predicted."""

import ctypes
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from operator import itemgetter
from typing import Any, get_args
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.contenders import Contender, Setup
from forecast.live_bytes import LiveBytes
from forecast.modes import MODES, Mode
from forecast.prediction import PURPOSES, Point
from zero.checkpoint.state import snapshot
from zero.held_bytes import held_bytes
from zero.host_comm import gather_objects

MICRO_STEPS = 2  # of a step, so that gradients accumulate


class AllocatedBytes(nullcontext[None]):
    """In place of LiveBytes on a GPU: what its allocator has allocated in this context."""

    def __enter__(self) -> None:
        self.reset_peak()
        self._before = torch.cuda.memory_allocated()

    @property
    def now(self) -> int:
        return torch.cuda.memory_allocated() - self._before

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() - self._before

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()


class MemoryProfile:
    """Measures one contender on this rank. Every method needs to be called on all ranks.

    On a GPU, the figures are what the allocator has allocated. On a CPU, they are the bytes of all tensors that are alive.
    """

    def __init__(self, setup: Setup, mode: Mode, micro_steps: int = MICRO_STEPS) -> None:
        self.setup, self.mode, self.micro_steps = setup, mode, micro_steps
        self.points: dict[str, dict[str, Any]] = {}
        self.live = AllocatedBytes() if setup.device.type == "cuda" else LiveBytes()

    def measure(self, can_save: bool = True) -> dict[str, dict[str, Any]]:
        """Run two steps and return the bytes by point of a step: total and parts."""
        free_unused_memory()
        with self.live, resizes_count(self.live) if isinstance(self.live, LiveBytes) else nullcontext():
            self.contender = Contender(self.setup, self.mode)
            params, device_type = self.contender.module.parameters(), self.setup.device.type
            on_device = sum(param.nbytes for param in params if param.device.type == device_type)
            self._record("after init", {"parameters": on_device})
            self.live.reset_peak()
            with broadcasts_free_their_copies():
                self.contender.wrap()
            self._record("wrapping", {}, total=self.live.peak)
            self._record("after wrapping", self._held())
            # in its second forward, DistributedDataParallel makes its buckets again, beside those that hold gradients
            for _ in range(2 if self.mode.in_place else 1):
                self.contender.step([None] * self.micro_steps)
            self.contender.wait()
            self._last_step()
            if can_save and self.mode.is_built:
                saved = snapshot(self.contender.optimizer, self.contender.module)  # frees the pool
                self.live.reset_peak()
                with saved.arriving() as pieces:
                    for _ in pieces:  # as while one is written, the next one arrives
                        pass
                del saved
                self._record("saving", self._held(), total=self.live.peak)
        return self.points

    def _last_step(self) -> None:
        self.live.reset_peak()
        activations = [self._micro_step(is_last=False) for _ in range(self.micro_steps - 1)]
        held = self._held()
        if self.micro_steps > 1:
            self._record("accumulating", held)
        activations.append(self._micro_step(is_last=True))
        self.contender.clip()
        self.contender.wait()
        self._record("before step", self._held())
        self.contender.update()
        self.contender.wait()
        self._record("after step", self._held())
        self._record("peak", {**held, "activations": activations[0]}, total=self.live.peak)

    def _micro_step(self, is_last: bool) -> int:
        """Run forward and backward, and return the bytes of activations."""
        before = self.live.now
        with nullcontext() if is_last else self.contender.accumulating():
            loss = self.contender.forward()
            activations = self.live.now - before
            loss.backward()
        return activations

    def _record(self, point: str, parts: dict[str, int], total: int | None = None) -> None:
        if dist.get_backend() != "fake" and dist.get_world_size() > 1:
            for _ in range(10):  # each thread of gloo holds the tensors of its last collective until it takes the next one
                dist.barrier()
            time.sleep(0.02)
        total = self.live.now if total is None else total
        self.points[point] = {"total": total, **parts, "rest": total - sum(parts.values())}

    def _held(self) -> dict[str, int]:
        """Return the bytes of the model and its optimizer by purpose."""
        if self.mode.fully_shard is None:
            return held_bytes(self.contender.optimizer, self.contender.model)
        parts = [
            part._get_fsdp_state()._fsdp_param_group for part in self.contender.model.modules() if isinstance(part, FSDPModule)
        ]
        params = [param for part in parts if part is not None for param in part.fsdp_params]
        whole = [param._unsharded_param for param in params if hasattr(param, "_unsharded_param")]
        gradients = [param.sharded_param.grad for param in params] + [param.grad for param in whole]
        gradients += [param.unsharded_accumulated_grad for param in params]  # since torch 2.15 the same tensors
        states = self.contender.optimizer.state.values()
        return {
            "parameters": sum(_local_bytes(param.sharded_param) for param in params)
            + sum(param.untyped_storage().nbytes() for param in whole),
            "gradients": sum({id(each): _local_bytes(each) for each in gradients if each is not None}.values()),
            "state": sum(_local_bytes(value) for state in states for key, value in state.items() if key != "step"),
        }


@contextmanager
def resizes_count(live: LiveBytes) -> Iterator[None]:
    """Count what FSDP2 does: it frees the memory of storages that stay alive, and allocates it again."""
    resize = torch.UntypedStorage.resize_

    def counted(storage: torch.UntypedStorage, nbytes: int) -> Any:
        result = resize(storage, nbytes)
        live.resized(storage)
        return result

    with mock.patch.object(torch.UntypedStorage, "resize_", counted):
        yield


@contextmanager
def broadcasts_free_their_copies() -> Iterator[None]:
    """Let DistributedDataParallel pause after its broadcast of the weights, until gloo's thread has freed what it has sent."""
    send = torch.nn.parallel.distributed._sync_module_states

    def send_and_pause(*args: Any, **kwargs: Any) -> None:
        send(*args, **kwargs)
        time.sleep(0.05)

    with mock.patch("torch.nn.parallel.distributed._sync_module_states", send_and_pause):
        yield


def memory_rows(setup: Setup, modes: list[str], simulated_world_size: int = 0) -> Iterator[dict[str, Any]]:
    """Yield one row per mode and point, from the rank that holds the most at this point. Needs to be called on all ranks.

    With `simulated_world_size`, it is rank 0 of so many, of which the others do not exist; call it without a process group.
    PyTorch's fake process group takes the place of the communication, so the steps compute with wrong gradients, but take
    real memory.
    """
    for name in modes:
        mode, first = MODES[name], {"world_size": simulated_world_size} if simulated_world_size else {}
        with simulated_world(simulated_world_size) if simulated_world_size else nullcontext():
            own = MemoryProfile(setup, mode).measure(can_save=not simulated_world_size)
            by_rank = [own] if simulated_world_size else gather_objects(own)
            prediction = predicted_totals(setup, mode, dist.get_world_size())
        for point in own:
            figures = max((points[point] for points in by_rank), key=itemgetter("total"))
            predicted, total = prediction.get(point), figures["total"]
            off = None if predicted is None else 100 * (predicted / max(1, total) - 1)
            parts = {part: figures.get(part) for part in (*PURPOSES, "activations", "rest")}
            yield {**first, "mode": name, "point": point, "total": total, "predicted": predicted, "off by, %": off, **parts}


def predicted_totals(setup: Setup, mode: Mode, world_size: int) -> dict[str, int]:
    """Return the predicted bytes of the fullest rank by point, where there is a prediction."""
    held = setup.forecast(mode, world_size, MICRO_STEPS)
    if held is None:
        return {}
    numel = sum(spec.numel * spec.dtype.itemsize for spec in held.plan.params)
    return {
        "after init": numel if held.on_cpu else 0,
        "wrapping": held.construction,
        **{point: sum(held.at(point).values()) for point in get_args(Point)},
        "saving": held.saving_peak,
        "peak": held.peak_of_training,
    }


@contextmanager
def simulated_world(world_size: int) -> Iterator[None]:
    """Be rank 0 of a world whose other ranks do not exist."""
    gc.collect()  # an optimizer waits for its GPU when it is deleted
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        with mock.patch("torch.distributed.all_to_all_single", partial(_all_to_all_single, dist.all_to_all_single)):
            yield
    finally:
        dist.destroy_process_group()


def _all_to_all_single(original: Any, output: torch.Tensor, sent: torch.Tensor, *sizes: Any, **options: Any) -> Any:
    """The fake process group refuses a rank that sends nothing and receives something, which real ones allow."""
    return original(output, sent, *sizes, **options) if sent.numel() else original(sent, sent, **options)


def _local_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor, or of this rank's part of a DTensor."""
    return getattr(tensor, "_local_tensor", tensor).nbytes


def free_unused_memory() -> None:
    """Release the memory of freed tensors to the system, so that it does not hide what is allocated next."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)
