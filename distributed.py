"""The ranks of a run: who this process is, as torchrun says in environment variables, and the process group of all."""

import os
from typing import NamedTuple

import torch
import torch.distributed as dist


class Launch(NamedTuple):
    """This process among the ranks of a run; not distributed: started alone."""

    distributed: bool = False
    rank: int = 0
    local_rank: int = 0  # among those of this machine
    world_size: int = 1
    local_world_size: int = 1


def launched() -> Launch:
    """What the launch variables say. They count together or not at all.

    Without RANK this process is alone, whatever WORLD_SIZE and others a cluster or a container sets.

    Raises:
        ValueError: if RANK stands without the others, or one of them is impossible.
    """
    if "RANK" not in os.environ:
        return Launch()
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ValueError(f"RANK is set without {', '.join(missing)}; {_REMEDY}")
    rank, world_size, port = _integer("RANK"), _integer("WORLD_SIZE"), _integer("MASTER_PORT")
    local_rank, local_world_size = _integer("LOCAL_RANK", 0), _integer("LOCAL_WORLD_SIZE", 1)
    if not 0 <= rank < world_size:
        raise ValueError(f"RANK={rank} is not one of the ranks 0 to WORLD_SIZE-1={world_size - 1}; {_REMEDY}")
    if not 0 < port < 2**16:
        raise ValueError(f"MASTER_PORT={port} is not a port, 1 to 65535; {_REMEDY}")
    if local_rank < 0 or local_world_size < 1:
        raise ValueError(f"LOCAL_RANK={local_rank} and LOCAL_WORLD_SIZE={local_world_size} cannot be; {_REMEDY}")
    return Launch(True, rank, local_rank, world_size, local_world_size)


def start_process_group(launch: Launch, device: str, backend: str = "auto") -> str:
    """Start torch.distributed; 'auto' is NCCL where every rank has a GPU of its own, else gloo. Called on all ranks.

    Returns:
        The device of this rank; of 'cuda' the GPU that goes with its place on the machine.
    """
    if device.startswith("cuda"):
        device = f"cuda:{launch.local_rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    store, _, _ = next(dist.rendezvous("env://"))
    if backend == "auto":
        backend = "nccl" if device.startswith("cuda") and _has_each_rank_a_gpu(device, store, launch.world_size) else "gloo"
    device_id = torch.device(device) if backend == "nccl" else None
    dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world_size, device_id=device_id)
    return device


def _has_each_rank_a_gpu(device: str, store: dist.Store, world_size: int) -> bool:
    """Whether no two ranks share a GPU, be it that each sees all of its machine or only its own."""
    if store.add(f"ranks on GPU {torch.cuda.get_device_properties(device).uuid}", 1) > 1:
        store.set("a GPU is shared", "")
    if store.add("ranks that have said so", 1) == world_size:
        store.set("all ranks have said so", "")
    store.wait(["all ranks have said so"])
    return not store.check(["a GPU is shared"])


_REMEDY = "start with torchrun, or unset RANK to start alone"


def _integer(name: str, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(f"{name}={text[:40]} is not an integer; {_REMEDY}") from error
