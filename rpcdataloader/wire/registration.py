"""A node server's self-description in a file of a directory, where clients look for it. Pure.

A file's name is used once, and its content is final: the server only renews its time, while it accepts clients.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import math
import re
from dataclasses import dataclass
from typing import Any

from rpcdataloader.wire import plain
from rpcdataloader.wire.address import Address

#: End of such files' names; a name that begins with a dot belongs to a file being written.
SUFFIX = ".server.json"

#: Longer files are no registrations.
MAX_FILE_BYTES = 4096

#: Seconds after which a server renews the time of its file.
RENEWAL_PERIOD = 10.0

#: Seconds without a renewal after which a server is gone. An NFS client may show a time that is 60 s old (acregmax).
MAX_SILENCE = 90.0


@dataclass(frozen=True, slots=True)
class Registration:
    """A node server that clients can find; behind a DNS name, only the address is known.

    Attributes:
        machine: Identity of the machine (:func:`~rpcdataloader.host.resources.machine_id`).
        started: Time of registration, in seconds of the file system's clock.
    """

    address: Address
    num_workers: int = 1
    host: str = ""
    pid: int = 1
    machine: str = ""
    started: float = 0.0

    def __post_init__(self) -> None:
        if self.num_workers < 1 or self.pid < 1:
            raise ValueError(f"num_workers {self.num_workers} and pid {self.pid} must be at least 1")
        if not self.host.isprintable() or not self.machine.isprintable():
            raise ValueError("host and machine must be printable")
        if not math.isfinite(self.started):
            raise ValueError(f"started must be a number of seconds, but is {self.started}")

    @property
    def is_for_its_machine_alone(self) -> bool:
        """Whether the address is local to its machine: a loopback address or a Unix socket."""
        if self.address.is_unix or self.address.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.address.host).is_loopback
        except ValueError:
            return False

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
    def decode(cls, data: bytes) -> Registration:
        """Read the content of a file; ignores unknown fields.

        Raises:
            ValueError: The content is malformed or incomplete.
        """
        if not data:
            raise ValueError("it is empty")
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
        fields = plain.load(data)
        try:
            started = float(_take(fields, "started", (int, float)))
        except OverflowError:
            raise ValueError("started is out of range") from None
        return cls(
            address=Address.parse(_take(fields, "address", str)),
            num_workers=_take(fields, "num_workers", int),
            host=_take(fields, "host", str),
            pid=_take(fields, "pid", int),
            machine=_take(fields, "machine", str),
            started=started,
        )


def _take(fields: dict[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    value = fields.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{name} is missing or of another type")
    return value
