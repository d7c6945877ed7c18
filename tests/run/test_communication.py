"""run/communication.py: bytes sent and time waited, the same for each of the three implementations."""

import itertools
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ranks import run_in_turn
from toy import MODES, batch, build_toy, train

from forecast.run_memory import planned_optimizer, predicted
from run.communication import CommunicationMeter
from zero.collectives import KINDS
from zero.flags import Flags
from zero.host_comm import gather_objects
from zero.sharded_state import partition

USED = {  # kinds that send or wait
    "adamw": {"all-reduce"},
    "torch": {"all-reduce", "broadcast"},
    "sharded": {"all-reduce", "reduce-scatter", "all-gather"},
    "gradients": {"all-reduce", "reduce-scatter", "all-gather"},
}
SLEEP_S = 0.5


def three_steps(mode, micro_steps):
    """Bytes sent by kind, the kinds that waited, and bytes of the trainable parameters; the gradients of 3 steps are sent."""
    model, optimizer = build_toy(mode)
    meter = CommunicationMeter(model, optimizer)
    for step in range(3):
        for micro_step in range(micro_steps):
            model.require_backward_grad_sync = micro_step == micro_steps - 1
            model(*batch(micro_steps * step + micro_step, dist.get_rank())).backward()
        with torch.no_grad():
            model(*batch(0, 0))  # an evaluation sends nothing
        optimizer.step()
        optimizer.zero_grad()
    model(*batch(0, 0))
    waited = [kind for kind, ms in meter.waited_ms().items() if ms > 0]
    padded = sum(buffer.data.nbytes for buffer in optimizer.placed.buffers) if mode in ("sharded", "gradients") else 0
    trainable = sum(param.nbytes for param in model.parameters() if param.requires_grad)
    return {"sent": meter.sent_bytes(), "waited": waited, "trainable": trainable, "padded": padded}


def test_bytes_and_waits_by_kind():
    cases = list(itertools.product(MODES, (1, 2)))
    by_case = run_in_turn(2, *(partial(three_steps, *case) for case in cases))
    for (mode, micro_steps), results in zip(cases, by_case, strict=True):
        for result in results:
            sent = result["sent"]
            assert (set(result["waited"]), list(sent)) == (USED[mode], list(KINDS))
            if mode in ("sharded", "gradients"):
                half = result["padded"] // 2
                scatters = 3 * (micro_steps if mode == "gradients" else 1)
                assert nonzero(sent) == {"reduce-scatter": scatters * half, "all-gather": 3 * half}
            else:
                half = result["trainable"] // 2
                assert nonzero(sent) == {"all-reduce": 6 * half} | ({"broadcast": 3 * half} if mode == "torch" else {})


def nonzero(sent):
    return {kind: count for kind, count in sent.items() if count}


def three_steps_of_muon():
    model, optimizer = build_toy("sharded", muon=True)
    meter = CommunicationMeter(model, optimizer)
    train(model, optimizer, dist.get_rank(), steps=3)
    part = partition(optimizer)
    world_size, flags = dist.get_world_size(), Flags(bucket_mb=optimizer.options.bucket_mb)
    sent = predicted(part.plan.params, flags, planned_optimizer({}), rank=part.rank, world_size=world_size).sent
    return nonzero(meter.sent_bytes()), {kind: 3 * count for kind, count in sent.items()}, meter.waited_ms()


@pytest.mark.parametrize("world_size", [2, 3])
def test_muon_sends_matrices(world_size):
    """On the wire is what the plan says."""
    for sent, expected, waited in run_in_turn(world_size, three_steps_of_muon)[0]:
        assert sent == expected
        assert min(sent["all-to-all"], waited["all-to-all"]) > 0


def sleepy(mode):
    """Milliseconds that each rank waits in a step in which rank 1 sleeps before its backward."""
    model, optimizer = build_toy(mode)
    train(model, optimizer, dist.get_rank(), steps=1)
    meter = CommunicationMeter(model, optimizer)
    before = meter.waited_ms()
    loss = model(*batch(1, dist.get_rank()))
    time.sleep(SLEEP_S * dist.get_rank())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return gather_objects([sum(meter.waited_ms().values()) - sum(before.values())])


def test_a_rank_waits_for_a_slower_one():
    for by_rank, same in run_in_turn(2, *(partial(sleepy, mode) for mode in MODES)):
        assert by_rank == same, "every rank gets the numbers of all ranks"
        (waiting,), (sleeping,) = by_rank
        assert waiting > 0.5 * SLEEP_S * 1000
        assert sleeping < 0.5 * waiting, "time in which a rank computes is no wait"
