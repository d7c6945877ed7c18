"""A small net, wrapped, and a backward on it; what several tests of the engine share."""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

from zero import ShardedDataParallel, ShardedOptimizer
from zero.collectives import Communicator

TINY_MB = 0.0002  # 50 elements: several buckets


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def wrap(module, bucket_mb=TINY_MB, **kwargs):
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.AdamW, bucket_mb=bucket_mb, lr=0.01)
    return ShardedDataParallel(module, optimizer, **kwargs), optimizer


def wrap_plain(module, bucket_mb=None):
    return DistributedDataParallel(module), torch.optim.AdamW(module.parameters(), lr=0.01)


def inputs(step=0):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def backward(model, step=0):
    model(inputs(step)).square().sum().backward()


def make_gathers_late():
    """On the last rank a gather arrives only when somebody waits for it; until then its place holds nan."""
    if dist.get_rank() != dist.get_world_size() - 1:
        return
    all_gather = Communicator.all_gather

    class Late:
        def __init__(self, bucket, arriving, works):
            self.bucket, self.arriving, self.works = bucket, arriving, works

        def wait(self):
            for work in self.works:
                work.wait()
            with _disable_current_modes():  # a real gather is no operation of this thread
                self.bucket.copy_(self.arriving)

    def late(comm, bucket, sizes):
        arriving = bucket.clone()
        works = all_gather(comm, arriving, sizes)
        bucket.fill_(float("nan"))
        return [Late(bucket, arriving, works)]

    Communicator.all_gather = late


def same_under_both(trains, bucket_mb, overlap):
    """`trains(wrap)` gives the same tensors with this package's two classes as with torch's two."""
    ours = trains(lambda module: wrap(module, bucket_mb, overlap=overlap))
    gc.collect()
    plain = trains(wrap_plain)
    assert len(ours) == len(plain)
    assert all(tensor.isfinite().all() for tensor in ours)
    return max((left - right).abs().max().item() for left, right in zip(ours, plain, strict=True))
