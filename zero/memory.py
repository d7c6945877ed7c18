"""Bytes: predicted from the partition, measured on tensors and on the device."""

import resource
import sys

import torch

from zero.partition import parameters, partition


def state_bytes_predicted(optimizer: torch.optim.Optimizer, tensors_per_parameter: int = 2) -> list[int]:
    """Bytes of per-element optimizer state on each rank, by rank, once every parameter has been updated.

    Args:
        tensors_per_parameter: 2 for Adam and AdamW (`exp_avg`, `exp_avg_sq`), each of the parameter's dtype. The `step`
            counters, 4 bytes per slice, are not counted.
    """
    params = parameters(optimizer)
    return [
        tensors_per_parameter
        * sum(piece.numel * params[piece.param].element_size() for piece in slices if params[piece.param].requires_grad)
        for slices in partition(optimizer).slices
    ]


def state_bytes_measured(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of per-element optimizer state that this rank really holds now."""
    inner = partition(optimizer).inner
    tensors = [value for state in inner.state.values() for key, value in state.items() if key != "step"]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, torch.Tensor))


def peak_bytes(device: torch.device) -> int:
    """Peak memory of this process in bytes: what the allocator held on a GPU, the resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
