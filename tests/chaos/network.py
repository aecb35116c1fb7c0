"""A network of its own for every node: namespaces on a bridge, whose cables can be cut and throttled.

Needs root. Everything goes when its processes end; nothing of the machine's own network is touched.
"""

from __future__ import annotations

import shutil
import signal
import subprocess

from tests.conftest import wait_until
from tests.support.zygote import Script, Zygote

_HOLD = """
import ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x40000000):  # CLONE_NEWNET
    raise OSError(ctypes.get_errno(), "unshare")
print("ready", flush=True)
signal.pause()
"""

_ENTER = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
if libc.setns(os.open("/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC), 0x40000000):
    raise OSError(ctypes.get_errno(), "setns")
"""

# Slower than batches need, and with a queue so short that packets are lost.
SLOW = ("tbf", "rate", "2mbit", "burst", "16kb", "limit", "20kb")


def why_not() -> str | None:
    """Why namespaces cannot be made here; None if they can."""
    for tool in ("ip", "tc", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            return f"{tool} is missing"
    script = "ip link add one type veth peer name two && ip link add three type bridge && tc qdisc add dev one root "
    done = subprocess.run(["unshare", "--net", "sh", "-c", script + " ".join(SLOW)], capture_output=True, text=True)
    return done.stderr.strip() or "no network namespaces" if done.returncode else None


_TRAINERS = 254  # the number of their host; that of a node is one more than its place


def _address(host: int) -> str:
    return f"10.99.0.{host}"


def _hardware(host: int) -> str:
    return f"02:00:00:00:00:{host:02x}"


class Network:
    """The trainers' namespace has the bridge; every node has a cable to it.

    Args:
        zygote: Starts the processes that hold the namespaces.
    """

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote
        self._bridge = self._hold()
        self._nodes: dict[int, Script] = {}
        self._run("ip", "link", "add", "bridge", "address", _hardware(_TRAINERS), "type", "bridge")
        self._run("ip", "address", "add", f"{_address(_TRAINERS)}/24", "dev", "bridge")
        self._run("ip", "link", "set", "lo", "up")
        self._run("ip", "link", "set", "bridge", "up")

    def _hold(self) -> Script:
        script = self._zygote.start(_HOLD)
        wait_until(lambda: script.output == "ready\n", what="a network namespace")
        return script

    def _run(self, *command: str, pid: int = 0) -> None:
        where = f"--net=/proc/{pid or self._bridge.pid}/ns/net"
        done = subprocess.run(["nsenter", where, *command], capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"

    def add(self, place: int) -> str:
        """Connect a node, if it is not; returns its address."""
        address, hardware = _address(place + 1), _hardware(place + 1)
        if place not in self._nodes:
            self._nodes[place] = node = self._hold()
            other_end = ("peer", "eth0", "address", hardware, "netns", str(node.pid))
            self._run("ip", "link", "add", f"cable{place}", "type", "veth", *other_end)
            self._run("ip", "link", "set", f"cable{place}", "master", "bridge", "up")
            self._run("ip", "address", "add", f"{address}/24", "dev", "eth0", pid=node.pid)
            for link in ("lo", "eth0"):
                self._run("ip", "link", "set", link, "up", pid=node.pid)
            # Or the kernel would soon tell that nobody is there.
            self._run("ip", "neighbour", "add", address, "lladdr", hardware, "dev", "bridge")
            others = (_address(_TRAINERS), "lladdr", _hardware(_TRAINERS), "dev", "eth0")
            self._run("ip", "neighbour", "add", *others, pid=node.pid)
        return address

    def enter_trainers(self) -> str:
        """Statements with which a script moves to the trainers' namespace."""
        return _ENTER.format(pid=self._bridge.pid)

    def enter(self, place: int) -> str:
        """Statements with which a script moves to a node's namespace."""
        return _ENTER.format(pid=self._nodes[place].pid)

    def cut(self, place: int) -> None:
        """Packets vanish, in both directions. Whoever sends them is not told."""
        self._run("ip", "link", "set", f"cable{place}", "down")

    def slow(self, place: int) -> None:
        """Packets wait, and some are dropped, on their way to the trainers."""
        self._run("tc", "qdisc", "replace", "dev", "eth0", "root", *SLOW, pid=self._nodes[place].pid)

    def heal(self, place: int) -> None:
        """As if nothing had been."""
        self._run("ip", "link", "set", f"cable{place}", "up")
        self._run("sh", "-c", "tc qdisc delete dev eth0 root 2>/dev/null || true", pid=self._nodes[place].pid)

    def close(self) -> None:
        """End the namespaces; what runs there is to have ended."""
        for script in (*self._nodes.values(), self._bridge):
            script.kill()
            assert script.wait().status == -signal.SIGKILL
