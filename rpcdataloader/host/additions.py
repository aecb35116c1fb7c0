"""Additions of a client's datasets and loaders to its sessions: environment variables, modules, and workers' output.

A client has one session per node for all of its loaders, which share each variable's value and each module's version.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from rpcdataloader.host.environment import Environment, install, set_variables
from rpcdataloader.host.modules import MAX_BYTES, Module, install_modules, unpack_into

_forward_output: Callable[[], object]  # in a session


@dataclass(frozen=True, slots=True)
class Additions:
    """Requests of a dataset or loader, or of all of them together."""

    variables: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[str, Module] = field(default_factory=dict)
    forward_output: bool = False

    @classmethod
    def of(cls, variables: Mapping[str, str], modules: Iterable[Module], forward_output: bool) -> Additions:
        """The additions of one dataset or loader."""
        return cls(variables, {module.name: module for module in modules}, forward_output)

    def plus(self, more: Additions) -> Additions:
        """Both together; this very object if ``more`` adds nothing.

        Raises:
            ValueError: A variable has another value, a module another version, or the modules are too large.
        """
        for name, value in more.variables.items():
            if (before := self.variables.get(name, value)) != value:
                raise ValueError(
                    f"env: {name} is to be {value!r}, but another dataset or loader of this process, with the same "
                    f"sessions, has set it to {before!r}: give both the same value, or leave it to one"
                )
        for name, module in more.modules.items():
            if self.modules.get(name, module) != module:
                raise ValueError(
                    f"py_modules: the files of {name} differ from those that another dataset or loader of this "
                    "process, with the same sessions, has sent: restart the script to use the new ones"
                )
        both = Additions(
            {**self.variables, **more.variables},
            {**self.modules, **more.modules},
            self.forward_output or more.forward_output,
        )
        if (size_bytes := sum(module.size_bytes for module in both.modules.values())) > MAX_BYTES:
            raise ValueError(
                f"py_modules: {', '.join(both.modules)} have {size_bytes / 2**20:.1f} MiB together, and the limit is "
                f"{MAX_BYTES >> 20} MiB: put data on a file system that the nodes see, or install packages there"
            )
        return self if both == self else both

    def since(self, before: Additions) -> Additions:
        """The part that a session which knows ``before`` lacks."""
        return Additions(
            self.variables,
            {name: module for name, module in self.modules.items() if name not in before.modules},
            self.forward_output,
        )


class SharedAdditions:
    """The additions for all sessions of a client; thread-safe.

    Attributes:
        current: Everything added so far; a new object after each change.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.current = Additions()

    def add(self, more: Additions) -> None:
        """Add these.

        Raises:
            ValueError: They contradict what was added before.
        """
        with self._lock:
            self.current = self.current.plus(more)


def become_session(folder: str, forward_output: Callable[[], object]) -> None:
    """Prepare this process as a session.

    Args:
        folder: Folder for modules; created on first use, and removed by the node server.
        forward_output: Function to call when the client wants the workers' output.
    """
    global _forward_output
    _forward_output = forward_output
    unpack_into(folder)


def begin(environment: Environment, additions: Additions) -> None:
    """First step of a session: see :func:`~rpcdataloader.host.environment.install` and :func:`add`."""
    install(environment)
    add(additions)


def add(additions: Additions) -> None:
    """Apply them to this session, and to its later workers.

    Raises:
        ImportError: A module was imported from elsewhere before.
        OSError: There is no room for the modules.
    """
    set_variables(additions.variables)
    if additions.forward_output:
        _forward_output()
    install_modules(additions.modules.values())
