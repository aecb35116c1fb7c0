"""Hosts with a network of their own on this machine, and cables between them that can be cut without a word.

A host is a network namespace without a name: it exists for as long as a process lives in it or a descriptor refers to
it, so nothing is left of it, whatever ends the tests, and two runs cannot meet. Nothing outside is changed. It takes
root, and the commands ``ip`` and ``tc``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import stat
import struct
import subprocess
from collections.abc import Iterable, Iterator

CLONE_NEWNET = 0x40000000  # of linux/sched.h

_libc = ctypes.CDLL(None, use_errno=True)


SO_ATTACH_FILTER = 26  # of asm-generic/socket.h
PIDFD_GETFD = 438  # of asm-generic/unistd.h


def drop_incoming(sock: socket.socket, above: int = 0) -> None:
    """Let the kernel drop what comes to a connection in segments of more than so many bytes, header included."""
    code = [(0x80, 0, 0, 0), (0x25, 0, 1, above), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF)]  # linux/filter.h
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in code))
    sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", len(code), ctypes.addressof(program)))


def deafen() -> None:
    """Let the kernel drop all that comes to this process by TCP."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            _drop_by_tcp(os.dup(int(name)))


def deafen_from_outside(pid: int) -> None:
    """Let the kernel drop all that comes to another process by TCP; it may have ended."""
    with contextlib.suppress(OSError):
        process = os.pidfd_open(pid)
        try:
            for name in os.listdir(f"/proc/{pid}/fd"):
                descriptor = _libc.syscall(PIDFD_GETFD, process, int(name), 0)
                if descriptor >= 0:
                    _drop_by_tcp(descriptor)
        finally:
            os.close(process)


def _drop_by_tcp(descriptor: int) -> None:
    """Drop what comes to a connection; closes the descriptor, which may be anything else."""
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return
    with socket.socket(fileno=descriptor) as sock:
        if sock.family == socket.AF_INET:
            drop_incoming(sock)


class Host:
    """A network namespace with a loopback interface."""

    def __init__(self) -> None:
        before = _current()
        try:
            _check(_libc.unshare(CLONE_NEWNET))
            self._descriptor = _current()
        finally:
            _enter(before)
            os.close(before)
        self.run("ip", "link", "set", "lo", "up")

    @property
    def path(self) -> str:
        """A file that names it to other processes."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @property
    def move_in(self) -> str:
        """Statements that bring the process there which executes them."""
        return f"import ctypes, os; assert ctypes.CDLL(None).setns(os.open({self.path!r}, os.O_RDONLY), 0) == 0"

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The calling thread, and the threads and processes that it starts, are on this host."""
        before = _current()
        _enter(self._descriptor)
        try:
            yield
        finally:
            _enter(before)
            os.close(before)

    def run(self, *words: str) -> None:
        """Run a command on this host."""
        with self.entered():
            subprocess.run(words, check=True, capture_output=True)

    def close(self) -> None:
        """Let go of it; it ends with the last process on it."""
        os.close(self._descriptor)


class Cable:
    """Joins two hosts, as if there were routers between them: neither notices by itself when it is cut.

    Attributes:
        address: That of the far end.
        near_address: That of the near end.
    """

    def __init__(self, near: Host, far: Host, number: int) -> None:
        self.address, self.near_address = f"10.0.{number}.2", f"10.0.{number}.1"
        self._ends = ((near, f"near{number}", self.near_address), (far, "far", self.address))
        near.run("ip", "link", "add", f"near{number}", "type", "veth", "peer", "name", "far", "netns", far.path)
        for place, ((host, interface, address), mac) in enumerate(zip(self._ends, self._macs, strict=True)):
            host.run("ip", "link", "set", interface, "address", mac, "up")
            host.run("ip", "address", "add", f"{address}/30", "dev", interface)
            # A neighbour that is asked for and does not answer would be an error of its own.
            other, other_mac = self._ends[1 - place], self._macs[1 - place]
            host.run("ip", "neighbour", "add", other[2], "lladdr", other_mac, "dev", interface, "nud", "permanent")

    _macs = ("02:00:00:00:00:01", "02:00:00:00:00:02")

    @property
    def interfaces(self) -> tuple[str, str]:
        """The names of its near and its far end."""
        (_near, near, _), (_far, far, _) = self._ends
        return near, far

    def shape(self, *discipline: str) -> None:
        """Let both ends send in this way: see tc(8)."""
        for host, interface, _address in self._ends:
            host.run("tc", "qdisc", "replace", "dev", interface, "root", *discipline)

    def limit(self, gigabits: float) -> None:
        """Let both ends send at most so many Gbit/s."""
        # Of a millisecond: what the timer of the kernel may be late. And more than the largest packet before it is cut.
        burst = max(256 * 1024, int(gigabits * 1e9 / 8 / 1000))
        self.shape("tbf", "rate", f"{gigabits:g}gbit", "burst", str(burst), "latency", "20ms")

    def receive_on(self, near: Iterable[int], far: Iterable[int]) -> None:
        """Let the kernel handle what comes to the near end on these CPUs, and what comes to the far end on those."""
        # A view of /sys that shows the interfaces of the host: that of this process shows its own.
        write = 'mount -t sysfs sysfs /sys && echo "$2" >"/sys/class/net/$1/queues/rx-0/rps_cpus"'
        for (host, interface, _address), cpus in zip(self._ends, (near, far), strict=True):
            mask = f"{sum(1 << cpu for cpu in cpus):x}"
            mask = ",".join(mask[max(0, end - 8) : end] for end in range(len(mask) % 8 or 8, len(mask) + 1, 8))
            host.run("unshare", "--mount", "sh", "-c", write, "sh", interface, mask)

    def cut(self) -> None:
        """From now on, nothing arrives at either end, and nobody is told."""
        self.shape("blackhole")

    def mend(self) -> None:
        """Undo all of this."""
        for host, interface, _address in self._ends:
            host.run("tc", "qdisc", "delete", "dev", interface, "root")

    @property
    def received_bytes(self) -> int:
        """How much has come to the near end."""
        near, interface, _address = self._ends[0]
        with near.entered(), open("/proc/thread-self/net/dev") as file:
            line = next(line for line in file if line.strip().startswith(f"{interface}:"))
        return int(line.split(":")[1].split()[0])


class Network:
    """One host for the trainer, and others that it has cables to."""

    def __init__(self) -> None:
        self.trainer = Host()
        self.others: list[Host] = []

    def add(self) -> tuple[Host, Cable]:
        """One more host."""
        host = Host()
        self.others.append(host)
        return host, Cable(self.trainer, host, len(self.others))

    def close(self) -> None:
        """Let go of all hosts."""
        for host in (self.trainer, *self.others):
            host.close()


def why_not() -> str | None:
    """Why there can be no such hosts here; None if there can."""
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            return f"the command {command} is not there"
    network = None
    try:
        network = Network()
        network.add()[1].cut()
    except subprocess.CalledProcessError as exc:
        return f"no networks of our own: {exc.stderr.decode().strip()}"
    except OSError as exc:
        return f"no networks of our own: {exc.strerror}"
    finally:
        if network is not None:
            network.close()
    return None


def _current() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _enter(descriptor: int) -> None:
    _check(_libc.setns(descriptor, CLONE_NEWNET))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
