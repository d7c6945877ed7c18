"""Runs on several hosts, which are network namespaces: exact as on one host, and with the bytes between hosts as predicted."""

import os
import re
import signal
import statistics
from collections import defaultdict
from functools import cache, partial

import faults
import pytest
import torch
from hosts import Hosts, why_not
from scripts import SETTINGS, events_of, run, torch_load, train

from model import GPT, GPTConfig

ARGUMENTS = {"adamw": ["--use_zero1=False"], "torch": ["--zero1_impl=torch"], "sharded": [], "hybrid": ["--shard_size=2"]}
WIDTH = 128  # of the model: so large that a step's small messages are less than one percent
SIZES = [f"--n_embd={WIDTH}", "--gradient_accumulation_steps=4", "--max_iters=11"]
FIRST, LAST = 6, 9  # iterations between which bytes are counted: no evaluation, no checkpoint
HEADERS = 14 + 20 + 32  # bytes of a packet: Ethernet, IPv4, TCP with its timestamp


@pytest.fixture(autouse=True)
def _hosts_can_be_made():
    if reason := why_not():
        pytest.skip(reason)


def train_on(hosts, ranks_per_host, fault, *arguments):
    """What train.py prints on these hosts, with a fault. The ranks start as `scripts.run` starts them, not by torchrun."""
    idle = [host.start("sh", "-c", "echo ready; exec sleep 1000") for host in hosts]
    for job in idle:
        job.wait_for("ready")
    before = partial(faults.be_on_hosts, [job.pid for job in idle], ranks_per_host, hosts[0].address, fault)
    return run("train.py", *SETTINGS, *arguments, ranks=len(hosts) * ranks_per_host, before=before).succeeded().stdout


def losses_of(out):
    keys = ("iter/loss", "iter/grad_norm", "train/loss", "val/loss")
    return [(event["iter"], key, event[key]) for event in events_of(out) for key in keys if key in event]


@pytest.fixture(scope="module")
def on_hosts(data, tmp_path_factory):
    """A function that trains on hosts, once for the same arguments: its out_dir, and the bytes per step that each host sent.

    With a rendezvous, by torchrun, and without the bytes.
    """

    @cache
    def on_hosts(implementation, number, ranks_per_host, rendezvous=None):
        out, payloads = tmp_path_factory.mktemp("out"), defaultdict(list)
        arguments = [*SIZES, f"--dataset={data}", f"--out_dir={out}", *ARGUMENTS[implementation]]
        with Hosts(number) as hosts:
            if rendezvous:
                line = "train.py", *SETTINGS, *arguments
                for job in hosts.torchrun(*line, ranks_per_host=ranks_per_host, rendezvous=rendezvous):
                    assert job.finish(200) == 0, job.printed()
                return out, None
            printed = train_on(hosts, ranks_per_host, partial(faults.print_bytes_sent, FIRST, LAST), *arguments)
        for host, sent, packets in sorted(re.findall(r"counted (\w+) (\d+) (\d+)", printed)):
            payloads[host].append(int(sent) - HEADERS * int(packets))
        return out, [(max(counted) - min(counted)) / (LAST - FIRST) for counted in payloads.values()]

    return on_hosts


@pytest.fixture(scope="module")
def on_one_host(data, tmp_path_factory):
    """A function that trains with four ranks on one host, once for the same implementation: its out_dir."""

    @cache
    def run(implementation):
        out = tmp_path_factory.mktemp("out")
        train(out, data, *SIZES, *ARGUMENTS[implementation], ranks=4)
        return out

    return run


def leaves_a_host(implementation, number, ranks_per_host):
    """The bytes of a step, as docs/running.md has them; of ZeroRedundancyOptimizer they depend on who owns what."""
    model = GPT(GPTConfig(block_size=16, vocab_size=29, n_layer=2, n_head=2, n_embd=WIDTH, bias=False))
    whole, size = 4 * sum(param.numel() for param in model.parameters()), number * ranks_per_host
    return {
        "sharded": 2 * whole * ranks_per_host * (size - ranks_per_host) / size,  # every rank sends to every other
        "adamw": 2 * whole * (size - 1) / size,  # a ring
        "hybrid": 2 * whole * (number - 1) / number,  # rings of the ranks that own the same
    }.get(implementation)


@pytest.mark.slow("each implementation on two or four hosts", seconds=14)
@pytest.mark.parametrize(
    "how",
    [
        *(("sharded", 2, 2), ("adamw", 2, 2), ("torch", 2, 2), ("hybrid", 2, 2)),
        *(("sharded", 2, 2, "c10d"), ("sharded", 2, 2, "static")),
        *(("sharded", 4, 1), ("adamw", 4, 1), ("torch", 4, 1)),
    ],
    ids=lambda how: "-".join(map(str, how)),
)
def test_hosts_train_exactly_as_one_and_send_what_the_arithmetic_says(on_hosts, on_one_host, how):
    out, sent = on_hosts(*how)
    assert losses_of(out) == losses_of(on_one_host(how[0]))
    assert len(losses_of(out)) == 2 * 12 + 2 * 3, "iterations and evaluations"
    weights, expected = (torch_load(folder)["model"] for folder in (out, on_one_host(how[0])))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    if sent is not None and how[0] != "torch":
        assert sent == pytest.approx([leaves_a_host(*how)] * how[1], rel=0.02)


@pytest.mark.slow("two hosts without a common folder", seconds=6)
def test_hosts_that_share_no_folder_cannot_write_one_checkpoint_together(data):
    with Hosts(2) as hosts:
        arguments = [*SETTINGS, f"--dataset={data}", "--out_dir=out", "--checkpoint_format=sharded"]
        jobs = hosts.torchrun("train.py", *arguments, ranks_per_host=1)
        assert [job.finish() for job in jobs] == [1, 1]  # torchrun's own exit code
        for job in jobs:
            (error,) = (line for line in job.printed().splitlines() if line.startswith("error: "))
            assert error.startswith(
                "error: checkpoint_format=sharded: rank 1 does not see the out_dir=out of rank 0; use a folder"
            )


@pytest.mark.slow("torchrun on two hosts", seconds=5)
def test_wrong_input_on_one_host_ends_all(data):
    with Hosts(2) as hosts:
        arguments = ["train.py", *SETTINGS, f"--dataset={data}", "--out_dir=out"]
        jobs = [
            host.torchrun(*hosts.options(host, ranks_per_host=1), *arguments, *wrong)
            for host, wrong in zip(hosts, ([], ["--n_layer=two"]), strict=True)
        ]
        for job in jobs:
            assert job.finish(60) == 1
            assert "error: --n_layer" in job.printed() or "error: n_layer" in job.printed(), job.printed()


@pytest.mark.slow("waits for timeouts of the store", seconds=11)
def test_a_frozen_host_that_holds_the_store_ends_the_others(data):
    arguments = [*SETTINGS, f"--dataset={data}", "--out_dir=out", "--max_iters=100000", "--dist_timeout_s=4"]
    with Hosts(2) as hosts:
        jobs = hosts.torchrun("train.py", *arguments, ranks_per_host=1)
        jobs[0].wait_for("iter 20:")
        for pid in hosts[0].pids():
            os.kill(pid, signal.SIGSTOP)
        jobs[1].wait_for("the store of the ranks does not answer", timeout_s=30)
        for pid in hosts[0].pids():
            os.kill(pid, signal.SIGCONT)


@pytest.mark.slow("a link that is slowed down", seconds=31)
@pytest.mark.parametrize("implementation", ["adamw", "sharded"])
def test_a_slow_link_makes_no_rank_look_slow(data, implementation, tmp_path):
    arguments = [*SIZES, "--gradient_accumulation_steps=3", *ARGUMENTS[implementation]]
    with Hosts(3) as hosts:
        hosts[1].set_rate(10)
        train_on(hosts, 1, partial(faults.measure_every, 1), f"--dataset={data}", f"--out_dir={tmp_path}", *arguments)
    measured = [event for event in events_of(tmp_path) if "time/slowest_rank" in event]
    assert statistics.median(event["comm/exposed_percent"] for event in measured) > 50, "the link is slow"
    assert statistics.median(event["time/rank_spread_ms"] / event["time/step_ms"] for event in measured) < 0.1
