"""zero.layout.plan and zero.flags: a plan made from a model without memory is that of the built optimizer."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_in_turn
from toy import MODES, Toy, make_toy

from forecast.prediction import Prediction
from model import GPT, GPTConfig
from zero.build import build
from zero.flags import Flags
from zero.held_bytes import held_bytes
from zero.layout import ParameterSpec, parameter_specs, plan, replicated_plan, zero_redundancy_plan
from zero.optimizer import ShardedOptimizer
from zero.options import Options
from zero.sharded_state import partition

FLOATS = [torch.float32, torch.bfloat16, torch.float64]
specs = st.lists(
    st.builds(
        ParameterSpec,
        shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
        dtype=st.sampled_from(FLOATS),
        device=st.just(torch.device("meta")),
        matrices=st.just(0),
        matrix_dtype=st.just(torch.bfloat16),
        state_tensors=st.integers(0, 3),
        requires_grad=st.booleans(),
        group=st.integers(0, 2),
        position=st.integers(-1, 5),
    ),
    max_size=9,
)
options = st.fixed_dictionaries(
    {"bucket_mb": st.sampled_from([75, 0.0002, 0.000001]), "param_dtype": st.sampled_from(["float32", "bfloat16"])}
)


@given(specs, st.integers(1, 9), options)
def test_every_element_has_one_owner_in_every_plan_and_state_bytes_are_those_of_the_slices(params, world_size, kwargs):
    for planned in (
        plan(params, world_size, Options(**kwargs)),
        zero_redundancy_plan(params, world_size),
        replicated_plan(params),
    ):
        owners = [[0] * max(spec.numel, 1) for spec in params]  # one without elements also has an owner
        for rank, held in enumerate(planned.state_bytes):
            for piece in planned.slices(rank):
                for element in range(piece.start, max(piece.stop, 1)):
                    owners[piece.param][element] += 1
                if (spec := params[piece.param]).requires_grad:
                    held -= spec.state_tensors * piece.numel * planned.update_dtypes[piece.param].itemsize
            assert held == 0
        assert len(planned.state_bytes) == planned.world_size
        assert all(count == 1 for parameter in owners for count in parameter)


def test_a_plan_for_no_ranks_is_refused():
    with pytest.raises(ValueError, match="world"):
        plan([ParameterSpec((3,), torch.float32, torch.device("cpu"))], 0)


# name: arguments of ShardedOptimizer
SETTINGS = {
    "equal shards": {},
    "small buckets": {"bucket_mb": 0.0002},
    "masters": {"bucket_mb": 0.0002, "param_dtype": "bfloat16"},
}


def planned_and_built(setting):
    """A plan made on the meta device is the built optimizer's, and its bytes are those that are held."""
    rank, world_size, kwargs = dist.get_rank(), dist.get_world_size(), SETTINGS[setting]
    with torch.device("meta"):
        meta = Toy()
    meta_groups = [*meta.param_groups(), {"params": list(meta.frozen.parameters())}]
    planned = plan(parameter_specs(meta_groups, meta.parameters()), world_size, Options(**kwargs))
    model = make_toy()
    groups = [*model.param_groups(), {"params": list(model.frozen.parameters())}]
    optimizer = ShardedOptimizer(groups, torch.optim.AdamW, registration_order=model.parameters(), **kwargs)
    part = partition(optimizer)
    assert [planned.slices(each) for each in range(world_size)] == [part.plan.slices(each) for each in range(world_size)]
    assert [piece.numel for piece in planned.slices(rank)] == [local.numel() for local in part.locals]
    assert [buffer.layout for buffer in planned.buffers] == [buffer.layout for buffer in optimizer.buffers]
    for param in model.parameters():  # so that there is state of every one
        param.grad = torch.ones_like(param) if param.requires_grad else None
    optimizer.step()
    trained = plan(parameter_specs(meta.param_groups(), meta.parameters()), world_size, Options(**kwargs))
    frozen = sum(param.nbytes for param in model.frozen.parameters())
    held, predicted = held_bytes(optimizer), Prediction(trained, rank, frozen=frozen).at("after step")
    for key in ("parameters", "state", "master"):
        assert (held[key], held[key] > 0) == (predicted[key], key != "master" or setting == "masters")


SIZES = GPTConfig(block_size=8, vocab_size=19, n_layer=2, n_head=2, n_embd=24, bias=False)
FLAGS = *MODES.values(), Flags(bucket_mb=0.0002, param_dtype="bfloat16")


def planned_and_chosen():
    """The plan that flags choose for a GPT on the meta device is that of the optimizer that they build."""
    for flags in FLAGS:
        with torch.device("meta"):
            meta = GPT(SIZES)
        planned = flags.plan(parameter_specs(meta.param_groups(0.1), meta.parameters()), dist.get_world_size())
        module = GPT(SIZES)
        built = partition(build(module, module.param_groups(0.1), flags, lr=0.01)[1]).plan
        assert all(planned.slices(rank) == built.slices(rank) for rank in range(planned.world_size)), flags


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_is_built_is_what_was_planned(world_size):
    run_in_turn(world_size, planned_and_chosen, *(partial(planned_and_built, setting) for setting in SETTINGS))


def test_specs_have_names_and_groups():
    with torch.device("meta"):
        model = GPT(SIZES)
    specs = parameter_specs(model.param_groups(0.1), model.parameters(), {p: name for name, p in model.named_parameters()})
    assert specs[0].name == "transformer.wte.weight"
    assert (specs[0].shape, specs[0].group, specs[0].position) == ((19, 24), 0, 0)
    assert {spec.group for spec in specs} == {0, 1}
