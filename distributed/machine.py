"""The machine of a rank: device, dtype, CPU threads and peak FLOP/s, and the facts about them for `run.json` and wandb."""

import importlib.metadata
import os
import platform
import re
import subprocess
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from zero.flags import weight_dtype
from zero.host_comm import gather_objects, is_rank_0

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Dense tensor-core peaks in bfloat16 or float16, in TFLOP/s, from the data sheets of NVIDIA and AMD. data_sheet_flops() takes
# the first name that matches whole words of torch.cuda.get_device_name(), so longer names come before shorter names.
PEAK_TFLOPS = {
    "B200": 2250.0,
    "GH200": 989.4,
    "H200": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 149.7,
    "A30": 165.0,
    "A10G": 70.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "V100": 125.0,
    "T4": 65.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "MI300X": 1307.4,
    "MI250X": 191.5,  # one of the two dies; each die is a separate device
}


def resolve(device: str, dtype: str, param_dtype: str = "float32") -> tuple[str, str]:
    """Replace 'auto' and check the device and the dtypes.

    Args:
        device: 'auto', 'cpu', 'cuda', 'cuda:1', 'mps'.
        dtype: dtype of the computation, or 'auto'.
        param_dtype: dtype of the weights. If it is less precise than float32, the computation must use the same dtype.

    Returns:
        The device and the dtype of the computation.

    Raises:
        ValueError: if this machine has no such device, or the two dtypes do not fit together.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = device.partition(":")
    counts = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if kind not in counts or (index and not index.isdigit()) or int(index or 0) >= counts[kind]:
        found = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        raise ValueError(f"device={device} is not available; this machine has {found}; use for example --device=cpu")
    best = "float32"
    if kind == "cuda":
        best = "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    return device, resolve_dtype(dtype, param_dtype, best)


def resolve_dtype(dtype: str, param_dtype: str, best: str) -> str:
    """Return the dtype of the computation.

    Args:
        dtype, param_dtype: see `resolve`.
        best: what 'auto' stands for if the weights are float32.

    Raises:
        ValueError: if the two dtypes do not fit together.
    """
    weights = weight_dtype(param_dtype)
    if dtype == "auto":
        dtype = best if weights == "float32" else weights
    if weights not in ("float32", dtype):
        raise ValueError(f"param_dtype={param_dtype} computes in {weights}, not in dtype={dtype}; use --dtype={weights}")
    return dtype


def autocast(device: torch.device, dtype: str) -> AbstractContextManager[Any]:
    """Return the context in which forward computes in `dtype`."""
    return nullcontext() if dtype == "float32" else torch.amp.autocast(device.type, DTYPES[dtype])


def device_name(device: torch.device) -> str:
    """Return the product name of the GPU, or of the processor if the system reports it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
        if names:
            return names[0]
    return platform.processor() or platform.machine()


def is_slow_on_cpu(device: torch.device, dtype: str) -> bool:
    """Return whether the device is a CPU that is known to lack instructions for `dtype`; autocast is slow without them."""
    flags = {"bfloat16": {"avx512_bf16", "amx_bf16", "bf16"}, "float16": {"avx512_fp16", "amx_fp16", "asimdhp"}}
    if device.type != "cpu" or dtype == "float32" or not os.path.exists("/proc/cpuinfo"):
        return False
    with open("/proc/cpuinfo") as file:
        return flags[dtype].isdisjoint(file.read().split())


def multiplies_in_float32(transposed: bool) -> bool:
    """Return whether this CPU holds a bfloat16 matrix product in float32 as well while it computes it.

    oneDNN does so with AVX-512 where the instructions for bfloat16 are missing. With AVX2, PyTorch itself does so where only
    the first factor is `transposed`, as in the gradient of a weight (`gemm_transb_` in ATen's BlasKernel.cpp).
    """
    level = torch.backends.cpu.get_cpu_capability()
    return is_slow_on_cpu(torch.device("cpu"), "bfloat16") and (level == "AVX512" or (transposed and level == "AVX2"))


def divide_threads(local_world_size: int) -> None:
    """Give each rank on this machine its share of the cores. torchrun would give each rank a single thread."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // local_world_size))


def data_sheet_flops(name: str) -> float | None:
    """Return the peak FLOP/s in bfloat16 of a GPU, such as 'H100' or 'NVIDIA H100 80GB HBM3'; None: it is not in the list."""
    return next((tflops * 1e12 for part, tflops in PEAK_TFLOPS.items() if re.search(rf"\b{part}\b", name)), None)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the peak FLOP/s of one rank, which corresponds to an MFU of 100 %.

    For bfloat16 and float16 on a GPU in the table, this is the figure of the data sheet. In all other cases, this function
    multiplies large matrices for 0.2 s and takes the fastest product.
    """
    if device.type == "cuda" and dtype != torch.float32 and (flops := data_sheet_flops(torch.cuda.get_device_name(device))):
        return flops
    size = 8192 if device.type == "cuda" else 512
    a = torch.ones(size, size, device=device, dtype=dtype)
    fastest = float("inf")  # seconds
    begin = time.perf_counter()
    while time.perf_counter() < begin + 0.2:
        start = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * size**3 / fastest


def environment(device: torch.device) -> dict[str, Any]:
    """Return facts about this run: device, backend, names of the devices, one per rank, versions, and on rank 0 the commit.

    Needs to be called on all ranks.
    """
    return {
        "device": device.type,
        "backend": dist.get_backend() if dist.is_initialized() else None,
        "devices": gather_objects(device_name(device)),
        "versions": {**versions(), "python": platform.python_version(), "wandb": _version("wandb")},
        "git_commit": _git_commit() if is_rank_0() else None,
    }


def versions() -> dict[str, str | None]:
    """Return the versions of what every rank computes with."""
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "cuda": torch.version.cuda,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """Return the commit of this code, with "-dirty" if files have changed since, or None if it is not a git checkout."""
    folder = os.path.dirname(os.path.abspath(__file__))
    command = ["git", "-C", folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
