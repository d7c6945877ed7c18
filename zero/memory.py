"""Bytes: predicted from a plan, measured on tensors and on the device."""

import resource
import sys

import torch

from zero.layout import Plan
from zero.optimizer import ShardedOptimizer
from zero.partition import parameters, partition
from zero.placeholders import local_gradient


def predicted_bytes(plan: Plan, rank: int, tensors_per_parameter: int = 2) -> dict[str, int]:
    """Bytes that a rank will hold for the model and its optimizer. A model on the meta device is enough for a plan.

    Args:
        plan: of any implementation, see `zero.layout`.
        tensors_per_parameter: 2 for Adam and AdamW (`exp_avg`, `exp_avg_sq`), each of the dtype of the update.

    Returns:
        parameters       the weights that forward and backward use, with the padding of flat buffers
        gradients        full ones, while they accumulate
        gradient_shards  mean gradients of the owned slices, from the last backward to the end of the step
        state            per-element optimizer state once every parameter has been updated; `step` counters, 4 bytes per
                         slice, are not counted
        master           masters of the owned slices
    """
    frozen = [spec for spec in plan.params if not spec.requires_grad]
    trainable = [spec for spec in plan.params if spec.requires_grad]
    owned = [piece for piece in plan.slices(rank) if plan.params[piece.param].requires_grad]
    predicted = {
        "parameters": sum(spec.numel * (plan.param_dtype or spec.dtype).itemsize for spec in frozen),
        "gradients": 0,
        "gradient_shards": 0,
        "state": tensors_per_parameter * sum(piece.numel * plan.update_dtype(piece.param).itemsize for piece in owned),
        "master": 0,
    }
    if not plan.buffers:
        predicted["gradients"] = sum(spec.numel * spec.dtype.itemsize for spec in trainable)
        predicted["parameters"] += predicted["gradients"]
    for buffer in plan.buffers:
        shard_numel = sum(shards[rank].numel for shards in buffer.layout.shards)
        predicted["parameters"] += buffer.layout.padded_numel * buffer.dtype.itemsize
        predicted["gradients"] += sum(buffer.layout.numels) * buffer.dtype.itemsize
        predicted["gradient_shards"] += shard_numel * buffer.update_dtype.itemsize
        if buffer.has_masters:
            predicted["master"] += shard_numel * buffer.update_dtype.itemsize
    return predicted


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
