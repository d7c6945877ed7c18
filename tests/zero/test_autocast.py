"""Linear layers that are stored as autocast rounds them train as float32 ones do, bit for bit."""

import copy
import itertools
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ranks import run_in_turn
from torch import nn
from toy import assert_equal, refused

from model import GPT, GPTConfig
from zero import ShardedDataParallel, ShardedGradScaler, ShardedOptimizer, autocast_parameters
from zero.build import build, clip_grad_norm_, optimizer_of
from zero.checkpoint import consolidate, model_state_dict
from zero.flags import Flags

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
STEPS = 3


@dataclass
class Case:
    """A run of a small GPT."""

    ranks: int = 2
    micro_steps: int = 1
    clip: float = 0.0
    dtype: torch.dtype = BFLOAT16
    muon: bool = False
    compiled: bool = False
    checkpointing: bool = False
    loss_chunk: int = 0
    shard_gradients: bool = False
    model: dict = field(default_factory=dict)  # other sizes
    options: dict = field(default_factory=dict)  # of ShardedOptimizer
    freeze: tuple = ()  # ends of the names of parameters


CASES = {
    "one rank": Case(1, 2),
    "one rank, clipped": Case(1, clip=0.1, options={"state_dtype": "int8"}),
    "two ranks": Case(),
    "biases, three micro-steps": Case(micro_steps=3, model={"bias": True}),
    "clipped": Case(micro_steps=2, clip=0.1),
    "shard_gradients": Case(micro_steps=2, shard_gradients=True),
    "checkpointing, loss_chunk": Case(micro_steps=2, checkpointing=True, loss_chunk=16),
    "dropout": Case(model={"dropout": 0.2}),
    "int8": Case(clip=0.1, options={"state_dtype": "int8"}),
    "state in bfloat16": Case(options={"state_dtype": "bfloat16"}),
    "muon": Case(muon=True),
    "muon, int8": Case(muon=True, clip=0.1, options={"state_dtype": "int8"}),
    "float16": Case(dtype=FLOAT16, micro_steps=2, clip=0.1),
    "compiled": Case(compiled=True, micro_steps=2, model={"bias": True, "n_layer": 1}),
    "frozen": Case(freeze=("mlp.c_proj.weight", "wte.weight", "ln_1.weight")),
    "one large bucket": Case(options={"bucket_mb": 10}),
    "three ranks": Case(3, clip=0.1),
    "four ranks": Case(4, 2, clip=0.1, model={"bias": True}),
    "four ranks, shard_gradients, int8": Case(4, 3, shard_gradients=True, options={"state_dtype": "int8"}),
    "replicas": Case(4, 2, options={"shard_size": 2}),
    "replicas, muon": Case(4, 2, muon=True, clip=0.1, options={"shard_size": 2}),
}
AS_ADAMW = {"one rank", "two ranks", "biases, three micro-steps", "checkpointing, loss_chunk", "dropout", "frozen"}


def a_gpt(case):
    torch.manual_seed(0)
    sizes = {"block_size": 16, "vocab_size": 33, "n_layer": 2, "n_head": 2, "n_embd": 32, "bias": False, **case.model}
    model = GPT(GPTConfig(**sizes))
    for name, param in model.named_parameters():
        nn.init.normal_(param, std=0.1)  # biases, too
        param.requires_grad_(not name.endswith(case.freeze or "\0"))
    model.activation_checkpointing, model.loss_chunk = case.checkpointing, case.loss_chunk
    if case.compiled:
        model.blocks[0].compile()
    return model


def wrapped(model, case, stored, also="\0"):
    """`stored`: the dtype of Linear layers, or "adamw". `also`: the end of the name of another parameter of this dtype."""
    groups = model.param_groups(0.1, {"ns_dtype": "float32"} if case.muon else None)
    groups = [{**group, "params": [param for param in group["params"] if param.requires_grad]} for group in groups]
    if stored == "adamw":
        return build(model, groups, Flags(use_zero1=False), lr=1e-2)
    optimizer_cls, how = optimizer_of(case.muon, "cpu", lr=1e-2)
    autocast = autocast_parameters(model, stored)
    autocast |= {param: stored for name, param in model.named_parameters() if name.endswith(also)}
    how |= {"registration_order": model.parameters(), "bucket_mb": 0.02, "autocast": autocast, **case.options}
    optimizer = ShardedOptimizer(groups, optimizer_cls, **how)
    return ShardedDataParallel(model, optimizer, case.shard_gradients, overlap=model.blocks), optimizer


def tokens_of(number, rank):
    return torch.randint(33, (2, 3, 16), generator=torch.Generator().manual_seed(7 * number + rank))


def trained(case, stored, spoil=lambda model: None, **others):
    """All that a run computes: losses, norms, an evaluation, a sample, on rank 0 a checkpoint. What it holds, and sends."""
    module = a_gpt(case)
    model, optimizer = wrapped(module, case, stored, **others)
    spoil(model)
    scaler = ShardedGradScaler("cpu", enabled=case.dtype == FLOAT16, init_scale=2.0**18)
    found, graphs, counters = [], [], torch._dynamo.utils.counters
    for number in range(STEPS * case.micro_steps):
        is_last = model.require_backward_grad_sync = (number + 1) % case.micro_steps == 0
        torch.manual_seed(100 * number + dist.get_rank())
        with torch.autocast("cpu", case.dtype):
            loss = model(*tokens_of(number, dist.get_rank()))[1]
        scaler.scale(loss / case.micro_steps).backward()
        found.append(loss.detach())
        graphs.append(counters["stats"]["unique_graphs"])
        if is_last:
            scaler.unscale_(optimizer)
            found.append(clip_grad_norm_(optimizer, case.clip or torch.inf))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert len(set(graphs)) == 1, "a block is compiled once"
    assert not counters["graph_break"]
    getattr(optimizer, "synchronize", int)()
    sent = dict(optimizer.comm.sent_bytes) if isinstance(optimizer, ShardedOptimizer) else {}
    module.eval()
    with torch.autocast("cpu", case.dtype), torch.no_grad():
        found.append(module(*tokens_of(99, 0))[1])
        torch.manual_seed(5)
        sample = module.generate(torch.zeros(1, 1, dtype=torch.long), 20)
    checkpoint = {"model": model_state_dict(module, optimizer), "optimizer": consolidate(optimizer)}
    held = {name: param.detach().clone() for name, param in module.named_parameters() if param.requires_grad}
    return {"numbers": torch.stack(found).double(), "sample": sample, "checkpoint": checkpoint}, held, sent


def both(case, with_adamw):
    """With float32 weights in the same buckets, as stored by autocast, and with plain AdamW."""
    return [trained(case, stored) for stored in (FLOAT32, case.dtype, *(["adamw"] if with_adamw else []))]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_values_are_those_of_float32_weights_in_the_same_buckets(ranks):
    cases = {name: case for name, case in CASES.items() if case.ranks == ranks}
    of_cases = run_in_turn(ranks, *(partial(both, case, name in AS_ADAMW) for name, case in cases.items()))
    for (name, case), by_rank in zip(cases.items(), of_cases, strict=True):
        for (expected, whole, sent_whole), (found, held, sent), *adamw in by_rank:
            assert_equal(found, expected, name)
            assert expected["numbers"].isfinite().any(), name
            rounded = {param for param in held if ".attn." in param or ".mlp." in param}
            for param, weight in held.items():
                assert weight.dtype == (case.dtype if param in rounded else FLOAT32), (name, param)
                assert torch.equal(weight, whole[param].to(weight.dtype)), (name, param)
            assert sent.get("reduce-scatter") == sent_whole.get("reduce-scatter"), name
            if ranks > 1 and case.dtype == BFLOAT16:  # a scaler skips steps
                others = 1 - 1 / case.options.get("shard_size", ranks)
                saved = STEPS * sum(2 * held[param].numel() for param in rounded) * others  # of 4 bytes
                assert sent_whole["all-gather"] - sent["all-gather"] == pytest.approx(saved, rel=0.02), name
            for plain, *_ in adamw:
                each = case.micro_steps + 1  # a norm comes after the losses of a step
                losses = [number for number in range(STEPS * each) if number % each < case.micro_steps]
                assert torch.equal(found["numbers"][losses], plain["numbers"][losses]), name
                if by_rank[0][1] is held:  # rank 0
                    weights, its = (each["checkpoint"]["model"] for each in (found, plain))
                    assert_equal({key: weights[key] for key in its}, dict(its), name)


def spoilt():
    """Whether runs are equal whose Linear layers add up gradients in 16 bits, or that round what is read in float32."""
    case = CASES["biases, three micro-steps"]
    sound, *_ = trained(case, BFLOAT16)
    found = {"narrow sums": trained(case, BFLOAT16, spoil=lambda model: model.reducer._casts.clear())[0]}
    for end in ("wte.weight", "wpe.weight"):
        found[end] = trained(case, BFLOAT16, also=end)[0]
    return {name: torch.equal(each["numbers"], sound["numbers"]) for name, each in found.items()}


def test_the_comparison_notices_narrow_sums_and_parameters_that_are_read_in_float32():
    assert run_in_turn(2, spoilt)[0] == [{"narrow sums": False, "wte.weight": False, "wpe.weight": False}] * 2


# -- what the contract says of them --------------------------------------------------------------------------------------


def contract():
    case = CASES["biases, three micro-steps"]
    module = a_gpt(case)
    model, optimizer = wrapped(module, case, BFLOAT16)
    weight, embedding = module.blocks[0].mlp.c_fc.weight, module.transformer.wte.weight
    message = r"stored in torch.bfloat16, .*forward in torch.autocast\('cpu', torch.bf"
    for context in (torch.autocast("cpu", FLOAT16), torch.autocast("cpu", enabled=False)):
        with context, pytest.raises(RuntimeError, match=message):
            model(*tokens_of(0, 0))
    refused(RuntimeError, "dtype", module, *tokens_of(0, 0))

    exact = torch.full_like(weight, 1 + 2.0**-8 + 2.0**-20, dtype=FLOAT32)  # neither of bfloat16, nor between two
    optimizer.set_parameter(weight, exact)
    assert (weight == 1 + 2.0**-7).all()
    half = torch.full_like(weight, 1 + 2.0**-8, dtype=FLOAT32)  # between two: to even
    state = module.state_dict() | {"transformer.h.1.mlp.c_fc.weight": half}
    model.load_state_dict({f"module.{name}": value for name, value in state.items()})
    assert (module.blocks[1].mlp.c_fc.weight == 1).all()
    assert weight.dtype == model.state_dict()["module.transformer.h.0.mlp.c_fc.weight"].dtype == BFLOAT16
    if (whole := model_state_dict(module, optimizer)) is not None:
        assert torch.equal(whole["transformer.h.1.mlp.c_fc.weight"], half)
        assert {value.dtype for value in whole.values()} == {FLOAT32}

    with torch.no_grad():
        embedding.mul_(0.5)  # has no master: the write counts
    optimizer.step()
    with torch.no_grad():
        weight.mul_(0.5)
    refused(RuntimeError, r"mlp.c_fc.weight was written to, but its master was not", optimizer.step)
    optimizer.set_parameter(weight, exact)

    copied = copy.deepcopy(model)
    assert copied.blocks[0].mlp.c_fc.weight.grad_dtype == FLOAT32
    with torch.autocast("cpu", BFLOAT16):
        for each in (copied, model):
            each(*tokens_of(0, 0))[1].backward()
    assert copied.blocks[0].mlp.c_fc.weight.grad.dtype == FLOAT32
    optimizer.zero_grad()
    with model.no_sync(), torch.autocast("cpu", BFLOAT16):
        model(*tokens_of(0, 0))[1].backward()
    assert weight.grad.dtype == FLOAT32
    with torch.autocast("cpu", BFLOAT16):
        model(*tokens_of(0, 0))[1].backward()
    refused(RuntimeError, "cannot be read", weight.grad.sum)
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()


def test_contract():
    run_in_turn(2, contract)


class Odd(nn.Module):
    """Linear layers, of which autocast always casts the parameters of one only."""

    def __init__(self):
        super().__init__()
        self.plain = nn.Linear(4, 4)
        self.embedding, self.head = nn.Embedding(4, 4), nn.Linear(4, 4)
        self.head.weight = self.embedding.weight
        self.attention = nn.MultiheadAttention(4, 1)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.old = nn.utils.weight_norm(nn.Linear(4, 4, bias=False))
        self.own = nn.Linear(4, 4)
        self.own.forward = lambda x: x * self.own.weight.sum()
        self.half = nn.Linear(4, 4).to(BFLOAT16)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_only_linear_layers_that_share_with_nobody_are_found():
    model = Odd()
    names = {param: name for name, param in model.named_parameters()}
    assert {names[param] for param in autocast_parameters(model, BFLOAT16)} == {"plain.weight", "plain.bias", "head.bias"}
    gpt = a_gpt(Case(model={"bias": True}))
    assert len(autocast_parameters(gpt, FLOAT16)) == 2 * 2 * 4
    assert gpt.lm_head.weight not in autocast_parameters(gpt, FLOAT16)


class Repeated(nn.Linear):
    """A layer that runs three times in a forward; autocast casts its weight once."""

    def __init__(self):
        super().__init__(16, 16)
        self.inner = nn.Linear(16, 16)

    def forward(self, x):
        return self.inner(torch.tanh(self.inner(torch.tanh(self.inner(super().forward(x))))))


def in_two_groups(stored):
    """Losses of a model whose groups were laid out one after the other."""
    torch.manual_seed(0)
    module = nn.Sequential(Repeated(), nn.Linear(16, 16))
    optimizer = ShardedOptimizer(module[0].parameters(), torch.optim.AdamW, autocast=autocast_parameters(module, stored))
    optimizer.add_param_group({"params": module[1].parameters(), "lr": 0.01})
    assert [buffer.data.dtype for buffer in optimizer.placed.buffers] == [stored, FLOAT32, stored]

    def loss_of(model, number):
        with torch.autocast("cpu", BFLOAT16):
            return model(torch.randn(8, 16, generator=torch.Generator().manual_seed(number))).float().square().sum()

    loss_of(module, 0).backward()
    if stored == BFLOAT16:
        refused(RuntimeError, "`autocast` needs ShardedDataParallel", optimizer.step)
    optimizer.zero_grad()
    model, losses = ShardedDataParallel(module, optimizer), []
    for number in range(6):
        model.require_backward_grad_sync = number % 2 == 1
        losses.append(loss_of(model, number))
        losses[-1].backward()
        if model.require_backward_grad_sync:
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack(losses).detach()


def test_groups_may_be_added_and_a_layer_may_run_several_times():
    float32, bfloat16 = run_in_turn(2, partial(in_two_groups, FLOAT32), partial(in_two_groups, BFLOAT16))
    assert all(map(torch.equal, float32, bfloat16))


def test_layer_norms_do_not_keep_a_bucket_of_embeddings_open():
    """Whether or not the order of registration is known, in which LayerNorms lie between Linear layers."""
    for is_known, dtype in itertools.product((True, False), (FLOAT32, BFLOAT16)):
        model = a_gpt(Case())
        names = {param: name for name, param in model.named_parameters()}
        how = {"registration_order": model.parameters() if is_known else None, "autocast": autocast_parameters(model, dtype)}
        buffers = ShardedOptimizer(model.param_groups(0.1), torch.optim.AdamW, **how).placed.buffers
        linear, norms, others = ([names[param] for param in buffer.params.values()] for buffer in buffers)
        assert (len(linear), len(norms)) == (8, 4 if is_known else 5)
        assert all(".attn." in name or ".mlp." in name for name in linear)
        assert all("ln_" in name for name in norms)
        first = ["transformer.h.0.ln_1.weight"] if is_known else []
        assert sorted(others) == [*first, "transformer.wpe.weight", "transformer.wte.weight"]
