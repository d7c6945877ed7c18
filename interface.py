"""The network interface that gloo uses on this machine."""

import contextlib
import ipaddress
import os
import socket
import struct
import sys

import torch.distributed as dist


def choose_interface(store: dist.Store, rank: int, world_size: int, is_one_machine: bool) -> None:
    """Set GLOO_SOCKET_IFNAME to the interface that reaches the other ranks, unless the user has set it.

    Gloo would take the address of this machine's name. On many machines this is 127.0.1.1, which no other machine can reach.
    Ranks of one machine use loopback. Several machines each use the interface that reaches MASTER_ADDR. On the machine that
    has this address, the name may mean loopback. Then it uses the interface that reaches another machine. If the interface is
    not found, the variable stays unset. NCCL chooses for itself. Needs to be called on all ranks.
    """
    address = _own_address("127.0.0.1" if is_one_machine else os.environ["MASTER_ADDR"])
    if not is_one_machine:
        store.set(f"address of rank {rank}", address)
        addresses = [found.decode() for found in store.multi_get([f"address of rank {r}" for r in range(world_size)])]
        outside = [found for found in addresses if found and not ipaddress.ip_address(found).is_loopback]
        if address not in outside and outside:
            address = _own_address(outside[0])
    name = _interfaces().get(address)
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _own_address(peer: str) -> str:
    """Returns the address from which this machine reaches a peer, a name or an address; '' if it is not known."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)  # with UDP, this sends nothing
                return probe.getsockname()[0]
    return ""


def _interfaces() -> dict[str, str]:
    """Returns the interface that has an address, by address; only on Linux."""
    if sys.platform != "linux":
        return {}
    import fcntl

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
                found[socket.inet_ntoa(answer[20:24])] = name
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:
        for line in file:
            digits, *_, name = line.split()
            found[str(ipaddress.IPv6Address(int(digits, 16)))] = name
    return found
