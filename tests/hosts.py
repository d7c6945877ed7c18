"""Several hosts on one machine: network namespaces with addresses of their own, joined by a switch. Linux, root, iproute2.

Every host has the address 10.77.0.<its number + 1>, the name host<its number>, and a full-duplex link to the switch, `eth0`. As
on Debian, a host resolves its own name to 127.0.1.1. The hosts share the file system. A relative path is in a folder
that only one host has. The hosts divide the cores of this machine among themselves. The network cannot be seen or
reached from outside, so many such networks can exist at the same time.

    $ sudo python tests/hosts.py 2 100 4 bench.py ...    # torchrun on two hosts with links of 100 Mbit/s, four ranks on each
"""

import contextlib
import functools
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

_ENVIRONMENT = {**os.environ, "PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"}
_BE_A_HOST = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'  # in its own UTS and mount namespaces
_numbers = itertools.count()


@functools.cache
def why_not():
    """The reason why this machine or this user cannot have such hosts, None if they can."""
    commands = "ip", "tc", "unshare", "mount", "taskset"
    if missing := [name for name in commands if shutil.which(name, path=_ENVIRONMENT["PATH"]) is None]:
        return f"network namespaces need the commands {', '.join(missing)}"
    try:
        with make_hosts(1) as [host]:
            return "a host cannot have a name of its own" if host.start("true").wait() else None
    except subprocess.CalledProcessError as error:
        return f"no network namespaces: {' '.join(error.cmd)}: {error.stderr.strip()}"


class Host(NamedTuple):
    """`make_hosts` makes it."""

    number: int
    namespace: str
    folder: str  # its own
    cores: str
    jobs: contextlib.ExitStack

    @property
    def name(self):
        return f"host{self.number}"

    def start(self, *command):
        """A command under way in the host's own folder; its output, with stderr, goes to a pipe."""
        line = ["taskset", "-c", self.cores, "ip", "netns", "exec", self.namespace, "unshare", "--uts", "--mount"]
        line += ["sh", "-c", _BE_A_HOST, "sh", self.name, f"{self.folder}.hosts", *command]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return self.jobs.enter_context(subprocess.Popen(line, cwd=self.folder, env=_ENVIRONMENT, text=True, **pipes))

    def set_rate(self, mbit_per_s):
        """Limit the link in both directions."""
        burst = max(200_000, int(mbit_per_s * 250))  # bytes: three of the largest packets, and two milliseconds
        limit = ("rate", f"{mbit_per_s}mbit", "burst", f"{burst}", "latency", "200ms")
        for namespace, device in ((self.namespace, "eth0"), (self.namespace.replace(self.name, "switch"), self.name)):
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *limit)


@contextlib.contextmanager
def make_hosts(number):
    """Some hosts. Leaving the block kills their processes and removes them."""
    network = f"zero1-{os.getpid()}-{next(_numbers)}"
    addresses = {f"host{k}": f"10.77.0.{k + 1}" for k in range(number)}
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // number)  # if there are fewer cores than hosts, some hosts have the same core
    with contextlib.ExitStack() as stack:
        jobs = stack.enter_context(contextlib.ExitStack())  # waited for when they have been killed
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{network}-"))
        switch = stack.enter_context(_namespace(f"{network}-switch"))  # has the bridge
        _run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "switch", "addrgenmode", "none", "up")
        hosts = []
        for k, (name, address) in enumerate(addresses.items()):
            namespace = stack.enter_context(_namespace(f"{network}-{name}"))
            _run("ip", "-n", namespace, "link", "set", "lo", "up")
            _run("ip", "link", "add", "eth0", "netns", namespace, "type", "veth", "peer", "name", name, "netns", switch)
            _run("ip", "-n", switch, "link", "set", name, "master", "switch", "addrgenmode", "none", "up")
            _run("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
            _run("ip", "-n", namespace, "link", "set", "eth0", "addrgenmode", "none", "up")  # no IPv6 packets to count
            own = [str(cores[core % len(cores)]) for core in range(k * share, (k + 1) * share)]
            hosts.append(Host(k, namespace, os.path.join(folder, name), ",".join(own), jobs))
            os.mkdir(hosts[k].folder)
            with open(f"{hosts[k].folder}.hosts", "w") as file:
                for known, found in {"localhost": "127.0.0.1", **addresses, name: "127.0.1.1"}.items():
                    file.write(f"{found} {known}\n")
        yield hosts


@contextlib.contextmanager
def _namespace(name):
    """A network namespace, whose processes are killed at the end."""
    _run("ip", "netns", "add", name)
    try:
        yield name
    finally:
        while pids := _run("ip", "netns", "pids", name).split():
            subprocess.run(["kill", "-KILL", *pids], stderr=subprocess.DEVNULL)  # one may have ended in the meantime
        _run("ip", "netns", "delete", name)


def _run(*command):
    return subprocess.run(command, env=_ENVIRONMENT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    number, mbit_per_s, ranks_per_host, *command = sys.argv[1:]
    common = f"--nnodes={number} --nproc_per_node={ranks_per_host} --master_addr=10.77.0.1 --master_port=1234"
    with make_hosts(int(number)) as hosts:
        jobs = []
        for host in hosts:
            host.set_rate(float(mbit_per_s))
            line = [sys.executable, "-m", "torch.distributed.run", *common.split(), f"--node_rank={host.number}"]
            jobs.append(host.start(*line, os.path.abspath(command[0]), *command[1:]))
        print(jobs[0].communicate()[0])
        sys.exit(max(job.wait() for job in jobs))
