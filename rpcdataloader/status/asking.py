"""Asking node servers how they are, all at once, each within a time limit."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from rpcdataloader.client.discovery import Inline, Local, Registered, find_workers
from rpcdataloader.client.register import Register
from rpcdataloader.errors import AuthenticationError, ConnectError, RemoteProtocolError, RPCError, RPCTimeoutError
from rpcdataloader.status.report import Answer
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.certificates import TlsCredentials
from rpcdataloader.wire.channel import Channel, open_channel
from rpcdataloader.wire.credentials import client_credentials
from rpcdataloader.wire.deadline import Deadline
from rpcdataloader.wire.frames import MessageType
from rpcdataloader.wire.identity import local_identity
from rpcdataloader.wire.preamble import STATUS_ID
from rpcdataloader.wire.status import NodeStatus, StatusRequest


class Places:
    """Where the node servers are.

    Args:
        texts: As ``workers=`` takes them; none for what the environment says.

    Raises:
        ValueError: There is nobody to ask, an address is malformed, or one has no node server of its own.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._places: list[Register | tuple[Address, ...]] = []
        for where in map(find_workers, texts) if texts else [find_workers(None)]:
            if where is None:
                raise ValueError("no node server is named, and RPCDATALOADER_WORKERS is not set")
            if isinstance(where, (Inline, Local)):
                raise ValueError(f"{where} belongs to one training process, and nobody else can ask it; name addresses")
            self._places.append(Register(where.directory) if isinstance(where, Registered) else where.addresses)

    def find(self) -> list[Address]:
        """Addresses that are named, and of those that are registered now; each once, in this order."""
        found: list[Address] = []
        for place in self._places:
            found += [one.address for one in place.look()] if isinstance(place, Register) else place
        return list(dict.fromkeys(found))

    @property
    def _registers(self) -> list[Register]:
        return [place for place in self._places if isinstance(place, Register)]

    def problems(self) -> dict[str, str]:
        """Why files of the directories, or these themselves, were not used at the last look, by path."""
        return {
            name if name == register.directory else f"{register.directory}/{name}": reason
            for register in self._registers
            for name, reason in register.problems.items()
        }

    def names(self) -> list[str]:
        """The directories."""
        return [f"@{register.directory}" for register in self._registers]


class Asker:
    """Asks the same node servers again and again, over connections that stay open.

    So one that drains, and takes no connections any more, can be watched until it ends.

    Args:
        tls: For TCP; None to do without.
        timeout: Seconds that each answer may take.
    """

    def __init__(self, tls: TlsCredentials | None, timeout: float) -> None:
        self._tls = tls
        self._timeout = timeout
        self._channels: dict[Address, Channel] = {}  # of an address, its thread's alone

    def ask(self, addresses: Sequence[Address], *, stacks: bool) -> list[Answer]:
        """Ask all of them, and wait for the slowest.

        One that was asked before and is not among them any more, because it drains and has left its register, is asked
        for as long as it answers.

        Args:
            stacks: With the stacks of the workers.
        """
        leaving = [address for address in self._channels if address not in addresses]
        num_wanted, addresses = len(addresses), [*addresses, *leaving]
        answers = [Answer(str(address), error=_late(address, self._timeout)) for address in addresses]

        def ask(position: int, address: Address) -> None:
            answers[position] = self._ask(address, stacks)

        # Not waited for in the end: one may still resolve a name, which cannot be ended.
        threads = [
            threading.Thread(target=ask, args=item, name=f"rpcdl-status {item[1]}", daemon=True)
            for item in enumerate(addresses)
        ]
        deadline = Deadline(self._timeout + 1)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(deadline.remaining())
        return [answer for position, answer in enumerate(answers) if position < num_wanted or answer.status is not None]

    def _ask(self, address: Address, stacks: bool) -> Answer:
        name = str(address)
        deadline = Deadline(self._timeout)
        try:
            if (channel := self._channels.pop(address, None)) is not None:
                try:
                    return Answer(name, self._question(address, channel, stacks, deadline))
                except RPCTimeoutError:
                    raise
                except RPCError:
                    pass  # it has ended; another one may be there
            return Answer(name, self._question(address, self._open(address, deadline), stacks, deadline))
        except RPCTimeoutError:
            return Answer(name, error=_late(address, self._timeout))
        # Waiting does not help: another version, perhaps of Python, or another program on that port; a ValueError is of
        # a variable that makes no sense.
        except (AuthenticationError, RemoteProtocolError, ValueError) as exc:
            return Answer(name, error=str(exc), is_refused=True)
        except RPCError as exc:
            return Answer(name, error=str(exc))

    def _open(self, address: Address, deadline: Deadline) -> Channel:
        tls = None if address.is_unix else self._tls
        return open_channel(
            address, client_credentials(address), local_identity("client"), STATUS_ID, deadline, tls=tls
        )

    def _question(self, address: Address, channel: Channel, stacks: bool, deadline: Deadline) -> NodeStatus:
        try:
            channel.stream.limit(deadline)
            channel.send(MessageType.STATS, payload=StatusRequest(stacks).encode())
            message = channel.recv()
            if message is None:
                raise ConnectError(f"{address} closed the connection instead of answering")
            if message.type != MessageType.STATS:
                raise RemoteProtocolError(f"{address} answered with message type {message.type} instead of its status")
            status = NodeStatus.decode(message.payload)
        except BaseException:
            channel.stream.close()
            raise
        self._channels[address] = channel
        return status

    def close(self) -> None:
        """End the connections."""
        for channel in self._channels.values():
            channel.stream.close()
        self._channels.clear()


def _late(address: Address, timeout: float) -> str:
    return f"{address} did not answer within {timeout:g} s"
