"""What the machine at hand has: the default device, number format and threads, and its peak for the MFU."""

import os
import re
import time

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
    ("MI250X", 383.0),
)


def default_device() -> str:
    """'cuda' where there is one, else 'cpu'."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_dtype(device_type: str) -> str:
    """bfloat16 on GPUs that have it, float16 on older ones, float32 on a CPU."""
    if device_type != "cuda":
        return "float32"
    return "bfloat16" if torch.cuda.is_bf16_supported() else "float16"


def cpu_has(dtype: torch.dtype) -> bool:
    """Whether this CPU computes in `dtype` with instructions of its own; without them autocast works, but slowly."""
    flags = {torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16"), torch.float16: ("avx512_fp16", "amx_fp16", "asimdhp")}
    try:
        with open("/proc/cpuinfo") as file:
            words = set(file.read().split())
    except OSError:
        return False
    return dtype == torch.float32 or any(flag in words for flag in flags[dtype])


def divide_threads(local_world_size: int) -> None:
    """Give each rank of this machine its share of the cores; torchrun would give each a single thread."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // local_world_size))


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second at which the MFU of one rank would be 100 %.

    On a GPU of the table the data sheet's figure for bfloat16 and float16; for anything else the fastest of a few large
    matrix products, measured here and now.
    """
    if device.type == "cuda" and dtype != torch.float32:
        name = torch.cuda.get_device_name(device)
        for part, tflops in _PEAK_TFLOPS:
            if re.search(rf"\b{part}\b", name):
                return tflops * 1e12
    size = 8192 if device.type == "cuda" else 1024
    a = torch.ones(size, size, device=device, dtype=dtype)
    seconds = []
    for _ in range(8):
        _synchronize(device)
        start = time.perf_counter()
        a @ a
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
