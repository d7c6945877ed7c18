"""distributed/rendezvous.py: the network interface of gloo, found from the address by which a machine reaches the others."""

import os
import sys

import pytest
import torch.distributed as dist

from distributed import rendezvous
from distributed.rendezvous import choose_interface

MACHINE_0 = {"host0": "127.0.1.1", "10.0.0.2": "10.0.0.1"}  # has MASTER_ADDR; its own name means loopback, as on Debian
MACHINE_1 = {"host0": "10.0.0.2", "10.0.0.2": "10.0.0.2"}
INTERFACES = {"127.0.0.1": "lo", "10.0.0.1": "eth0", "10.0.0.2": "eth1"}


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that it is unset again after the test
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")


@pytest.fixture
def chosen(monkeypatch):
    """What a rank with these routes chooses, by peer; the other rank has stored its own address."""
    monkeypatch.setenv("MASTER_ADDR", "host0")
    monkeypatch.setattr(rendezvous, "_interfaces", lambda: INTERFACES)

    def choose(rank, routes, others, **variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(rendezvous, "_own_address", lambda peer: routes.get(peer, ""))
        store = dist.HashStore()
        store.set(f"address of rank {1 - rank}", others)
        choose_interface(store, rank, world_size=2, is_one_machine=False)
        return os.environ.get("GLOO_SOCKET_IFNAME")

    return choose


def test_each_machine_takes_the_interface_that_reaches_the_other(chosen):
    assert chosen(1, MACHINE_1, others="127.0.1.1") == "eth1"


def test_the_machine_of_rank_0_does_not_take_loopback_where_it_finds_its_own_name(chosen):
    assert chosen(0, MACHINE_0, others="10.0.0.2") == "eth0"


def test_the_user_chooses(chosen):
    assert chosen(0, MACHINE_0, others="10.0.0.2", GLOO_SOCKET_IFNAME="ib0") == "ib0"


def test_an_unknown_address_chooses_nothing(chosen):
    assert chosen(1, {"host0": "10.0.0.9"}, others="127.0.1.1") is None


def test_an_unknown_master_chooses_nothing(chosen):
    assert chosen(1, {}, others="") is None


def test_one_machine_takes_loopback(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    choose_interface(dist.HashStore(), 0, world_size=2, is_one_machine=True)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == ("lo" if sys.platform == "linux" else None)
