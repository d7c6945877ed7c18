"""A small net, wrapped, a backward on it, and gathers that come late; what several tests of the engine share."""

import contextlib
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from zero import ShardedDataParallel, ShardedOptimizer
from zero.collectives import Communicator

TINY_MB = 0.0002  # 50 elements: several buckets


def net(outputs=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, outputs))


def wrap(module, cls=torch.optim.AdamW, lr=0.01, bucket_mb=TINY_MB, param_dtype="float32", **kwargs):
    optimizer = ShardedOptimizer(module.parameters(), cls, bucket_mb=bucket_mb, param_dtype=param_dtype, lr=lr)
    return ShardedDataParallel(module, optimizer, **kwargs), optimizer


def inputs(step=0):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def loss_of(model, step=0):
    """In the dtype of the model; of a function, in float32."""
    dtype = next(model.parameters()).dtype if isinstance(model, nn.Module) else torch.float32
    return model(inputs(step).to(dtype)).float().square().sum()


def backward(model, step=0):
    loss_of(model, step).backward()


def steps(model, optimizer, count=1, first=0):
    for step in range(first, first + count):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def average_gradients(params):
    """The mean over the ranks where any of them has a gradient; a rank without one counts as zero."""
    for param in params:
        has_one = torch.tensor(0.0 if param.grad is None else 1.0)
        dist.all_reduce(has_one)
        if has_one:
            share = torch.zeros_like(param) if param.grad is None else param.grad / dist.get_world_size()
            share = share.contiguous()
            dist.all_reduce(share)
            if param.grad is None:
                param.grad = torch.empty_like(param)
            param.grad.copy_(share)


def late_gathers(ever=True):
    """In the block, the gathers of this rank are there only when somebody waits for them; until then all other shards are nan.

    If not `ever`, they never arrive, a defect that must be found.
    """
    all_gather = Communicator.all_gather

    def gather(comm, bucket):
        received = bucket.clone()  # the order of the collectives must stay the same on all ranks
        works = all_gather(comm, received)
        for owner, shard in enumerate(bucket.chunk(comm.shard_size)):
            if owner != comm.rank:
                shard.fill_(float("nan"))

        def wait():
            for work in works:
                work.wait()
            with _disable_current_modes():  # a real gather is no operation of this thread
                bucket.copy_(received)

        return [SimpleNamespace(wait=wait)] if ever else works

    return mock.patch.object(Communicator, "all_gather", gather)


def late_on_the_last_rank():
    """Only there, so that late gathers and real ones are mixed."""
    return late_gathers() if dist.get_rank() == dist.get_world_size() - 1 else contextlib.nullcontext()
