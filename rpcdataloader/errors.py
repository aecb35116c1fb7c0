"""Every exception that this package raises itself.

::

    RPCError
    ├── ConnectError             no server reachable at that address before the deadline
    ├── AuthenticationError      wrong or missing secret or certificate; always before any unpickling
    ├── ProtocolError            base of the next two
    │   ├── LocalProtocolError   the caller did something that the protocol forbids
    │   └── RemoteProtocolError  the peer did: bad magic, version, length over the limit
    ├── ConnectionLostError      peer or worker died with requests in flight
    ├── RPCTimeoutError          also a TimeoutError; names the operation and the limit
    ├── SerializationError       an object cannot be pickled or rebuilt; names the type
    ├── BadSamplesError          more samples were skipped than the loader allows
    └── RemoteError              a task raised something that cannot be rebuilt here

An exception of user code on a worker is raised again with its own type; its ``__cause__`` is a
:class:`RemoteTraceback` that shows where it happened. Wrong arguments are ``ValueError`` and ``TypeError``.
"""

from __future__ import annotations


class RPCError(RuntimeError):
    """Base of this package's own exceptions; a ``RuntimeError``, which is what torch's loader raises."""


class ConnectError(RPCError):
    """No server could be reached at the address before the deadline, or the server had no room."""


class AuthenticationError(RPCError):
    """The secret, or a certificate, is wrong, missing or unusable. Nothing has been unpickled."""


class ProtocolError(RPCError):
    """One side broke the protocol; raised as one of the two subclasses."""


class LocalProtocolError(ProtocolError):
    """The caller did something that the protocol forbids."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something that the protocol forbids, or speaks an incompatible version."""


class ConnectionLostError(RPCError):
    """The peer, or the worker behind it, died with requests in flight."""


class RPCTimeoutError(RPCError, TimeoutError):
    """An operation exceeded its limit, which the message gives in seconds."""


class SerializationError(RPCError):
    """An object cannot be pickled, or cannot be rebuilt on the other side."""


class BadSamplesError(RPCError):
    """A pass skipped more samples than the loader's ``max_skipped``; the cause is the last exception."""


class RemoteError(RPCError):
    """A task's exception that cannot be rebuilt here: its type, text and traceback as text."""


class RemoteTraceback(Exception):
    """Cause of an exception raised on a worker: the worker, and its traceback."""

    def __str__(self) -> str:
        return "\n" + "".join(str(arg) for arg in self.args).rstrip()
