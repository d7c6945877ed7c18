"""Bytes: predicted from the partition, measured on tensors and on the device."""

import resource
import sys

import torch

from zero.arriving import local_gradient
from zero.optimizer import ShardedOptimizer
from zero.partition import parameters, partition


def state_bytes_predicted(optimizer: torch.optim.Optimizer, tensors_per_parameter: int = 2) -> list[int]:
    """Bytes of per-element optimizer state on each rank, by rank, once every parameter has been updated.

    Args:
        tensors_per_parameter: 2 for Adam and AdamW (`exp_avg`, `exp_avg_sq`), each of the dtype of the update. The `step`
            counters, 4 bytes per slice, are not counted, nor are master weights.
    """
    params = parameters(optimizer)
    masters = isinstance(optimizer, ShardedOptimizer) and optimizer.param_dtype is not None
    return [
        tensors_per_parameter
        * sum(
            piece.numel * (torch.float32.itemsize if masters else params[piece.param].element_size())
            for piece in slices
            if params[piece.param].requires_grad
        )
        for slices in partition(optimizer).slices
    ]


def held_bytes(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes that this rank holds now for the model and its optimizer, by purpose.

    Returns:
        parameters  the weights that forward and backward use
        gradients   full ones, and with ShardedDataParallel this rank's shards
        state       per-element optimizer state, `step` counters not counted
        master      float32 masters of the owned slices
        buckets     what communication holds besides: buckets being filled, sent or received, or kept for the next ones
    """
    params = parameters(optimizer)
    states = partition(optimizer).inner.state.values()
    held = {
        "parameters": sum(param.nbytes for param in params),
        "gradients": sum(gradient.nbytes for param in params if (gradient := local_gradient(param)) is not None),
        "state": sum(
            value.nbytes
            for state in states
            for key, value in state.items()
            if key != "step" and isinstance(value, torch.Tensor)
        ),
        "master": 0,
        "buckets": 0,
    }
    if isinstance(optimizer, ShardedOptimizer):
        held["parameters"] += sum(
            buffer.data.nbytes - sum(param.nbytes for param in buffer.params) for buffer in optimizer.buffers
        )
        held["master"] = sum(bucket.master.nbytes for bucket in optimizer.buckets if bucket.master is not None)
        for purpose, count in optimizer.source.held_bytes().items():
            held[purpose] += count
    return held


def peak_bytes(device: torch.device) -> int:
    """Peak memory of this process in bytes: what the allocator held on a GPU, the resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
