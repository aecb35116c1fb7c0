"""The node servers of a run, and everything that can be done to them and to the processes below them."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from pathlib import Path

from tests.chaos.datasets import Traps
from tests.chaos.plan import Event, Kind
from tests.conftest import descendants, is_running, stat_of, wait_until
from tests.support.network import Cable, Host, Network, deafen_from_outside
from tests.support.quick import QuickServer
from tests.support.zygote import Zygote

# Slower than batches need, and with a queue so short that packets are lost.
SLOW = ("tbf", "rate", "2mbit", "burst", "16kb", "limit", "20kb")


def children(pid: int) -> list[int]:
    """The processes that a process has started and that run."""
    return sorted(child for child in descendants(pid) if stat_of(child)[1:2] == [str(pid)])


def _birth(pid: int) -> str:
    """Tells a process from a later one with the same id."""
    return "".join(stat_of(pid)[19:20])


def _take_room(pids: list[int]) -> dict[int, tuple[int, int]]:
    """Leave processes about as many descriptors as they have open; returns the limits that they had."""
    before = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{pid}/fd")), limits[1]))
            before[pid] = limits
    return before


class Pool:
    """Node servers at numbered places; each keeps its port when it is started again.

    Args:
        folder: For the register.
        num_places: Servers from the beginning.
        num_workers: That each offers.
        network: Where the servers are, instead of on the loopback interface.
        traps: Those of the datasets.
    """

    def __init__(
        self, zygote: Zygote, folder: Path, num_places: int, num_workers: int, network: Network | None, traps: Traps
    ) -> None:
        self.register = str(folder / "register")
        self._zygote = zygote
        self._num_workers = num_workers
        self._network = network
        self._hosts: dict[int, tuple[Host, Cable]] = {}
        self._traps = traps
        self.servers: dict[int, QuickServer] = {}  # those that should be there, by place
        self._ports: dict[int, str] = {}
        self._stopped: dict[int, list[int]] = {}
        self._limits: dict[int, dict[int, tuple[int, int]]] = {}  # of open files, by place and process
        self._seen: set[tuple[int, str]] = set()  # every process, with its birth
        self.addresses = [self._start(place).address for place in range(num_places)]

    def _start(self, place: int) -> QuickServer:
        options = ["--num-workers", str(self._num_workers), "--max-connections", "64", "--grace", "5"]
        options += ["--register", self.register, "--port", self._ports.get(place, "0")]
        before = ""
        if self._network is not None:
            host, cable = self._hosts[place] = self._hosts.get(place) or self._network.add()
            options += ["--host", cable.address]
            before = host.move_in
        server = QuickServer(self._zygote, tuple(options), before)
        self.servers[place] = server
        self._ports[place] = server.address.rpartition(":")[2]
        return server

    def look(self) -> None:
        """Remember what runs now, for the question what is left at the end."""
        for server in self.servers.values():
            for pid in (server.pid, *server.processes()):
                self._seen.add((pid, _birth(pid)))

    def do(self, event: Event) -> str:
        """Let it happen; returns what it was, in words."""
        self.look()
        place = event.place
        server = self.servers.get(place)
        if event.kind in (Kind.SEGFAULT, Kind.HANG):
            self._traps.set(event.kind.name.lower())
            return event.kind.value
        if event.kind is Kind.CUT:
            self._hosts[place][1].cut()
        elif event.kind is Kind.SLOW:
            self._hosts[place][1].shape(*SLOW)
        elif event.kind is Kind.HEAL:
            self._hosts[place][1].mend()
        elif event.kind in (Kind.START_SERVER, Kind.ADD_SERVER):
            if server is not None:
                server.wait()  # a drain is over when the port is free
            if event.kind is Kind.ADD_SERVER:
                self._ports.pop(place, None)
            self._start(place)
            return f"{event.kind.value} {place}, pid {self.servers[place].pid}"
        elif event.kind is Kind.CONTINUE:
            for pid in self._stopped.pop(place, []):
                self._signal(pid, signal.SIGCONT)
        elif event.kind is Kind.GIVE_ROOM:
            for pid, limits in self._limits.pop(place, {}).items():
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        elif event.kind is Kind.TAKE_ROOM:
            assert server is not None
            self._limits[place] = _take_room([server.pid, *children(server.pid)])
        else:
            assert server is not None
            pids = self._victims(event, server)
            if event.kind is Kind.DEAFEN_WORKER:
                for pid in pids:
                    deafen_from_outside(pid)
                return f"{event.kind.value} of node {place}, pid {pids or 'none there'}"
            for pid in pids:
                self._signal(pid, _SIGNALS[event.kind])
            if event.kind in _STOPS:
                self._stopped[place] = pids
            return f"{event.kind.value} of node {place}, pid {pids or 'none there'}"
        return f"{event.kind.value} of node {place}"

    def _victims(self, event: Event, server: QuickServer) -> list[int]:
        """One process of the kind that the event is about, or none if there is none."""
        found = [server.pid]
        if event.kind in (Kind.KILL_SESSION, Kind.STOP_SESSION) or event.kind in _OF_A_WORKER:
            found = children(server.pid)
        if event.kind in _OF_A_WORKER:
            found = [pid for session in found for pid in children(session)]
        return [found[int(event.pick * len(found))]] if found else []

    def _signal(self, pid: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def close(self) -> None:
        """End everything, and wait until nothing is left of what was ever seen."""
        self.look()
        for pids in self._stopped.values():
            for pid in pids:
                self._signal(pid, signal.SIGCONT)
        for server in self.servers.values():
            if is_running(server.pid):
                server.stop()
        wait_until(lambda: not self._left(), 20, f"processes left: {self._left()}")

    def _left(self) -> list[int]:
        return [pid for pid, birth in self._seen if is_running(pid) and _birth(pid) == birth]


_OF_A_WORKER = {Kind.KILL_WORKER, Kind.STOP_WORKER, Kind.DEAFEN_WORKER}
_STOPS = {Kind.STOP_WORKER, Kind.STOP_SESSION, Kind.STOP_SERVER}
_SIGNALS = {
    Kind.KILL_WORKER: signal.SIGKILL,
    Kind.KILL_SESSION: signal.SIGKILL,
    Kind.KILL_SERVER: signal.SIGKILL,
    Kind.TERM_SERVER: signal.SIGTERM,
    Kind.REMOVE_SERVER: signal.SIGTERM,
    **dict.fromkeys(_STOPS, signal.SIGSTOP),
}
