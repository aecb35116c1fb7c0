"""``env=``: which environment variables the sessions of this client get."""

from __future__ import annotations

import fnmatch
import os
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
