"""distributed/ranks.py, rendezvous.py, machine.py: which rank a process is, how the ranks meet, what 'auto' stands for."""

import json
import os
import resource
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from ranks import context, run_ranks
from scripts import LAUNCH_VARIABLES

from configurator import configure
from distributed import machine, rendezvous
from distributed.exits import print_error
from distributed.launch import Launch, launched
from distributed.ranks import start
from distributed.rendezvous import connect, interface, meet
from zero.host_comm import LONG_TIMEOUT, cpu_group, gather_objects, timeout_of

ALONE = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "a-machine-whose-name-has-no-address"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


LACKING = {"WORLD_SIZE, MASTER_ADDR, MASTER_PORT": {"RANK": "0"}, "MASTER_PORT": {**TORCHRUN, "MASTER_PORT": ""}}


@pytest.mark.parametrize("missing", LACKING)
def test_launch_variables_that_cannot_be(capsys, monkeypatch, missing):
    for name in LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in LACKING[missing].items():
        monkeypatch.setenv(name, value)
    message = f"RANK is set without {missing}; start with torchrun, or unset RANK for a single process"
    with pytest.raises(ValueError, match=f"^{message}$"):
        launched()
    with pytest.raises(SystemExit, match=r"^2$"):
        configure({}, [])
    assert capsys.readouterr().err == f"error: {message}\n"


def test_launch_variables_count_together_or_not_at_all(monkeypatch):
    for name in LAUNCH_VARIABLES:
        monkeypatch.setenv(name, "7")
    monkeypatch.delenv("RANK")
    assert launched() == Launch() == (False, 0, 0, 1, 1)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert launched() == (True, 1, 7, 2, 7)


def join(port, results):
    """One process that starts a process group of its own."""
    monkeypatch = pytest.MonkeyPatch()
    for name, value in {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": str(port), **ALONE}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    connect(launched())
    device = start(launched(), "cpu")
    limit, largest = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert limit == (2**16 if largest == resource.RLIM_INFINITY else min(largest, 2**16)), "for connections of other programs"
    results.put((str(device), dist.get_backend(), dist.get_rank(), dist.get_world_size()))


def test_ranks_on_cpus_meet_by_gloo():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("exception_dump", "0")
    results = context.SimpleQueue()
    process = context.Process(target=join, args=(store.port, results))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert results.get() == ("cpu", "gloo", 0, 1)
    assert not store.check(["exception_dump"]), "NCCL would end the ranks of a restart for the hang before it"


def backends(gpus):
    """What `start` chooses for two ranks on such GPUs, by their PCI address: gloo by another name stands in for NCCL."""
    rank, begun = dist.get_rank(), []

    def init(backend, device_id, **how):
        begun.append((backend, str(device_id)))
        original("other", **how)

    dist.Backend.register_backend("other", lambda store, *args: dist.ProcessGroupGloo(store, *args), devices=["cpu"])
    original = dist.init_process_group
    assert gather_objects(rank) == [0, 1], "before the choice, by gloo"
    card = SimpleNamespace(pci_domain_id=0, pci_bus_id=gpus[rank], pci_device_id=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", init)
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        patch.setattr(torch.cuda, "set_device", lambda device: None)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: card)
        device = start(Launch(True, rank, rank, 2, 2), "cuda", timeout=LONG_TIMEOUT)
    return begun, str(device), gather_objects(rank), dist.get_backend(cpu_group(None)), timeout_of(None).total_seconds()


@pytest.mark.parametrize("gpus", [(1, 2), (1, 1)])
def test_nccl_is_chosen_where_each_rank_has_a_card_of_its_own(gpus):
    """Two slices of one card (MIG) have one address, which NCCL refuses."""
    for rank, (begun, device, ranks, backend, timeout) in enumerate(run_ranks(backends, 2, gpus)):
        assert begun == ([("nccl", device)] if gpus == (1, 2) else [])
        assert (device, ranks, backend, timeout) == (f"cuda:{rank}", [0, 1], "gloo", LONG_TIMEOUT.total_seconds())


def test_the_gpu_of_a_mac_is_for_a_single_process():
    assert "mps" not in dist.Backend.backend_capability["gloo"], "the reason that the message gives"
    with pytest.raises(ValueError, match=r"device=mps works without torchrun only, .*; or use --device=cpu"):
        start(Launch(True, 0, 0, 2, 2), "mps")
    assert str(start(Launch(), "mps")) == "mps"


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1"])
def test_one_process_makes_the_gpu_that_it_names_the_current_one(monkeypatch, device):
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert start(Launch(), device) == torch.device(device)
    assert chosen == ([device] if device == "cuda:1" else [])


def test_a_restarted_rank_finds_nothing_that_the_ranks_before_have_left_in_the_store():
    """torchrun may keep its store over a restart."""
    store = dist.HashStore()

    def started(delays):
        """What each rank reads from its part of the store, before rank 0 writes to it and after."""
        both_have_looked = threading.Barrier(2)

        def start(rank):
            time.sleep(delays[rank])
            part, addresses = meet(store, rank, 2, f"10.0.0.{rank} {delays}")
            assert addresses == [f"10.0.0.{number} {delays}" for number in range(2)]
            found = part.check(["address"])
            both_have_looked.wait(20)
            if rank == 0:
                part.set("address", str(delays))
            return found, part.get("address").decode()

        with ThreadPoolExecutor(2) as ranks:
            return list(ranks.map(start, (0, 1)))

    for delays in ((0.0, 0.3), (0.3, 0.0), (0.0, 0.0)):
        assert started(delays) == [(False, str(delays))] * 2


def test_a_process_that_is_left_from_an_earlier_start_meets_nobody():
    store = dist.HashStore()
    with ThreadPoolExecutor(1) as threads:
        left = threads.submit(meet, store, 0, 2, "10.0.0.1", 5.0)
        while not store.check(["start of rank 0"]):
            time.sleep(0.01)
        store.set("start of rank 0", json.dumps(["new", "10.0.0.1", ""]))
        with pytest.raises(RuntimeError, match="another process is rank 0 now"):
            left.result(20)


def test_a_line_of_another_thread_does_not_wait_for_stdout(monkeypatch, capsys):
    """The main thread may hang in a print, and so hold its lock."""
    with monkeypatch.context() as context:
        context.setattr(sys, "stdout", SimpleNamespace(flush=lambda: pytest.fail("it waits for stdout")))
        print_error("a rank is lost")
    assert capsys.readouterr().err == "error: a rank is lost\n"


def test_a_rank_that_does_not_start_is_named():
    with pytest.raises(RuntimeError, match=r"^rank 0, 2 did not start within 0 s$"):
        meet(dist.HashStore(), 1, 3, "", timeout_s=0.2)


def test_a_rank_that_waits_says_where(monkeypatch, capsys):
    def never(*_, **__):
        time.sleep(0.2)
        raise RuntimeError("nobody came")

    for name, value in {"MASTER_ADDR": "host", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rendezvous, "_PATIENCE_S", 0.01)
    monkeypatch.setattr(dist, "rendezvous", never)
    with pytest.raises(RuntimeError, match="nobody came"):
        connect(Launch(True, 3, 0, 4, 1))
    assert capsys.readouterr().err == "rank 3 waits for the others at host:29500\n"


MACHINE_0 = {"host0": "127.0.1.1", "10.0.0.2": "10.0.0.1"}  # has MASTER_ADDR; its own name means loopback, as on Debian
MACHINE_1 = {"host0": "10.0.0.2", "10.0.0.2": "10.0.0.2"}
NAMES = {"lo": "127.0.0.1", "eth0": "10.0.0.1", "eth1": "10.0.0.2"}
INTERFACES = {name: [SimpleNamespace(address=found)] for name, found in NAMES.items()}


@pytest.mark.parametrize(
    ("routes", "others", "expected"),
    [
        (MACHINE_1, "127.0.1.1", "eth1"),  # what reaches the other machine
        (MACHINE_0, "10.0.0.2", "eth0"),  # not loopback, which its own name means
        ({"host0": "10.0.0.9"}, "127.0.1.1", None),  # no interface has this address
        ({}, "", None),  # nothing reaches the first machine
    ],
)
def test_each_machine_takes_the_interface_that_reaches_the_other(monkeypatch, routes, others, expected):
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: INTERFACES)
    monkeypatch.setattr(rendezvous, "_own_address", lambda peer: routes.get(peer, ""))
    own = routes.get("host0", "")
    assert interface(own, [own, others]) == expected


@pytest.mark.parametrize(
    ("local_world_size", "choice", "expected"),
    [(2, {}, "lo" if sys.platform == "linux" else None), (1, {}, "eth0"), (1, {"GLOO_SOCKET_IFNAME": "ib0"}, "ib0")],
    ids=["one machine", "several", "the user's choice"],
)
def test_gloo_gets_an_interface(monkeypatch, local_world_size, choice, expected):
    """On one of two ranks whose store and process group are left out."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that it is unset again after the test
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    for name, value in {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1", **choice}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(dist.HashStore(), 0, 2)]))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(rendezvous, "meet", lambda store, *_: (store, ["10.0.0.1", "10.0.0.2"]))
    monkeypatch.setattr(rendezvous, "interface", lambda *_: "eth0")
    rendezvous.connect(Launch(True, 0, 0, 2, local_world_size))
    assert os.environ.get("GLOO_SOCKET_IFNAME") == expected


def test_what_auto_stands_for(monkeypatch):
    assert machine.resolve("cpu", "auto") == ("cpu", "float32")
    assert machine.resolve("cpu", "bfloat16") == ("cpu", "bfloat16")
    cases = (False, False, "cpu", "float32"), (True, False, "cuda", "float16"), (True, True, "cuda", "bfloat16")
    for available, supported, *expected in cases:
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        monkeypatch.setattr(torch.cuda, "device_count", lambda available=available: int(available))
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda supported=supported, **_: supported)
        assert machine.resolve("auto", "auto") == tuple(expected)


@pytest.mark.parametrize("device", ["cuda:1", "cuda:x", "cpu:1", "tpu", ""])
def test_a_device_that_is_not_there_is_refused(monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=f"device={device} is not available; this machine has 1 cpu, 1 cuda, "):
        machine.resolve(device, "float32")


def test_the_number_format_follows_that_of_the_weights():
    assert machine.resolve("cpu", "auto", "bfloat16") == ("cpu", "bfloat16")
    with pytest.raises(ValueError, match="param_dtype=bfloat16 computes in bfloat16, not in dtype=float16"):
        machine.resolve("cpu", "float16", "bfloat16")
    with pytest.raises(ValueError, match="this GPU has no bfloat16 and computes in float16; use --param_dtype=auto"):
        machine.resolve_dtype("auto", "bfloat16", "float16")


@pytest.mark.parametrize(
    ("name", "row"),
    [
        *((name, name) for name in machine.CARDS),
        *(("NVIDIA A100-PCIE-40GB", "A100-40"), ("NVIDIA A100-SXM4-80GB", "A100"), ("Tesla V100-SXM2-32GB", "V100-32")),
        *(("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA GH200 480GB", "GH200"), ("NVIDIA A10G", "A10G"), ("Tesla T4", "T4")),
        *(("NVIDIA GeForce RTX 5090", "5090"), ("rtx 4090", "4090"), ("rtx4090", "4090"), ("2080ti", "2080 Ti")),
        *(("NVIDIA RTX A6000", "A6000"), ("NVIDIA RTX 6000 Ada Generation", "6000 Ada"), ("a100 40gb", "A100-40")),
        *(("NVIDIA GeForce RTX 4070 Ti", "4070 Ti"), ("NVIDIA A100 80GB PCIe", "A100"), ("h100 sxm", "H100")),
        *((name, None) for name in ("", "A100X", "H200 NVL", "Quadro RTX 6000", "RTX 3080 Ti")),
        *((name, None) for name in ("GRID A100X-40C", "NVIDIA A100-SXM-64GB")),
    ],
)
def test_a_card_is_known_by_its_name_and_by_that_of_its_driver(name, row):
    assert machine.card(name) is machine.CARDS.get(row)
    for other in (f"{name} Laptop GPU", f"{name} MIG 1g.5gb", f"{name} D", f"{name} SUPER"):
        assert machine.card(other) is None


def test_the_peak_of_a_gpu_is_that_of_its_data_sheet_and_that_of_a_cpu_is_measured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    assert machine.peak_flops(torch.device("cuda", 0), torch.bfloat16) == 989.4e12
    assert machine.peak_flops(torch.device("cpu"), torch.float32) == 0
    assert not machine.is_slow_on_cpu(torch.device("cpu"), "float32")


def test_ranks_share_the_cores_unless_the_user_has_said_how_many(monkeypatch):
    before = torch.get_num_threads()
    try:
        of_user = lambda: [b"OMP_NUM_THREADS=1"]  # noqa: E731
        cases = (True, "1", 2, list), (True, "1", before, of_user), (True, "3", before, list), (False, "1", before, list)
        for by_torchrun, given, threads, variables_of_parent in (*cases, (False, "", 2, list)):
            monkeypatch.setattr(machine, "_variables_of_parent", variables_of_parent)
            torch.set_num_threads(before)
            monkeypatch.setenv("OMP_NUM_THREADS", given)
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7") if by_torchrun else monkeypatch.delenv("TORCHELASTIC_RUN_ID", False)
            monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
            machine.divide_threads(2)
            assert torch.get_num_threads() == threads, (by_torchrun, given)
        for cores, ranks, threads in ((8, 2, 4), (8, 3, 2), (1, 4, 1)):
            monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)), raising=False)
            machine.divide_threads(ranks)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
