"""The current node servers: those registered in a directory, and those behind a DNS name.

The clocks of the machines need not agree, and nothing is written: a server lives while the time of its file changes.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from rpcdataloader.host import safe_files
from rpcdataloader.host.resources import machine_id
from rpcdataloader.host.safe_files import UnsafeFileError
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.lines import printable
from rpcdataloader.wire.registration import MAX_FILE_BYTES, MAX_SILENCE, SUFFIX, Registration

logger = logging.getLogger("rpcdataloader.client")

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

# After being unusable this many times in a row, a file is not merely being written: one warning.
PATIENCE = 3


class Lookup(Protocol):
    """Finds the current node servers, as this process has seen them so far. Thread-safe.

    Attributes:
        pause: Seconds between two looks.
        problems: Reasons why entries were not used at the last look, by their names.
    """

    pause: float
    problems: dict[str, str]

    @property
    def place(self) -> str: ...

    @property
    def advice(self) -> str: ...

    def look(self) -> Sequence[Registration]:
        """The current servers, in an order that is the same for every client."""


class Several:
    """Named node servers, which are always there, and those of several lookups."""

    def __init__(self, named: Iterable[Address], lookups: Sequence[Lookup]) -> None:
        self._named = {address: Registration(address) for address in named}
        self._lookups = lookups
        self.pause = min((lookup.pause for lookup in lookups), default=1.0)
        self.place = " or ".join(lookup.place for lookup in lookups)
        self.advice = "; ".join(lookup.advice for lookup in lookups)
        self.problems: dict[str, str] = {}

    def look(self) -> tuple[Registration, ...]:
        """The current servers, named ones first."""
        found: dict[Address, Registration] = {**self._named}
        for lookup in self._lookups:
            found |= {server.address: server for server in lookup.look()}
        self.problems = {name: reason for lookup in self._lookups for name, reason in lookup.problems.items()}
        return tuple(found.values())


class Silences:
    """Seconds of silence of the server of each file. Pure: observations and their times are passed in."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[float, float]] = {}  # time of the file, seconds since it changed
        self._is_first = True

    def look(self, times: Mapping[str, float], elapsed: float, wall: float) -> dict[str, float]:
        """Take an observation; returns seconds of silence for each file.

        Args:
            times: Modification times of the files, on the clock of their file system.
            elapsed: Seconds since the last look, without the look itself: a file server that hangs stops all renewals.
            wall: Time of this machine, for the first look: a wrong clock makes servers seem silent for one renewal.
        """
        before, self._files = self._files, {}
        for name, time_ in times.items():
            if self._is_first:
                silence = abs(wall - time_)
            elif name in before and before[name][0] == time_:
                silence = before[name][1] + elapsed
            else:
                silence = 0.0
            self._files[name] = time_, silence
        self._is_first = False
        return {name: silence for name, (_time, silence) in self._files.items()}


class Register:
    """The directory, as this process has seen it so far. Thread-safe.

    Attributes:
        problems: Reasons why files were not used at the last look, by name; the directory's, if it could not be read.
    """

    pause = 1.0

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.place = f"registered in {directory}"
        self.advice = f"start some with: python -m rpcdataloader.launch --register {directory}"
        self.problems: dict[str, str] = {}
        self._lock = threading.Lock()
        # Guarded by the lock:
        self._silences = Silences()
        self._last_look = time.monotonic()
        self._read: dict[str, Registration] = {}
        self._failures: dict[str, int] = {}
        self._found: tuple[Registration, ...] = ()

    def look(self) -> tuple[Registration, ...]:
        """The current servers, in the order in which they registered, which is the same for every client."""
        with self._lock:
            elapsed = time.monotonic() - self._last_look
            try:
                self._found = self._look(elapsed)
            except OSError as exc:
                # A problem of the file system says nothing about the servers.
                self.problems = {self.directory: exc.strerror or str(exc)}
                logger.debug("cannot read %s: %s", self.directory, exc)
            self._last_look = time.monotonic()
            return self._found

    def _look(self, elapsed: float) -> tuple[Registration, ...]:
        statuses = self._list()
        problems: dict[str, str] = {}
        times = {name: status.st_mtime for name, status in statuses.items()}
        silences = self._silences.look(times, elapsed, time.time())
        self._read = {name: registration for name, registration in self._read.items() if name in statuses}
        self._failures = {name: count for name, count in self._failures.items() if name in statuses}
        usable: dict[str, Registration] = {}
        for name, status in statuses.items():
            if silences[name] > MAX_SILENCE:
                problems[name] = "its server is silent"
                continue
            try:
                usable[name] = self._take(name, status)
                self._failures.pop(name, None)
            except (OSError, ValueError) as exc:
                problems[name] = str((isinstance(exc, OSError) and exc.strerror) or exc)
                self._complain(name, problems[name])
        order = sorted(usable, key=lambda name: (usable[name].started, name))
        # The newest file at an address counts: a server that was killed may have a successor there.
        last = {usable[name].address: name for name in order}
        for name in order:
            if (other := last[usable[name].address]) != name:
                problems[name] = f"{other} is newer and has the same address"
        self.problems = problems
        return tuple(usable[name] for name in order if name not in problems)

    def _list(self) -> dict[str, os.stat_result]:
        statuses = {}
        try:
            with os.scandir(self.directory) as entries:
                for entry in entries:
                    # Hidden ones are being written, or are what NFS leaves of open files that were removed.
                    if entry.name.endswith(SUFFIX) and not entry.name.startswith("."):
                        try:
                            statuses[entry.name] = entry.stat(follow_symlinks=False)
                        except OSError as exc:
                            logger.debug("%s has gone: %s", entry.path, exc)
        except FileNotFoundError:
            logger.debug("there is no directory %s yet", self.directory)
        return statuses

    def _take(self, name: str, status: os.stat_result) -> Registration:
        try:
            safe_files.check(status, _OTHERS_WRITE)
            if name not in self._read:
                path = os.path.join(self.directory, name)
                data = safe_files.read(path, MAX_FILE_BYTES, _OTHERS_WRITE, follow=False)
                self._read[name] = Registration.decode(data)
        except UnsafeFileError as exc:
            raise ValueError(f"it {exc}") from None
        registration = self._read[name]
        if registration.is_for_its_machine_alone and registration.machine != machine_id():
            raise ValueError(
                f"{registration.address} cannot be reached from outside {registration.host}; start that server with a "
                "--host that other machines can reach"
            )
        return registration

    def _complain(self, name: str, problem: str) -> None:
        count = self._failures[name] = self._failures.get(name, 0) + 1
        level = logging.WARNING if count == PATIENCE else logging.DEBUG
        # Other users may have chosen the name, if they can write to the directory.
        logger.log(level, "%s", printable(f"{os.path.join(self.directory, name)} is not used: {problem}"))


# The name does not exist, or has no address. Other errors are the resolver's.
_NOTHING = (socket.EAI_NONAME, socket.EAI_NODATA)


class Names:
    """The addresses behind a name, such as a headless service of Kubernetes, as this process last saw them.

    Thread-safe.
    """

    pause = 2.0

    def __init__(self, name: Address) -> None:
        self._name = name
        self.place = f"behind the name {name.host}"
        self.advice = "does it exist, and are the node servers ready?"
        self.problems: dict[str, str] = {}
        self._found: tuple[Registration, ...] = ()

    def look(self) -> tuple[Registration, ...]:
        """The current servers, in the order of their addresses, which is the same for every client."""
        try:
            infos = socket.getaddrinfo(self._name.host, self._name.port, type=socket.SOCK_STREAM)
        except OSError as exc:  # a resolver's error says nothing about the servers
            self.problems = {self._name.host: exc.strerror or str(exc)}
            if exc.errno in _NOTHING:
                self._found = ()
            logger.debug("cannot resolve %s: %s", self._name.host, exc)
            return self._found
        # With addresses of both families, each server has one of each.
        hosts = {info[4][0] for info in infos if info[0] == infos[0][0]}
        self.problems = {}
        self._found = tuple(
            Registration(Address(str(host), self._name.port)) for host in sorted(hosts, key=ipaddress.ip_address)
        )
        return self._found
