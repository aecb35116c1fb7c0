from __future__ import annotations

import dataclasses
import json
import re

import pytest

from rpcdataloader.errors import AuthenticationError, RemoteProtocolError
from rpcdataloader.wire.channel import local_identity
from rpcdataloader.wire.frames import HANDSHAKE_LIMITS, Decoder, Message, MessageType
from rpcdataloader.wire.handshake import Handshake, Identity, Preamble, TlsError
from tests.unit.wire.test_frames import feed, refuse_to_allocate

SECRET = b"a secret of the test"
TICKET = bytes(range(16))

CLIENT = Identity(
    role="client",
    host="trainer1",
    pid=11,
    rank=3,
    protocol=5,
    python_implementation="CPython",
    python_version="3.11.7",
    machine="x86_64",
    torch="2.13.0+cu128",
    numpy="2.1.3",
    cloudpickle="3.1.2",
    job="4711",
    rpcdataloader="0.1.0",
)
SERVER = dataclasses.replace(CLIENT, role="server", host="node07", pid=22, rank=None, torch="2.13.0+cpu", job="")


def client(nonce=None, **changes):
    return Handshake(SECRET, dataclasses.replace(CLIENT, **changes), Preamble(TICKET), nonce)


def server(nonce=None):
    return Handshake(SECRET, SERVER, Preamble(TICKET), nonce)


def decode(data):
    """The messages in ``data``, within the limits that the transport sets for a handshake."""
    return feed(Decoder(refuse_to_allocate, limits=HANDSHAKE_LIMITS), data)


def decode_one(data):
    [message] = decode(data)
    return message


def start(client_options=None, server_options=None):
    """Both sides, and the client's HELLO."""
    one = client(**client_options or {})
    preamble = one.preamble_to_send()
    assert Preamble.decode(preamble) == Preamble(TICKET)
    return one, server(**server_options or {}), decode_one(one.data_to_send())


def refusal(side):
    reply = decode_one(side.data_to_send())
    assert reply.type == MessageType.REFUSED
    return reply, json.loads(bytes(reply.payload))


# ---------------------------------------------------------------------------------------------------- agreement


def test_golden_handshake():
    one, two, hello = start({"nonce": bytes(32)}, {"nonce": b"\x01" * 32})
    identity = (
        '{"role": "%s", "host": "%s", "pid": %d, "rank": %s, "protocol": 5, "python_implementation": "CPython", '
        '"python_version": "3.11.7", "machine": "x86_64", "torch": "2.13.0+%s", "numpy": "2.1.3", '
        '"cloudpickle": "3.1.2", "job": "%s", "rpcdataloader": "0.1.0"}'
    )
    hello_format = '{"nonce": "%s", "identity": ' + identity + "}"
    client_hello = hello_format % ("00" * 32, "client", "trainer1", 11, "3", "cu128", "4711") + "\r\n\r\n"
    server_hello = hello_format % ("01" * 32, "server", "node07", 22, "null", "cpu", "")
    assert bytes(hello.payload).decode() == client_hello
    two.receive(hello)
    answer = decode_one(two.data_to_send())
    assert bytes(answer.payload).decode() == server_hello

    # How these are made is on the page of the protocol.
    one.receive(answer)
    proof = decode_one(one.data_to_send())
    assert bytes(proof.payload) == b'{"proof": "e5355b6da8a0b6da63614e67b592fd4d443303b2df7265ddb006f30293a1ab73"}'
    two.receive(proof)
    answer = decode_one(two.data_to_send())
    assert bytes(answer.payload) == b'{"proof": "8de89026ea7995ca05d66fff6bfb20ae57b0e33aba2f622978c46796d9c5f7d2"}'
    one.receive(answer)
    assert one.established.send.seal(b"header").hex() == "5d6b1a72dfb75ddc2ccf30ff1d21fc4f"
    assert one.established.receive.seal(b"header").hex() == "84959fce951d92ffa936299dc7490966"
    key = "3c28cbcfcce8bcdc1efc75d9d7b051b75ecd146cc794ced4b2bd974add92beab"
    assert [side.established.ticket_key.hex() for side in (one, two)] == [key, key]


def test_only_clients_name_their_job(monkeypatch):
    """A server does not tell strangers."""
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    assert [local_identity(role).job for role in ("client", "server")] == ["4711", ""]


def test_nonces_are_fresh():
    assert len({bytes(start()[2].payload) for _ in range(5)}) == 5


# ---------------------------------------------------------------------------------------------------- versions


@pytest.mark.parametrize(
    ("changes", "ours", "theirs"),
    [
        ({"protocol": 6}, "rpcdataloader 0.1.0 (version 5 of the protocol)", "rpcdataloader 0.1.0 (version 6 of"),
        ({"python_version": "3.1.1"}, "CPython 3.11", "CPython 3.1"),
        ({"python_implementation": "PyPy"}, "CPython 3.11", "PyPy 3.11"),
        ({"numpy": "1.26.4"}, "numpy 2", "numpy 1"),
    ],
    ids=str,
)
def test_incompatible_versions_are_refused_by_either_side_naming_both(changes, ours, theirs):
    # The server is the first to see both HELLOs; a client looks in the same way.
    one, two, hello = start(changes)
    text = f"the node server on node07 runs {ours}, the client on trainer1 (pid 11) runs {theirs}"
    with pytest.raises(RemoteProtocolError, match=f"^{re.escape(text)}.* on both sides$"):
        two.receive(hello)
    reply, content = refusal(two)
    assert content["code"] == "version"
    with pytest.raises(RemoteProtocolError, match=re.escape(text)):
        one.receive(reply)
    assert one.established is two.established is None


@pytest.mark.parametrize(
    ("changes", "differences"),
    [
        ({}, []),
        ({"python_version": "3.11.2", "numpy": "2.1.0", "torch": "2.13.0", "pid": 5, "rank": None}, []),
        ({"rpcdataloader": "0.1.1"}, [("rpcdataloader", "0.1.0", "0.1.1")]),
        ({"torch": "2.11.0+cu128"}, [("torch", "2.13.0", "2.11.0")]),
        ({"numpy": "2.4.0"}, [("numpy", "2.1", "2.4")]),
        ({"cloudpickle": "3.0.0", "machine": "x"}, [("cloudpickle", "3.1.2", "3.0.0"), ("machine", "x86_64", "x")]),
    ],
    ids=str,
)
def test_other_differences_are_listed_on_both_sides(changes, differences):
    one, two, hello = start(changes)
    two.receive(hello)
    for speaker, hearer in (two, one), (one, two), (two, one):
        hearer.receive(decode_one(speaker.data_to_send()))
    there, here = two.established.differences, one.established.differences
    assert there == [f"{name}: {ours} here, {theirs} on trainer1" for name, ours, theirs in differences]
    assert here == [f"{name}: {theirs} here, {ours} on node07" for name, ours, theirs in differences]


# ---------------------------------------------------------------------------------------------------- bad messages


GOOD_HELLO = {"nonce": "00" * 32, "identity": dataclasses.asdict(CLIENT)}


def hello_with(**identity):
    return json.dumps({**GOOD_HELLO, "identity": {**GOOD_HELLO["identity"], **identity}}).encode()


@pytest.mark.parametrize(
    ("payload", "problem"),
    [
        (b"[]", "not a JSON object"),
        (b"{}", "without a nonce of 32 bytes"),
        (b'{"nonce": "%s"}' % (b"00" * 33), "without a nonce of 32 bytes"),
        (b'{"nonce": "%s"}' % (b"00" * 32), "without a valid role"),
        (b'{"nonce": "%s", "identity": []}' % (b"00" * 32), "without a valid role"),
        (hello_with(role="server"), "says that it is a server"),
        (hello_with(host=None), "without a valid host"),
        (hello_with(pid=True), "without a valid pid"),
        (hello_with(pid=-1), "without a valid pid"),
        (hello_with(pid=2**63), "without a valid pid"),
        (hello_with(rank="3"), "without a valid rank"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_malformed_hello_is_a_protocol_error_and_is_answered(payload, problem):
    two = server()
    with pytest.raises(RemoteProtocolError, match=problem):
        two.receive(Message(MessageType.HELLO, payload=payload))
    reply, content = refusal(two)
    assert content["code"] == "protocol"
    one = client()
    with pytest.raises(RemoteProtocolError, match=f"refused this connection: .*{problem}"):
        one.receive(reply)


@pytest.mark.parametrize("field", ["request_id", "flags"])
def test_message_that_does_not_belong_into_a_handshake_is_a_protocol_error(field):
    with pytest.raises(RemoteProtocolError, match="request id or flags"):
        server().receive(Message(MessageType.HELLO, payload=json.dumps(GOOD_HELLO).encode(), **{field: 1}))


def test_text_from_a_peer_is_made_fit_for_a_terminal():
    _, two, _ = start()
    evil = "node\x1b[2J\r\nroot logged in\ud800\u202e" + "x" * 300
    payload = hello_with(host=evil)
    two.receive(Message(MessageType.HELLO, payload=payload))
    assert two._peer.host == (r"node\x1b[2J\r\nroot logged in\ud800\u202e" + "x" * 300)[:252] + "..."


@pytest.mark.parametrize(
    ("content", "error", "text"),
    [
        ({"code": "authentication", "text": "no"}, AuthenticationError, "refused this connection: no$"),
        ({"code": "version", "text": "no"}, RemoteProtocolError, "refused this connection: no$"),
        ({"code": "of the future", "text": "a\nb"}, RemoteProtocolError, r"refused this connection: a\\nb$"),
        ({"code": "tls", "text": "no"}, TlsError, "refused this connection: no"),
        ({"code": 5, "text": "no"}, RemoteProtocolError, "without a reason"),
        ({"code": "version"}, RemoteProtocolError, "without a reason"),
        ({"code": "version", "text": "x" * 2000}, RemoteProtocolError, r": x{497}\.\.\.$"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refusal_becomes_an_error_and_is_not_answered(content, error, text):
    for side, name in ((client(), "node server"), (server(), "client")):
        side.data_to_send()
        with pytest.raises(error, match=f"the {name} .*{text}"):
            side.receive(Message(MessageType.REFUSED, payload=json.dumps(content).encode()))
        assert side.data_to_send() == b""


def test_refusal_fits_into_a_message_whatever_the_peer_calls_itself():
    one, two, _ = start()
    longest = "\U0001f600" * 255
    identity = {**GOOD_HELLO["identity"], "role": longest, "host": longest}
    payload = json.dumps({**GOOD_HELLO, "identity": identity}, ensure_ascii=False).encode()
    with pytest.raises(RemoteProtocolError, match="says that it is a"):
        two.receive(Message(MessageType.HELLO, payload=payload))
    reply, _ = refusal(two)
    with pytest.raises(RemoteProtocolError, match=longest):
        one.receive(reply)
