"""zero/overlap.py: reads of what is in flight, and the end of a program whose last gathers are."""

import copy
import os
import pickle
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from nets import backward, net, wrap
from ranks import run_ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from zero.overlap import ReadCheck, WaitingDict

READS = {
    "[]": lambda waiting: waiting["a"],
    "get": lambda waiting: waiting.get("a"),
    "values": lambda waiting: list(waiting.values()),
    "items": lambda waiting: list(waiting.items()),
    "pop": lambda waiting: waiting.pop("a"),
    "popitem": lambda waiting: waiting.popitem(),
    "setdefault": lambda waiting: waiting.setdefault("a"),
    "copy": lambda waiting: waiting.copy(),
    "dict": lambda waiting: dict(waiting),
    "unpacking": lambda waiting: {**waiting},
    "copy.copy": copy.copy,
    "pickle": lambda waiting: pickle.loads(pickle.dumps(waiting)),
}


@pytest.mark.parametrize("read", READS)
def test_whoever_reads_a_value_waits_for_it(read):
    waited = []
    waiting = WaitingDict({"a": 1}, waited.append)
    found = READS[read](waiting)
    assert waited == [1]
    assert type(found) is not WaitingDict


def test_whoever_reads_no_value_does_not_wait():
    waited = []
    waiting = WaitingDict({"a": 1}, waited.append)
    assert (list(waiting), len(waiting), "a" in waiting, waiting.plain()) == (["a"], 1, True, {"a": 1})
    assert not waited
    assert type(waiting.plain()) is dict
    assert waiting.get("b", 2) == 2
    assert waiting.pop("b", 3) == 3


def test_a_check_of_reads_sees_operations_of_higher_order():
    flying, other = torch.ones(3), torch.ones(3)
    with ReadCheck(lambda: [flying], {}):
        assert torch.cond(other.sum() > 0, lambda x: 2 * x, lambda x: 3 * x, (other,)).tolist() == [2, 2, 2]
        with pytest.raises(RuntimeError, match="uses a parameter before its all-gather has ended"):
            torch.cond(other.sum() > 0, lambda x: 2 * x, lambda x: 3 * x, (flying,))


def test_a_check_of_reads_lets_torch_compile_compile():
    from torch.nn.attention.flex_attention import flex_attention  # imports the compiler

    x = torch.randn(1, 1, 128, 16)
    with torch.no_grad(), ReadCheck(lambda: [torch.ones(3)], {}):
        assert flex_attention(x, x, x).shape == x.shape  # it compiles itself


def reads_are_checked_at_first_only():
    """Without `check_reads` and with it: whether reads are checked in its forward of each step."""
    found = []
    for options in ({}, {"check_reads": True}):
        model, optimizer = wrap(net(), overlap=True, **options)
        checks = []
        for step in range(5):
            checks.append(isinstance(model._check_of_reads(), TorchDispatchMode))  # a call counts as a forward
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        found.append(checks)
    return found


def test_reads_are_checked_in_the_first_forwards_after_a_step():
    # nothing is in flight before the first step
    assert run_ranks(reads_are_checked_at_first_only, 2) == [[[False, True, False, False, False], [False] + 4 * [True]]] * 2


def _ends_early(rank, folder):
    """Rank 1 ends as soon as its last step has returned; the other one is still in it, and saves afterwards."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    module = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    model, optimizer = wrap(module, bucket_mb=1, overlap=True)
    model(torch.ones(2, 512)).sum().backward()
    if rank == 0:
        update = optimizer.inner.step.__func__.__wrapped__

        def slow(self):
            threading.Event().wait(0.2)
            return update(self)

        type(optimizer.inner).step.__wrapped__ = slow
    optimizer.step()
    if rank == 0:
        torch.save(module.state_dict(), f"{folder}/saved.pt")


def test_a_rank_that_ends_first_leaves_the_others_their_parameters(tmp_path):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [subprocess.Popen([sys.executable, __file__, str(rank), str(tmp_path)], env=env) for rank in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]
    assert (tmp_path / "saved.pt").exists()


if __name__ == "__main__":
    _ends_early(int(sys.argv[1]), sys.argv[2])
