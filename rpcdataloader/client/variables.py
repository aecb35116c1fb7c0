"""``env=``: which environment variables the sessions of this client get, and that all who share them agree.

A client has one session per node, whichever loader asks for it. So a variable has one value for all loaders and
datasets of a process, which the first one to ask has chosen.
"""

from __future__ import annotations

import fnmatch
import os
import threading
from collections.abc import Iterable, Mapping

from rpcdataloader.wire.credentials import TOKEN_VARIABLE

# Those that say something of this machine or of this process. A pattern leaves them out; in full, they can be named.
OWN = ("LD_*", "CUDA_VISIBLE_DEVICES", "SLURM_*", "RANK", "WORLD_SIZE", "LOCAL_*", "MASTER_*", "RPCDATALOADER_*")


def choose_variables(
    env: Mapping[str, str] | Iterable[str] | None, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The variables that a user means by ``env``, with their values.

    Args:
        env: Values by name; or names and patterns of variables of this process. Names that are not set are left out.
        environ: The environment of this process.

    Raises:
        TypeError: It is something else.
        ValueError: A name or value is impossible, or is that of the secret.
    """
    if env is None:
        return {}
    if isinstance(env, (str, bytes)) or not isinstance(env, Iterable):
        raise TypeError(
            f"env must be a list of names and patterns, or a mapping of names to values, but is {env!r}; "
            "for an argument of the dataset that is called env, use functools.partial"
        )
    chosen: dict[str, str] = {}
    for name in env:
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise ValueError(f"env: {name!r} is no name of an environment variable")
        if name == TOKEN_VARIABLE:
            raise ValueError(f"env: {name} is the secret, which is never sent")
        if isinstance(env, Mapping):
            value = env[name]
            if not isinstance(value, str) or "\0" in value:
                raise ValueError(f"env: the value of {name} must be a string, but is {value!r}")
            chosen[name] = value
        elif set(name) & set("*?["):
            found = fnmatch.filter(environ, name)
            chosen |= {each: environ[each] for each in found if not any(fnmatch.fnmatchcase(each, own) for own in OWN)}
        elif name in environ:
            chosen[name] = environ[name]
    return chosen


class SharedVariables:
    """What all sessions of a client get; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, str] = {}  # replaced as a whole

    @property
    def values(self) -> Mapping[str, str]:
        """All of them; another object after each change."""
        return self._values

    def add(self, chosen: Mapping[str, str]) -> None:
        """Have these, too.

        Raises:
            ValueError: One has another value already.
        """
        with self._lock:
            for name, value in chosen.items():
                before = self._values.get(name, value)
                if before != value:
                    raise ValueError(
                        f"env: {name} is to be {value!r}, and is {before!r} for another dataset or loader of this "
                        "process, with which it shares its sessions: give both the same value, or leave it to one"
                    )
            if not chosen.items() <= self._values.items():
                self._values = {**self._values, **chosen}
