"""A directory in which node servers register, and clients look for them: both sides.

Each server has a file, which appears whole and under a name of its own, so that servers need no lock and touch no other
file. Its content is final: the server only renews its time, while it accepts clients.

Clients write nothing, and the clocks of the machines need not agree: a server lives while the time of its file changes.
Passes look again every 5 s, because the kernel's notifications for directories do not cross an NFS server; those of one
process share their looks, as each asks the file server for every file.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import json
import logging
import math
import mmap
import os
import re
import secrets
import stat
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from rpcdataloader.errors import ConnectError
from rpcdataloader.host.locks import Condition
from rpcdataloader.host.resources import machine_id
from rpcdataloader.host.signals import signals_held, signals_let_through
from rpcdataloader.host.trust import UnsafeFileError, check_file, read_safely
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.connecting import is_local, leads_here
from rpcdataloader.wire.messages import from_json, printable, read_json

client_logger = logging.getLogger("rpcdataloader.client")
server_logger = logging.getLogger("rpcdataloader.server")

#: End of such files' names; a name that begins with a dot belongs to a file being written.
SUFFIX = ".server.json"

# Longer files are no registrations.
_MAX_FILE_BYTES = 4096

#: Seconds after which a server renews the time of its file.
RENEWAL_PERIOD = 10.0

# Seconds after which a live server has renewed it, with a margin.
_RENEWED_AFTER = 1.2 * RENEWAL_PERIOD

#: Seconds without a renewal after which a server is gone. An NFS client may show a time that is 60 s old (acregmax).
MAX_SILENCE = 90.0


@dataclass(frozen=True, slots=True)
class ServerEntry:
    """A node server that clients can find: the content of its file, which no other user can have written."""

    address: Address
    num_workers: int
    host: str
    pid: int
    machine: str  # its identity (:func:`~rpcdataloader.host.resources.machine_id`)
    started: float = 0.0  # time of registration, in seconds of the file system's clock
    is_local: bool = False  # True if it listens where other machines cannot reach it, whatever its name

    @property
    def is_for_its_machine_alone(self) -> bool:
        """Whether the address is local to its machine: a loopback or link-local address, or a Unix socket."""
        return self.is_local or self.address.is_unix or is_local(self.address.host) or leads_here(self.address.host)

    def file_name(self, unique: str) -> str:
        """A name for its file, for users to recognise.

        Args:
            unique: Text that sets it apart from all others: process ids are used again.
        """
        host = re.sub(r"[^A-Za-z0-9_-]", "_", self.host)
        port = "unix" if self.address.is_unix else self.address.port
        return f"{host}-{port}-{self.pid}-{unique}{SUFFIX}"

    def encode(self) -> bytes:
        """The content of its file."""
        return json.dumps({**dataclasses.asdict(self), "address": str(self.address)}, indent=1).encode() + b"\n"

    @classmethod
    def decode(cls, data: bytes) -> ServerEntry:
        """Read the content of a file; ignores unknown fields.

        Raises:
            ValueError: The content is malformed or incomplete.
        """
        fields = read_json(data)
        address = fields.get("address")
        return from_json(cls, fields | {"address": Address.parse(address) if isinstance(address, str) else None})


class Registration:
    """The file of a server in ``directory``, from the beginning until :meth:`close`.

    Args:
        directory: Absolute path; created if it is missing, for its owner alone.
        entry: Content of the file; its time is replaced by that of the file system.

    Raises:
        ConnectError: The directory cannot be written.
    """

    def __init__(self, directory: str, entry: ServerEntry) -> None:
        self._directory = directory
        self._entry = entry
        self._path = os.path.join(directory, entry.file_name(secrets.token_hex(4)))
        self._has_failed = mmap.mmap(-1, 1)  # shared with forks, each of which may renew once
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory, 0o700)
            self._write(is_first=True)
        except OSError as exc:
            raise ConnectError(f"cannot register in {directory}: {exc.strerror or exc}") from exc
        server_logger.info("registered as %s", self._path)

    def renew(self) -> None:
        """Show that the server still lives; call this every ``RENEWAL_PERIOD``. Logs problems."""
        try:
            try:
                os.utime(self._path)  # the clock of the file server
            except FileNotFoundError:
                self._write()
                server_logger.warning("%s was removed by another process: registered again", self._path)
            self._has_failed[0] = False
        except OSError as exc:
            if not self._has_failed[0]:
                server_logger.warning("cannot renew %s: %s", self._path, exc.strerror or exc)
            self._has_failed[0] = True

    def close(self) -> None:
        """Tell clients that the server is leaving."""
        try:
            os.unlink(self._path)
        except FileNotFoundError:
            pass
        except OSError as exc:
            server_logger.warning("cannot remove %s: %s", self._path, exc.strerror or exc)

    def _write(self, is_first: bool = False) -> None:
        descriptor, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=self._directory)  # of mode 0600
        try:
            with open(descriptor, "wb") as file:
                if is_first:
                    # Time of the file server: all clients must see the servers in the order of their coming.
                    started = os.fstat(descriptor).st_mtime
                    self._entry = dataclasses.replace(self._entry, started=started)
                file.write(self._entry.encode())
                file.flush()
                os.fsync(descriptor)
            os.rename(temporary, self._path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

# Seconds after which a pass goes on with the servers that were found before.
LOOK_TIMEOUT = 1.0

# After being unusable this many times in a row, a file is not merely being written: one warning.
PATIENCE = 3

# Files that cannot be used, in a folder that has thousands: how many one look reads in vain, the newest first, as those
# of servers are renewed; how many have a warning of their own; and how many problems are told by name. Others may put
# any number of files there: what owner or mode rule out is not read, and hides no server.
MAX_UNUSABLE = 100
MAX_TOLD = 10


class Lookup(ABC):
    """A place where node servers come and go, as this process has seen them so far. Thread-safe.

    A thread looks, one at a time: file servers and resolvers may hang. Lookups are equal if they are made with the same
    arguments. A copy has seen nothing yet.

    Args:
        name: Name in :attr:`problems` for the place itself.
        arguments: Arguments of the subclass's constructor.

    Attributes:
        condition: State that a server must reach to be found, in words, such as ``registered in /pool``.
        advice: Hint for a user who finds no servers.
        pause: Seconds between two looks of the passes of a process.
        problems: Reasons why the place, or entries there, were not used at the last look, by their names.
    """

    condition: str
    advice: str
    pause = 2.0

    def __init__(self, name: str, *arguments: Any) -> None:
        self._name = name
        self._arguments = arguments
        self._changed = Condition()
        # Guarded by the condition:
        self._begun: float | None = None  # time of the look under way
        self._looked = -math.inf  # time of the last look
        self._found: dict[Address, str] = {}
        self.problems: dict[str, str] = {}

    def look(self, timeout: float | None = None, *, max_age: float = 0.0) -> dict[Address, str]:
        """The current servers, in an order that is the same for every client; those of before if the look fails.

        The text of an address changes when another server takes it; it is empty where that cannot be told.

        Args:
            timeout: Seconds for the look, after which those of before are given; None to wait for it.
            max_age: Seconds after a look in which another thread's is as good.
        """
        with self._changed:
            now = time.monotonic()
            began = self._begun
            if began is None:
                if now < self._looked + max_age:
                    return self._found
                with signals_held():  # which would leave a look that never ends
                    began = self._begun = now
                    self._start()
            left = None if timeout is None else began + timeout - now
            if not self._changed.wait_for(lambda: self._begun is None, left):
                self.problems = {self._name: f"no answer for {time.monotonic() - began:.0f} s"}
            return self._found

    def follow(self) -> tuple[dict[Address, str], float]:
        """The servers of the last moments, in the same order, and the seconds until it is time for another look."""
        found = self.look(max_age=self.pause)
        return found, max(0.0, self._looked + self.pause - time.monotonic())

    def _start(self) -> None:
        try:
            threading.Thread(target=self._run, name="rpcdl-lookup", daemon=True).start()
        except RuntimeError:  # there are too many threads, or the interpreter ends
            try:
                with signals_let_through():  # it may hang
                    self._run()
            finally:
                self._begun = None

    def _run(self) -> None:
        found, problems = self._found, dict[str, str]()
        try:
            found, problems = self._look()
        except Exception as exc:  # of a file system, a resolver, or an engine: it says nothing about the servers
            problems = {self._name: getattr(exc, "strerror", None) or str(exc)}
            client_logger.debug("cannot look for servers %s: %s", self.condition, exc)
        finally:
            with self._changed:
                self._found, self.problems, self._begun, self._looked = found, problems, None, time.monotonic()
                self._changed.notify_all()

    @abstractmethod
    def _look(self) -> tuple[dict[Address, str], dict[str, str]]:
        """The current servers, and the problems. Called in one thread at a time."""

    def open(self) -> Lookup:
        """The same lookup, for one use in this process."""
        return copy.copy(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lookup) and self.__reduce__() == other.__reduce__()

    def __hash__(self) -> int:
        return hash(self.__reduce__())


@dataclass(slots=True)
class _File:
    """A file in a register, as it was seen last."""

    changed: float = math.nan  # its modification time, on the clock of its file system
    silence: float = 0.0  # seconds since that changed
    entry: ServerEntry | None = None
    is_foreign: bool | None = None  # whether only another machine reaches the server; None before that is known
    num_failures: int = 0  # number of looks in a row at which it was unusable


class Register(Lookup):
    """The node servers registered in a directory; problems are those of the directory and its files.

    Args:
        directory: Absolute path.
    """

    pause = 5.0

    def __init__(self, directory: str) -> None:
        super().__init__(directory, directory)
        self.directory = directory
        self.condition = f"registered in {directory}"
        self.advice = f"start some with: python -m rpcdataloader.launch --register {directory}"
        # For the thread that looks:
        self._unsure_until = -math.inf
        self._last_look = time.monotonic()
        self._files: dict[str, _File] | None = None  # before the first look
        self._num_told = 0  # files with a warning

    def __str__(self) -> str:
        return f"@{self.directory}"

    @property
    def is_unsure(self) -> bool:
        """Whether servers seem silent by this machine's clock alone, and have had no time to renew their files."""
        return time.monotonic() < self._unsure_until

    def _look(self) -> tuple[dict[Address, str], dict[str, str]]:
        """In the order in which they registered, with the names of their files."""
        # Without the look itself: a file server that hangs stops all renewals.
        elapsed = time.monotonic() - self._last_look
        try:
            return self._judge(self._list(), elapsed)
        finally:
            self._last_look = time.monotonic()

    def _judge(self, statuses: dict[str, os.stat_result], elapsed: float) -> tuple[dict[Address, str], dict[str, str]]:
        known, self._files = self._files, {}
        if known is None and statuses:  # one that renews its file shows that the clocks agree
            is_silent = all(abs(time.time() - each.st_mtime) > MAX_SILENCE for each in statuses.values())
            self._unsure_until = time.monotonic() + _RENEWED_AFTER if is_silent else -math.inf
        problems: dict[str, str] = {}
        usable: dict[str, ServerEntry] = {}
        num_in_vain = 0
        for name, status in sorted(statuses.items(), key=lambda item: item[1].st_mtime, reverse=True):
            file = self._files[name] = (known or {}).get(name) or _File()
            if known is None:
                # A wrong clock of this machine makes servers seem silent for one renewal; see `is_unsure`.
                file.silence = abs(time.time() - status.st_mtime)
            else:
                file.silence = file.silence + elapsed if status.st_mtime == file.changed else 0.0
            file.changed = status.st_mtime
            if file.silence > MAX_SILENCE:
                problems[name] = "its server is silent"
                continue
            try:
                check_file(status, _OTHERS_WRITE)
                if num_in_vain == MAX_UNUSABLE and file.entry is None:
                    problems[name] = f"{MAX_UNUSABLE} others cannot be used"
                    continue
                usable[name] = self._take(name, file)
                file.num_failures = 0
            except (OSError, ValueError, UnsafeFileError) as exc:
                is_unsafe = isinstance(exc, UnsafeFileError)
                num_in_vain += file.entry is None and not is_unsafe
                problems[name] = f"it {exc}" if is_unsafe else str(getattr(exc, "strerror", None) or exc)
                file.num_failures += 1
                if file.num_failures == PATIENCE:
                    self._warn_of(name, problems[name])
        found: dict[Address, str] = {}
        # The newest file at an address counts: a server that was killed may have a successor there.
        for name in sorted(usable, key=lambda name: (usable[name].started, name)):
            if (older := found.pop(usable[name].address, None)) is not None:
                problems[older] = f"{name} is newer and has the same address"
            found[usable[name].address] = name
        if (num_more := len(problems) - MAX_TOLD) > 0:
            problems = dict(itertools.islice(problems.items(), MAX_TOLD))
            problems[self.directory] = f"{num_more} more files there are not used"
        return found, problems

    def _warn_of(self, name: str, problem: str) -> None:
        """Warn of a file that stays unusable, or that there are too many such files."""
        self._num_told += 1
        if self._num_told <= MAX_TOLD:
            # Other users may have chosen the name, if they can write to the directory.
            path = os.path.join(self.directory, name)
            client_logger.warning("%s", printable(f"{path} is not used: {problem}"))
        elif self._num_told == MAX_TOLD + 1:
            client_logger.warning(
                "%s has more files that are not used; give the node servers their own", self.directory
            )

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
                            client_logger.debug("%s has gone: %s", entry.path, exc)
        except FileNotFoundError:
            if self._files:  # it may come back, as after a failure of its file system
                raise
            client_logger.debug("there is no directory %s yet", self.directory)
        return statuses

    def _take(self, name: str, file: _File) -> ServerEntry:
        if (entry := file.entry) is None:
            path = os.path.join(self.directory, name)
            data = read_safely(path, _MAX_FILE_BYTES, _OTHERS_WRITE, follow=False)
            entry = file.entry = ServerEntry.decode(data)
        if file.is_foreign is None:  # once, as names are resolved
            file.is_foreign = entry.machine != machine_id() and entry.is_for_its_machine_alone
        if file.is_foreign:
            raise ValueError(
                f"{entry.address} cannot be reached from outside {entry.host}; start that server with a "
                "--host that other machines can reach"
            )
        return entry
