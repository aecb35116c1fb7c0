"""The node servers of the moment: those registered in a directory, and those behind a DNS name.

The clocks of the machines need not agree, and nothing is written: a server lives while the time of its file changes.
Passes look again every second or two, because the kernel's notifications for directories do not cross an NFS server.
"""

from __future__ import annotations

import copy
import ipaddress
import logging
import math
import os
import socket
import stat
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from rpcdataloader.host.resources import machine_id
from rpcdataloader.host.trust import UnsafeFileError, check_file, read_safely
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.messages import printable
from rpcdataloader.wire.status import MAX_FILE_BYTES, MAX_SILENCE, SUFFIX, Registration

logger = logging.getLogger("rpcdataloader.client")

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

# After being unusable this many times in a row, a file is not merely being written: one warning.
PATIENCE = 3


class Lookup(ABC):
    """A place where node servers come and go, as this process has seen them so far. Thread-safe.

    Lookups are equal if they are made with the same arguments.

    Attributes:
        pause: Seconds between two looks.
        place: Origin of the servers, in words.
        advice: Hint for a user who finds no servers.
        problems: Reasons why entries were not used at the last look, by their names.
    """

    pause: float
    place: str
    advice: str
    problems: dict[str, str]

    @abstractmethod
    def look(self) -> dict[Address, str]:
        """The current servers, in an order that is the same for every client.

        The text of an address changes when another server takes it; it is empty where that cannot be told.
        """

    @abstractmethod
    def __reduce__(self) -> tuple[Any, ...]:
        """The class and its arguments: a copy has seen nothing yet."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lookup) and self.__reduce__() == other.__reduce__()

    def __hash__(self) -> int:
        return hash(self.__reduce__())

    def open(self) -> Lookup:
        """The same lookup, for one use in this process."""
        return copy.copy(self)


@dataclass(slots=True)
class _File:
    """A file in a register, as it was seen last."""

    changed: float = math.nan  # its modification time, on the clock of its file system
    silence: float = 0.0  # seconds since that changed
    registration: Registration | None = None
    num_failures: int = 0  # number of looks in a row at which it was unusable


class Register(Lookup):
    """The node servers registered in a directory; problems are those of the directory and its files.

    Args:
        directory: Absolute path.
    """

    pause = 1.0

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.place = f"registered in {directory}"
        self.advice = f"start some with: python -m rpcdataloader.launch --register {directory}"
        self.problems: dict[str, str] = {}
        self._lock = threading.Lock()
        # Guarded by the lock:
        self._last_look = time.monotonic()
        self._files: dict[str, _File] | None = None  # before the first look
        self._found: dict[Address, str] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Register, (self.directory,)

    def __str__(self) -> str:
        return f"@{self.directory}"

    def look(self) -> dict[Address, str]:
        """The current servers, in the order in which they registered, with the names of their files."""
        with self._lock:
            # Without the look itself: a file server that hangs stops all renewals.
            elapsed = time.monotonic() - self._last_look
            try:
                self._found = self._look(elapsed)
            except OSError as exc:
                # A problem of the file system says nothing about the servers.
                self.problems = {self.directory: exc.strerror or str(exc)}
                logger.debug("cannot read %s: %s", self.directory, exc)
            self._last_look = time.monotonic()
            return self._found

    def _look(self, elapsed: float) -> dict[Address, str]:
        statuses = self._list()
        known, self._files = self._files, {}
        problems: dict[str, str] = {}
        usable: dict[str, Registration] = {}
        for name, status in statuses.items():
            file = self._files[name] = (known or {}).get(name) or _File()
            if known is None:
                # A wrong clock of this machine makes servers seem silent for one renewal.
                file.silence = abs(time.time() - status.st_mtime)
            else:
                file.silence = file.silence + elapsed if status.st_mtime == file.changed else 0.0
            file.changed = status.st_mtime
            if file.silence > MAX_SILENCE:
                problems[name] = "its server is silent"
                continue
            try:
                usable[name] = self._take(name, status, file)
                file.num_failures = 0
            except (OSError, ValueError) as exc:
                problems[name] = str((isinstance(exc, OSError) and exc.strerror) or exc)
                file.num_failures += 1
                level = logging.WARNING if file.num_failures == PATIENCE else logging.DEBUG
                # Other users may have chosen the name, if they can write to the directory.
                path = os.path.join(self.directory, name)
                logger.log(level, "%s", printable(f"{path} is not used: {problems[name]}"))
        found: dict[Address, str] = {}
        # The newest file at an address counts: a server that was killed may have a successor there.
        for name in sorted(usable, key=lambda name: (usable[name].started, name)):
            if (older := found.pop(usable[name].address, None)) is not None:
                problems[older] = f"{name} is newer and has the same address"
            found[usable[name].address] = name
        self.problems = problems
        return found

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

    def _take(self, name: str, status: os.stat_result, file: _File) -> Registration:
        try:
            check_file(status, _OTHERS_WRITE)
            if (registration := file.registration) is None:
                path = os.path.join(self.directory, name)
                data = read_safely(path, MAX_FILE_BYTES, _OTHERS_WRITE, follow=False)
                registration = file.registration = Registration.decode(data)
        except UnsafeFileError as exc:
            raise ValueError(f"it {exc}") from None
        if registration.is_for_its_machine_alone and registration.machine != machine_id():
            raise ValueError(
                f"{registration.address} cannot be reached from outside {registration.host}; start that server with a "
                "--host that other machines can reach"
            )
        return registration


# The name does not exist, or has no address. Other errors are the resolver's.
_NOTHING = (socket.EAI_NONAME, socket.EAI_NODATA)


class Names(Lookup):
    """The node servers behind a DNS name, such as a headless service of Kubernetes.

    Args:
        name: Host, and the port of all of them.
    """

    pause = 2.0

    def __init__(self, name: Address) -> None:
        self._name = name
        self.place = f"behind the name {name.host}"
        self.advice = "does it exist, and are the node servers ready?"
        self.problems: dict[str, str] = {}
        self._found: dict[Address, str] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Names, (self._name,)

    def __str__(self) -> str:
        return f"dns://{self._name}"

    def look(self) -> dict[Address, str]:
        """The current servers, in the order of their addresses."""
        try:
            infos = socket.getaddrinfo(self._name.host, self._name.port, type=socket.SOCK_STREAM)
        except OSError as exc:  # a resolver's error says nothing about the servers
            self.problems = {self._name.host: exc.strerror or str(exc)}
            if exc.errno in _NOTHING:
                self._found = {}
            logger.debug("cannot resolve %s: %s", self._name.host, exc)
            return self._found
        # With addresses of both families, each server has one of each.
        hosts = {str(info[4][0]) for info in infos if info[0] == infos[0][0]}
        self.problems = {}
        self._found = {Address(host, self._name.port): "" for host in sorted(hosts, key=ipaddress.ip_address)}
        return self._found
