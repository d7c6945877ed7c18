"""How the ranks find each other: the store, the network interface of gloo, and their first process group."""

import contextlib
import ctypes
import datetime
import hashlib
import ipaddress
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
import uuid

import torch.distributed as dist

from distributed.exits import print_error
from distributed.launch import Launch

_MEETING_S = 600.0  # seconds within which all ranks must start
_PATIENCE_S = 10.0  # until a line says that a rank waits


def connect(launch: Launch) -> None:
    """Start a process group of gloo, through which the ranks agree until `ranks.start` chooses the backend of the training.

    Needs to be called on all ranks. A single process has none.
    """
    if not launch.distributed:
        return
    _end_with_torchrun()
    _raise_limit_of_open_files()
    is_one_machine = launch.local_world_size == launch.world_size
    if is_one_machine:  # torchrun --standalone writes the name of the machine, which may have no address
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    others = f"rank {launch.rank} waits for the others at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}\n"
    patience = threading.Timer(_PATIENCE_S, sys.stderr.write, [others])
    patience.daemon = True
    if launch.local_rank == 0:  # a line of each machine
        patience.start()
    timeout = datetime.timedelta(seconds=_MEETING_S)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    store.delete_key("exception_dump")  # stale after a restart: NCCL ends a rank that finds it, and ignores a PrefixStore
    own = _own_address(os.environ["MASTER_ADDR"])
    store, addresses = meet(store, rank, world_size, own)
    patience.cancel()
    # gloo would take the address of the machine's name: on many machines 127.0.1.1, which no other machine can reach
    if is_one_machine and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    elif not is_one_machine and "GLOO_SOCKET_IFNAME" not in os.environ and (name := interface(own, addresses)):
        os.environ["GLOO_SOCKET_IFNAME"] = name  # NCCL chooses for itself
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


def meet(
    store: dist.Store, rank: int, world_size: int, address: str, timeout_s: float = _MEETING_S
) -> tuple[dist.Store, list[str]]:
    """Return a PrefixStore without stale keys, and the addresses of all ranks. Needs to be called on all ranks.

    torchrun may keep its store when it restarts the ranks, and they would connect to addresses of ranks that have ended
    (https://github.com/pytorch/pytorch/issues/135712). So each process posts an ID of its own, and a checksum of the IDs that
    it sees. When all ranks see the same, no ID is from before: only a process of this start has seen the new ones.

    Raises RuntimeError if not all ranks call this function within `timeout_s`, or if another process has taken this rank.
    """
    keys = [f"start of rank {number}" for number in range(world_size)]
    own, seen, end = uuid.uuid4().hex, "", time.monotonic() + timeout_s
    store.set(keys[rank], last := json.dumps([own, address, seen]))
    while time.monotonic() < end:
        post = json.dumps([own, address, seen])
        if store.compare_set(keys[rank], last, post) != post.encode():
            raise RuntimeError(f"another process is rank {rank} now; this one is left from an earlier start")
        last = post
        if store.check(keys):
            posts = [json.loads(post) for post in store.multi_get(keys)]
            if seen and all(view == seen for _, _, view in posts):
                return dist.PrefixStore(seen, store), [found for _, found, _ in posts]
            seen = hashlib.sha256("".join(number for number, _, _ in posts).encode()).hexdigest()
        time.sleep(0.05)
    missing = [str(number) for number in range(world_size) if not store.check([keys[number]])]
    who = f"rank {', '.join(missing)} did not start" if missing else "the ranks have not met"
    raise RuntimeError(f"{who} within {timeout_s:.0f} s")


def interface(own: str, addresses: list[str]) -> str | None:
    """Return the name of the interface that reaches the other machines; None if it is not found.

    This is the one with `own`, the address from which this machine reaches MASTER_ADDR. On the machine that has MASTER_ADDR,
    the name may mean loopback: then it is the interface that reaches another machine. `addresses` are those of all ranks.

    Raises ImportError without psutil.
    """
    outside = [found for found in addresses if found and not ipaddress.ip_address(found).is_loopback]
    if own not in outside and outside:
        own = _own_address(outside[0])
    try:
        import psutil
    except ImportError as error:
        raise ImportError(f"several machines need psutil ({error}); pip install psutil") from error
    for name, found in psutil.net_if_addrs().items():
        if own in [each.address.partition("%")[0] for each in found]:  # of IPv6 without its zone
            return name
    return None


def _own_address(peer: str) -> str:
    """Return the address from which this machine reaches a peer, a name or an address; '' if it is not known."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)  # with UDP, this sends nothing
                return probe.getsockname()[0]
    return ""


def _end_with_torchrun() -> None:
    """On Linux, let the kernel kill a rank of torchrun when torchrun ends; if it has ended, end now.

    Otherwise the rank would continue alone, keep its GPU and the output folder, and meet the ranks of the next torchrun.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or sys.platform != "linux":
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL), 0, 0, 0)
    # process 1 takes over the children of a process that has ended; in a container, it may be torchrun itself
    with open("/proc/1/cmdline", "rb") as file:  # unlike /proc/1/exe, everybody may read it
        first = file.read().partition(b"\0")[0]
    if os.getppid() == 1 and b"python" not in os.path.basename(first):
        print_error("torchrun has ended")
        os._exit(1)


def _raise_limit_of_open_files() -> None:
    """Raise it to the hard limit, at most 65,536: gloo aborts when connections from other programs use it up."""
    limit, largest = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = 2**16 if largest == resource.RLIM_INFINITY else min(largest, 2**16)
    if limit != resource.RLIM_INFINITY and limit < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, largest))
