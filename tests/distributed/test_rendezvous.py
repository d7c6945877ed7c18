"""distributed/rendezvous.py: the network interface of gloo, found from the address by which a machine reaches the others."""

import os
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch.distributed as dist

from distributed import rendezvous
from distributed.launch import Launch
from distributed.rendezvous import interface

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
    for name, value in {"MASTER_ADDR": "192.0.2.1", **choice}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(dist.HashStore(), 0, 2)]))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(rendezvous, "meet", lambda store, *_: (store, ["10.0.0.1", "10.0.0.2"]))
    monkeypatch.setattr(rendezvous, "interface", lambda *_: "eth0")
    rendezvous.connect(Launch(True, 0, 0, 2, local_world_size))
    assert os.environ.get("GLOO_SOCKET_IFNAME") == expected
