"""Floods, drips, guesses and nonsense: a node server survives them, serves others meanwhile, and leaves nothing behind.

What somebody on the path can do is in ``test_security``, and nonsense in a handshake in ``tests/unit/wire``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import re
import secrets
import select
import struct
import threading
import time

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rpcdataloader import RPCDataloader, rpc_async
from rpcdataloader.client.worker import WorkerOwner
from rpcdataloader.errors import RPCError
from rpcdataloader.wire.handshake import Tickets
from rpcdataloader.wire.transport import Transport
from tests.conftest import TIMEOUT_SCALE, close_client, descendants, is_running, wait_until
from tests.support import peers
from tests.support.clocks import in_server
from tests.support.datasets import Numbers
from tests.support.quick import quick_server
from tests.support.tampering import dial, read_to_the_end

pytestmark = pytest.mark.usefixtures("clean_client")

PROMPTLY = 8 * TIMEOUT_SCALE

# Real processes: few examples, the same ones in every run.
FEW = settings(
    max_examples=25,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def server(zygote):
    """A server that does not wait long for strangers; at the end of the module, nothing is left of them in it."""
    limits = in_server("strangers", "small door", "all refusals")
    with quick_server(zygote, "--max-connections", "64", before=limits) as server:
        descriptors = descriptors_of(server)
        yield server
        assert serves(server)
        close_client()
        wait_until(lambda: not server.processes(), what="processes of attackers")
        wait_until(lambda: descriptors_of(server) == descriptors, what="descriptors of attackers")
        assert "Traceback" not in server.log
        assert "ERROR" not in server.log


@pytest.fixture(autouse=True)
def server_survives(server):
    yield
    assert is_running(server.pid)
    assert serves(server)


def descriptors_of(server):
    return len(os.listdir(f"/proc/{server.pid}/fd"))


def serves(server):
    """Whether a client is served as ever, by processes of this very server."""
    return rpc_async(server.address, os.getppid).wait() in descendants(server.pid)


# --- too much, too slowly


@pytest.mark.parametrize("known", [False, True], ids=["new session", "known session"])
def test_handshake_that_drips_is_ended_in_time(server, known):
    hello = peers.Stranger(peers.ticket_of(server.address) if known else peers.NO_TICKET).says()
    pause = PROMPTLY / (len(hello) - peers.PREAMBLE_SIZE)
    start = time.monotonic()
    with dial(server.address, hello[: peers.PREAMBLE_SIZE]) as sock, contextlib.suppress(ConnectionError):
        for byte in hello[peers.PREAMBLE_SIZE :]:
            if select.select([sock], [], [], pause)[0]:
                break
            sock.send(bytes([byte]))
        else:
            pytest.fail("it was let come to its end")
    assert time.monotonic() - start > 2.9


def test_worker_whose_first_bytes_come_in_parts_is_served(server, monkeypatch):
    ticket, before, send = peers.ticket_of(server.address), descriptors_of(server), Transport.send

    def send_in_parts(transport, pieces):
        monkeypatch.undo()
        start = bytes(pieces[0])
        send(transport, [start[:8]])
        wait_until(lambda: descriptors_of(server) != before, what="the server to take it")
        send(transport, [start[8:], *pieces[1:]])

    monkeypatch.setattr(Transport, "send", send_in_parts)
    channel, welcome = peers.open_as_client(server.address, ticket)
    channel.transport.close()
    assert welcome.worker > 0


def test_flood_of_strangers_does_not_keep_a_client_from_its_work(server):
    """Three times as many as may be at the door, from elsewhere, and another one for each that is put out."""
    preambles = [b"", peers.preamble(), peers.preamble(peers.ticket_of(server.address))]
    over = threading.Event()

    def flood():
        poll, held = select.poll(), {}
        wanted = 8 * preambles
        while not over.is_set():
            for data in wanted:
                sock = dial(server.address, data, source="127.0.0.2")
                held[sock.fileno()] = sock, data
                poll.register(sock, select.POLLIN)
            wanted = []
            for descriptor, _events in poll.poll(50):
                poll.unregister(descriptor)
                sock, data = held.pop(descriptor)
                sock.close()
                wanted.append(data)
        for sock, _data in held.values():
            sock.close()

    thread = threading.Thread(target=flood)
    try:
        with dial(server.address):  # of somebody who is slow, and is not put out for others
            thread.start()
            wait_until(lambda: "from 127.0.0.2:" in server.log, what="a flood")
        loader = RPCDataloader(Numbers(64), batch_size=8, num_workers=2, workers=server.address)
        assert torch.cat(list(loader)).tolist() == list(range(64))
    finally:
        over.set()
        thread.join()
    refused = re.findall(r"closed a connection from ([0-9.]+):\d+: too many", server.log)
    assert set(refused) == {"127.0.0.2"}


# --- guesses


COUNTED_FORKS = "os.register_at_fork(before=lambda: os.write(2, b'it forks\\n'))"


def tickets_that_are_not_good(server):
    """Taken away on the network, guessed or made up by somebody without the secret."""
    right = peers.ticket_of(server.address)
    yield from [right[:n] + bytes([right[n] ^ 1]) + right[n + 1 :] for n in range(16)]
    yield from [right[::-1], b"\xff" * 16, secrets.token_bytes(16)]
    used = peers.ticket_of(server.address)
    with contextlib.closing(peers.open_channel_to(server.address, used).transport):
        yield used
    yield used
    control, welcome = peers.open_as_client(server.address)
    other, own = Tickets(control.ticket_key, welcome.pid), peers.session_of(server.address).wait().pid
    yield Tickets(control.ticket_key, own).make()
    control.transport.close()
    wait_until(lambda: welcome.pid not in server.processes(), what="the end of a session")
    yield other.make()


def test_ticket_that_is_not_good_costs_no_process(serve):
    """Nor is it told whether such a session is there."""
    server = serve(before=COUNTED_FORKS)
    for ticket in tickets_that_are_not_good(server):
        num_forks = server.log.count("it forks")
        with dial(server.address, peers.preamble(ticket)) as sock:
            assert b"there is no such session on this node server" in read_to_the_end(sock)
        assert server.log.count("it forks") == num_forks > 0
    assert re.search(r"INFO .* refused 127\.0\.0\.1:\d+: its ticket is forged or used\n", server.log)
    assert serves(server)


def test_what_is_no_preamble_costs_no_process(serve):
    server = serve(before=COUNTED_FORKS)
    with dial(server.address, b"GET /index.html HTTP/1.1\r\nHost: node01\r\n\r\n") as sock:
        assert read_to_the_end(sock) == b""
    with dial(server.address, peers.preamble()[:31]):
        pass
    server.logged(r"INFO .* refused 127\.0\.0\.1:\d+: closed after 31 bytes of a preamble\n")
    server.logged(
        r"INFO .* refused 127\.0\.0\.1:\d+: the peer does not speak this protocol: its first bytes are b'GET /ind'"
    )
    assert "it forks" not in server.log
    assert serves(server)


def test_flood_of_forged_tickets_does_not_keep_a_client_from_its_work(serve):
    server, over = serve("--num-workers", "2", before=COUNTED_FORKS), threading.Event()
    session = peers.ticket_of(server.address)[:4]
    num_tried = 0

    def flood():
        nonlocal num_tried
        while not over.is_set():
            with dial(server.address, peers.preamble(session + secrets.token_bytes(12))) as sock:
                read_to_the_end(sock)
            num_tried += 1

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        wait_until(lambda: num_tried > 100)
        for _epoch in range(3):
            loader = RPCDataloader(Numbers(64), batch_size=8, num_workers=2, workers=server.address)
            assert torch.cat(list(loader)).tolist() == list(range(64))
    finally:
        over.set()
        thread.join()
    assert server.log.count("it forks") < 20  # of the session, of workers, and of nobody else
    assert num_tried > 100


def test_hundreds_of_workers_wait_for_a_session_that_builds(serve, monkeypatch):
    """Those that come to their first bytes too late, as there is room for few strangers, try again."""
    monkeypatch.setenv("RPCDATALOADER_CONNECT_TIMEOUT", "60")  # as by default
    limits = in_server("strangers", "small door") + "; session.HANDSHAKE_TIMEOUT = 60"
    server = serve("--num-workers", "300", before=limits)
    session = peers.session_of(server.address)
    session.call(time.sleep, 4)  # longer than strangers have
    workers = [session.open_worker(WorkerOwner()) for _ in range(300)]
    wait_until(lambda: all(worker.number or worker.connection.error for worker in workers), 60, "all workers")
    assert {str(worker.connection.error) for worker in workers} == {"None"}
    assert "refused" not in server.log


# --- nonsense of somebody who knows the secret


UNLOADABLE = [
    b"",
    b"\x80",
    b"\x80\x05.",
    b"\x80\x05K\x01.",  # a number
    b"\x80\x05].",  # a list that is empty
    b"\x80\x05cno.such.module\nname\n.",
    b"\x80\x05(" * 50,
    b"\x80\x05\x8d" + b"\xff" * 8,  # a string of 2**64 - 1 bytes
    b"\x80\x05\x97.",  # a buffer that is not there
    b"\x80\x05Q.",  # a persistent id, of nothing
    b"\x80\x05\x8c\x05wrongQ.",
    b"\x80\x05cbuiltins\nlen\n(K\x01K\x02K\x03tR.",  # a call that fails
    pickle.dumps((1,) * 7, 5),
    pickle.dumps((len, 5, 5, 5, 5, 5, 5), 5),
    pickle.dumps((1, "name", True, (), b"not a pickle"), 5),
    pickle.dumps((None, None, True, None, None), 5),
]

UNREADABLE = [pickled + end for pickled in UNLOADABLE for end in (b"", bytes(8), b"\xff" * 8)]

PAYLOADS = (
    st.sampled_from(UNREADABLE)
    | st.binary(max_size=64)
    | st.lists(st.integers(0, 2**64 - 1), max_size=4).map(peers.pack_handles)
    # Lengths of index and slab that are not there.
    | st.tuples(st.sampled_from(UNLOADABLE), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)).map(
        lambda parts: parts[0] + struct.pack("<II", *parts[1:])
    )
)
REQUEST_IDS = st.sampled_from([0, 1, 2, 2**31, 2**63, 2**64 - 1])
ASKING = [int(peers.MessageType[name]) for name in ("CALL", "BUILD", "RELEASE", "CANCEL")]
TYPES = st.sampled_from(ASKING) | st.sampled_from([int(type) for type in peers.MessageType]) | st.integers(0, 255)
MESSAGES = st.lists(
    st.tuples(TYPES, st.integers(0, 1), REQUEST_IDS, PAYLOADS, st.lists(st.binary(max_size=20), max_size=3)),
    min_size=1,
    max_size=8,
)


@contextlib.contextmanager
def channel_to(server, where):
    """The control connection of a new session, or that of its worker; and the process of the session."""
    with contextlib.ExitStack() as stack:
        channel, welcome = peers.open_as_client(server.address)
        stack.callback(channel.transport.close)
        if where == "worker":
            channel = peers.open_worker_of(server.address, channel, welcome.pid)
            stack.callback(channel.transport.close)
        yield channel, welcome.pid


@pytest.mark.parametrize("where", ["control", "worker"])
def test_requests_that_cannot_be_read_are_answered_each_and_the_next_one_is_served(server, where):
    types = [peers.MessageType.CALL] + [peers.MessageType.BUILD] * (where == "control")
    with channel_to(server, where) as (channel, _session):
        channel.send(peers.MessageType.RELEASE, payload=peers.pack_handles([0, 1, 2**64 - 1]))
        channel.send(peers.MessageType.CANCEL, 2**64 - 1)
        for number, (type, payload) in enumerate(itertools.product(types, UNREADABLE)):
            channel.send(type, 2**63 + number, payload)
            answer = channel.recv()
            assert (answer.type, answer.request_id) == (peers.MessageType.ERROR, 2**63 + number), payload
            assert isinstance(peers.loads_exception(answer.payload), Exception)
        channel.send(peers.MessageType.CALL, 2**64 - 1, *peers.encode_call(os.getpid))
        answer = channel.recv()
        assert (answer.type, answer.request_id) == (peers.MessageType.REPLY, 2**64 - 1)


@FEW
@given(where=st.sampled_from(["control", "worker"]), messages=MESSAGES, cut=st.booleans())
def test_nonsense_of_a_client_harms_nobody_else(server, where, messages, cut):
    """Of any type, known or not, and of any content; broken off in the middle of a peers.message, or not."""
    with channel_to(server, where) as (channel, session):
        with contextlib.suppress(RPCError):
            for type, flags, request_id, payload, blocks in messages:
                channel.send(type, request_id, payload, blocks, flags)
            if cut:
                channel.transport.send([peers.message(peers.MessageType.CALL, bytes(1000), 1)[:500]])
        channel.transport.finish()
        # It ends, one way or another, and answers requests with errors until then.
        with contextlib.suppress(RPCError):
            while (answer := channel.recv()) is not None:
                assert answer.type.name in ("ERROR", "REPLY", "LOG", "EXITED", "GOAWAY")
    wait_until(lambda: session not in server.processes(), what="the session of a client that has gone")
