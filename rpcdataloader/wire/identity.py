"""Who this process is, as its HELLO tells the peer."""

from __future__ import annotations

import functools
import os
import platform
import socket
from importlib import metadata

from rpcdataloader.wire.handshake import Identity
from rpcdataloader.wire.preamble import PROTOCOL_VERSION

# Slurm's are numbers. A longer one must not make a HELLO too long to be sent.
_MAX_JOB_CHARS = 64


def local_identity(role: str, rank: int | None = None) -> Identity:
    """Describe this process."""
    return Identity(
        role=role,
        host=socket.gethostname(),
        pid=os.getpid(),
        rank=rank,
        protocol=PROTOCOL_VERSION,
        python_implementation=platform.python_implementation(),
        python_version=platform.python_version(),
        machine=platform.machine(),
        torch=_version("torch"),
        numpy=_version("numpy"),
        cloudpickle=_version("cloudpickle"),
        # A server tells strangers no more than it must.
        job=os.environ.get("SLURM_JOB_ID", "")[:_MAX_JOB_CHARS] if role == "client" else "",
    )


@functools.cache
def machine_id() -> str:
    """What tells this machine from others, whatever its containers are called; new with every boot."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:  # not Linux
        return socket.gethostname()


@functools.cache
def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # built in place, without metadata; or not needed to say hello
        return "unknown"
