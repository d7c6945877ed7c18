"""zero/data_parallel.py: the weights are those of plain AdamW on the mean gradient, with any overlap."""

import functools
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint
from toy import batch, largest_difference, make_toy, weights

from zero import ShardedDataParallel, ShardedOptimizer
from zero.build import clip_grad_norm_
from zero.collectives import Communicator
from zero.reducer import SentGradient

STEPS = 12


def make(shard_gradients=False, seed=None):
    """A wrapped toy whose ranks start from different weights; the wrapper must make them those of rank 0."""
    model = make_toy(dist.get_rank() if seed is None else seed)
    optimizer = ShardedOptimizer(
        model.param_groups(),
        torch.optim.AdamW,
        bucket_mb=0.0002,
        registration_order=model.parameters(),
        lr=0.01,
        fused=True,
    )
    return ShardedDataParallel(model, optimizer, shard_gradients=shard_gradients, overlap=True), optimizer


def loss_of(model, step, rank, micro_step):
    """One layer has a gradient every third step only, and with several ranks on rank 0 only."""
    loss = model(*batch(10 * step + micro_step, rank))
    toy = getattr(model, "module", model)
    if step % 3 == 1 and micro_step == 0 and rank == 0:
        loss = loss + toy.unused(torch.ones(3)).square().sum()
    return loss


def sharded_run(micro_steps=1, clip=0.0, shard_gradients=False):
    model, optimizer = make(shard_gradients)
    for step in range(STEPS):
        for micro_step in range(micro_steps):
            model.require_backward_grad_sync = micro_step == micro_steps - 1
            (loss_of(model, step, dist.get_rank(), micro_step) / micro_steps).backward()
        if clip:
            assert clip_grad_norm_(optimizer, clip).total > clip
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return weights(model)


def oracle_run(world_size, micro_steps=1, clip=0.0):
    """One process that sees every rank's batches: gradients averaged as DistributedDataParallel does, before they are added."""
    model = make_toy(0)
    optimizer = torch.optim.AdamW(model.param_groups(), lr=0.01, fused=True)
    for step in range(STEPS):
        total = {}
        for rank in range(world_size):
            for micro_step in range(micro_steps):
                (loss_of(model, step, rank, micro_step) / micro_steps).backward()
            for param in model.parameters():
                if param.grad is not None:
                    share = param.grad * (1 / world_size)
                    total[param] = total[param] + share if param in total else share
            model.zero_grad()
        for param, gradient in total.items():
            param.grad = gradient
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        model.zero_grad()
    return weights(model)


def oracle(*args):
    return run_ranks(oracle_run, 1, *args)[0]  # a process like the ranks: one thread


@pytest.mark.parametrize("shard_gradients", [False, True])
@pytest.mark.parametrize("micro_steps", [1, 4])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_parity(world_size, micro_steps, shard_gradients):
    reference = oracle(world_size, micro_steps)
    assert largest_difference(reference, weights(make_toy(0))) > 0.01, "training must have changed something"
    # a sum of two is the same in any order; with shard_gradients micro-steps are added after ranks, not before
    exact = world_size <= 2 and (micro_steps == 1 or not shard_gradients)
    for result in run_ranks(sharded_run, world_size, micro_steps, 0.0, shard_gradients):
        assert largest_difference(result, reference) <= (0.0 if exact else 1e-6)


@pytest.mark.parametrize("world_size", [2, 3])
def test_clipping(world_size):
    reference = oracle(world_size, 2, 0.05)
    assert largest_difference(reference, oracle(world_size, 2)) > 1e-3, "the clip must bite"
    for result in run_ranks(sharded_run, world_size, 2, 0.05):
        assert largest_difference(result, reference) <= 1e-6


def without_overlap():
    """Every collective is waited for as soon as it has started."""
    for name in ("all_gather", "reduce_scatter"):
        setattr(Communicator, name, _waiting(getattr(Communicator, name)))
    return sharded_run(micro_steps=2, clip=0.05)


def _waiting(collective):
    def wait_at_once(*args):
        in_flight = collective(*args)
        works = in_flight if isinstance(in_flight, list) else in_flight.works
        while works:
            works.pop(0).wait()
        return in_flight

    return wait_at_once


def test_overlap_changes_nothing():
    for plain, overlapped in zip(run_ranks(without_overlap, 2), run_ranks(sharded_run, 2, 2, 0.05), strict=True):
        assert largest_difference(plain, overlapped) == 0.0


def poisoned():
    """All but the shard of this rank is nan, and the gather starts only when somebody waits for it."""
    all_gather = Communicator.all_gather

    class Late:
        def __init__(self, *args):
            self.args = args

        def wait(self):
            with _disable_current_modes():  # a real gather is no operation of this thread
                for work in all_gather(*self.args):
                    work.wait()

    def poison(comm, bucket, sizes):
        for owner, shard in enumerate(bucket.split(sizes)):
            if owner != comm.rank:
                shard.fill_(float("nan"))
        return [Late(comm, bucket, sizes)]

    Communicator.all_gather = poison
    torchs_own_modules()
    a_users_own_module()
    model, optimizer = make()
    taken_beforehand = list(model.parameters())
    for step in range(STEPS):
        loss = loss_of(model, step, dist.get_rank(), 0)
        assert loss.isfinite()
        loss.backward()
        optimizer.step()
        poisoned = any(param.isnan().any() for param in taken_beforehand)
        assert poisoned, "the poison must be there to be found"
        optimizer.zero_grad()
    return weights(model)


def torchs_own_modules():
    """Some read the weight of a child without calling it; the state dict of a part must also wait."""
    torch.manual_seed(0)
    layers = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.nn.Linear(8, 8)
    optimizer = ShardedOptimizer([p for layer in layers for p in layer.parameters()], torch.optim.AdamW, bucket_mb=0.0005)
    model = ShardedDataParallel(torch.nn.Sequential(*layers), optimizer, overlap=True)
    x, of_linear = torch.ones(2, 3, 8), list(layers[1].parameters())
    for step in range(4):
        model.train(step < 3)
        loss = model(x).square().sum()
        assert loss.isfinite()
        if step < 3:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    loss = model.train()(x).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert any(param.isnan().any() for param in of_linear)
    assert not any(tensor.isnan().any() for tensor in model.module[1].state_dict().values())
    optimizer.synchronize()


class ReadsItsChild(torch.nn.Module):
    """A head that is never called: its weight is used by its parent."""

    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)

    def forward(self, x):
        return torch.nn.functional.linear(self.body(x), self.head.weight, self.head.bias)


def a_users_own_module():
    torch.manual_seed(0)
    module = ReadsItsChild()
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.AdamW, bucket_mb=0.0002)
    model = ShardedDataParallel(module, optimizer, overlap=True)
    weight = module.head.weight
    for _ in range(4):
        loss = model(torch.ones(2, 8)).square().sum()
        assert loss.isfinite()
        optimizer.zero_grad()  # after forward, as some do
        loss.backward()
        optimizer.step()
        assert weight.isnan().any()
        assert not module.head.weight.isnan().any()
    optimizer.synchronize()


def test_a_parameter_is_never_read_before_it_is_gathered():
    reference = oracle(2)
    for result in run_ranks(poisoned, 2):
        assert largest_difference(result, reference) == 0.0


def no_sync_and_state():
    """no_sync() accumulates; gradients are gone once they are reduced; bytes are those of a ring all-reduce."""
    model, optimizer = make()
    with model.no_sync():
        loss_of(model, 0, dist.get_rank(), 0).backward()
    assert model.module.hidden.weight.grad is not None
    assert not optimizer.comm.sent_bytes
    loss_of(model, 0, dist.get_rank(), 1).backward()
    assert all(isinstance(param.grad, SentGradient | None) for param in model.parameters())
    optimizer.step()
    optimizer.synchronize()
    elements = sum(bucket.data.numel() for bucket in optimizer.buckets)
    expected = elements * 4 * (dist.get_world_size() - 1) // dist.get_world_size()
    assert optimizer.comm.sent_bytes == {"reduce-scatter": expected, "all-gather": expected}
    assert set(optimizer.comm.waits.read_ms()) == {"reduce-scatter", "all-gather", "all-reduce"}
    return True


def test_no_sync_and_bytes_sent():
    run_ranks(no_sync_and_state, 2)


def reentrant_checkpoints():
    """Each calls backward within backward; every bucket is sent once."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(7)])
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.AdamW, bucket_mb=0.0002)
    whole = torch.nn.Sequential(module)
    whole.forward = lambda x: functools.reduce(lambda x, part: checkpoint(part, x, use_reentrant=True), module, x)
    model = ShardedDataParallel(whole, optimizer)
    sent = []
    for _ in range(2):
        before = optimizer.comm.sent_bytes["reduce-scatter"]
        model(torch.ones(2, 8, requires_grad=True)).square().sum().backward()
        sent.append(optimizer.comm.sent_bytes["reduce-scatter"] - before)
        optimizer.step()
        optimizer.zero_grad()
    elements = sum(bucket.data.numel() for bucket in optimizer.buckets)
    assert len(optimizer.buckets) > 7
    return [nbytes / (elements * 4 // 2) for nbytes in sent]


def test_reentrant_checkpoints_send_each_bucket_once():
    assert run_ranks(reentrant_checkpoints, 2) == [[1.0, 1.0]] * 2


def misuse():
    """A use that would train nothing, or train wrongly, is an error."""
    tokens = batch(0, 0)
    model, optimizer = make()
    model.module.load_state_dict(make_toy(1).state_dict(), assign=True)
    model(*tokens).backward()
    with pytest.raises(RuntimeError, match=r"embedding\.weight, .*assign=True"):
        optimizer.step()

    model, optimizer = make()
    model(*tokens).backward()
    model.module.hidden.weight.data = model.module.hidden.weight.data.t()
    with pytest.raises(RuntimeError, match=r"hidden\.weight was moved or replaced"):
        optimizer.step()

    model, optimizer = make()
    with model.no_sync():
        model(*tokens).backward()
    with pytest.raises(RuntimeError, match="have not been sent"):
        optimizer.step()

    model, optimizer = make()
    model.module.frozen.requires_grad_(True)
    model(*tokens).backward()
    with pytest.raises(RuntimeError, match=r"frozen\.weight, frozen\.bias require gradients, but .* unfrozen"):
        optimizer.step()

    for wrapped, other, message in (
        (make_toy(), torch.optim.SGD(make_toy().parameters()), "needs a ShardedOptimizer, not SGD"),
        (make()[0], make()[1], "wrapped for data parallelism already"),
    ):
        with pytest.raises(ValueError, match=message):
            ShardedDataParallel(wrapped, other)

    model, optimizer = make()
    with pytest.raises(RuntimeError, match="before you make it"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    return True


def test_misuse_is_an_error():
    run_ranks(misuse, 2)


def failed_backward():
    """A backward that ends halfway leaves nothing behind once the gradients are cleared."""
    model, optimizer = make()
    before = weights(model)
    model.module.embedding.weight.register_hook(_fail_once())
    with pytest.raises(RuntimeError, match="out of memory"):
        model(*batch(0, 0)).backward()
    with pytest.raises(RuntimeError, match="did not end"):
        optimizer.step()
    optimizer.zero_grad()
    assert largest_difference(weights(model), before) == 0.0
    for step in range(3):
        model(*batch(step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    fresh, fresh_optimizer = make()
    for step in range(3):
        fresh(*batch(step, 0)).backward()
        fresh_optimizer.step()
        fresh_optimizer.zero_grad()
    return largest_difference(weights(model), weights(fresh))


def _fail_once():
    left = [1]

    def hook(gradient):
        if left:
            left.pop()
            raise RuntimeError("out of memory")
        return gradient

    return hook


def test_a_failed_backward_can_be_repeated():
    assert run_ranks(failed_backward, 2) == [0.0, 0.0]


def gone():
    references = []
    for _ in range(3):
        model, optimizer = make()
        model(*batch(0, 0)).backward()
        optimizer.step()
        references += [weakref.ref(model), weakref.ref(optimizer.buckets[0].data), weakref.ref(model.module.hidden.weight)]
        del model, optimizer
        gc.collect()
    return [reference() is None for reference in references]


def test_a_model_that_nobody_uses_is_freed():
    assert all(all(freed) for freed in run_ranks(gone, 2))


def strangers():
    model = make_toy()
    optimizer = ShardedOptimizer([model.hidden.weight], torch.optim.AdamW)
    with pytest.raises(ValueError, match=r"not the optimizer's: .*hidden\.bias, norm\.weight"):
        ShardedDataParallel(model, optimizer)
    return True


def test_every_trainable_parameter_must_be_the_optimizers():
    run_ranks(strangers, 1)


def profiled_step():
    """The names of the ranges of a step in a trace, in the order in which they begin, and the number of buckets."""
    model, optimizer = make(seed=0)
    loss_of(model, 1, 0, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        loss_of(model, 2, 0, 0).backward()
        optimizer.step()
        optimizer.synchronize()
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if event.name.startswith("zero::")], len(optimizer.buckets)


def test_a_trace_names_the_phases_of_a_step_by_bucket():
    for names, count in run_ranks(profiled_step, 2):
        buckets = list(range(count))

        def of(phase, names=names):
            return [int(name.rpartition(" ")[2]) for name in names if name.startswith(f"zero::{phase} bucket ")]

        assert count > 3
        assert of("reduce_scatter") == of("wait_reduce_scatter") == buckets
        assert of("update") == of("all_gather") == buckets[::-1]
        assert sorted(of("wait_all_gather")) == sorted(2 * buckets)
        assert names.index(f"zero::update bucket {count - 1}") > names.index(f"zero::wait_reduce_scatter bucket {count - 1}")
