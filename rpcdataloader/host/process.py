"""Settings of a process that its forks inherit, and that decide what a dataset makes, or whether it does.

Those of a thread, such as ``numpy.seterr``, are left out: sessions are also told of news by threads of ours.
"""

from __future__ import annotations

import socket
import sys
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """Settings of a process.

    Attributes:
        arguments: Those of the script, which modules may read as they are imported.
        recursion_limit: Depth of calls.
        socket_timeout: Default timeout of sockets, in seconds; None without.
        dtype: torch's default for floating-point numbers.
    """

    arguments: tuple[str, ...]
    recursion_limit: int
    socket_timeout: float | None
    dtype: torch.dtype

    @classmethod
    def current(cls) -> ProcessSettings:
        """The settings of this process."""
        arguments = tuple(map(str, getattr(sys, "argv", ())))  # an embedded interpreter may have none
        return cls(arguments, sys.getrecursionlimit(), socket.getdefaulttimeout(), torch.get_default_dtype())

    def apply(self) -> None:
        """Make these the settings of this process."""
        sys.argv = list(self.arguments)
        sys.setrecursionlimit(self.recursion_limit)
        socket.setdefaulttimeout(self.socket_timeout)
        torch.set_default_dtype(self.dtype)
