"""Memory use in bytes, measured on tensors. `forecast.dry_run` predicts it."""

import torch
from torch.nn.parallel import DistributedDataParallel

from zero.codecs import Encoded
from zero.gradients import SentGradient
from zero.optimizer import ShardedOptimizer
from zero.sharded_state import parameters, partition


def held_bytes(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None = None) -> dict[str, int]:
    """Return the bytes that this rank holds now for its optimizer and the wrapped `model`, by purpose.

    parameters  the weights that forward and backward use
    gradients   full gradients, and with ShardedDataParallel also this rank's gradient shards
    state       per-element optimizer state; excludes `step` counters
    master      float32 masters of the owned slices, or their remainders
    buckets     other memory for communication: buckets being filled, sent or received, and the pool for later ones
    """
    params = list(dict.fromkeys([*parameters(optimizer), *(() if model is None else model.parameters())]))
    entries = [entry for state in partition(optimizer).inner.state.values() for entry in state.items()]
    held = {
        "parameters": sum(param.nbytes for param in params),
        "gradients": sum(
            grad.nbytes for param in params if (grad := param.grad) is not None and not isinstance(grad, SentGradient)
        ),
        "state": sum(value.nbytes for key, value in entries if key != "step" and isinstance(value, torch.Tensor | Encoded)),
        "master": 0,
        "buckets": 0,
    }
    if isinstance(model, DistributedDataParallel):
        # a synchronized gradient is a view into a bucket; one that accumulates after zero_grad has its own memory
        own = [param.grad.nbytes for param in params if param.grad is not None and not param.grad._is_view()]
        held["gradients"] = sum(own) + sum(param.nbytes for param in params if param.requires_grad)
    if isinstance(optimizer, ShardedOptimizer):
        for buffer in optimizer.placed.buffers:
            held["parameters"] += buffer.data.nbytes - sum(param.nbytes for param in buffer.params.values())
        held["master"] = sum(bucket.masters.nbytes for bucket in optimizer.placed.buckets if bucket.masters is not None)
        for purpose, count in optimizer.source.held_bytes().items():
            held[purpose] += count
    return held
