"""Nobody without the secret gets anything unpickled, in either direction, and nobody gets the server to stop."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import secrets
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from rpcdataloader import RPCDataloader, RPCDataset, rpc_async
from rpcdataloader.errors import AuthenticationError, ConnectionLostError, RemoteProtocolError, RPCError
from tests.conftest import TIMEOUT_SCALE, close_client, wait_until
from tests.support.clocks import in_server
from tests.support.peers import NO_TICKET, STATUS_TICKET, MessageType, Stranger, message, ticket_of
from tests.support.quick import quick_server
from tests.support.tampering import Bomb, Impostor, Proxy, dial, num_loaded, read_frames, recv_frame

pytestmark = pytest.mark.usefixtures("clean_client")

# A peer that does wrong is noticed by what it does, and not by a limit of time.
PROMPTLY = 8 * TIMEOUT_SCALE


@pytest.fixture(scope="module")
def server(zygote):
    """A server that does not wait long for strangers."""
    with quick_server(zygote, before=in_server("strangers", "all refusals")) as server:
        yield server
        # Whatever the tests have done to it, the next client is served.
        assert rpc_async(server.address, os.getppid).wait() in server.processes()
        close_client()
        wait_until(lambda: not server.processes())
        assert "ERROR" not in server.log
        assert "Traceback" not in server.log


# --- somebody on the path


# ``tests/unit/wire/test_attacker.py`` does all kinds of harm to single messages.
HARM = {
    "flip the body": lambda frame: [replace(frame, body=frame.body[:-1] + bytes([frame.body[-1] ^ 4]))],
    "replay": lambda frame: [frame, frame],
    "inject": lambda frame: [message(frame.type, frame.body, 1), frame],
}


def attack_on(where, how):
    """Does harm to the first message of a type in one direction of one connection; gives what was harmed, too."""
    harmed = []

    def attack(direction, connection, number, frame):
        if harmed or number < 2 or (direction, connection, frame.type) != where:
            return [frame]
        harmed.append(frame)
        return HARM[how](frame)

    return attack, harmed


NOTICED = "failed authentication .altered, replayed or injected.|was altered on its way|the peer sent no message"


ATTACKS = [
    *(("up", 1, MessageType.CALL, how) for how in HARM),
    *(("down", 1, MessageType.REPLY, how) for how in HARM),
    ("up", 0, MessageType.CALL, "flip the body"),
    ("down", 0, MessageType.WELCOME, "flip the body"),
]


@pytest.mark.parametrize(("direction", "connection", "type", "how"), ATTACKS)
def test_altered_message_is_never_loaded(server, trace, direction, connection, type, how):
    """Of the control connection, which is the first one, and of that of a worker."""
    attack, harmed = attack_on((direction, connection, type), how)
    start = time.monotonic()
    with Proxy(server.address, attack) as proxy:
        # The bomb is loaded by the worker in the arguments, or by this process in the result.
        func, args = (id, (Bomb(trace),)) if direction == "up" else (Bomb, (trace,))
        with pytest.raises(RPCError) as raised:
            torch.futures.wait_all([rpc_async(proxy.address, *each) for each in [(func, args), *2 * [(os.getpid,)]]])
        assert harmed, raised.value
    assert time.monotonic() - start < PROMPTLY
    # What is replayed has arrived once, as it should; but a worker looks at all that has come before it begins.
    expected = int(how == "replay")
    assert num_loaded(trace) in ({expected} if direction == "down" else {0, expected})
    if direction == "down":
        assert isinstance(raised.value, RemoteProtocolError), raised.value
        assert re.search(NOTICED, str(raised.value))
        return
    assert isinstance(raised.value, ConnectionLostError)
    server.logged(rf"{r'worker 1]' if connection else 'the session ends:'} .*({NOTICED})")
    if connection:  # what the worker noticed reaches the client on its control connection
        assert re.search(rf"worker 1 .* gave up: .*({NOTICED})", str(raised.value)), raised.value


class Large:
    """An object of 64 KiB and more whose class says nothing of how it is pickled."""

    def __init__(self):
        self.numbers = list(range(1 << 16))


class Shuffled(IterableDataset):
    """A stream with a large state."""

    def __iter__(self):
        yield from range(4)

    def state_dict(self):
        return vars(Large())

    def load_state_dict(self, state):
        pass


class Objects(IterableDataset):
    def __iter__(self):
        yield Large()


class Boxes(torch.Tensor):
    pass


class WithAttributes(Dataset):
    """A large tensor with large attributes."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        tensor = torch.zeros(1 << 16).as_subclass(Boxes)
        tensor.boxes = Large().numbers
        return tensor


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Shuffled(), {"batch_size": 2}),
        (Objects(), {"batch_size": 1, "transform": lambda large: len(large.numbers)}),
        (WithAttributes(), {"batch_size": None}),
    ],
    ids=["state", "raw samples", "attributes"],
)
def test_altered_blocks_of_replies_are_never_unpickled(server, trace, dataset, options):
    """No code authenticates them."""
    bomb = pickle.dumps(Bomb(trace), protocol=4)
    num_pickles = 0

    def plant(direction, _connection, _number, frame):
        nonlocal num_pickles
        at = frame.blocks.find(b"\x80\x05\x95")  # the first bytes of a pickle
        if direction == "up" or at < 0:
            return [frame]
        num_pickles += 1
        blocks = frame.blocks
        return [replace(frame, blocks=blocks[:at] + bomb + blocks[at + len(bomb) :])]

    with Proxy(server.address, plant) as proxy:
        with contextlib.suppress(RPCError, AttributeError):
            list(RPCDataloader(dataset, workers=proxy.address, num_workers=1, **options))
        close_client()
    assert (num_pickles, num_loaded(trace)) == (0, 0)


# --- servers that are none


def at_once(sock, bomb):
    sock.sendall(message(MessageType.REPLY, bomb, 1))


def after_a_wrong_proof(sock, bomb):
    stranger = Stranger(of_client=sock.recv(32, socket.MSG_WAITALL))
    frame = recv_frame(sock)
    stranger.hears(frame.type, frame.body)
    sock.sendall(stranger.says())
    sock.sendall(message(MessageType.AUTH, json.dumps({"proof": secrets.token_hex(32)}).encode()))
    sock.sendall(message(MessageType.REPLY, bomb, 1))


# ``tests/unit/wire/test_attacker.py`` has other servers that do not know the secret.
@pytest.mark.parametrize(("act", "error"), [(at_once, RemoteProtocolError), (after_a_wrong_proof, AuthenticationError)])
def test_client_loads_nothing_of_a_server_without_the_secret(act, error, trace):
    bomb = pickle.dumps(Bomb(trace))
    pickle.loads(bomb)
    assert num_loaded(trace) == 1  # it would go off
    start = time.monotonic()
    with Impostor(lambda sock: act(sock, bomb)) as impostor:
        with pytest.raises(error) as raised:
            rpc_async(impostor.address, os.getpid).wait()
        close_client()
    assert time.monotonic() - start < PROMPTLY
    assert impostor.address in str(raised.value)
    assert num_loaded(trace) == 1


# --- clients that are none


@pytest.fixture(params=["new session", "session of somebody else", "status"])
def ticket(request, server):
    """None, one that was taken away on the network, or what asks for the status."""
    return {"new session": NO_TICKET, "status": STATUS_TICKET}.get(request.param) or ticket_of(server.address)


@pytest.mark.parametrize("type", [MessageType.CALL, MessageType.AUTH])
@pytest.mark.parametrize("after", ["preamble", "hello", "wrong proof"])
def test_server_loads_nothing_of_a_client_without_the_secret(server, ticket, trace, type, after):
    bomb = message(type, pickle.dumps(Bomb(trace)), 1)
    stranger = Stranger(ticket)
    start = stranger.says()
    with dial(server.address, start[:32]) as sock:
        if after != "preamble":
            sock.sendall(start[32:])
            hello = recv_frame(sock)
            if after == "wrong proof":
                stranger.hears(hello.type, hello.body)
                sock.sendall(stranger.says())
        with contextlib.suppress(ConnectionError):
            sock.sendall(bomb)
        answers = read_frames(sock)
    assert {frame.type for frame in answers} <= {MessageType.REFUSED}
    assert num_loaded(trace) == 0


def test_peers_that_stop_in_the_middle_are_put_out(server):
    """At the limits of the server, which are 3 s here; whether they ask for a session or have taken its tickets."""
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        socks = []
        for make_ticket in (lambda: NO_TICKET, lambda: ticket_of(server.address)):
            for sent in (0, 16, 32, 200, None):
                hello = Stranger(make_ticket()).says()
                socks.append((stack.enter_context(dial(server.address, hello[:sent])), sent is None))
        for sock, complete in socks:
            assert [frame.type for frame in read_frames(sock)] == [MessageType.HELLO] * complete
            assert time.monotonic() - start > 2.9
    assert re.search(r"refused 127\.0\.0\.1:\d+: no handshake within 3 s", server.log)
    assert rpc_async(server.address, os.getpid).wait() > 0  # in that session


# --- secrets


def test_wrong_secret_is_told_on_both_sides(server, other_secret, monkeypatch):
    original = os.environ["RPCDATALOADER_TOKEN_FILE"]
    with monkeypatch.context() as patch:
        patch.setenv("RPCDATALOADER_TOKEN_FILE", str(other_secret))
        with pytest.raises(AuthenticationError, match="do not hold the same secret") as raised:
            rpc_async(server.address, os.getpid).wait()
    mine = re.search(rf"\(this client's secret: file {other_secret}, fingerprint (\w+)\)", str(raised.value))[1]
    assert server.address in str(raised.value)
    theirs = server.logged(rf"do not hold the same secret.*file {original}, fingerprint (\w+)")[1]
    assert len(mine) == len(theirs)
    assert mine != theirs


@pytest.mark.parametrize("options", [[], ["--host", "unix:{tmp_path}/socket", "--insecure"]])
def test_secret_is_nowhere_to_be_seen(serve, tmp_path, monkeypatch, options):
    """Given in the environment, to a server that needs it or does not; there, the trainer's own programs find it."""
    secret = secrets.token_urlsafe(32)
    monkeypatch.delenv("RPCDATALOADER_TOKEN_FILE")
    monkeypatch.setenv("RPCDATALOADER_TOKEN", secret)
    if "--insecure" in options:
        monkeypatch.setenv("RPCDATALOADER_INSECURE", "1")
    server = serve(
        *[option.format(tmp_path=tmp_path) for option in options],
        before=f"os.environ.pop('RPCDATALOADER_TOKEN_FILE'); os.environ['RPCDATALOADER_TOKEN'] = {secret!r}",
    )

    def look():

        command_lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in (os.getpid(), os.getppid())]
        return repr(dict(os.environ)), subprocess.run(["env"], capture_output=True, text=True).stdout, command_lines

    seen = rpc_async(server.address, look).wait()
    assert "PATH" in seen[0]
    assert secret not in repr(seen)
    assert secret not in server.log
    assert os.environ["RPCDATALOADER_TOKEN"] == secret
    if "--insecure" not in options:
        looks = type("Looks", (), {"__getitem__": lambda _self, _index: look()})
        assert secret not in repr(RPCDataset("local:1", looks)[0])


def test_bombs_go_off_otherwise(server, trace):
    """What the tests above rely on."""
    assert rpc_async(server.address, id, (Bomb(trace),)).wait()
    assert num_loaded(trace) == 1
    rpc_async(server.address, Bomb, (trace,)).wait()
    assert num_loaded(trace) == 2
