"""Errors of a distributed job say which rank they are of, so that they can be read among those of the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rpcdataloader import errors
from rpcdataloader.client.sharing import Partition


def of_rank(error: BaseException, partition: Partition) -> BaseException:
    """The error to raise: a copy that begins with the rank if it is one of this package.

    Exceptions of user code stay as they are; where they come from a worker, their cause names the rank.
    """
    text = partition.label
    cause = error.__cause__
    if text and isinstance(cause, errors.RemoteTraceback):
        where = str(cause.args[0])
        if not where.startswith(text):  # raised before
            cause.args = (text + where, *cause.args[1:])
    elif text and type(error).__module__ == errors.__name__:
        named = type(error)(f"{text}{error}").with_traceback(error.__traceback__)
        named.__cause__ = cause
        return named
    return error


@contextmanager
def errors_of_rank(partition: Partition) -> Iterator[None]:
    """Around what raises errors: :func:`of_rank` for each."""
    try:
        yield
    except Exception as exc:
        named = of_rank(exc, partition)
        if named is exc:
            raise
        raise named from exc.__cause__
