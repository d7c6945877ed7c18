"""Building blocks of models, each with something that trips a wrapper: every one takes and returns x, (4, 3, WIDTH)."""

import types
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

WIDTH = 10
now = types.SimpleNamespace(step=0, rank=0)  # for blocks that do other things at other times, or on other ranks


class Part(nn.Module):
    """Modules, parameters and buffers by name, and a forward that is a function of this module and x."""

    def __init__(self, function: Callable[[nn.Module, torch.Tensor], torch.Tensor], **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x):
        return self.function(self, x)


def linear(**kwargs):
    return nn.Linear(WIDTH, WIDTH, **kwargs)


def parameter(*shape):
    return nn.Parameter(torch.randn(*shape) / WIDTH**0.5)


def tied():
    first, second = linear(), linear()
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second)


def used_when(condition, use=lambda layer, x: layer(x)):
    """One layer that is used always, and one that is used when `condition()` says so."""

    def forward(part, x):
        x = torch.tanh(part.always(x))
        return x + use(part.sometimes, x) if condition() else x

    return Part(forward, always=linear(), sometimes=linear())


def recurrent(cls, **kwargs):
    return Part(lambda part, x: part.inner(x)[0], inner=cls(WIDTH, WIDTH, batch_first=True, **kwargs))


def in_dtype(dtype):
    return Part(lambda part, x: part.inner(x.to(dtype)).to(x.dtype), inner=linear(dtype=dtype))


def embeds_with_head():
    """The tied weight of a language model, where the head alone has it: the parent reads it before the head is called."""

    def forward(part, x):
        tokens = (torch.arange(12) + now.step).reshape(4, 3) % WIDTH
        return part.head(x + F.embedding(tokens, part.head.weight))

    return Part(forward, head=linear(bias=False))


def read_by_sibling():
    """A module that reads the weight of another one, which is not its child and is called after it."""
    owner = linear()
    borrowed = [owner]  # in a list, so that it is not a child
    reader = Part(lambda _, x: F.linear(x, borrowed[0].weight))
    return Part(lambda part, x: part.owner(torch.tanh(part.reader(x))), reader=reader, owner=owner)


def functional_call():
    def forward(part, x):
        changed = {name: 1.01 * param for name, param in part.inner.named_parameters()}
        return torch.func.functional_call(part.inner, changed, x)

    return Part(forward, inner=linear())


def of_weight(weight):
    return Part(lambda part, x: F.linear(x, part.weight), weight=weight)


def before_buffer(mix):
    return Part(lambda part, x: F.linear(part.inner(x), part.mix), inner=linear(), mix=mix)


def strided(*shape):
    """Every other element of something."""
    return parameter(*shape, 2).data[..., 0]


def expanded_buffer():
    """One number as a vector; what lies in memory after that number belongs to each rank itself."""
    memory = torch.cat([torch.rand(1) + 0.5, torch.full((WIDTH,), float(dist.get_rank()))])

    def forward(part, x):
        assert (part.others == dist.get_rank()).all(), "memory beyond the expanded buffer has been overwritten"
        return part.inner(x) * part.scale

    part = Part(forward, inner=linear(), scale=memory[:1].expand(WIDTH))
    part.others = memory[1:]
    return part


def buffers_that_share_memory():
    """A running mean, and a view of a part of it."""
    whole = torch.rand(WIDTH) + 0.5

    def forward(part, x):
        with torch.no_grad():
            part.whole.lerp_(part.inner.weight.diagonal().abs() + 0.5, 0.1)
        return part.inner(x) * part.some.mean()

    return Part(forward, inner=linear(), whole=whole, some=whole[::2])


def hooked_gradient():
    inner = linear()
    inner.weight.register_hook(lambda gradient: 0.5 * gradient)
    return inner


def inner_gradient():
    """A gradient within forward, whose graph backward goes through again."""

    def forward(part, x):
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            return torch.autograd.grad(torch.tanh(part.inner(x)).square().sum(), x, create_graph=True)[0]

    return Part(forward, inner=linear())


def same_module_in_several_checkpoints(use_reentrant):
    """The layers of ALBERT: all have the same weights, and each is a checkpoint."""

    def forward(part, x):
        for _ in range(3):
            x = x + torch.tanh(checkpoint(part.inner, x, use_reentrant=use_reentrant))
        return x

    return Part(forward, inner=linear())


def checkpoint_of_part(use_reentrant):
    """The weight of a child is read within a checkpoint, and the child called outside of it."""

    def forward(part, x):
        inside = checkpoint(lambda x: F.linear(x, part.inner.weight), x, use_reentrant=use_reentrant)
        return part.inner(torch.tanh(inside))

    return Part(forward, inner=linear())


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "linear": linear,
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "batch norm": lambda: Part(lambda part, x: part.norm(x.flatten(0, 1)).view(x.shape), norm=nn.BatchNorm1d(WIDTH)),
    "tied": tied,
    "frozen": lambda: nn.Sequential(linear().requires_grad_(False), linear()),
    "unused": lambda: used_when(lambda: False),
    "used in odd steps": lambda: used_when(lambda: now.step % 2 == 1),
    "used in the first step": lambda: used_when(lambda: now.step == 0),
    "used by one rank": lambda: used_when(lambda: now.rank == 1),
    "used by the ranks in turn": lambda: used_when(lambda: now.rank == now.step % 2),
    "parameter list by rank": lambda: Part(
        lambda part, x: F.linear(x, part.parameters_[(now.step + now.rank) % 3]),
        parameters_=nn.ParameterList(parameter(WIDTH, WIDTH) for _ in range(3)),
    ),
    "experts by rank": lambda: Part(
        lambda part, x: part.experts[(now.step + now.rank) % 3](x), experts=nn.ModuleList(linear() for _ in range(3))
    ),
    "legacy weight norm": lambda: weight_norm(linear()),
    "weight norm": lambda: parametrizations.weight_norm(linear()),
    "legacy spectral norm": lambda: spectral_norm(linear()),
    "spectral norm": lambda: parametrizations.spectral_norm(linear()),
    "pruned": lambda: prune.random_unstructured(linear(), "weight", amount=0.4),
    "attention": lambda: Part(lambda part, x: part.inner(x, x, x)[0], inner=nn.MultiheadAttention(WIDTH, 2, batch_first=True)),
    "encoder layer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.1, batch_first=True),
    "lstm": lambda: recurrent(nn.LSTM),
    "gru": lambda: recurrent(nn.GRU, num_layers=2),
    "channels last": lambda: Part(
        lambda part, x: part.conv(x.reshape(4, 3, 2, WIDTH // 2)).reshape(4, 3, WIDTH),
        conv=nn.Conv2d(3, 3, 3, padding=1).to(memory_format=torch.channels_last),
    ),
    "transposed parameter": lambda: Part(
        lambda part, x: F.linear(F.linear(x, part.weight), part.weight.t()), weight=nn.Parameter(parameter(WIDTH, 5).data.t())
    ),
    "strided parameter": lambda: of_weight(nn.Parameter(strided(WIDTH, WIDTH))),
    "frozen strided parameter": lambda: of_weight(nn.Parameter(strided(WIDTH, WIDTH), requires_grad=False)),
    "strided buffer": lambda: before_buffer(strided(WIDTH, WIDTH)),
    "transposed buffer": lambda: before_buffer(parameter(WIDTH, WIDTH).data.t()),
    "expanded buffer": expanded_buffer,
    "buffers that share memory": buffers_that_share_memory,
    "no elements": lambda: Part(lambda part, x: part.inner(x) + part.none.sum(), inner=linear(), none=parameter(0, WIDTH)),
    "no dimensions": lambda: Part(lambda part, x: x * part.scale, scale=nn.Parameter(torch.tensor(0.5))),
    "float64": lambda: in_dtype(torch.float64),
    "bfloat16": lambda: in_dtype(torch.bfloat16),
    "read by parent": lambda: Part(lambda part, x: F.linear(x, part.head.weight, part.head.bias), head=linear()),
    "embeds with head": embeds_with_head,
    "read by sibling": read_by_sibling,
    "functional call": functional_call,
    "hooked gradient": hooked_gradient,
    "inner gradient": inner_gradient,
    "one module in several reentrant checkpoints": lambda: same_module_in_several_checkpoints(True),
    "one module in several checkpoints": lambda: same_module_in_several_checkpoints(False),
    "reentrant checkpoint on one rank": lambda: used_when(lambda: now.rank == 1, partial(checkpoint, use_reentrant=True)),
    "read in a reentrant checkpoint": lambda: checkpoint_of_part(True),
    "read in a checkpoint": lambda: checkpoint_of_part(False),
}

# how a model runs its block
RUNS: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "call": lambda block, x: block(x),
    "twice": lambda block, x: block(torch.tanh(block(x))),
    "forward": lambda block, x: block.forward(x),
    "checkpoint": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "reentrant twice": lambda block, x: checkpoint(
        block, torch.tanh(checkpoint(block, x, use_reentrant=True)), use_reentrant=True
    ),
}

# what computes its weight in a hook, of which only a call takes notice, and whose weight torch cannot copy
BY_HOOK = {"legacy weight norm", "legacy spectral norm", "pruned"}
