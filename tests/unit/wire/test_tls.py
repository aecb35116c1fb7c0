"""Streams over TLS: what arrives, in both directions at once, and what is said when one side refuses the other.

Both sides in one process, over a socket pair.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rpcdataloader.errors import AuthenticationError, ConnectionLostError, RemoteProtocolError, RPCTimeoutError
from rpcdataloader.wire.handshake import TlsError
from rpcdataloader.wire.tls import CHUNK_BYTES, TlsFiles, TlsStream
from rpcdataloader.wire.transport import Deadline, Stream
from tests.conftest import TIMEOUT_SCALE, wait_until

FOREVER = 30 * TIMEOUT_SCALE

pytestmark = pytest.mark.usefixtures("nothing_left")


def files(folder, name="node", ca="ca"):
    return TlsFiles(f"{folder}/{name}.pem", f"{folder}/{name}.key", f"{folder}/{ca}.pem")


@pytest.fixture
def threads():
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def plain():
    streams = [Stream(sock, name) for sock, name in zip(socket.socketpair(), ("node07:6543", "client"), strict=True)]
    yield streams
    for stream in streams:
        stream.close()


@pytest.fixture
def join(plain, certificates, threads):
    """Put TLS over the plain pair: ``join(client's files, server's files)``; gives what each handshake ended with."""

    def join(client=None, server=None, host="localhost"):
        ours = TlsStream(plain[0], (client or files(certificates)).load("client"), host)
        theirs = TlsStream(plain[1], (server or files(certificates)).load("server"))
        shaking = [threads.submit(stream.shake_hands, Deadline(FOREVER)) for stream in (ours, theirs)]
        outcomes = [future.exception(FOREVER) for future in shaking]
        for stream in (ours, theirs):
            stream.limit(Deadline(None))
        return ours, theirs, outcomes

    return join


@pytest.fixture
def pair(join):
    ours, theirs, outcomes = join()
    assert outcomes == [None, None]
    return ours, theirs


def read(stream, size):
    """Exactly ``size`` bytes, or what comes before the end of file."""
    data = bytearray(size)
    view = memoryview(data)
    filled = 0
    while filled < size and (count := stream.recv_into([view[filled:]])):
        filled += count
    return bytes(data[:filled])


# --- bytes


def test_pieces_arrive_in_order_whatever_their_number_and_kind(pair, threads):
    ours, theirs = pair
    pieces = [bytes([number % 251]) * (number * 37 % 3000 + 1) for number in range(2000)]
    pieces += [bytearray(b"x" * 5_000_000), memoryview(b"y" * 7), memoryview(bytearray(8)).cast("Q"), b"z"]
    expected = b"".join(pieces)
    sending = threads.submit(ours.send, pieces)
    assert read(theirs, len(expected)) == expected
    sending.result(FOREVER)
    assert not theirs.has_unread


def test_send_that_must_not_wait_keeps_the_rest(pair, threads):
    ours, theirs = pair
    pieces = [b"", *(bytes([number % 251]) * 1000 for number in range(3000)), bytes(5_000_000)]
    assert not ours.send_now(pieces)
    assert not ours.send_now([b"more"])
    expected = b"".join(pieces) + b"more"
    received = threads.submit(read, theirs, len(expected))
    while not ours.send_now():
        select.select([], [ours], [])
    assert received.result(FOREVER) == expected
    assert ours.send_now([b"again"])
    assert read(theirs, 5) == b"again"


def test_nothing_of_it_can_be_read_on_the_way(join, plain):
    ours, _theirs, _ = join()
    ours.send([b"the sample that nobody should see" * 10])
    seen = plain[1]._sock.recv(10_000)
    assert len(seen) > 330
    assert b"sample" not in seen


@pytest.mark.parametrize("buffer_bytes", [4096, None])
def test_both_directions_carry_much_at_the_same_time(pair, threads, buffer_bytes):
    """Neither side reads before it has written in one thread, as with SSLSocket: two full directions would stand."""
    size = 100_000_000 if buffer_bytes is None else 2_000_000
    if buffer_bytes is not None:
        for stream in pair:
            stream._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
    data = os.urandom(1_000_000) * (size // 1_000_000)
    sending = [threads.submit(stream.send, [data[:100], memoryview(data)[100:]]) for stream in pair]
    receiving = [threads.submit(read, stream, size) for stream in pair]
    for future in receiving:
        assert future.result(FOREVER) == data
    for future in sending:
        future.result(FOREVER)


def test_thread_that_waits_does_not_keep_another_from_sending(pair, threads):
    ours, theirs = pair
    waiting = threads.submit(read, ours, 5)
    for _ in range(3):
        threads.submit(ours.send, [b"abc"]).result(FOREVER)
        assert read(theirs, 3) == b"abc"
    assert not waiting.done()
    theirs.send([b"12345"])
    assert waiting.result(FOREVER) == b"12345"


def test_receive_fills_several_views_and_waits_for_all_of_them(pair, threads):
    ours, theirs = pair
    views = [memoryview(bytearray(size)) for size in (3, 5, 400_000, 100_000)]
    receiving = threads.submit(theirs.recv_into, views)
    for _ in range(10):
        ours.send([b"abc" * 16_000])
    assert not receiving.done()
    ours.send([b"x" * 20_008])
    assert receiving.result(FOREVER) == 500_008
    assert b"".join(views)[:9] == b"abcabcabc"


def test_bytes_that_come_one_at_a_time_make_the_same_message(certificates, threads):
    """Records are cut wherever the network likes."""
    ours, middle_in = socket.socketpair()
    middle_out, theirs = socket.socketpair()

    def forward():
        while data := middle_in.recv(65536):
            for position in range(len(data)):
                middle_out.sendall(data[position : position + 1])
        middle_out.shutdown(socket.SHUT_WR)

    def answer():
        while data := middle_out.recv(65536):
            middle_in.sendall(data)

    with ours, middle_in, middle_out, theirs:
        moving = [threads.submit(forward), threads.submit(answer)]
        client = TlsStream(Stream(ours, "server"), files(certificates).load("client"), "127.0.0.1")
        server = TlsStream(Stream(theirs, "client"), files(certificates).load("server"))
        shaking = threads.submit(client.shake_hands, Deadline(FOREVER))
        server.shake_hands(Deadline(FOREVER))
        shaking.result(FOREVER)
        server.limit(Deadline(None))
        data = os.urandom(50_000)
        client.send([data[:10], data[10:]])
        client.finish()
        assert read(server, 100_000) == data
        server.shutdown()
        for future in moving:
            future.result(FOREVER)


def test_thread_that_receives_may_be_interrupted_by_a_message_of_its_own(pair):
    """A finalizer that warns, which the session sends on."""
    ours, theirs = pair

    class Interrupted:
        def __init__(self, tls):
            self._tls = tls

        def read(self, *args):
            tls, theirs._tls = self._tls, self._tls
            theirs.send([b"a warning"])
            return tls.read(*args)

        def pending(self):
            return self._tls.pending()

    ours.send([b"abc"])
    theirs._tls = Interrupted(theirs._tls)
    assert read(theirs, 3) == b"abc"
    assert read(ours, 9) == b"a warning"


# --- polling


def test_what_was_received_and_not_taken_is_unread(pair):
    """A loop that polls the descriptor asks this before it sleeps."""
    ours, theirs = pair
    theirs.read_ahead()
    assert not theirs.has_unread
    assert not theirs.has_input()
    ours.send([b"one", b"two"])
    ours.send([b"three"])
    wait_until(theirs.has_input)
    taken = read(theirs, 2)
    while theirs.has_unread:
        assert theirs.has_input()
        taken += read(theirs, 1)
    assert taken == b"onetwothree"
    assert not theirs.has_input()


def test_nothing_comes_between_handshake_and_first_message(pair):
    """A ticket to resume the session with would wake whoever polls, for a message that is not there."""
    ours, _theirs = pair
    assert not ours.has_input()
    assert not ours.has_unread


# --- ends


def test_half_close_loses_nothing_and_leaves_the_other_direction_open(pair, threads):
    """A drain: the server has finished, and takes what the client still sends."""
    ours, theirs = pair
    data = os.urandom(3_000_000)
    sending = threads.submit(lambda: [ours.send([data]), ours.finish()])
    assert read(theirs, len(data) + 1) == data
    assert theirs.recv_into([memoryview(bytearray(1))]) == 0
    sending.result(FOREVER)
    sending = threads.submit(lambda: [theirs.send([data, b"after the end"]), theirs.finish()])
    assert read(ours, len(data) + 100) == data + b"after the end"
    sending.result(FOREVER)


def test_close_in_the_middle_of_a_record_reads_as_a_short_receive(pair, plain):
    ours, theirs = pair
    ours.send([b"abc"])
    plain[0]._sock.sendall(b"\x17\x03\x03\x40\x00half a record")
    ours.close()
    assert theirs.recv_into([memoryview(bytearray(100))]) == 3
    assert theirs.recv_into([memoryview(bytearray(100))]) == 0


def test_end_that_tls_announces_is_an_end(pair):
    """Ours is not announced; another implementation's may be."""
    ours, theirs = pair
    ours.send([b"abc"])
    with pytest.raises(ssl.SSLWantReadError):
        ours._tls.unwrap()
    ours.send([])
    assert theirs.recv_into([memoryview(bytearray(10))]) == 3
    assert theirs.recv_into([memoryview(bytearray(10))]) == 0


def test_shutdown_wakes_a_receiver_and_a_sender(pair, threads):
    ours, _theirs = pair
    receiving = threads.submit(ours.recv_into, [memoryview(bytearray(10))])
    sending = threads.submit(ours.send, [bytes(50_000_000)])
    ours.shutdown()
    assert receiving.result(FOREVER) == 0
    with pytest.raises(ConnectionLostError, match="connection to node07:6543 lost while sending"):
        sending.result(FOREVER)


def test_lingering_lets_the_peer_read_the_last_words(pair, threads):
    ours, theirs = pair
    theirs.send([b"nobody reads this" * 1000])
    ours.send([b"refused"])
    lingering = threads.submit(ours.linger)
    assert read(theirs, 100) == b"refused"
    theirs.close()
    lingering.result(FOREVER)


def test_limit_bounds_receives_and_sends(pair):
    ours, theirs = pair
    ours.limit(Deadline(0.01))
    with pytest.raises(RPCTimeoutError, match="timed out receiving from node07:6543"):
        ours.recv_into([memoryview(bytearray(10))])
    theirs.send([b"abc"])
    ours.limit(Deadline(FOREVER))
    assert ours.recv_into([memoryview(bytearray(10))]) == 3  # what is there, as with a plain stream
    ours.limit(Deadline(0.01))
    with pytest.raises(RPCTimeoutError, match="timed out sending to node07:6543"):
        ours.send([bytes(50_000_000)])


def test_limit_holds_while_a_record_trickles_in(pair, plain, threads):
    ours, _theirs = pair
    stop = threading.Event()

    def trickle():
        plain[1]._sock.sendall(b"\x17\x03\x03\x40\x00")
        while not stop.wait(0.01):
            plain[1]._sock.sendall(b"x")

    trickling = threads.submit(trickle)
    ours.limit(Deadline(0.1))
    try:
        with pytest.raises(RPCTimeoutError):
            ours.recv_into([memoryview(bytearray(10))])
    finally:
        stop.set()
        trickling.result(FOREVER)


def test_limit_bounds_the_handshake(plain, certificates):
    ours = TlsStream(plain[0], files(certificates).load("client"), "localhost")
    with pytest.raises(RPCTimeoutError, match="timed out receiving from node07:6543"):
        ours.shake_hands(Deadline(0.01))


def test_change_on_the_way_is_noticed(pair, plain):
    ours, theirs = pair
    ours.send([b"x" * 100])
    record = bytearray(plain[1]._sock.recv(1000))
    record[50] ^= 1
    plain[0]._sock.sendall(record)
    view = memoryview(bytearray(100))
    with pytest.raises(RemoteProtocolError, match="something from client was altered on its way"):
        theirs.recv_into([view])
    assert not any(view)


# --- who accepts whom


def test_versions_below_1_2_are_not_spoken(certificates):
    for role in ("client", "server"):
        context = files(certificates).load(role).context
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2
        assert context.verify_mode == ssl.CERT_REQUIRED
    assert files(certificates).load("client").context.check_hostname


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "::1%lo"])
def test_names_and_addresses_of_the_certificate_are_accepted(join, host):
    assert join(host=host)[2] == [None, None]


def test_tls_1_2_does_as_well(plain, certificates, threads):
    client, server = files(certificates).load("client"), files(certificates).load("server")
    client.context.maximum_version = ssl.TLSVersion.TLSv1_2
    ours, theirs = TlsStream(plain[0], client, "localhost"), TlsStream(plain[1], server)
    shaking = threads.submit(ours.shake_hands, Deadline(FOREVER))
    theirs.shake_hands(Deadline(FOREVER))
    shaking.result(FOREVER)
    ours.send([b"abc"])
    assert read(theirs, 3) == b"abc"


def outcome_of(stream, outcome):
    """What one side says; with TLS 1.3 the client hears of its refusal with the first thing that it receives."""
    if outcome is not None:
        return outcome
    with pytest.raises((AuthenticationError, ConnectionLostError)) as raised:
        stream.recv_into([memoryview(bytearray(10))])
    return raised.value


@pytest.mark.parametrize(
    ("client", "server", "host", "client_says", "server_says"),
    [
        ("node", "stranger", "localhost", "unable to get local issuer certificate", "unknown ca"),
        ("stranger", "node", "localhost", "unknown ca", "unable to get local issuer certificate"),
        ("node", "expired", "localhost", "certificate has expired", "certificate expired"),
        ("expired", "node", "localhost", "certificate expired", "certificate has expired"),
        ("node", "early", "localhost", "certificate is not yet valid", "bad certificate|certificate expired"),
        ("node", "elsewhere", "localhost", "not valid for 'localhost'", "bad certificate"),
        ("node", "elsewhere", "127.0.0.1", "not valid for '127.0.0.1'", "bad certificate"),
        ("servers-only", "node", "localhost", "unsupported certificate", "unsuitable certificate purpose"),
    ],
)
def test_refusal_is_clear_on_both_sides(join, certificates, client, server, host, client_says, server_says):
    ours, theirs, outcomes = join(files(certificates, client), files(certificates, server), host)
    theirs.finish()
    said = outcome_of(ours, outcomes[0])
    ours.finish()
    heard = outcome_of(theirs, outcomes[1])
    assert isinstance(said, TlsError)
    assert isinstance(heard, TlsError)
    # OpenSSL's words, the other side, and the files of this one.
    with pytest.raises(TlsError, match=f"TLS failed: .*({client_says}).*/{client}.pem, CA .*/ca.pem"):
        raise said
    with pytest.raises(TlsError, match=f"TLS failed: .*({server_says}).*/{server}.pem, CA .*/ca.pem"):
        raise heard


def test_client_without_a_certificate_is_refused(plain, certificates, threads):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(f"{certificates}/ca.pem")
    theirs = TlsStream(plain[1], files(certificates).load("server"))
    shaking = threads.submit(theirs.shake_hands, Deadline(FOREVER))
    with context.wrap_socket(plain[0]._sock.dup(), server_hostname="localhost") as sock:
        with pytest.raises(TlsError, match="TLS failed: peer did not return a certificate"):
            shaking.result(FOREVER)
        with pytest.raises(ssl.SSLError, match="certificate required"):
            sock.recv(1)


def test_server_that_answers_in_clear_is_refused(plain, certificates):
    ours = TlsStream(plain[0], files(certificates).load("client"), "localhost")
    plain[1].send([b"RPDL and more"])
    with pytest.raises(TlsError, match="TLS failed: wrong version number"):
        ours.shake_hands(Deadline(FOREVER))


def test_client_that_sends_something_else_is_refused(plain, certificates):
    theirs = TlsStream(plain[1], files(certificates).load("server"))
    plain[0].send([b"GET / HTTP/1.1\r\n\r\n"])
    with pytest.raises(TlsError, match="TLS failed: http request"):
        theirs.shake_hands(Deadline(FOREVER))


def test_peer_that_goes_away_during_the_handshake_is_a_lost_connection(plain, certificates):
    theirs = TlsStream(plain[1], files(certificates).load("server"))
    plain[0].finish()
    with pytest.raises(ConnectionLostError, match="client closed the connection during the handshake of TLS"):
        theirs.shake_hands(Deadline(FOREVER))


def test_the_lock_is_held_for_a_piece_at_a_time(pair, threads):
    """Or a large batch would keep requests from being decrypted."""
    ours, theirs = pair
    largest = 0

    class Recorder:
        def __init__(self, tls):
            self._tls = tls

        def write(self, data):
            nonlocal largest
            largest = max(largest, len(data))
            return self._tls.write(data)

    ours._tls = Recorder(ours._tls)
    sending = threads.submit(ours.send, [bytes(1_000_000)])
    read(theirs, 1_000_000)
    sending.result(FOREVER)
    assert 0 < largest <= CHUNK_BYTES
