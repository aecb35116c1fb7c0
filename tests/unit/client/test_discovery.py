"""From ``workers=`` to where the workers are."""

from __future__ import annotations

import contextlib
import os
import re
import socket

import pytest

from rpcdataloader.client.discovery import WORKERS_VARIABLE, Inline, Local, Names, Remote, find_workers
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.register import Register

NODE = Address("node01", 6543)
V6 = Address("fe80::1", 7000)
UNIX = Address(path="/run/pool,1")
D = Address("d", 1)
FOLDER = Remote(lookups=(Register("/run/pool"),))
MIXTURE = Remote((NODE,), (Names(NODE), Register("/run/pool")), Local(4))


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ("node01:6543", Remote((NODE,))),
        (["node01:6543"], Remote((NODE,))),
        (("node01:6543", "[fe80::1]:7000"), Remote((NODE, V6))),
        (" node01:6543 , [fe80::1]:7000,", Remote((NODE, V6))),
        (iter(["node01:6543"]), Remote((NODE,))),
        # Only a list can hold a path whose last part has a comma; a folder may end with a slash.
        (["unix:/run/pool,1"], Remote((UNIX,))),
        ("@/lr=0.1,bs=64/", Remote(lookups=(Register("/lr=0.1,bs=64"),))),
        (
            "@/lr=0.1,bs=64,seed=1/.pool, @/a,b/c,d:1",
            Remote((D,), (Register("/lr=0.1,bs=64,seed=1/.pool"), Register("/a,b/c"))),
        ),
        (
            "unix:/a, b:x/socket,local:4,unix:/run/x,d:1",
            Remote((Address(path="/a, b:x/socket"), Address(path="/run/x"), D), (), Local(4)),
        ),
        ("inline", Inline()),
        (" inline ", Inline()),
        ("local", Local()),
        ("local:4", Local(4)),
        ("@/run/pool", FOLDER),
        (" @/run/../run/pool/ ", FOLDER),
        ("@pool", Remote(lookups=(Register(os.path.abspath("pool")),))),
        ("@~/pool", Remote(lookups=(Register(os.path.expanduser("~/pool")),))),
        ("dns://node01:6543", Remote(lookups=(Names(NODE),))),
        (["inline"], Inline()),
        (["local:4"], Local(4)),
        ("local:4, dns://node01:6543,node01:6543,@/run/pool", MIXTURE),
        ([Names(NODE), "@/run/pool", "local:4", "node01:6543"], MIXTURE),
    ],
)
def test_forms(workers, expected):
    assert find_workers(workers, {}) == expected
    if isinstance(workers, str):
        assert find_workers(None, {WORKERS_VARIABLE: workers}) == expected


@pytest.mark.parametrize(
    ("workers", "problem"),
    [
        ([], "workers names no worker; write host:port"),
        ("", "workers names no worker; write host:port"),
        ("node01", "cannot read the address 'node01': write host:port"),
        ("tcp://node01:6543", "cannot read the address 'tcp://node01:6543'"),
        ("node01:6543,node02:6543,node01:6543", "workers names node01:6543 more than once"),
        ("local:0", "'local:0' asks for no worker; use inline"),
        ("local:x", "'local:x' names no number of workers; write local:N, or local for one per CPU"),
        (["inline", "node01:6543"], "'inline' cannot be one of several"),
        ("local:2,local", "there is one number of workers on this machine, but workers names local:2 and local"),
        ("@", "'@' names no directory; write @/path"),
        (" @ ", "'@' names no directory; write @/path"),
        ("dns://pool", "cannot read the address 'pool': write host:port"),
        ("@/run/pool,node01", "cannot read the address 'node01': write host:port"),
        ("@/run/pool,/run/other", "cannot read the address '/run/other': write host:port"),
        ("@/lr=0.1,bs=64", "cannot read the address 'bs=64'"),
        ("dns://unix:/run/pool", "'dns://unix:/run/pool' names no host; write dns://host:port"),
        ("@/run/pool,node01:6543,@/run/pool", "workers names @/run/pool more than once"),
    ],
)
def test_malformed_lists_are_refused(workers, problem):
    with pytest.raises(ValueError, match=re.escape(problem)):
        find_workers(workers, {})


def test_error_in_the_environment_names_the_variable():
    with pytest.raises(ValueError, match=f"environment variable {WORKERS_VARIABLE}: cannot read the address 'node01'"):
        find_workers(None, {WORKERS_VARIABLE: "node01"})


# Node servers behind a DNS name


@pytest.fixture
def resolver(monkeypatch):
    """What the resolver answers: a list of hosts, or the number of an error."""
    answers = {"pool": []}

    def getaddrinfo(host, port, type):
        if isinstance(answers[host], int):
            raise socket.gaierror(answers[host], "what it says")
        families = {found: socket.AF_INET6 if ":" in found else socket.AF_INET for found in answers[host]}
        return [(families[found], type, 6, "", (found, port)) for found in answers[host]]

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


@pytest.mark.skipif(not socket.has_ipv6, reason="there is no IPv6")
@pytest.mark.parametrize(
    ("family", "expected"), [("v4", ["127.0.0.1", "127.0.0.2"]), ("v6", ["[::1]"]), (None, ["[::1]"])]
)
def test_of_two_families_of_addresses_the_one_that_answers_counts(resolver, family, expected):
    """The resolver prefers IPv6."""
    resolver["pool"] = ["::1", "127.0.0.1", "127.0.0.2"]
    with contextlib.ExitStack() as opened:
        if family:
            where = {"v4": (socket.AF_INET, "127.0.0.1"), "v6": (socket.AF_INET6, "::1")}[family]
            listener = opened.enter_context(socket.create_server((where[1], 0), family=where[0]))
            port = listener.getsockname()[1]
        else:  # which nothing listens on
            with socket.create_server(("127.0.0.1", 0)) as listener:
                port = listener.getsockname()[1]
        names = Names(Address("pool", port))
        assert look(names) == [f"{host}:{port}" for host in expected]
    # What was found out holds, also while no server is there.
    resolver["pool"].reverse()
    assert look(names) == [f"{host}:{port}" for host in (expected if family else ["127.0.0.1", "127.0.0.2"])]


@pytest.mark.skipif(not socket.has_ipv6, reason="there is no IPv6")
def test_family_that_goes_is_given_up(resolver):
    resolver["pool"] = ["::1", "127.0.0.1"]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        names = Names(Address("pool", port := listener.getsockname()[1]))
        assert look(names) == [f"127.0.0.1:{port}"]
        resolver["pool"] = ["::1"]
        assert look(names) == [f"[::1]:{port}"]
