"""Every exception that this package raises itself.

::

    RPCError
    ├── ConnectError             nobody reachable at that address before the deadline
    ├── AuthenticationError      wrong or missing secret or certificate; always before any unpickling
    ├── ProtocolError            never raised itself
    │   ├── LocalProtocolError   our caller did something the protocol forbids
    │   └── RemoteProtocolError  the peer did: bad magic, version, length over the limit
    ├── ConnectionLostError      peer or worker died with requests in flight
    ├── RPCTimeoutError          also a TimeoutError; names the operation and the limit
    ├── SerializationError       something cannot be pickled or rebuilt; names the type
    ├── BadSamplesError          more samples were skipped than the loader allows
    └── RemoteError              a task raised something that cannot be rebuilt here

An exception raised by user code on a worker is raised again with its own type; its ``__cause__`` is a
:class:`RemoteTraceback` that shows where it happened. Wrong arguments are ``ValueError`` and ``TypeError``.
"""

from __future__ import annotations


class RPCError(RuntimeError):
    """Base of everything that this package raises itself; a ``RuntimeError``, which is what torch's loader raises."""


class ConnectError(RPCError):
    """Nobody could be reached at the address before the deadline, or the server had no room."""


class AuthenticationError(RPCError):
    """The secret, or a certificate, is wrong, missing or unusable. Nothing has been unpickled."""


class ProtocolError(RPCError):
    """One side broke the protocol; raised as one of its two subclasses."""


class LocalProtocolError(ProtocolError):
    """The caller asked for something that the protocol forbids."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something that the protocol forbids, or speaks an incompatible version."""


class ConnectionLostError(RPCError):
    """The peer, or the worker behind it, died with requests in flight."""


class RPCTimeoutError(RPCError, TimeoutError):
    """An operation took longer than its limit, which the message gives in seconds."""


class SerializationError(RPCError):
    """An object cannot be pickled, or cannot be rebuilt on the other side."""


class BadSamplesError(RPCError):
    """In one pass, more samples were skipped than ``max_skipped`` of the loader; the cause is the last exception."""


class RemoteError(RPCError):
    """A task raised an exception that cannot be rebuilt here; carries its type, text and traceback as text."""


class RemoteTraceback(Exception):
    """Cause of an exception that was raised on a worker: where it ran, and the traceback there."""

    def __str__(self) -> str:
        return "\n" + "".join(str(arg) for arg in self.args).rstrip()
