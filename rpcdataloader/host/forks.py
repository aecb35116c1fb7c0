"""What this package does as its process forks: one list, in one order, whichever module is imported first.

User code and libraries fork, too. A module takes part by :func:`at_fork`, as it is imported, or first used.
"""

from __future__ import annotations

import enum
import functools
import os
from collections.abc import Callable


class Part(enum.Enum):
    """What takes part: before a fork from the first to the last, after it from the last to the first.

    So signals wait, and the descriptors of sessions stay as they are, until all others have acted.
    """

    SIGNALS = "wait, until the child hears them as it should (server/processes.py)"
    SESSIONS = "of this machine: their descriptors are neither opened nor closed meanwhile (client/local.py)"
    DATASETS = "of nodes belong to the parent (client/datasets.py)"
    CLIENT = "of the parent: a child gets one of its own (client/client.py)"
    LOGS = "for a client are sent by the parent (server/logs.py)"
    SHARED_MEMORY = "stays as it is while a child may read it (wire/shared.py)"
    POOLS = "of memory begin empty in a child (wire/slabs.py)"
    SOURCES = "of the script are noted under a lock: a child gets one of its own (host/sources.py)"
    CONNECTIONS = "are closed in a child (wire/transport.py)"
    LOCKS = "of passes and their records are free in a child, unless the thread that forks has them (host/locks.py)"


_before: dict[Part, Callable[[], object]] = {}
_in_parent: dict[Part, Callable[[], object]] = {}
_in_child: dict[Part, Callable[[], object]] = {}


def at_fork(
    part: Part,
    *,
    before: Callable[[], object] | None = None,
    in_parent: Callable[[], object] | None = None,
    in_child: Callable[[], object],
) -> None:
    """Let one part call functions at each fork from now on, in the thread that forks.

    Args:
        in_parent: Called after ``before``, also if that has failed.
    """
    for functions, function in (_before, before), (_in_parent, in_parent), (_in_child, in_child):
        if function is not None:
            functions[part] = function


def _call(functions: dict[Part, Callable[[], object]], part: Part) -> None:
    if part in functions:
        functions[part]()


# One for each: Python reports what one of them raises, and calls the others. Before a fork, the last one is the first.
for _part in reversed(Part):
    os.register_at_fork(
        before=functools.partial(_call, _before, _part),
        after_in_parent=functools.partial(_call, _in_parent, _part),
        after_in_child=functools.partial(_call, _in_child, _part),
    )
