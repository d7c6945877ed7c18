"""Runs on several hosts, which are network namespaces: exact as on one host, and with the bytes between hosts as predicted."""

import os
import re
import signal
import statistics
import sys
from collections import defaultdict
from functools import cache, partial

import faults
import pytest
import torch
from hosts import make_hosts, why_not
from scripts import ROOT, Forked, events_of, run, torch_load, training

from model import GPT, GPTConfig

ARGUMENTS = {"adamw": ["--use_zero1=False"], "torch": ["--zero1_impl=torch"], "sharded": [], "hybrid": ["--shard_size=2"]}
WIDTH = 128  # of the model: so large that a step's small messages are less than one percent
SIZES = [f"--n_embd={WIDTH}", "--gradient_accumulation_steps=4", "--max_iters=11"]
FIRST, LAST = 6, 9  # iterations between which bytes are counted: no evaluation, no checkpoint
HEADERS = 14 + 20 + 32  # bytes of a packet: Ethernet, IPv4, TCP with its timestamp
RENDEZVOUS = {  # options of torchrun: as in README.md, and as in docs/running.md
    "static": "--nnodes=2 --nproc_per_node=2 --node_rank={} --master_addr=10.77.0.1 --master_port=1234",
    "c10d": "--nnodes=2 --nproc_per_node=2 --rdzv-backend=c10d --rdzv-endpoint=host0:1234 --rdzv-id=job",
}


@pytest.fixture(autouse=True)
def _hosts_can_be_made():
    if reason := why_not():
        pytest.skip(reason)


def on(hosts, ranks_per_host, fault, *arguments):
    """What puts each rank on its host, and another fault. The ranks start as `scripts.run` starts them, not by torchrun."""
    idle = [host.start("sh", "-c", "echo ready; exec sleep 1000") for host in hosts]
    assert [job.stdout.readline() for job in idle] == ["ready\n"] * len(hosts)
    return partial(faults.be_on_hosts, [job.pid for job in idle], ranks_per_host, "host0", partial(fault, *arguments))


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
        line = training(out, data, *SIZES, *ARGUMENTS[implementation])
        with make_hosts(number) as hosts:
            if rendezvous:
                torchrun, script = [sys.executable, "-m", "torch.distributed.run"], [os.path.join(ROOT, line[0]), *line[1:]]
                launches = [RENDEZVOUS[rendezvous].format(host.number).split() for host in hosts]
                for job in [host.start(*torchrun, *how, *script) for host, how in zip(hosts, launches, strict=True)]:
                    printed, _ = job.communicate(timeout=200)
                    assert job.returncode == 0, printed
                return out, None
            before = on(hosts, ranks_per_host, faults.print_bytes_sent, FIRST, LAST)
            printed = run(*line, ranks=number * ranks_per_host, before=before).succeeded().stdout
        for host, sent, packets in sorted(re.findall(r"counted (\w+) (\d+) (\d+)", printed)):
            payloads[host].append(int(sent) - HEADERS * int(packets))
        return out, [(max(counted) - min(counted)) / (LAST - FIRST) for counted in payloads.values()]

    return on_hosts


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
def test_hosts_train_exactly_as_one_and_send_what_the_arithmetic_says(on_hosts, how):
    (out, sent), (expected, _) = on_hosts(*how), on_hosts(how[0], 1, 4)
    assert losses_of(out) == losses_of(expected)
    assert len(losses_of(out)) == 2 * 12 + 2 * 3, "iterations and evaluations"
    weights, expected = (torch_load(folder)["model"] for folder in (out, expected))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    if sent is not None and how[0] != "torch":
        assert sent == pytest.approx([leaves_a_host(*how)] * how[1], rel=0.02)


@pytest.mark.slow("two hosts", seconds=5)
def test_wrong_input_on_one_host_ends_all_and_each_host_says_why(data):
    with make_hosts(2) as hosts:
        before = on(hosts, 1, faults.add_arguments_by_rank, {1: ["--n_layer=two"]})
        process = run(*training("out", data), ranks=2, before=before)
    assert process.returncodes == [2, 2], process.stderr
    assert process.stderr.count("error: n_layer='two' in --n_layer=two is text") == 2, process.stderr


@pytest.mark.slow("waits for timeouts of the store", seconds=11)
def test_a_frozen_host_that_holds_the_store_ends_the_others(data, tmp_path):
    line = training(tmp_path, data, "--max_iters=100000", "--dist_timeout_s=4")
    with make_hosts(2) as hosts, Forked(*line, ranks=2, before=on(hosts, 1, faults.add_arguments)) as job:
        job.wait_for("iter 20:")
        os.kill(job.pids[0], signal.SIGSTOP)
        job.processes[1].join(30)
        assert job.processes[1].exitcode == 1
        assert "the store of the ranks does not answer" in job.printed("stderr")


@pytest.mark.slow("a link that is slowed down", seconds=31)
@pytest.mark.parametrize("implementation", ["adamw", "sharded"])
def test_a_slow_link_makes_no_rank_look_slow(data, implementation, tmp_path):
    line = training(tmp_path, data, *SIZES, "--gradient_accumulation_steps=3", *ARGUMENTS[implementation])
    with make_hosts(3) as hosts:
        hosts[1].set_rate(10)
        run(*line, ranks=3, before=on(hosts, 1, faults.measure_every, 1)).succeeded()
    measured = [event for event in events_of(tmp_path) if "time/slowest_rank" in event]
    assert statistics.median(event["comm/exposed_percent"] for event in measured) > 50, "the link is slow"
    assert statistics.median(event["time/rank_spread_ms"] / event["time/step_ms"] for event in measured) < 0.1
