"""The contract of ShardedDataParallel: what each of its sentences admits, and what it refuses, on two ranks."""

import atexit
import copy
import gc
import io
import pickle
import threading
import weakref
from functools import partial
from multiprocessing import util

import torch
import torch.distributed as dist
from nets import TINY_MB, backward, inputs, late_gathers, loss_of, net, steps, wrap
from ranks import context, run_in_turn
from torch import nn
from toy import refused

from zero import ShardedDataParallel, ShardedOptimizer
from zero import checkpoint as ckpt
from zero.gradients import SentGradient

MASTERS = ("bfloat16", "bfloat16_remainder")


def trained(module=None, count=2, **options):
    """A wrapped module after some steps, the last of which may still be in flight."""
    model, optimizer = wrap(module or net(), **options)
    steps(model, optimizer, count)
    return model, optimizer


# -- 1. parameters -------------------------------------------------------------------------------------------------------


def in_flight(optimizer):
    return sum(bucket.gather is not None for bucket in optimizer.placed.buckets)


def parameters_are_there():
    """When its forward begins, a unit waits for its own, and the model for the others. Gathers are late, and nan till then."""
    for prepare in (lambda module: None, lambda module: module[0].compile(backend="eager")):
        module = net()
        prepare(module)
        with late_gathers():
            model, optimizer = trained(module, 1, overlap=[module[0]])
            seen = {}

            def look(part, *_, seen=seen, module=module, optimizer=optimizer):
                finite = [param.isfinite().all().item() for param in module.parameters()]
                seen[part] = finite, in_flight(optimizer) > 0

            assert not all(param.isfinite().all() for param in module.parameters()), "what is read too early is wrong"
            handles = [part.register_forward_pre_hook(torch.compiler.disable(look)) for part in (module, module[0])]
            loss_of(model)
            for handle in handles:
                handle.remove()
            (first, *_, weight, bias), is_in_flight = seen[module]
            assert (first, weight, bias, is_in_flight) == (False, True, True, True)
            assert seen[module[0]] == ([True] * 4, False)
            steps(model, optimizer, first=1)
            optimizer.synchronize()
            assert all(param.isfinite().all() for param in module.parameters())


def a_compiled_whole_waits():
    """A module that contains units and is compiled, before or after it is wrapped, waits for all that it reads."""
    for how in ("before", "inside", "after"):
        module = net()
        inner = torch.compile(module, backend="eager") if how == "before" else module
        with late_gathers():
            if how == "inside":
                module.compile(backend="eager")
            model, _ = trained(inner, 1, overlap=[module[2]])
            if how == "after":
                module.compile(backend="eager")
            assert loss_of(model).isfinite()


def a_tied_weight_is_there_for_both():
    """A weight of a unit that is read outside of it first, as the embedding that is tied to the head. And one of the loss."""
    with late_gathers():
        module, scale = net(8), nn.Parameter(torch.ones(16, 1, 8))  # in buckets of its own
        module[2].weight = module[0].weight
        optimizer = ShardedOptimizer([*module.parameters(), scale], torch.optim.AdamW, bucket_mb=TINY_MB)
        model = ShardedDataParallel(module, optimizer, overlap=[module[2]])
        for step in range(3):
            loss = (model(inputs(step)) * scale).square().sum()
            assert loss.isfinite()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def what_waits_by_itself(name):
    module = net()
    with late_gathers():
        model, optimizer = trained(module, 1, overlap=[module[0], module[2]] if name else ())
        assert (in_flight(optimizer) > 0) == bool(name)
        WAIT[name](model, optimizer)
        assert all(param.isfinite().all() for param in module.parameters())
        assert bool(name) == any(part._forward_pre_hooks for part in model.modules())


WAIT = {
    "": lambda model, optimizer: None,  # without units nothing is in flight
    "save weights": lambda model, optimizer: ckpt.model_state_dict(model.module, optimizer),
    "save a weight": lambda model, optimizer: ckpt.model_state_dict(nn.ParameterList([model.module[0].weight]), optimizer),
    "save state": lambda model, optimizer: ckpt.consolidate(optimizer),
    "state_dict": lambda model, optimizer: model.module.state_dict(),
    "a copy": lambda model, optimizer: copy.deepcopy(model),
    "write": lambda model, optimizer: optimizer.set_parameter(model.module[0].bias, torch.zeros(8)),
    "load": lambda model, optimizer: model.module.load_state_dict(net().state_dict()),
    "step": lambda model, optimizer: (optimizer.clip_grad_norm_(1.0), optimizer.step(), optimizer.synchronize()),
}


def copies():
    """A copy or a pickle of a module with hooks is plain, trains on its own, and waits for nobody."""
    module = nn.Sequential(*net(), nn.Linear(3, 3))
    module[0].compile(backend="eager")
    model, optimizer = trained(module, param_dtype="bfloat16", overlap=[module[0], module[2]])
    optimizer.synchronize()
    for other in (copy.deepcopy(module), copy.deepcopy(model), pickle.loads(pickle.dumps(module))):
        assert type(other) is nn.Sequential
        torch.save(other, io.BytesIO())
        other.load_state_dict({name: 2 * value for name, value in module.state_dict().items()})
        loss_of(other).backward()
        assert not isinstance(other[0].weight.grad, SentGradient)
        torch.testing.assert_close(other[2].bias, 2 * module[2].bias)
    refused(TypeError, r"pickle its \.module", pickle.dumps, model)


def freed():
    """A model that nobody uses any more."""
    for overlap in (False, True):
        module = net()
        model, optimizer = trained(module, overlap=[module[0]] if overlap else ())
        references = [weakref.ref(each) for each in (model, optimizer.placed.buckets[0].data, module[0].weight)]
        del model, optimizer, module
        gc.collect()
        assert not any(reference() is not None for reference in references)


def test_parameters():
    done = [partial(what_waits_by_itself, name) for name in WAIT]
    of_units = parameters_are_there, a_compiled_whole_waits, a_tied_weight_is_there_for_both
    run_in_turn(2, *of_units, copies, freed, *done)


def ends_early(rank, folder):
    """Rank 1 ends as soon as its last step has returned; the other one is still in it, and saves afterwards."""
    util.Finalize(None, atexit._run_exitfuncs, exitpriority=0)  # as at the end of Python; a forked process runs none of them
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    module = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    model, optimizer = wrap(module, bucket_mb=1, overlap=module)
    model(torch.ones(2, 512)).sum().backward()
    if rank == 0:
        update = optimizer.inner.step.__func__.__wrapped__

        def slow(self):
            threading.Event().wait(0.2)
            return update(self)

        type(optimizer.inner).step.__wrapped__ = slow
    optimizer.step()
    if rank == 0:
        optimizer.synchronize()
        torch.save(module.state_dict(), f"{folder}/saved.pt")


def test_a_rank_that_ends_first_leaves_the_others_their_parameters(tmp_path):
    processes = [context.Process(target=ends_early, args=(rank, str(tmp_path))) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert (tmp_path / "saved.pt").exists()


# -- 2. gradients --------------------------------------------------------------------------------------------------------

SENT = r"this gradient cannot be read or written: .*optimizer\.clip_grad_norm_"


def unscale(module):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD(module.parameters(), 0.1))


USES = {
    "clip_grad_norm_": lambda module: nn.utils.clip_grad_norm_(module.parameters(), 1.0),
    "clip_grad_norm_ one by one": lambda module: nn.utils.clip_grad_norm_(module.parameters(), 1.0, foreach=False),
    "clip_grad_value_": lambda module: nn.utils.clip_grad_value_(module.parameters(), 1.0),
    "zero_grad in place": lambda module: module.zero_grad(set_to_none=False),
    "norm": lambda module: module[0].weight.grad.norm(),
    "detach": lambda module: module[0].weight.grad.detach(),
    "mul_": lambda module: module[0].weight.grad.mul_(2),
    "zero_": lambda module: module[0].weight.grad.zero_(),
    "add": lambda module: module[0].weight.grad + 1,
    "item": lambda module: module[0].weight.grad[0, 0].item(),
    "data": lambda module: module[0].weight.grad.data.clamp_(-1, 1),
    "data =": lambda module: setattr(module[0].weight.grad, "data", torch.zeros(8, 8)),
    "another optimizer": lambda module: torch.optim.SGD(module.parameters(), 0.1).step(),
    "a scaler": lambda module: unscale(module),
    "pickle": lambda module: pickle.dumps(module[0].weight.grad),
    "share_memory": lambda module: module.share_memory(),
    "a backward past the wrapper": lambda module: module[0].weight.sum().backward(),
}


def placeholders_refuse_every_operation():
    model, _ = wrap(net())
    backward(model)
    sent = model.module[0].weight.grad
    assert (sent.shape, sent.dtype, sent.device) == ((8, 8), torch.float32, torch.device("cpu"))
    assert "shape=(8, 8)" in repr(sent)
    for use in USES.values():
        refused(RuntimeError, SENT, use, model.module)


def gradients_are_dropped_by(name):
    """All at once, by any of three; a part of them, by none."""
    model, optimizer = trained(count=0)
    before = [param.detach().clone() for param in model.parameters()]
    backward(model)
    DROP[name](model, optimizer)
    if "one" in name:
        refused(RuntimeError, r"the gradient of 0\.\w+ was dropped, and those of other parameters were not", optimizer.step)
        refused(RuntimeError, r"the gradient of 0\.\w+ was dropped", backward, model)
        optimizer.zero_grad()
    optimizer.step()
    assert all(torch.equal(param, value) for param, value in zip(model.parameters(), before, strict=True))
    expected, _ = trained(count=1)
    steps(model, optimizer)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), expected.parameters(), strict=True))


def a_failed_backward():
    """Its gradients are dropped by the optimizer's or the wrapper's `zero_grad` only, because the model's cannot be seen."""
    model, optimizer = trained()
    for zero_grad in (optimizer.zero_grad, model.zero_grad):
        hook = model.module[0].weight.register_hook(lambda _: 1 / 0)
        refused(ZeroDivisionError, "", backward, model)
        hook.remove()
        model.module.zero_grad()
        refused(RuntimeError, "the last backward did not end", optimizer.step)
        refused(RuntimeError, "the last backward did not end", backward, model)
        zero_grad()
        steps(model, optimizer)


DROP = {
    "the optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "the wrapper": lambda model, optimizer: model.zero_grad(),
    "the model": lambda model, optimizer: model.module.zero_grad(),
    "one parameter": lambda model, optimizer: setattr(model.module[0].weight, "grad", None),
    "one part": lambda model, optimizer: model.module[0].zero_grad(),
}


def test_gradients():
    dropped = [partial(gradients_are_dropped_by, name) for name in DROP]
    run_in_turn(2, placeholders_refuse_every_operation, a_failed_backward, *dropped)


# -- 3. weights ----------------------------------------------------------------------------------------------------------

WRITES = {  # of a weight, in place
    "copy_": lambda weight: weight.copy_(weight.flip(0)),
    "an element": lambda weight: weight[0, 0].add_(1),
    "init": lambda weight: nn.init.ones_(weight),
    "data": lambda weight: weight.data.mul_(1.5),
}


def any_write_counts_without_masters():
    for write in WRITES.values():
        model, optimizer = trained()
        weight = model.module[0].weight
        with torch.no_grad():
            write(weight)
        expected = weight.detach().clone()
        optimizer.step()  # which has no gradient
        assert torch.equal(weight, expected)
        steps(model, optimizer)
        assert 0 < (weight - expected).abs().max() < 0.05


def writes_that_are_seen_are_refused(param_dtype):
    """By name, by a step and by a save; the ways to write reach the masters in full precision."""
    for name in WRITES.keys() - {"data"}:
        model, optimizer = trained(param_dtype=param_dtype)
        with torch.no_grad():
            WRITES[name](model.module[0].weight)
        message = r"^0\.weight was written to, but its master was not; write with optimizer.set_parameter"
        refused(RuntimeError, message, steps, model, optimizer)
        refused(RuntimeError, message, ckpt.consolidate, optimizer)
        optimizer.zero_grad()
        precise = torch.full((8, 8), 1 + 2.0**-12)
        for number, written in enumerate((model, model.module, model.module[0], None)):
            if written is None:
                optimizer.set_parameter(model.module[0].weight, precise)
            else:
                prefix = "module.0." if written is model else "0." if written is model.module else ""
                written.load_state_dict({f"{prefix}weight": precise + number}, strict=False)
            optimizer.step()
            whole = ckpt.model_state_dict(model.module, optimizer)
            assert whole is None or torch.equal(whole["0.weight"], precise + (number if written is not None else 0))
        steps(model, optimizer)


def loading_counts_however_often_a_module_writes(param_dtype):
    """A parameter under two names, a number for one without dimensions, and one of a part that has parts."""
    module = net()
    module[0].other = module[0].weight
    module[0].scale, module.of_root = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(3))
    model, optimizer = trained(module, param_dtype=param_dtype)
    module.load_state_dict({**module.state_dict(), "0.scale": torch.tensor([2.0])})
    optimizer.step()
    assert module[0].scale == 2
    steps(model, optimizer)


def a_write_that_is_not_seen(param_dtype):
    """With remainders, it changes a master by at most half a unit of bfloat16; a separate master knows nothing of it."""
    model, optimizer = trained(param_dtype=param_dtype)
    weight = model.module[0].weight
    before = weight.detach().clone()
    weight.data.fill_(3.0)
    whole = ckpt.model_state_dict(model.module, optimizer)
    optimizer.step()
    if whole is not None and param_dtype == "bfloat16_remainder":
        assert 0 < (whole["0.weight"] - 3.0).abs().max() <= 2.0**-7, "half of 2**-6"
        assert (weight == 3.0).all()
    elif whole is not None:
        assert torch.equal(whole["0.weight"].bfloat16(), before)
        assert torch.equal(weight, before)


OF_MASTERS = writes_that_are_seen_are_refused, a_write_that_is_not_seen, loading_counts_however_often_a_module_writes


def test_weights():
    with_masters = [partial(test, dtype) for test in OF_MASTERS for dtype in MASTERS]
    run_in_turn(2, any_write_counts_without_masters, *with_masters)
    run_in_turn(1, any_write_counts_without_masters)


# -- 4. structure --------------------------------------------------------------------------------------------------------

MOVED = r"^(0\.weight|2\.bias) was moved or replaced after ShardedOptimizer was built"
REPLACED = r"are not the optimizer's: 0\.weight(, 0\.bias)?; .*, after they were unfrozen or replaced \(as by load_state_dict"
CHANGES = {  # of a module that has been wrapped
    "to": (lambda module: module.double(), MOVED),
    "data =": (lambda module: setattr(module[0].weight, "data", module[0].weight.data.clone()), MOVED),
    "transposed": (lambda module: setattr(module[0].weight, "data", module[0].weight.data.t()), MOVED),
    "another parameter": (lambda module: setattr(module[0], "weight", nn.Parameter(torch.ones(8, 8))), REPLACED),
    "another part": (lambda module: module.__setitem__(0, nn.Linear(8, 8)), REPLACED),
    "a further part": (lambda module: module.append(nn.Linear(3, 3)), r"not the optimizer's: 3\.weight, 3\.bias;"),
    "assign": (lambda module: module.load_state_dict({"0.weight": torch.ones(8, 8)}, strict=False, assign=True), REPLACED),
}


def changes_are_refused():
    for change, message in CHANGES.values():
        model, optimizer = trained()
        change(model.module)
        refused(RuntimeError, message, optimizer.step)
    for change in (list.pop, list.reverse):
        _, optimizer = trained()
        change(optimizer.param_groups[0]["params"])
        refused(RuntimeError, "the parameters in param_groups have been changed", optimizer.step)


def a_model_is_wrapped_once():
    model, optimizer = trained()
    again = ShardedOptimizer(model.module.parameters(), torch.optim.AdamW)
    dead, its_optimizer = trained()
    module = dead.module
    del dead, its_optimizer
    for wrapped, its_optimizer, message in (
        (module, ShardedOptimizer(module.parameters(), torch.optim.AdamW), "was wrapped in another ShardedDataParallel"),
        (model.module, optimizer, "the optimizer has a ShardedDataParallel already"),
        (net(), optimizer, "the optimizer has a ShardedDataParallel already"),
        (model, again, "wrapped for data parallelism already"),
        (model.module, again, "was wrapped in another ShardedDataParallel"),
    ):
        refused(ValueError, message, ShardedDataParallel, wrapped, its_optimizer)


def test_structure():
    run_in_turn(2, changes_are_refused, a_model_is_wrapped_once)
