"""What the machine at hand has: device, number format, threads, and its peak for the MFU."""

import os
import re
import time
from typing import Any

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Dense tensor-core peaks in bfloat16 or float16, in TFLOP/s, from NVIDIA's and AMD's data sheets. The first name that
# stands as whole words in torch.cuda.get_device_name() counts, so longer names come before shorter ones.
_PEAK_TFLOPS = (
    ("B200", 2250.0),
    ("GH200", 989.4),
    ("H200", 989.4),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.4),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A40", 149.7),
    ("A30", 165.0),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("V100", 125.0),
    ("T4", 65.0),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
    ("MI300X", 1307.4),
    ("MI250X", 191.5),  # of one of its two dies, each a device of its own
)


def resolve(device: str, dtype: str, param_dtype: str = "float32") -> tuple[str, Any]:
    """The device and the number format to compute in, with what 'auto' stands for filled in.

    Args:
        param_dtype: the number format of the weights. Weights in less than float32 are computed with in that.

    Raises:
        ValueError: if this machine has no such device, or the two number formats do not go together.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = device.partition(":")
    counts = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if kind not in counts or (index and not index.isdigit()) or int(index or 0) >= counts[kind]:
        raise ValueError(f"device={device} is not on this machine, which has {_count(counts)}; use for example --device=cpu")
    if dtype == "auto":
        dtype = param_dtype
        if kind == "cuda" and param_dtype == "float32":
            dtype = "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    if param_dtype not in ("float32", dtype):
        raise ValueError(
            f"param_dtype={param_dtype} computes in {param_dtype}, not in dtype={dtype}; use --dtype={param_dtype}"
        )
    return device, dtype


def _count(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())


def is_slow_on_cpu(device: torch.device, dtype: str) -> bool:
    """Whether the device is a CPU that is known to lack instructions for `dtype`; autocast works without them, but slowly."""
    flags = {"bfloat16": {"avx512_bf16", "amx_bf16", "bf16"}, "float16": {"avx512_fp16", "amx_fp16", "asimdhp"}}
    if device.type != "cpu" or dtype == "float32" or not os.path.exists("/proc/cpuinfo"):
        return False
    with open("/proc/cpuinfo") as file:
        return flags[dtype].isdisjoint(file.read().split())


def divide_threads(local_world_size: int) -> None:
    """Give each rank of this machine its share of the cores; torchrun would give each a single thread."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // local_world_size))


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second at which the MFU of one rank would be 100 %.

    On a GPU of the table the data sheet's figure for bfloat16 and float16; for anything else the fastest large
    matrix product of a fifth of a second, measured here and now.
    """
    if device.type == "cuda" and dtype != torch.float32:
        name = torch.cuda.get_device_name(device)
        for part, tflops in _PEAK_TFLOPS:
            if re.search(rf"\b{part}\b", name):
                return tflops * 1e12
    size = 8192 if device.type == "cuda" else 512
    a = torch.ones(size, size, device=device, dtype=dtype)
    fastest = float("inf")  # seconds
    begin = time.perf_counter()
    while time.perf_counter() < begin + 0.2:
        start = time.perf_counter()
        a @ a
        _synchronize(device)
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * size**3 / fastest


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
