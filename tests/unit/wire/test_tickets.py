from __future__ import annotations

import random

import pytest

from rpcdataloader.wire.handshake import NO_TICKET, STATUS_TICKET, TICKET_SIZE, TICKET_WINDOW, Tickets, session_of

KEY = bytes(range(32))


def made(number, key=KEY, session=4711):
    """The first tickets of a session."""
    tickets = Tickets(key, session)
    return [tickets.make() for _ in range(number)]


def test_golden_ticket():
    # How the last 8 bytes are made is on the page of the protocol.
    first, second = made(2)
    assert first == bytes.fromhex("67120000 01000000 62fdc3b002ba8816")
    assert second == bytes.fromhex("67120000 02000000 219efd607d59db29")
    assert len(first) == TICKET_SIZE
    assert session_of(first) == 4711


def test_tickets_are_taken_once_in_any_order():
    tickets = made(200)
    random.Random(7).shuffle(tickets)
    server = Tickets(KEY, 4711)
    for number, ticket in enumerate(tickets):
        assert server.take(ticket)
        assert not any(map(server.take, tickets[: number + 1]))


def test_ticket_may_be_late_but_not_without_limit():
    server, tickets = Tickets(KEY, 4711), made(TICKET_WINDOW + 2)
    assert server.take(tickets[-1])
    assert not server.take(tickets[0])
    assert not server.take(tickets[1])
    assert server.take(tickets[2])
    assert not server.take(tickets[2])
    assert not server.take(tickets[-1])


@pytest.mark.parametrize("position", range(TICKET_SIZE))
def test_forged_ticket_is_not_taken_and_uses_nothing_up(position):
    server, [ticket] = Tickets(KEY, 4711), made(1)
    for bit in range(8):
        forged = bytearray(ticket)
        forged[position] ^= 1 << bit
        assert not server.take(bytes(forged))
    assert server.take(ticket)


@pytest.mark.parametrize("other", [{"key": bytes(32)}, {"session": 4712}], ids=str)
def test_ticket_of_another_session_is_not_taken(other):
    [ticket] = made(1, **other)
    assert not Tickets(KEY, 4711).take(ticket)


def test_what_asks_for_something_else_is_no_ticket():
    assert not any(map(Tickets(KEY, 0).take, (NO_TICKET, STATUS_TICKET)))
    assert not Tickets(KEY, 1).take(STATUS_TICKET)
    assert {made(1, session=session)[0][4:8] for session in (1, 4711)} == {b"\1\0\0\0"}
