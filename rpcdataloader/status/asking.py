"""Queries to all node servers at once, each within a time limit."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence

from rpcdataloader.client.discovery import Elastic, Inline, Local, find_workers
from rpcdataloader.client.register import Lookup, Register
from rpcdataloader.errors import AuthenticationError, ConnectionLostError, RemoteProtocolError, RPCError
from rpcdataloader.status.report import Answer
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.certificates import TlsCredentials
from rpcdataloader.wire.channel import Channel, local_identity, open_channel
from rpcdataloader.wire.credentials import client_credentials
from rpcdataloader.wire.frames import MessageType
from rpcdataloader.wire.preamble import STATUS_ID
from rpcdataloader.wire.status import NodeStatus, StatusRequest
from rpcdataloader.wire.transport import Deadline


class Places:
    """The places of node servers.

    Args:
        texts: Places as in ``workers=``; empty for those of the environment.

    Raises:
        ValueError: No node server is named, an address is malformed, or a place has no node server of its own.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._places: list[Lookup | tuple[Address, ...]] = []
        self._elastic: list[str] = []
        for where in map(find_workers, texts) if texts else [find_workers(None)]:
            if where is None:
                raise ValueError("name a node server, or set RPCDATALOADER_WORKERS")
            if isinstance(where, (Inline, Local)):
                raise ValueError(f"{where} belongs to one training process; name node servers by address")
            if isinstance(where, Elastic):
                self._places.append(where.open())
                self._elastic.append(str(where))
            else:
                self._places.append(where.addresses)

    def look(self) -> tuple[list[Address], dict[str, str]]:
        """Addresses that are named, and those that are registered now; each once, in this order.

        The mapping has the reason for each unused file or directory, by path.
        """
        found: list[Address] = []
        problems: dict[str, str] = {}
        for place in self._places:
            if isinstance(place, tuple):
                found += place
            else:
                found += [one.address for one in place.look()]
                # The path of a directory stands for the directory itself.
                folder = place.directory if isinstance(place, Register) else ""
                problems |= {os.path.join(folder, name): reason for name, reason in place.problems.items()}
        return list(dict.fromkeys(found)), problems

    def registers(self) -> list[str]:
        """Places where node servers come and go: directories, and names."""
        return self._elastic


class Asker:
    """Asks the same node servers repeatedly, over connections that stay open.

    So a draining node server, which refuses new connections, can be watched until it ends.

    Args:
        timeout: Seconds that each answer may take.
    """

    def __init__(self, tls: TlsCredentials | None, timeout: float) -> None:
        self._tls = tls
        self._timeout = timeout
        self._channels: dict[Address, Channel] = {}  # each used only by its address's thread

    def ask(self, addresses: Sequence[Address], *, stacks: bool) -> list[Answer]:
        """Ask all node servers, and wait for the slowest.

        A node server that is draining has left its register: it is asked until it stops answering.
        """
        leaving = [address for address in list(self._channels) if address not in addresses]
        answers: dict[Address, Answer] = {}

        def ask(address: Address) -> None:
            answers[address] = self._ask(address, stacks)

        # Not joined at the end: a thread may be resolving a name, which cannot be ended.
        threads = [
            threading.Thread(target=ask, args=[address], name=f"rpcdl-status {address}", daemon=True)
            for address in [*addresses, *leaving]
        ]
        deadline = Deadline(self._timeout + 1)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(deadline.remaining())
        found = [answers.get(address) or self._late(address) for address in addresses]
        return found + [answer for address in leaving if (answer := answers.get(address)) and answer.status]

    def _ask(self, address: Address, stacks: bool) -> Answer:
        deadline = Deadline(self._timeout)
        try:
            if (channel := self._channels.pop(address, None)) is not None:
                with contextlib.suppress(ConnectionLostError):  # the server has ended; another one may have its address
                    return Answer(str(address), self._question(address, channel, stacks, deadline))
            tls = None if address.is_unix else self._tls
            identity = local_identity("client")
            channel = open_channel(address, client_credentials(address), identity, STATUS_ID, deadline, tls=tls)
            return Answer(str(address), self._question(address, channel, stacks, deadline))
        except TimeoutError:  # includes RPCTimeoutError
            return self._late(address)
        except (RPCError, ValueError) as exc:
            # Waiting does not help: another version, perhaps of Python, or another program on that port; a ValueError
            # is about a malformed variable.
            is_refused = isinstance(exc, (AuthenticationError, RemoteProtocolError, ValueError))
            return Answer(str(address), error=str(exc), is_refused=is_refused)

    def _question(self, address: Address, channel: Channel, stacks: bool, deadline: Deadline) -> NodeStatus:
        with contextlib.ExitStack() as failed:
            failed.callback(channel.stream.close)
            channel.stream.limit(deadline)
            channel.send(MessageType.STATS, payload=StatusRequest(stacks).encode())
            message = channel.recv()
            if message is None:
                raise ConnectionLostError(f"{address} closed the connection without an answer")
            if message.type != MessageType.STATS:
                raise RemoteProtocolError(f"{address} answered with message type {message.type} instead of its status")
            status = NodeStatus.decode(message.payload)
            failed.pop_all()
        self._channels[address] = channel
        return status

    def _late(self, address: Address) -> Answer:
        return Answer(str(address), error=f"{address} did not answer within {self._timeout:g} s")

    def close(self) -> None:
        """Close the connections."""
        for channel in self._channels.values():
            channel.stream.close()
        self._channels.clear()
