"""A small model with everything that trips sharded optimizers, and the oracle: plain AdamW on the mean gradient."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from zero import Muon, ShardedDataParallel, ShardedOptimizer
from zero.build import build, clip_grad_norm_
from zero.flags import Flags


class Toy(nn.Module):
    """Tied, frozen and unused parameters, biases, and sizes that no world size divides."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.hidden = nn.Linear(7, 7)
        self.norm = nn.LayerNorm(7)
        self.frozen = nn.Linear(7, 7)
        self.unused = nn.Linear(3, 5)
        self.scale = nn.Parameter(torch.tensor(1.0))  # no dimensions
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)

    def forward(self, tokens, targets):
        x = self.norm(self.frozen(torch.tanh(self.hidden(self.embedding(tokens))))) * self.scale
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

    def param_groups(self, muon=False):
        params = [param for param in self.parameters() if param.requires_grad]
        others = [param for param in params if not muon or param not in {self.hidden.weight, self.unused.weight}]
        groups = [
            {"params": [param for param in others if param.dim() >= 2], "weight_decay": 0.1},
            {"params": [param for param in others if param.dim() < 2], "weight_decay": 0.0},
        ]
        if muon:  # in float32, so that the ranks' rounding is not amplified
            matrices = [param for param in params if param not in set(others)]
            groups.append({"params": matrices, "weight_decay": 0.1, "matrices": 1, "ns_dtype": "float32"})
        return groups


def make_toy(seed=0):
    torch.manual_seed(seed)
    return Toy()


def batch(step, rank):
    """Tokens and targets, each (4, 6), different at every step and on every rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(11, (2, 4, 6), generator=generator).unbind()


MODES = {
    "adamw": Flags(use_zero1=False),
    "torch": Flags(zero1_impl="torch"),
    "sharded": Flags(bucket_mb=0.0002),  # 50 elements: several buckets
    "gradients": Flags(bucket_mb=0.0002, shard_gradients=True),
}


def build_toy(mode, seed=0, muon=False, freeze=True, overlap=(), **others):
    """`mode`: one of MODES, or flags. `overlap`: names of modules."""
    model = make_toy(seed)
    if freeze:  # DistributedDataParallel refuses parameters without a gradient
        model.unused.requires_grad_(False)
    units = [model.get_submodule(name) for name in overlap]
    how = {"overlap": units, "lr": 0.01, "betas": (0.9, 0.95), **others}
    return build(model, model.param_groups(muon), MODES.get(mode, mode), **how)


def sharded_toy(seed=0, optimizer_cls=torch.optim.AdamW, shard_gradients=False, overlap=(), **kwargs):
    """Both of zero's classes by hand; the unused parameter is trainable. `overlap`: names of modules."""
    model = make_toy(seed)
    groups = model.param_groups(optimizer_cls is Muon)
    optimizer = ShardedOptimizer(groups, optimizer_cls, **{"bucket_mb": 0.0002, "lr": 0.01, **kwargs})
    units = [model.get_submodule(name) for name in overlap]
    return ShardedDataParallel(model, optimizer, shard_gradients, overlap=units), optimizer


def toy_loss(model, number, rank):
    """Of the micro-step with this number."""
    return model(*batch(number, rank))


def train(model, optimizer, rank, steps, clip=0.0, first=0, micro_steps=1, decay_lr=True, loss_of=toy_loss):
    for step in range(first, first + steps):
        for group in optimizer.param_groups if decay_lr else ():
            group["lr"] = 0.01 / (1 + step)
        for micro_step in range(micro_steps):
            model.require_backward_grad_sync = micro_step == micro_steps - 1
            (loss_of(model, step * micro_steps + micro_step, rank) / micro_steps).backward()
        if clip:
            norm = clip_grad_norm_(optimizer, clip)
            assert norm > clip, "the clip must bite"
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    getattr(optimizer, "synchronize", int)()  # with overlap


def refused(error, message, do, *args, **kwargs):
    """It raises such an error, with a message that matches."""
    with pytest.raises(error, match=message):
        do(*args, **kwargs)


def of_rank_0(value, group=None):
    """What rank 0 passes, on all ranks of the group."""
    values = [value]
    dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]


def weights(model):
    return {name.removeprefix("module."): tensor.detach().clone() for name, tensor in model.state_dict().items()}


def largest_difference(a, b):
    """Over all tensors, relative to the largest magnitude in `b`."""
    assert a.keys() == b.keys()
    scale = max(tensor.abs().max() for tensor in b.values())
    return max((a[name] - b[name]).abs().max() for name in a) / scale


def assert_equal(a, b, where=""):
    """The same nested dicts and lists with bit-identical tensors of one dtype and device."""
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_equal(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list):
        assert len(a) == len(b), where
        for index, (left, right) in enumerate(zip(a, b, strict=True)):
            assert_equal(left, right, f"{where}[{index}]")
    elif isinstance(a, torch.Tensor):
        assert (a.dtype, a.device) == (b.dtype, b.device), where
        assert torch.equal(a, b), where
    else:
        assert a == b, where
