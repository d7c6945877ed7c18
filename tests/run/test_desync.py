"""run/rank_checks.py: a weight that changes on one rank is found at the next comparison and named, and nothing saved."""

import json
from functools import partial

import faults
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from scripts import SETTINGS, run, torch_load, train
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from toy import MODES, assert_equal, batch, build_toy

from run.rank_checks import DesyncCheck, checksum

WEIGHT = "transformer.h.0.mlp.c_fc.weight"
CASES = {
    "adamw": ["--use_zero1=False"],
    "torch": ["--zero1_impl=torch"],
    "sharded": [],
    "bfloat16": ["--param_dtype=bfloat16"],
    "gradients": ["--shard_gradients=True"],
}

REST = [("adamw", 0), ("sharded", 0), *((case, culprit) for case in ("torch", "bfloat16", "gradients") for culprit in (0, 1))]


def flipped(data, out, culprit, *arguments, ranks=3):
    """The line that names what differs, and the iteration of the last checkpoint."""
    where = [f"--dataset={data}", f"--out_dir={out}", "--eval_interval=10", "--max_iters=30", "--zero_bucket_mb=0.05"]
    before = partial(faults.flip_a_bit, WEIGHT, culprit, 13)
    process = run("train.py", *SETTINGS, *where, *arguments, ranks=ranks, before=before)
    assert process.returncodes == [1] * ranks, process.stdout + process.stderr
    message, unchanged = [line for line in process.stderr.splitlines() if "ranks differ" in line or "unchanged" in line]
    assert "--init_from=resume goes on from there" in unchanged
    with open(out / "metrics.jsonl") as file:
        assert max(json.loads(line)["iter"] for line in file) >= 16, "what was logged before stays"
    return message, torch_load(out)["iter_num"]


@pytest.mark.parametrize(
    ("case", "culprit"),
    [
        ("adamw", 1),
        ("sharded", 1),  # which owns the element
        *(pytest.param(*rest, marks=pytest.mark.slow("more modes and the other rank", seconds=12)) for rest in REST),
    ],
)
def test_a_flipped_bit_is_found_at_the_next_comparison(data, tmp_path, case, culprit):
    message, saved = flipped(data, tmp_path, culprit, "--desync_check_interval=4", *CASES[case])
    assert message.startswith(f"the ranks differ at iteration 16: rank {culprit} in {WEIGHT}"), message
    assert ("(bucket" in message) == (case not in ("adamw", "torch"))
    assert saved == 10


def test_nothing_is_saved_before_the_ranks_have_compared(data, tmp_path):
    message, saved = flipped(data, tmp_path, 1, "--desync_check_interval=20", ranks=2)
    assert message.startswith(f"the ranks differ at iteration 20: ranks 0 and 1 in {WEIGHT} (bucket"), "nobody knows which one"
    assert saved == 10


@pytest.mark.parametrize(
    "case",
    ["sharded", *(pytest.param(case, marks=pytest.mark.slow("more modes", seconds=17)) for case in CASES if case != "sharded")],
)
def test_the_check_changes_nothing(data, tmp_path, case):
    checkpoints = []
    for interval in (0, 3):
        out = tmp_path / str(interval)
        train(out, data, *CASES[case], "--max_iters=10", f"--desync_check_interval={interval}", ranks=2)
        checkpoints.append(torch_load(out))
    assert_equal(*(checkpoint["model"] for checkpoint in checkpoints))
    assert_equal(*(checkpoint["optimizer"]["state"] for checkpoint in checkpoints))


def compared(what):
    """By mode: the messages of six iterations with comparisons at 0 and 4, when `what` is wrong on rank 1 in between."""
    return {mode: messages_of(mode, what if dist.get_rank() == 1 else "nothing") for mode in MODES}


def messages_of(mode, what):
    model, optimizer = build_toy(mode)
    model.module.register_buffer("table", torch.arange(3.0))
    messages = []
    check = DesyncCheck(model.module, optimizer, 4, lambda title, message: messages.append(f"{title}: {message}"))
    for step in range(6):
        for group in optimizer.param_groups:
            group["lr"] = 0.02 if what == "rate" and step == 2 else 0.01
        model(*batch(step, dist.get_rank())).backward()
        if what == "frozen" and step == 1:  # for good; the sign of an odd element is the highest bit of a word of 64 bits
            model.module.frozen.weight.data.view(-1)[1] *= -1
        if what == "buffer" and step == 2:
            model.module.table[1] += 1
        check.check(step + 1 if what == "iteration" and step == 2 else step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return messages


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("nothing", None),
        ("frozen", "frozen.weight"),
        ("buffer", "table"),
        ("rate", "the learning rate of group 0"),
        ("iteration", "the iteration"),
    ],
)
def test_everything_that_must_be_equal_is_compared(what, named):
    for of_rank in run_ranks(compared, 3, what):
        for mode, messages in of_rank.items():
            if named is None:
                assert not messages, mode
            else:
                assert messages, mode
                assert messages[0].startswith(f"The ranks differ: the ranks differ at iteration 4: rank 1 in {named}"), messages


def test_adding_never_waits_for_the_device(monkeypatch):
    """Fake tensors have no values that the host could ask for."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with FakeTensorMode():
        model = torch.nn.Linear(3, 3)
        optimizer = torch.optim.AdamW(model.parameters())
        check = DesyncCheck(model, optimizer, 2, lambda *_: None)
        check._calls = 1
        check.check(1)
        with pytest.raises(DataDependentOutputException):
            check.check(2)


def test_a_single_process_compares_with_nobody():
    model = torch.nn.Linear(3, 3)
    check = DesyncCheck(model, torch.optim.AdamW(model.parameters()), 1, lambda *_: pytest.fail("nobody differs"))
    check.check(0)
    assert check.interval == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_flipped_bit_changes_the_checksum(dtype):
    tensor = torch.randn(7, generator=torch.Generator().manual_seed(0)).to(dtype)  # 7: some elements are after the last word
    for place in range(7 * dtype.itemsize):
        for bit in range(8):
            changed = tensor.clone()
            changed.view(torch.uint8)[place] ^= 1 << bit
            assert checksum(changed) != checksum(tensor)


def test_checksums_of_unusual_tensors():
    whole = torch.arange(24, dtype=torch.float32).view(4, 6)
    assert checksum(whole.t()) == checksum(whole.t().contiguous())
    assert checksum(whole.view(-1)[1:8]) == checksum(whole.view(-1)[1:8].clone()), "not at a multiple of 8 bytes"
    assert checksum(torch.tensor(1.0)) != checksum(torch.tensor(-1.0))
    assert checksum(torch.empty(0)) == 0
    assert checksum(torch.tensor([True, False, True])) == 2
