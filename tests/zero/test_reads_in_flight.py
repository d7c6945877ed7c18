"""zero/overlap.py: reads of what is in flight."""

import copy
import pickle

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

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
    x = torch.randn(1, 1, 128, 16)
    with torch.no_grad(), ReadCheck(lambda: [torch.ones(3)], {}):
        assert flex_attention(x, x, x).shape == x.shape  # it compiles itself
