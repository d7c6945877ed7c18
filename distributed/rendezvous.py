"""How the ranks find each other: the store, the network interface of gloo, and their first process group."""

import contextlib
import ctypes
import datetime
import hashlib
import ipaddress
import os
import resource
import signal
import socket
import sys
import time
import uuid

import torch.distributed as dist

from distributed.launch import Launch

_MEETING_S = 600.0  # seconds within which all ranks must start


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
    timeout = datetime.timedelta(seconds=_MEETING_S)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    store.delete_key("exception_dump")  # from before a restart: NCCL ends a rank that finds it, and ignores parts of a store
    store = without_old_keys(store, rank, world_size)
    choose_interface(store, rank, world_size, is_one_machine)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


def without_old_keys(store: dist.Store, rank: int, world_size: int, timeout_s: float = _MEETING_S) -> dist.Store:
    """Return a part of the store without keys from before a restart. Needs to be called on all ranks.

    torchrun may keep its store when it restarts the ranks, and they would connect to addresses of ranks that have ended
    (https://github.com/pytorch/pytorch/issues/135712). So the part is named by an ID of every process of this start. A rank may
    read the old ID of another rank at first. It has the right IDs when all ranks have the same: the others know its new ID.

    Raises:
        RuntimeError: if not all ranks call this function within `timeout_s`, or if another process has taken this rank.
    """
    ids, names = ([f"{key} of rank {number}" for number in range(world_size)] for key in ("id", "name"))
    own = uuid.uuid4().hex
    store.set(ids[rank], own)
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if late := [number for number in range(world_size) if not store.check([ids[number]])]:
            time.sleep(0.1)
            continue
        found = store.multi_get(ids)
        if found[rank].decode() != own:
            raise RuntimeError(f"another process is rank {rank} now; this one is left from an earlier start")
        name = hashlib.sha256(b"".join(found)).hexdigest()
        store.set(names[rank], name)
        if {text.decode() for text in store.multi_get(names)} == {name}:
            return dist.PrefixStore(name, store)
        late = list(range(world_size))
        time.sleep(0.1)
    missing = f"rank {late[0]}" if len(late) == 1 else f"{len(late)} of {world_size} ranks"
    raise RuntimeError(f"{missing} did not start within {timeout_s:.0f} s")


def choose_interface(store: dist.Store, rank: int, world_size: int, is_one_machine: bool) -> None:
    """Set GLOO_SOCKET_IFNAME to the interface that reaches the other ranks, unless the user has set it.

    Gloo would take the address of this machine's name. On many machines this is 127.0.1.1, which no other machine can reach.
    Ranks of one machine use loopback. Several machines each use the interface that reaches MASTER_ADDR. On the machine that
    has this address, the name may resolve to loopback. Then it uses the interface that reaches another machine. If none
    is found, the variable stays unset. NCCL chooses for itself. Needs to be called on all ranks.
    """
    if is_one_machine:
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return
    address = _own_address(os.environ["MASTER_ADDR"])
    store.set(f"address of rank {rank}", address)
    addresses = [found.decode() for found in store.multi_get([f"address of rank {r}" for r in range(world_size)])]
    outside = [found for found in addresses if found and not ipaddress.ip_address(found).is_loopback]
    if address not in outside and outside:
        address = _own_address(outside[0])
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    try:
        import psutil
    except ImportError as error:
        raise ImportError(f"several machines need psutil ({error}); pip install psutil") from error
    for name, found in psutil.net_if_addrs().items():
        if address in [each.address.partition("%")[0] for each in found]:  # of IPv6 without its zone
            os.environ["GLOO_SOCKET_IFNAME"] = name


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
        sys.stderr.write("error: torchrun has ended\n")
        os._exit(1)


def _raise_limit_of_open_files() -> None:
    """Raise it to the hard limit, at most 65,536: gloo aborts when connections from other programs use it up."""
    limit, largest = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = 2**16 if largest == resource.RLIM_INFINITY else min(largest, 2**16)
    if limit != resource.RLIM_INFINITY and limit < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, largest))
