"""The machine of a rank: device, dtype, CPU threads and peak FLOP/s, and the facts about them for `run.json` and wandb."""

import os
import platform
import re
import subprocess
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from zero.host_comm import gather_objects, is_rank_0
from zero.options import weight_dtype

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Card(NamedTuple):
    """A GPU, or one of its dies if each is a device."""

    tflops: float  # dense peak of the tensor cores in bfloat16 or float16
    memory_gb: float  # all that CUDA reports, in 10^9 bytes: the least that was seen
    link_gbit: float  # to the other GPUs of its machine, one way: NVLink or Infinity Fabric, otherwise PCI Express
    memory_gbps: float  # read or written, in 10^9 bytes per second
    has_bfloat16: bool = True


# From the data sheets of NVIDIA and AMD, products summed in float32; the memory from PyTorch's error messages ("has a total
# capacity of 22.03 GiB").
CARDS = {
    "B200": Card(2250.0, 191.4, 7200, 8000),
    "GH200": Card(989.4, 101.4, 3600, 4000),
    "H200": Card(989.4, 149.9, 3600, 4800),
    "H100 PCIe": Card(756.0, 84.9, 512, 2000),
    "H100 NVL": Card(835.0, 99.8, 512, 3900),
    "H100": Card(989.4, 84.9, 3600, 3350),
    "A100-40": Card(312.0, 42.2, 2400, 1555),
    "A100": Card(312.0, 84.9, 2400, 2039),
    "A800": Card(312.0, 84.9, 1600, 2039),
    "A6000": Card(154.8, 51.0, 256, 768),
    "6000 Ada": Card(364.2, 47.7, 256, 960),
    "A40": Card(149.7, 47.5, 256, 696),
    "A30": Card(165.0, 25.2, 256, 933),
    "A10G": Card(70.0, 23.6, 256, 600),
    "A10": Card(125.0, 23.6, 256, 600),
    "L40S": Card(362.0, 47.5, 256, 864),
    "L40": Card(181.0, 47.5, 256, 864),
    "L4": Card(121.0, 23.6, 256, 300),
    "V100-32": Card(125.0, 34.0, 1200, 900, has_bfloat16=False),
    "V100": Card(125.0, 16.9, 1200, 900, has_bfloat16=False),
    "T4": Card(65.0, 15.6, 128, 320, has_bfloat16=False),
    "5090": Card(209.5, 33.6, 512, 1792),
    "5080": Card(112.6, 16.6, 512, 960),
    "4090": Card(165.2, 25.2, 256, 1008),
    "4080": Card(97.5, 16.6, 256, 717),
    "4070 Ti": Card(80.2, 12.5, 256, 504),
    "3090": Card(71.0, 25.2, 256, 936),
    "3080": Card(59.5, 10.5, 256, 760),
    "2080 Ti": Card(53.8, 11.5, 128, 616, has_bfloat16=False),
    "MI300X": Card(1307.4, 206.0, 3584, 5300),
    "MI250X": Card(191.5, 68.7, 800, 1638),
}

_ANY_CARD = r"nvidia|tesla|amd|instinct|generation|sxm\d?|hbm\d?e?"  # words that do not tell one card from another

# What a process takes on a GPU in addition to tensors, in 10^9 bytes. The context of CUDA, from the same messages ("non-PyTorch
# memory"): 0.2 on an L4 (evo2#190), 0.5 on a 4090 (pytorch#16417). Workspaces of cuBLAS and cuBLASLt, for forward's thread and
# for backward's: 32 MiB each from Hopper on, 4 to 8 MiB before (pytorch#120925).
CUDA_GB = 0.6
# A communicator of NCCL: 0.5 and 0.7 on two and four A100 (nccl#964), 1.1 on eight H100 without PyTorch's memory, and 3.3 more
# after the first all-to-all (nccl#1685), which Muon and bfloat16 weights start.
NCCL_GB = 0.6
NCCL_ALL_TO_ALL_GB = 3.9
MIB = 2**20


def resolve(device: str, dtype: str, param_dtype: str = "auto") -> tuple[str, str]:
    """Return the device ('cpu', 'cuda', 'cuda:1', 'mps') and the dtype of the computation, with 'auto' replaced.

    Raises ValueError if this machine has no such device, or as `resolve_dtype`.
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
    """Return the dtype of the computation. Weights that are all less precise than float32 need a computation in their dtype.

    `best` is what 'auto' stands for if they are not. 'float16': the GPU has no bfloat16.

    Raises ValueError if the two dtypes do not fit together, or the GPU lacks that of the weights.
    """
    weights = weight_dtype(param_dtype)
    if best == "float16" and weights != "float32":
        raise ValueError(
            f"param_dtype={param_dtype}: this GPU has no bfloat16 and computes in float16; use "
            "--param_dtype=auto. state_dtype, activation_checkpointing and loss_chunk save memory there"
        )
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
    names = re.search(r"^model name\s*: (.*)", _cpuinfo(), re.MULTILINE)
    return names[1].strip() if names else platform.processor() or platform.machine()


def is_slow_on_cpu(device: torch.device, dtype: str) -> bool:
    """Return whether the device is a CPU that is known to lack instructions for `dtype`; autocast is slow without them."""
    flags = {"bfloat16": {"avx512_bf16", "amx_bf16", "bf16"}, "float16": {"avx512_fp16", "amx_fp16", "asimdhp"}}
    if device.type != "cpu" or dtype == "float32" or not (known := _cpuinfo().split()):
        return False
    return flags[dtype].isdisjoint(known)


def multiplies_in_float32(transposed: bool) -> bool:
    """Return whether this CPU takes a temporary float32 copy of a bfloat16 matrix product.

    oneDNN does so with AVX-512 where the instructions for bfloat16 are missing. With AVX2, PyTorch itself does so where only
    the first factor is `transposed`, as in the gradient of a weight (`gemm_transb_` in ATen's BlasKernel.cpp).
    """
    level = torch.backends.cpu.get_cpu_capability()
    return is_slow_on_cpu(torch.device("cpu"), "bfloat16") and (level == "AVX512" or (transposed and level == "AVX2"))


@cache
def _cpuinfo() -> str:
    """Return what Linux says of the processors; elsewhere ''."""
    with suppress(OSError), open("/proc/cpuinfo") as file:
        return file.read()
    return ""


def divide_threads(local_world_size: int) -> None:
    """Give each rank on this machine its share of the cores, unless the user has set OMP_NUM_THREADS."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given and (given != "1" or "TORCHELASTIC_RUN_ID" not in os.environ or b"OMP_NUM_THREADS=1" in _variables_of_parent()):
        return  # otherwise torchrun has set 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // local_world_size))


def _variables_of_parent() -> list[bytes]:
    """Return the environment that the parent of this process was started with, where Linux tells."""
    with suppress(OSError), open(f"/proc/{os.getppid()}/environ", "rb") as file:
        return file.read().split(b"\0")
    return []


def card(name: str) -> Card | None:
    """Return what is known of a GPU, such as 'h100', 'A100-40' or 'NVIDIA A100-SXM4-40GB'; None: it is not in the list.

    A name with any other word is another card: a laptop's, a slice of one (MIG), '4090 D'.
    """
    words = re.findall(r"[a-z0-9]+", re.sub(r"(geforce|rtx) ?", " ", name.lower()))
    known = {re.sub(r"[^a-z0-9]", "", key.lower()): found for key, found in CARDS.items()}
    sizes = [size[1] for word in words if (size := re.fullmatch(r"(\d{2,3})(gb?)?", word))]  # GB
    for dropped in ("", "|pcie"):
        parts = [word for word in words if not re.fullmatch(rf"\d{{2,3}}(gb?)?|{_ANY_CARD}{dropped}", word)]
        for key in ("".join(parts + sizes), "".join(parts)):
            if key in known and all(int(size) > 0.9 * known[key].memory_gb for size in sizes):
                return known[key]
    return None


def usual_mfu(numel: int) -> float:
    """Return the MFU in per cent that others have published for full batches, of the nearer one of two sizes.

    124M: 30 to 36 on one to eight H100 (Jjschwartz/gollem), 29 on eight A100 (nanoGPT's README), 31 and 37 on one (llm.c#323,
    nanoGPT's transformer_sizing.ipynb). XL: 42 on an H100 (gollem), 41 to 42 on eight A100 (llm.c#469). Other cards: unknown.
    """
    return 33.0 if numel < 440e6 else 42.0


def allocated(nbytes: int) -> int:
    """Return the bytes that PyTorch counts for a new tensor on a GPU, see c10/cuda/CUDACachingAllocator.cpp.

    From 10 MiB on, each has a segment, in steps of 2 MiB. Those of 1 to 10 MiB share segments of 20 MiB. What is left of a
    segment counts for the tensor before it, unless it is more than 1 MiB; with expandable_segments, nothing is left.
    """
    if nbytes <= MIB:
        return -(-nbytes // 512) * 512
    fitting = 1 if nbytes >= 10 * MIB else 20 * MIB // nbytes
    left = -nbytes % (2 * MIB) if fitting == 1 else 20 * MIB - fitting * nbytes
    return nbytes + (left // fitting if left <= MIB else 0)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the peak FLOP/s of one rank, which corresponds to an MFU of 100 %; 0 for a CPU, whose speed varies too much.

    For bfloat16 and float16 on a GPU in the table, this is the figure of the data sheet. In all other cases, this function
    multiplies large matrices for 0.2 s and takes the fastest product.
    """
    if device.type == "cpu":
        return 0.0
    if device.type == "cuda" and dtype != torch.float32 and (found := card(torch.cuda.get_device_name(device))):
        return found.tflops * 1e12
    size = 8192 if device.type == "cuda" else 512
    a = torch.ones(size, size, device=device, dtype=dtype)
    seconds, end = [], time.perf_counter() + 0.2
    while time.perf_counter() < end:
        start = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def environment(device: torch.device) -> dict[str, Any]:
    """Return facts about this run: device, backend, names of the devices, one per rank, versions, and on rank 0 the commit.

    Needs to be called on all ranks. The commit has "-dirty" if files have changed since; without a git checkout, it is None.
    """
    commit, folder = None, os.path.dirname(os.path.abspath(__file__))
    if is_rank_0():
        command = ["git", "-C", folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        with suppress(OSError, subprocess.SubprocessError):
            commit = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    return {
        "device": device.type,
        "backend": dist.get_backend() if dist.is_initialized() else None,
        "devices": gather_objects(device_name(device)),
        "versions": {**versions(), "python": platform.python_version()},
        "git_commit": commit,
    }


def versions() -> dict[str, str | None]:
    """Return the versions of what every rank computes with."""
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "cuda": torch.version.cuda,
    }
