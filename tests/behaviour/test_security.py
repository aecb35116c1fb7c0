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
import threading
import time
from pathlib import Path

import pytest
import torch

from rpcdataloader import RPCDataset, launch, rpc_async
from rpcdataloader.errors import (
    AuthenticationError,
    ConnectionLostError,
    RemoteProtocolError,
    RPCError,
)
from tests.conftest import TIMEOUT_SCALE, close_client, is_running, wait_until
from tests.support.clocks import in_server
from tests.support.peers import NEW_SESSION, MessageType, Stranger, message, session_id_of, session_of
from tests.support.quick import quick_server
from tests.support.tampering import Bomb, Frame, Proxy, dial, leave_trace, num_loaded, read_frames, recv_frame

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


@pytest.fixture(autouse=True)
def server_survives(request):
    yield
    if "server" in request.fixturenames:
        assert is_running(request.getfixturevalue("server").pid)


@pytest.fixture
def trace(tmp_path):
    """Where bombs leave their trace."""
    return tmp_path / "trace"


# --- somebody on the path


def forge(frame):
    """An injected message: what the attacker would like to have loaded, under a seal of his own making."""
    forged = message(frame.type, frame.body, 1)
    return [forged[:64] + os.urandom(16) + forged[80:], frame]


# ``tests/unit/wire/test_attacker.py`` does all kinds of harm to single messages.
HARM = {
    "flip the payload size beyond all memory": lambda frame: [frame.flip("header", 22)],
    "flip the body": lambda frame: [frame.flip("body", -1)],
    "replay": lambda frame: [frame, frame],
    "inject": forge,
    "inject without a seal": lambda frame: [message(frame.type, frame.body, 1), frame],
    "drop": lambda _frame: [],
}


class Attack:
    """Does harm to the first message of a type in one direction of one connection."""

    def __init__(self, direction, connection, type, how):
        self.where = direction, connection, type
        self.harm = HARM[how]
        self.done = False

    def __call__(self, direction, connection, number, frame):
        if self.done or number < 2 or (direction, connection, frame.type) != self.where:
            return [frame]
        self.done = True
        return self.harm(frame)


NOTICED = "failed authentication .altered, replayed or injected.|was altered on its way|the peer sent no message"


@pytest.mark.parametrize("how", HARM)
@pytest.mark.parametrize(("direction", "type"), [("up", MessageType.CALL), ("down", MessageType.REPLY)])
def test_altered_message_of_a_worker_connection_is_never_loaded(server, trace, direction, type, how):
    attack = Attack(direction, 1, type, how)
    start = time.monotonic()
    with Proxy(server.address, attack) as proxy:
        # The bomb is loaded by the worker in the arguments, or by this process in the result.
        func, args = (id, (Bomb(trace),)) if direction == "up" else (Bomb, (trace,))
        futures = [rpc_async(proxy.address, func, args)]
        futures += [rpc_async(proxy.address, os.getpid) for _ in range(2)]
        with pytest.raises(RPCError) as raised:
            torch.futures.wait_all(futures)
        assert attack.done, raised.value
    assert time.monotonic() - start < PROMPTLY
    # What is replayed has arrived once, as it should; but a worker looks at all that has come before it begins.
    expected = int(how == "replay")
    assert num_loaded(trace) in ({expected} if direction == "down" else {0, expected})
    if direction == "down":
        assert isinstance(raised.value, RemoteProtocolError), raised.value
        assert re.search(NOTICED, str(raised.value))
    else:
        assert isinstance(raised.value, ConnectionLostError)
        # What the worker noticed reaches the client on its control connection.
        assert re.search(rf"worker 1 .* gave up: .*({NOTICED})", str(raised.value)), raised.value
        wait_until(lambda: re.search(rf"worker 1\] .*({NOTICED})", server.log))


@pytest.mark.parametrize(("direction", "type"), [("up", MessageType.CALL), ("down", MessageType.WELCOME)])
def test_altered_message_of_a_control_connection_ends_the_session(server, direction, type):
    with Proxy(server.address, Attack(direction, 0, type, "flip the body")) as proxy:
        error = end_of(session_of(proxy.address))
        if direction == "down":
            assert isinstance(error, RemoteProtocolError)
            assert re.search(NOTICED, str(error))
        else:
            assert isinstance(error, ConnectionLostError)
            wait_until(lambda: re.search(rf"the session ends: .*({NOTICED})", server.log))


def end_of(session):
    """Why a session has ended, once it has."""
    errors = []

    def has_ended():
        try:
            session.wait()
        except RPCError as exc:
            errors.append(exc)
        return errors

    wait_until(has_ended, PROMPTLY)
    return errors[0]


# --- servers that are none


class Impostor:
    """Listens, and lets ``act`` deal with every connection."""

    def __init__(self, act):
        self._act = act
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._run)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _run(self):
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                sock.settimeout(20 * TIMEOUT_SCALE)
                with sock, contextlib.suppress(OSError, EOFError):
                    self._act(sock)
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(65536):
                        pass


def meet(sock):
    """Take the preamble and HELLO of a client and answer with a HELLO."""
    stranger = Stranger(of_client=sock.recv(32, socket.MSG_WAITALL))
    listen_to(sock, stranger)


def listen_to(sock, stranger):
    """Take a message, and answer it."""
    frame = recv_frame(sock)
    stranger.hears(frame.type, frame.body)
    sock.sendall(stranger.says())


def at_once(sock, bomb):
    sock.sendall(message(MessageType.REPLY, bomb, 1))


def welcome_after_hello(sock, bomb):
    meet(sock)
    welcome = {"node": "node07", "pid": 1, "session": "00" * 16, "num_workers": 2}
    sock.sendall(message(MessageType.WELCOME, json.dumps(welcome).encode()) + message(MessageType.REPLY, bomb, 1))


def after_a_wrong_proof(sock, bomb):
    meet(sock)
    sock.sendall(message(MessageType.AUTH, json.dumps({"proof": secrets.token_hex(32)}).encode()))
    sock.sendall(message(MessageType.REPLY, bomb, 1))


def after_the_clients_own_proof(sock, bomb):
    meet(sock)
    sock.sendall(recv_frame(sock).encode() + message(MessageType.REPLY, bomb, 1))


def as_an_echo(sock, bomb):
    sock.recv(32, socket.MSG_WAITALL)
    with contextlib.suppress(EOFError):
        while True:
            sock.sendall(recv_frame(sock).encode())
    sock.sendall(message(MessageType.REPLY, bomb, 1))


def as_a_refusal(sock, bomb):
    sock.sendall(message(MessageType.REFUSED, bomb))


@pytest.mark.parametrize(
    "act",
    [
        at_once,
        welcome_after_hello,
        after_a_wrong_proof,
        after_the_clients_own_proof,
        as_an_echo,
        as_a_refusal,
    ],
)
def test_client_loads_nothing_of_a_server_without_the_secret(act, trace):
    bomb = pickle.dumps(Bomb(trace))
    pickle.loads(bomb)
    assert num_loaded(trace) == 1  # it would go off
    start = time.monotonic()
    with Impostor(lambda sock: act(sock, bomb)) as impostor:
        with pytest.raises((AuthenticationError, RemoteProtocolError)) as raised:
            rpc_async(impostor.address, os.getpid).wait()
        close_client()
    assert time.monotonic() - start < PROMPTLY
    assert impostor.address in str(raised.value)
    assert num_loaded(trace) == 1


def test_client_shows_its_secret_to_nobody():
    """Nothing of it is in what a server without the secret gets to see."""
    seen = []

    def listen(sock):
        meet(sock)
        seen.append(recv_frame(sock).encode())

    with Impostor(listen) as impostor:
        with pytest.raises(RPCError):
            rpc_async(impostor.address, os.getpid).wait()
        close_client()
    assert seen
    assert Path(os.environ["RPCDATALOADER_TOKEN_FILE"]).read_bytes().strip() not in b"".join(seen)


# --- clients that are none


@pytest.fixture(params=["new session", "session of somebody else"])
def session_id(request, server):
    """Zeros, or an id that was seen on the network."""
    if request.param == "new session":
        return NEW_SESSION
    return session_id_of(server.address)


@pytest.mark.parametrize("type", [MessageType.CALL, MessageType.AUTH])
@pytest.mark.parametrize("after", ["preamble", "hello", "wrong proof"])
def test_server_loads_nothing_of_a_client_without_the_secret(server, session_id, trace, type, after):
    bomb = message(type, pickle.dumps(Bomb(trace)), 1)
    stranger = Stranger(session_id)
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
    """At the limit of the server, which is 10 s and 1 s here; whether they mean a new session or know of one."""
    known = session_id_of(server.address)
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        socks = []
        for session_id in (NEW_SESSION, known):
            hello = Stranger(session_id).says()
            for data in (b"", hello[:16], hello[:32], hello[: 32 + len(hello) // 2], hello):
                socks.append((stack.enter_context(dial(server.address, data)), data == hello))
        for sock, complete in socks:
            assert [frame.type for frame in read_frames(sock)] == [MessageType.HELLO] * complete
            assert time.monotonic() - start > 0.9
    assert len(re.findall(r"refused 127\.0\.0\.1:\d+: no handshake within 1 s", server.log)) > 1
    assert rpc_async(server.address, os.getpid).wait() > 0  # in that session


def test_names_that_a_stranger_gives_do_not_write_into_the_log(server):
    """It may be read in a terminal, or by a program that goes line by line."""
    stranger = Stranger(host="x\n2026-01-01 CRITICAL forged\x1b[31m")
    with dial(server.address, stranger.says()) as sock:
        listen_to(sock, stranger)  # its HELLO, which is answered by a wrong proof
        assert [frame.type for frame in read_frames(sock)] == [MessageType.REFUSED]
    wait_until(lambda: r"x\n2026-01-01 CRITICAL forged\x1b[31m" in server.log)
    assert "\x1b" not in server.log


# --- secrets


@pytest.fixture
def token(tmp_path, monkeypatch):
    """A token file for this process alone."""

    def write(text, mode=0o600):
        path = tmp_path / "token"
        path.write_text(text)
        path.chmod(mode)
        monkeypatch.setenv("RPCDATALOADER_TOKEN_FILE", str(path))
        return path

    return write


def test_wrong_secret_is_told_on_both_sides(server, token):
    original = os.environ["RPCDATALOADER_TOKEN_FILE"]
    path = token("another secret, of somebody else")
    with pytest.raises(AuthenticationError, match="do not hold the same secret") as raised:
        rpc_async(server.address, os.getpid).wait()
    mine = re.search(rf"\(this client's secret: file {path}, fingerprint (\w+)\)", str(raised.value))[1]
    assert server.address in str(raised.value)
    wait_until(lambda: "do not hold the same secret" in server.log)
    theirs = re.search(rf"do not hold the same secret.*file {original}, fingerprint (\w+)", server.log)[1]
    assert len(mine) == len(theirs)
    assert mine != theirs
    # For the fixture that looks after the server.
    path.write_text(Path(original).read_text())


@pytest.mark.parametrize(
    ("text", "mode", "problem"),
    [("short", 0o600, "is shorter than 16 characters"), ("a secret that anybody can read", 0o644, "(mode 0644)")],
)
def test_unusable_secrets_are_refused_on_both_sides(token, capsys, text, mode, problem):
    path = token(text, mode)
    with pytest.raises(AuthenticationError, match=re.escape(problem)) as raised:
        rpc_async("127.0.0.1:1", os.getpid).wait()
    assert launch.main(["--port", "0"]) == 1
    assert capsys.readouterr().err == f"error: {raised.value}\n"
    assert str(path) in str(raised.value)


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
    assert secret not in repr(RPCDataset("local:1", look)[0])


def test_bombs_go_off_otherwise(server, trace):
    """What the tests above rely on."""
    assert rpc_async(server.address, id, (Bomb(trace),)).wait()
    assert num_loaded(trace) == 1
    rpc_async(server.address, Bomb, (trace,)).wait()
    assert num_loaded(trace) == 2
    leave_trace(str(trace))
    assert isinstance(Frame(bytes(80), b"", b"").encode(), bytes)
