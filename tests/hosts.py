"""Several hosts on one machine: network namespaces with addresses of their own, joined by a switch. Linux, root, iproute2.

    with Hosts(2) as hosts:
        jobs = hosts.torchrun("train.py", "config/train_stdlib_char.py", "--out_dir=/tmp/out", ranks_per_host=2)
        assert [job.finish() for job in jobs] == [0, 0], jobs[0].printed()

As a script, it prints what the first of several hosts prints; here of two, each with 0.1 Gbit/s and two ranks:
    $ sudo .venv/bin/python tests/hosts.py 2 100 2 bench.py --what=time --device=cpu

Every host has the address 10.77.0.<its number + 1>, the name host<its number>, and a full-duplex link to the switch, `eth0`. As
on Debian, a host resolves its own name to 127.0.1.1. The hosts share the file system. A relative path is in a folder
that only one host has. The hosts divide the cores of this machine among themselves. The network cannot be seen or
reached from outside, so many such networks can exist at the same time.
"""

import contextlib
import functools
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PORT = 1234  # of torchrun's rendezvous, as in nanoGPT's README
_ENVIRONMENT = {**os.environ, "PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"}
_BE_A_HOST = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'  # in its own UTS and mount namespaces
_numbers = itertools.count()


@functools.cache
def why_not() -> str | None:
    """Return the reason why this machine or this user cannot have such hosts, None if they can."""
    missing = [
        name for name in ("ip", "tc", "unshare", "mount", "taskset") if shutil.which(name, path=_ENVIRONMENT["PATH"]) is None
    ]
    if missing:
        return f"network namespaces need the commands {', '.join(missing)}"
    try:
        with Hosts(1, mbit_per_s=1000) as hosts:
            code = hosts[0].start("true").finish()
    except subprocess.CalledProcessError as error:
        return f"no network namespaces: {' '.join(error.cmd)}: {error.stderr.strip()}"
    return None if code == 0 else "a host cannot have a name of its own"


class Job(subprocess.Popen[bytes]):
    """A running command on a host; `pid` is that of the command. Stdout and stderr go to one file."""

    def __init__(self, command: list[str], path: str, **options: Any) -> None:
        self.path = path
        with open(path, "wb") as output:
            super().__init__(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, **options)

    def printed(self) -> str:
        """Return what it has written so far."""
        with open(self.path, errors="replace") as file:
            return file.read()

    def wait_for(self, text: str, timeout_s: float = 60.0) -> str:
        """Wait until `text` has been printed, and return all that has been printed then. TimeoutError: it is not printed."""
        end = time.monotonic() + timeout_s
        while True:
            is_over = self.poll() is not None or time.monotonic() > end  # checked before reading: the last output counts
            if text in (printed := self.printed()):
                return printed
            if is_over:
                raise TimeoutError(f"{text!r} is not printed; exit code {self.returncode}:\n{printed}")
            time.sleep(0.02)

    def finish(self, timeout_s: float = 120.0) -> int:
        """Wait for its end, and return its exit code, negative if a signal ended it. TimeoutError: it does not end."""
        try:
            return self.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"it does not end:\n{self.printed()}") from None


class Host:
    """One host. `Hosts` makes and removes it."""

    def __init__(self, number: int, namespace: str, switch: str, folder: str, cores: list[int]) -> None:
        self.name, self.address = f"host{number}", f"10.77.0.{number + 1}"
        self.number, self.namespace, self.folder = number, namespace, os.path.join(folder, f"host{number}")
        self._switch, self._etc_hosts = switch, os.path.join(folder, f"{self.name}.hosts")
        self._cores = ",".join(map(str, cores))
        self._jobs: list[Job] = []
        os.mkdir(self.folder)

    def join(self, names: dict[str, str]) -> None:
        """Connect it to the switch. `names` are the addresses of all hosts, by name."""
        with open(self._etc_hosts, "w") as file:
            for name, address in {"localhost": "127.0.0.1", **names, self.name: "127.0.1.1"}.items():
                file.write(f"{address} {name}\n")
        _run("ip", "-n", self.namespace, "link", "set", "lo", "up")
        peer = ("peer", "name", self.name, "netns", self._switch)
        _run("ip", "link", "add", "eth0", "netns", self.namespace, "type", "veth", *peer)
        _run("ip", "-n", self._switch, "link", "set", self.name, "master", "switch", "addrgenmode", "none", "up")
        _run("ip", "-n", self.namespace, "address", "add", f"{self.address}/24", "dev", "eth0")
        _run("ip", "-n", self.namespace, "link", "set", "eth0", "addrgenmode", "none", "up")  # no IPv6 packets to count

    def start(self, *command: str) -> Job:
        """Start a command in the host's own `folder`."""
        line = ["taskset", "-c", self._cores, "ip", "netns", "exec", self.namespace, "unshare", "--uts", "--mount"]
        line += ["sh", "-c", _BE_A_HOST, "sh", self.name, self._etc_hosts, *command]
        path = os.path.join(self.folder, f"output{len(self._jobs)}")
        self._jobs.append(Job(line, path, cwd=self.folder, env=_ENVIRONMENT))
        return self._jobs[-1]

    def torchrun(self, *arguments: str) -> Job:
        """Start torchrun with these arguments. An argument `name.py` is a script of this repository."""
        line = [os.path.join(ROOT, text) if text.endswith(".py") and "/" not in text else text for text in arguments]
        return self.start(sys.executable, "-m", "torch.distributed.run", *line)

    def set_rate(self, mbit_per_s: float) -> None:
        """Limit the link in both directions."""
        burst = max(200_000, int(mbit_per_s * 250))  # bytes: three of the largest packets, and two milliseconds
        limit = ("rate", f"{mbit_per_s}mbit", "burst", f"{burst}", "latency", "200ms")
        for namespace, device in ((self.namespace, "eth0"), (self._switch, self.name)):
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *limit)

    def pids(self) -> list[int]:
        """Return the IDs of the processes of this host."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self.namespace).split()]

    def kill(self) -> None:
        """Kill every process at once, as a power failure does."""
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for job in self._jobs:
                job.poll()
            time.sleep(0.01)


class Hosts(list[Host]):
    """Makes `number` hosts, each with a link of `mbit_per_s`. As a context manager, ends their processes and removes them."""

    def __init__(self, number: int, mbit_per_s: float | None = None) -> None:
        super().__init__()
        network = f"zero1-{os.getpid()}-{next(_numbers)}"
        self.switch = f"{network}-switch"  # also a namespace, which has the bridge
        self._folder = tempfile.TemporaryDirectory(prefix=f"{network}-")
        self._namespaces: list[str] = []
        try:
            self._add_namespace(self.switch)
            _run("ip", "-n", self.switch, "link", "add", "switch", "type", "bridge")
            _run("ip", "-n", self.switch, "link", "set", "switch", "addrgenmode", "none", "up")
            cores = sorted(os.sched_getaffinity(0))
            share = max(1, len(cores) // number)  # if there are fewer cores than hosts, some hosts have the same core
            for k in range(number):
                self._add_namespace(f"{network}-host{k}")
                own = [cores[core % len(cores)] for core in range(k * share, (k + 1) * share)]
                self.append(Host(k, f"{network}-host{k}", self.switch, self._folder.name, own))
            for host in self:
                host.join({other.name: other.address for other in self})
                if mbit_per_s is not None:
                    host.set_rate(mbit_per_s)
        except BaseException:
            self.__exit__()
            raise

    def _add_namespace(self, name: str) -> None:
        _run("ip", "netns", "add", name)
        self._namespaces.append(name)

    def torchrun(self, *arguments: str, ranks_per_host: int = 2, rendezvous: str = "static") -> list[Job]:
        """Start a script on all hosts, as a user does: one torchrun per host, with the same arguments except `--node_rank`.

        `rendezvous`: 'static' is how nanoGPT's README writes it; 'c10d' is `--rdzv-backend=c10d`.
        """
        return [host.torchrun(*self.options(host, ranks_per_host, rendezvous), *arguments) for host in self]

    def options(self, host: Host, ranks_per_host: int = 2, rendezvous: str = "static") -> list[str]:
        """Return the options of torchrun on this host; see `torchrun`."""
        common = [f"--nproc_per_node={ranks_per_host}", f"--nnodes={len(self)}"]
        if rendezvous == "c10d":
            # by name: torchrun would not know that it is on the host with this address, because the host's name means 127.0.1.1
            return [*common, "--rdzv-backend=c10d", f"--rdzv-endpoint={self[0].name}:{PORT}", "--rdzv-id=job"]
        return [*common, f"--node_rank={host.number}", f"--master_addr={self[0].address}", f"--master_port={PORT}"]

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *_: object) -> None:
        for host in self:
            host.kill()
        for name in self._namespaces:
            with contextlib.suppress(subprocess.CalledProcessError):  # the others are removed nevertheless
                _run("ip", "netns", "delete", name)
        self._folder.cleanup()


def _run(*command: str) -> str:
    return subprocess.run(command, env=_ENVIRONMENT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    number, mbit_per_s, ranks_per_host, *command = sys.argv[1:]
    with Hosts(int(number), float(mbit_per_s)) as hosts:
        jobs = hosts.torchrun(*command, ranks_per_host=int(ranks_per_host))
        code = max(job.finish(timeout_s=3600) for job in jobs)
        print(jobs[0].printed())
    sys.exit(code)
