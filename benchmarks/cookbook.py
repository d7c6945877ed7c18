"""The model of PyTorch's tutorial on ZeroRedundancyOptimizer: 20 x Linear(2000, 2000), Adam, a batch of 20.

Source: https://pytorch.org/tutorials/recipes/zero_redundancy_optimizer.html. On two GPUs, it prints 335 MB for the local
model, 656 MB after DistributedDataParallel, 992 MB before the step, and 1361 MB after it, or 1697 MB without sharding.
"""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contenders import Setup
from benchmarks.memory_profile import free_unused_memory
from forecast.activations import LiveBytes
from zero import ShardedDataParallel, ShardedOptimizer
from zero.host_comm import gather_objects
from zero.layout import BucketMB

# without bucket views, as in the tutorial, DistributedDataParallel keeps its buckets in addition to the gradients
IMPLEMENTATIONS = ("tutorial: Adam", "tutorial: ZeroRedundancyOptimizer", "adamw", "torch", "sharded")
LAYERS, WIDTH, BATCH, LEARNING_RATE = 20, 2000, 20, 0.01


def cookbook_rows(setup: Setup) -> list[dict[str, Any]]:
    """Return one row per implementation, with the figures of the fullest rank in MB. Needs to be called on all ranks.

    The figures are peaks, as in the tutorial: on a GPU of the allocator, on a CPU of the bytes of all live tensors.

    Raises:
        RuntimeError: if the sum of the parameters after the step is not equal on all ranks and for all implementations.
    """
    rows, sums = [], {}
    for implementation in IMPLEMENTATIONS:
        free_unused_memory()
        by_rank = gather_objects(_train(implementation, setup))
        if len({total for _, total in by_rank}) > 1:
            raise RuntimeError(f"{implementation}: the ranks have different parameters: {[total for _, total in by_rank]}")
        sums[implementation] = by_rank[0][1]
        figures = {point: max(points[point] for points, _ in by_rank) for point in by_rank[0][0]}
        rows.append({"mode": implementation, **figures, "check: sum of weights": f"{sums[implementation]:.6f}"})
    if len(set(sums.values())) > 1:
        raise RuntimeError(f"the implementations have different parameters: {sums}")
    return rows


def _train(implementation: str, setup: Setup) -> tuple[dict[str, float], float]:
    """Return megabytes by point, and the sum of the parameters in float64."""
    live, device = LiveBytes(), setup.device
    on_gpu = device.type == "cuda"
    allocated = torch.cuda.memory_allocated() if on_gpu else 0
    points: dict[str, float] = {}

    def record(point: str) -> None:
        dist.barrier()  # gloo holds the tensors of the last collective until it takes the next one
        points[f"{point}, MB"] = (torch.cuda.max_memory_allocated() - allocated if on_gpu else live.peak) / 1e6

    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with nullcontext() if on_gpu else live:
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(device)
        record("local model")
        model, optimizer = _wrapped(implementation, module, setup.bucket_mb)
        record("after wrapping")
        torch.manual_seed(dist.get_rank())
        inputs, labels = torch.randn(BATCH, WIDTH, device=device), torch.randn(BATCH, WIDTH, device=device)
        nn.functional.mse_loss(model(inputs), labels).backward()
        record("before step")
        optimizer.step()
        if isinstance(optimizer, ShardedOptimizer):
            optimizer.synchronize()
        record("after step")
    return points, sum(param.detach().double().sum().item() for param in module.parameters())


def _wrapped(implementation: str, module: nn.Module, bucket_mb: BucketMB) -> tuple[nn.Module, torch.optim.Optimizer]:
    if implementation == "sharded":
        sharded = ShardedOptimizer(module.parameters(), torch.optim.Adam, bucket_mb=bucket_mb, lr=LEARNING_RATE)
        return ShardedDataParallel(module, sharded, overlap=True), sharded
    model = DistributedDataParallel(module, gradient_as_bucket_view=not implementation.startswith("tutorial"))
    if implementation in ("torch", "tutorial: ZeroRedundancyOptimizer"):
        return model, ZeroRedundancyOptimizer(module.parameters(), optimizer_class=torch.optim.Adam, lr=LEARNING_RATE)
    return model, torch.optim.Adam(module.parameters(), lr=LEARNING_RATE)
