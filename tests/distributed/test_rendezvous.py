"""distributed/rendezvous.py: the network interface of gloo, found from the address by which a machine reaches the others."""

import os
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch.distributed as dist

from distributed import rendezvous
from distributed.rendezvous import choose_interface

MACHINE_0 = {"host0": "127.0.1.1", "10.0.0.2": "10.0.0.1"}  # has MASTER_ADDR; its own name means loopback, as on Debian
MACHINE_1 = {"host0": "10.0.0.2", "10.0.0.2": "10.0.0.2"}
NAMES = {"lo": "127.0.0.1", "eth0": "10.0.0.1", "eth1": "10.0.0.2"}
INTERFACES = {name: [SimpleNamespace(address=found)] for name, found in NAMES.items()}


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that it is unset again after the test
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")


@pytest.mark.parametrize(
    ("rank", "routes", "others", "variables", "interface"),
    [
        (1, MACHINE_1, "127.0.1.1", {}, "eth1"),  # what reaches the other machine
        (0, MACHINE_0, "10.0.0.2", {}, "eth0"),  # not loopback, which its own name means
        (0, MACHINE_0, "10.0.0.2", {"GLOO_SOCKET_IFNAME": "ib0"}, "ib0"),  # the user's choice
        (1, {"host0": "10.0.0.9"}, "127.0.1.1", {}, None),  # no interface has this address
        (1, {}, "", {}, None),  # nothing reaches the first machine
    ],
)
def test_each_machine_takes_the_interface_that_reaches_the_other(monkeypatch, rank, routes, others, variables, interface):
    for name, value in {"MASTER_ADDR": "host0", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: INTERFACES)
    monkeypatch.setattr(rendezvous, "_own_address", lambda peer: routes.get(peer, ""))
    store = dist.HashStore()
    store.set(f"address of rank {1 - rank}", others)  # which the other rank has found
    choose_interface(store, rank, world_size=2, is_one_machine=False)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == interface


def test_one_machine_takes_loopback(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    choose_interface(dist.HashStore(), 0, world_size=2, is_one_machine=True)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == ("lo" if sys.platform == "linux" else None)
