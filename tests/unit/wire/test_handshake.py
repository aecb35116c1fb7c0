from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import re
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpcdataloader.errors import AuthenticationError, RemoteProtocolError
from rpcdataloader.wire.frames import HANDSHAKE_LIMITS, Decoder, Message, MessageType
from rpcdataloader.wire.handshake import PREAMBLE_SIZE, Handshake, Identity, Preamble, TlsError

SECRET = b"a secret of the test"
SESSION_ID = bytes(range(16))

CLIENT = Identity(
    role="client",
    host="trainer1",
    pid=11,
    rank=3,
    protocol=3,
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


def client(secret=SECRET, nonce=None, session_id=SESSION_ID, **changes):
    return Handshake(secret, dataclasses.replace(CLIENT, **changes), Preamble(session_id), nonce)


def server(data=None, secret=SECRET, nonce=None, **changes):
    """A server that has read the preamble at the start of ``data``."""
    preamble = Preamble.decode(data[:PREAMBLE_SIZE]) if data else Preamble(SESSION_ID)
    return Handshake(secret, dataclasses.replace(SERVER, **changes), preamble, nonce)


def fill_from(data):
    """A function that fills memory from ``data``, which it takes away."""

    def fill(views, _is_first):
        [view] = views
        piece = data[: len(view)]
        del data[: len(view)]
        view[: len(piece)] = piece
        return len(piece)

    return fill


def make_decoder():
    """With the limits that the transport sets for a handshake."""
    return Decoder(lambda _request_id, _sizes: pytest.fail("allocated"), limits=HANDSHAKE_LIMITS)


def decode(data):
    """The messages in ``data``."""
    decoder, fill = make_decoder(), fill_from(bytearray(data))
    return list(iter(lambda: decoder.read(fill), None))


def decode_one(data):
    [message] = decode(data)
    return message


def start(client_options=None, server_options=None):
    """Both sides, and the client's HELLO."""
    one = client(**client_options or {})
    data = one.data_to_send()
    return one, server(data, **server_options or {}), decode_one(data[PREAMBLE_SIZE:])


def message(type, **content):
    return Message(type, payload=json.dumps(content).encode())


def refusal(side):
    reply = decode_one(side.data_to_send())
    assert reply.type == MessageType.REFUSED
    return reply, json.loads(bytes(reply.payload))


# ---------------------------------------------------------------------------------------------------- agreement


def establish(client_options=None, server_options=None):
    one, two, hello = start(client_options, server_options)
    two.receive(hello)
    one.receive(decode_one(two.data_to_send()))
    two.receive(decode_one(one.data_to_send()))
    one.receive(decode_one(two.data_to_send()))
    return one.established, two.established


def test_golden_handshake():
    one, two, hello = start({"nonce": bytes(32)}, {"nonce": b"\x01" * 32})
    identity = (
        '{"role": "%s", "host": "%s", "pid": %d, "rank": %s, "protocol": 3, "python_implementation": "CPython", '
        '"python_version": "3.11.7", "machine": "x86_64", "torch": "2.13.0+%s", "numpy": "2.1.3", '
        '"cloudpickle": "3.1.2", "job": "%s", "rpcdataloader": "0.1.0"}'
    )
    hello_format = '{"nonce": "%s", "identity": ' + identity + "}"
    client_hello = hello_format % ("00" * 32, "client", "trainer1", 11, "3", "cu128", "4711")
    server_hello = hello_format % ("01" * 32, "server", "node07", 22, "null", "cpu", "")
    assert bytes(hello.payload).decode() == client_hello
    two.receive(hello)
    answer = decode_one(two.data_to_send())
    assert bytes(answer.payload).decode() == server_hello

    # The same, written down a second time and in another way.
    transcript = b"rpcdataloader handshake transcript"
    for part in (Preamble(SESSION_ID).encode(), client_hello.encode(), server_hello.encode()):
        transcript += struct.pack("<Q", len(part)) + part
    transcript = hashlib.sha256(transcript).digest()

    def derive(label):
        return hmac.new(SECRET, label + b"\0" + transcript, hashlib.sha256)

    one.receive(answer)
    proof = decode_one(one.data_to_send())
    assert json.loads(bytes(proof.payload)) == {"proof": derive(b"rpcdataloader proof of the client").hexdigest()}
    two.receive(proof)
    counter_proof = decode_one(two.data_to_send())
    assert json.loads(bytes(counter_proof.payload)) == {
        "proof": derive(b"rpcdataloader proof of the server").hexdigest()
    }
    one.receive(counter_proof)
    for seal, label in [
        (one.established.send, b"rpcdataloader key client to server"),
        (one.established.receive, b"rpcdataloader key server to client"),
    ]:
        expected = hashlib.blake2b(bytes(8) + b"header", key=derive(label).digest(), digest_size=16).digest()
        assert seal.seal(b"header") == expected
    # So that a change of both descriptions at once is seen.
    assert json.loads(bytes(proof.payload))["proof"].startswith("1f74be4a2e6ceb96d5d3d4258cd33886")


def test_nonces_are_fresh():
    assert len({bytes(start()[2].payload) for _ in range(5)}) == 5


# ---------------------------------------------------------------------------------------------------- wrong secrets


def record():
    """What both sides said in a good handshake."""
    one, two, hello = start()
    two.receive(hello)
    answer = decode_one(two.data_to_send())
    one.receive(answer)
    proof = decode_one(one.data_to_send())
    two.receive(proof)
    return hello, answer, proof, decode_one(two.data_to_send())


# ---------------------------------------------------------------------------------------------------- versions


@pytest.mark.parametrize(
    ("changes", "ours", "theirs"),
    [
        (
            {"protocol": 4, "rpcdataloader": "0.2.0"},
            "rpcdataloader 0.1.0 (version 3 of the protocol)",
            "rpcdataloader 0.2.0 (version 4 of the protocol)",
        ),
        ({"python_version": "3.12.1"}, "CPython 3.11", "CPython 3.12"),
        ({"python_version": "3.1.1"}, "CPython 3.11", "CPython 3.1"),
        ({"python_implementation": "PyPy"}, "CPython 3.11", "PyPy 3.11"),
        ({"numpy": "1.26.4"}, "numpy 2", "numpy 1"),
    ],
    ids=str,
)
def test_incompatible_versions_are_refused_by_either_side_naming_both(changes, ours, theirs):
    # The server is the first to see both HELLOs.
    one, two, hello = start(changes)
    with pytest.raises(RemoteProtocolError) as caught:
        two.receive(hello)
    assert str(caught.value).startswith(
        f"the node server on node07 (pid 22) runs {ours}, the client on trainer1 (pid 11) runs {theirs}; "
    )
    assert "on both sides" in str(caught.value)
    reply, content = refusal(two)
    assert content["code"] == "version"
    with pytest.raises(RemoteProtocolError, match=re.escape(f"runs {theirs}; ")):
        one.receive(reply)
    assert one.established is two.established is None

    # A server that did not look is refused by the client.
    one, two, hello = start(server_options=changes)
    answer = Message(MessageType.HELLO, payload=two._hello)
    with pytest.raises(RemoteProtocolError) as caught:
        one.receive(answer)
    assert str(caught.value).startswith(
        f"the client on trainer1 (pid 11) runs {ours}, the node server on node07 (pid 22) runs {theirs}; "
    )
    assert refusal(one)[1]["code"] == "version"


@pytest.mark.parametrize(
    ("changes", "differences"),
    [
        ({}, []),
        ({"python_version": "3.11.2", "numpy": "2.1.0", "torch": "2.13.0", "pid": 5, "rank": None}, []),
        ({"rpcdataloader": "0.1.1"}, ["rpcdataloader: {} 0.1.0, {} 0.1.1"]),
        ({"torch": "2.11.0+cu128"}, ["torch: {} 2.13.0, {} 2.11.0"]),
        ({"numpy": "2.4.0"}, ["numpy: {} 2.1, {} 2.4"]),
        (
            {"cloudpickle": "3.0.0", "machine": "aarch64"},
            ["cloudpickle: {} 3.1.2, {} 3.0.0", "machine: {} x86_64, {} aarch64"],
        ),
    ],
    ids=str,
)
def test_other_differences_are_listed_on_both_sides(changes, differences):
    one, two = establish(changes)

    def words(text, swap):
        name, ours, theirs = text.replace("{} ", "").replace(",", "").split(" ")
        mine, other = (theirs, ours) if swap else (ours, theirs)
        return f"{name} {mine} here, {other} on {'node07' if swap else 'trainer1'}"

    assert two.differences == [words(text, swap=False) for text in differences]
    assert one.differences == [words(text, swap=True) for text in differences]


# ---------------------------------------------------------------------------------------------------- bad messages


GOOD_HELLO = {"nonce": "00" * 32, "identity": dataclasses.asdict(CLIENT)}


def hello_with(**identity):
    return json.dumps({**GOOD_HELLO, "identity": {**GOOD_HELLO["identity"], **identity}}).encode()


@pytest.mark.parametrize(
    ("payload", "problem"),
    [
        (b"", "not JSON"),
        (b"[" * 4096, "(nested too deeply|is not JSON)"),  # from Python 3.12 on, it is not too deep
        (b"[]", "not a JSON object"),
        (b"{}", "without a nonce of 32 bytes"),
        (b'{"nonce": "zz"}', "without a nonce of 32 bytes"),
        (b'{"nonce": "%s"}' % (b"00" * 33), "without a nonce of 32 bytes"),
        (b'{"nonce": "%s"}' % (b"00" * 32), "without a valid role"),
        (b'{"nonce": "%s", "identity": []}' % (b"00" * 32), "without a valid role"),
        (hello_with(role="server"), "says that it is a server"),
        (hello_with(host=None), "without a valid host"),
        (hello_with(pid=True), "without a valid pid"),
        (hello_with(pid=-1), "without a valid pid"),
        (hello_with(pid=2**63), "without a valid pid"),
        (hello_with(rank="3"), "without a valid rank"),
        (hello_with(torch=["2"]), "without a valid torch"),
        (hello_with(job=4711), "without a valid job"),
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


def test_message_that_does_not_belong_into_a_handshake_is_a_protocol_error():
    good = json.dumps(GOOD_HELLO).encode()
    for bad in (
        Message(MessageType.HELLO, payload=good, request_id=1),
        Message(MessageType.HELLO, payload=good, flags=1),
    ):
        with pytest.raises(RemoteProtocolError, match="request id or flags"):
            server().receive(bad)


@pytest.mark.parametrize("type", [type for type in MessageType if type != MessageType.REFUSED])
def test_messages_out_of_order_are_protocol_errors(type):
    hello, answer, _, _ = record()
    one, two = client(), server()
    if type != MessageType.HELLO:
        for side in (one, two):
            with pytest.raises(RemoteProtocolError, match=f"message type {int(type)} instead of HELLO"):
                side.receive(message(type))
    if type != MessageType.AUTH:
        for side, opening in ((client(), answer), (server(), hello)):
            side.receive(opening)
            with pytest.raises(RemoteProtocolError, match=f"message type {int(type)} instead of AUTH"):
                side.receive(message(type))


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
        ({"code": "protocol", "text": "no"}, RemoteProtocolError, "refused this connection: no$"),
        ({"code": "of the future", "text": "a\nb"}, RemoteProtocolError, r"refused this connection: a\\nb$"),
        ({"code": "tls", "text": "no"}, TlsError, "refused this connection: no"),
        ({"code": 5, "text": "no"}, RemoteProtocolError, "without a reason"),
        ({"code": "version"}, RemoteProtocolError, "without a reason"),
        ({}, RemoteProtocolError, "without a reason"),
        ({"code": "version", "text": "x" * 2000}, RemoteProtocolError, r": x{497}\.\.\.$"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refusal_becomes_an_error_and_is_not_answered(content, error, text):
    for side, name in ((client(), "node server"), (server(), "client")):
        side.data_to_send()
        with pytest.raises(error, match=f"the {name} .*{text}"):
            side.receive(message(MessageType.REFUSED, **content))
        assert side.data_to_send() == b""


def test_preamble_can_be_sent_alone_and_both_sides_agree_on_what_it_said():
    """In clear, before TLS. Somebody who changes its flag on the way does not get past the proofs."""
    one = Handshake(SECRET, CLIENT, Preamble(SESSION_ID, tls=True))
    preamble = one.preamble_to_send()
    assert Preamble.decode(preamble) == Preamble(SESSION_ID, tls=True)
    [hello] = decode(one.data_to_send())
    for tls in (True, False):
        two = Handshake(SECRET, SERVER, Preamble(SESSION_ID, tls=tls), nonce=bytes(32))
        two.receive(hello)
        if tls:
            one.receive(decode_one(two.data_to_send()))
            proof = decode_one(one.data_to_send())
            two.receive(proof)
            assert two.established is not None
        else:
            with pytest.raises(AuthenticationError):
                two.receive(proof)


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


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=5,
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 2, 3, 4, 16, 99]),
            st.binary(max_size=50)
            | json_values.map(lambda value: json.dumps(value).encode())
            | st.fixed_dictionaries(
                {},
                optional={
                    "nonce": st.just("00" * 32) | json_values,
                    "proof": st.just("00" * 32) | json_values,
                    "code": st.sampled_from(["authentication", "version"]) | json_values,
                    "text": st.text(max_size=10) | json_values,
                    "identity": st.builds(
                        lambda role, changes: {**dataclasses.asdict(CLIENT), "role": role, **changes},
                        st.sampled_from(["client", "server"]),
                        st.dictionaries(st.sampled_from([f.name for f in dataclasses.fields(Identity)]), json_values),
                    ),
                },
            ).map(lambda value: json.dumps(value).encode()),
        ),
        max_size=4,
    )
)
def test_garbage_is_refused_and_never_establishes(garbage):
    for side in (client(), server()):
        try:
            for type, payload in garbage:
                side.receive(Message(type, payload=payload))
        except (AuthenticationError, RemoteProtocolError):
            decode(side.data_to_send().removeprefix(Preamble(SESSION_ID).encode()))
        assert side.established is None


# ---------------------------------------------------------------------------------------------------- arguments
