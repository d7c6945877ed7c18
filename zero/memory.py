"""Memory use in bytes: predicted from a plan, or measured on tensors and on the device."""

import resource
import sys

import torch

from zero.layout import Plan
from zero.optimizer import ShardedOptimizer
from zero.partition import parameters, partition
from zero.placeholders import local_gradient


def predicted_bytes(
    plan: Plan, rank: int, *, tensors_per_parameter: int = 2, wrapped: bool = True, shard_gradients: bool = False
) -> dict[str, int]:
    """Return the bytes that a rank will hold for the model and its optimizer. A model on the meta device is enough.

    Args:
        plan: the plan of any implementation, see `zero.layout`.
        tensors_per_parameter: per-element state tensors. The number is 2 for Adam and AdamW (`exp_avg`, `exp_avg_sq`). They
            have the dtype of the update.
        wrapped: a ShardedOptimizer is used with ShardedDataParallel, which converts frozen parameters to `param_dtype` and
            keeps gradients as shards once they are sent.
        shard_gradients: see ShardedDataParallel.

    Returns:
        parameters       the weights that forward and backward use, with the padding of flat buffers
        gradients        full gradients, between the micro-steps of an iteration
        gradient_shards  mean gradients of the owned slices, from the last backward to the end of the step
        state            per-element optimizer state after every parameter has been updated. `step` counters, 4 bytes per
                         slice, are not counted.
        master           masters of the owned slices
    """
    trainable = [number for number, spec in enumerate(plan.params) if spec.requires_grad]
    frozen = [spec for spec in plan.params if not spec.requires_grad]
    frozen_dtype = plan.param_dtype if wrapped else None
    owned = [slice_ for slice_ in plan.slices(rank) if plan.params[slice_.param].requires_grad]
    updated = sum(slice_.numel * plan.update_dtype(slice_.param).itemsize for slice_ in owned)
    predicted = {
        "parameters": sum(spec.numel * (frozen_dtype or spec.dtype).itemsize for spec in frozen),
        "gradients": 0,
        "gradient_shards": 0,
        "state": tensors_per_parameter * updated,
        "master": 0,
    }
    if not plan.buffers:
        predicted["gradients"] = sum(plan.params[number].numel * plan.params[number].dtype.itemsize for number in trainable)
        predicted["parameters"] += predicted["gradients"]
    for buffer in plan.buffers:
        shard_bytes = sum(shards[rank].numel for shards in buffer.layout.shards) * buffer.update_dtype.itemsize
        predicted["parameters"] += buffer.layout.padded_numel * buffer.dtype.itemsize
        predicted["gradients"] += 0 if shard_gradients else sum(buffer.layout.numels) * buffer.dtype.itemsize
        predicted["gradient_shards"] += shard_bytes if wrapped else 0
        predicted["master"] += shard_bytes if buffer.has_masters else 0
    return predicted


def held_bytes(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the bytes that this rank holds now for the model and its optimizer, by purpose.

    Returns:
        parameters  the weights that forward and backward use
        gradients   full gradients, and with ShardedDataParallel also this rank's gradient shards
        state       per-element optimizer state; excludes `step` counters
        master      float32 masters of the owned slices
        buckets     other memory for communication: buckets that are being filled, sent or received, and tensors in the
                    pool for later buckets
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
    """Return the peak memory of this process in bytes: allocated memory on a GPU, the resident set size on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux reports KiB
