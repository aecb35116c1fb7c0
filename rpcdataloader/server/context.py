"""What every process of a node server knows of it; handed down by the forks."""

from __future__ import annotations

from dataclasses import dataclass

from rpcdataloader.wire.credentials import Credentials


@dataclass(frozen=True, slots=True)
class ServerContext:
    """The part of the server's settings that sessions and workers need.

    Attributes:
        node: Host name, for messages.
        num_workers: What the server advertises.
        parallel: Threads per worker for ``rpc_async`` calls.
        timeout: Seconds for an ``rpc_async`` call whose caller set no limit; 0 for none.
        credentials: The secret that clients must know.
        tells_clients: Whether warnings go to the client, too; not when the log is the client's terminal.
    """

    node: str
    num_workers: int
    parallel: int
    timeout: float
    credentials: Credentials
    tells_clients: bool = True
