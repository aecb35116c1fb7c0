"""Node servers behind a DNS name; that of the resolver is in ``tests/behaviour/test_dns.py``."""

from __future__ import annotations

import socket

import pytest

from rpcdataloader.client.discovery import Names
from rpcdataloader.wire.address import Address


@pytest.fixture
def resolver(monkeypatch):
    """What the resolver answers: a list of hosts, or the number of an error."""
    answers = {"pool": []}

    def getaddrinfo(host, port, type):
        if isinstance(answers[host], int):
            raise socket.gaierror(answers[host], "what it says")
        return [
            (socket.AF_INET6 if ":" in found else socket.AF_INET, type, 6, "", (found, port)) for found in answers[host]
        ]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return answers


def look(names):
    return list(map(str, names.look()))


def test_servers_are_in_the_same_order_for_everybody(resolver):
    for answer in ["10.0.0.10", "10.0.0.9", "10.0.0.10"], ["10.0.0.9", "10.0.0.10"]:
        resolver["pool"] = answer
        assert look(Names(Address("pool", 6543))) == ["10.0.0.9:6543", "10.0.0.10:6543"]


def test_resolver_that_cannot_be_asked_takes_nothing_away(resolver):
    names = Names(Address("pool", 6543))
    resolver["pool"] = ["10.0.0.1"]
    assert look(names) == ["10.0.0.1:6543"]
    resolver["pool"] = socket.EAI_AGAIN
    assert look(names) == ["10.0.0.1:6543"]
    assert names.problems == {"pool": "what it says"}
    for number in socket.EAI_NONAME, socket.EAI_NODATA:
        resolver["pool"] = ["10.0.0.1"]
        assert look(names) == ["10.0.0.1:6543"]
        resolver["pool"] = number
        assert look(names) == []
