"""Two places on this machine: the CPUs of a trainer, and CPUs elsewhere, behind a link whose speed is known.

Each is a host with a network of its own, where that is possible: see ``tests/support/network.py``.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterable, Iterator

from tests.support.network import Cable, Host, Network, why_not


@contextlib.contextmanager
def pinned(cpus: Iterable[int]) -> Iterator[None]:
    """Run the calling thread, and what it starts, on these CPUs."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Places:
    """The CPUs that this process may use, divided in two.

    Args:
        num_here: Number of CPUs of the trainer; the rest is elsewhere.
        hosts: That of the trainer, the other one, and the cable between them; None to do without.

    Attributes:
        here: Numbers of the trainer's CPUs.
        elsewhere: Numbers of the others.
        between: What is between the places, for the reader.
    """

    def __init__(self, num_here: int, hosts: tuple[Host, Host, Cable] | None) -> None:
        cpus = sorted(os.sched_getaffinity(0))
        if len(cpus) <= num_here:
            raise ValueError(f"of {len(cpus)} CPUs, {num_here} are the trainer's, and none is left for workers")
        self.here, self.elsewhere = cpus[:num_here], cpus[num_here:]
        self._hosts = hosts
        self.between = "the loopback interface"

    @property
    def server_options(self) -> tuple[str, ...]:
        """Where a node server elsewhere listens."""
        return ("--host", self._hosts[2].address, "--port", "0") if self._hosts else ("--port", "0")

    def limit(self, gigabits: float) -> None:
        """Give the link this speed, in Gbit/s. Without a link, nothing changes."""
        if self._hosts is None:
            return
        cable = self._hosts[2]
        cable.limit(gigabits)
        self.between = f"a link of {gigabits:g} Gbit/s"
        try:
            # Otherwise the CPU that has sent a packet also receives it, and the trainer's has less to do than usual.
            cable.receive_on(self.here, self.elsewhere)
        except subprocess.CalledProcessError:
            self.between += " whose packets any CPU receives"

    @contextlib.contextmanager
    def entered_here(self) -> Iterator[None]:
        """What the calling thread starts is at the trainer's place."""
        with self._hosts[0].entered() if self._hosts else contextlib.nullcontext(), pinned(self.here):
            yield

    @contextlib.contextmanager
    def entered_elsewhere(self) -> Iterator[None]:
        """What the calling thread starts is at the other place."""
        with self._hosts[1].entered() if self._hosts else contextlib.nullcontext(), pinned(self.elsewhere):
            yield


@contextlib.contextmanager
def two_places(num_here: int) -> Iterator[tuple[Places, str | None]]:
    """Give the places, and the reason why there is no link between them, or None.

    Args:
        num_here: Number of CPUs of the trainer.
    """
    if reason := why_not():
        yield Places(num_here, None), reason
        return
    with contextlib.closing(Network()) as network:
        host, cable = network.add()
        yield Places(num_here, (network.trainer, host, cable)), None
