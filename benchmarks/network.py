"""Steps on two machines with a slow network between them, for each mode. Linux, root, iproute2; it takes about ten minutes.

    $ sudo .venv/bin/python -m benchmarks.network

Two machines are two network namespaces of this one, see `tests/hosts.py`. A token bucket limits what each of them can send
and receive. `bench.py` runs on both. The folder results/network-cpu/ receives the table and the picture. The columns are those
of bench.py. The ratio is that to DistributedDataParallel with plain AdamW in the same round.
"""

import datetime
import json
import os
import sys
import tempfile
from typing import Any, NamedTuple

import torch

from benchmarks.results import Results, draw
from distributed.machine import device_name
from tests.hosts import ROOT, Hosts, why_not

MODEL = (
    "--n_layer=6",
    "--n_head=6",
    "--n_embd=384",
    "--vocab_size=65",
    "--batch_size=1",
    "--block_size=64",
    "--zero_bucket_mb=10",
)
MODES = "adamw,torch,sharded,bfloat16,hybrid"


class Network(NamedTuple):
    """Gbit/s of the link of a machine, and how long to measure."""

    gbit_per_s: float
    rounds: int
    steps_per_turn: int


NETWORKS = (Network(10, 7, 4), Network(1, 7, 3), Network(0.1, 3, 2))


def rows_of(network: Network, ranks_per_host: int) -> list[dict[str, Any]]:
    """Return the rows of bench.py from two hosts."""
    measure = ("--what=time", f"--rounds={network.rounds}", f"--steps_per_turn={network.steps_per_turn}")
    with tempfile.TemporaryDirectory() as folder, Hosts(2, mbit_per_s=1000 * network.gbit_per_s) as hosts:
        arguments = ("bench.py", *measure, *MODEL, f"--name={folder}", "--device=cpu", f"--modes={MODES}")
        jobs = hosts.torchrun(*arguments, ranks_per_host=ranks_per_host)
        codes = [job.finish(timeout_s=900) for job in jobs]
        if any(codes):
            raise RuntimeError("\n".join(job.printed() for job in jobs))
        with open(os.path.join(folder, "results.json")) as file:
            rows = json.load(file)["time"]["rows"]
    return [{"Gbit/s": network.gbit_per_s, "ranks": f"2 x {ranks_per_host}", **row} for row in rows]


def main() -> None:
    if reason := why_not():
        sys.exit(f"error: {reason}; run it as root on Linux, with iproute2")
    description = {
        "command": "python -m benchmarks.network",
        "date": datetime.date.today().isoformat(),
        "machine": f"{device_name(torch.device('cpu'))}, {os.cpu_count()} cores, torch {torch.__version__}",
        "setup": "6x384, 10.7M parameters, gloo, float32, 1 x 64 tokens per rank and micro-step, buckets of 10 MB",
    }
    results = Results(os.path.join(ROOT, "results", "network-cpu"), description)
    rows = [row for ranks in (1, 2) for network in NETWORKS for row in rows_of(network, ranks)]
    results.add("network", "Time of a step on two machines; the ratio is that to adamw", rows, "network.csv")
    draw(results.folder)


if __name__ == "__main__":
    main()
