"""What the exporter answers, and to whom. It listens at ports of the kernel's choice, on the loopback address."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import select
import socket
import threading
import urllib.request
from pathlib import Path

import pytest

from rpcdataloader.errors import AuthenticationError
from rpcdataloader.status import serving
from rpcdataloader.status.report import NodeAnswer, make_document
from rpcdataloader.status.serving import PATHS, StatusServer, find_token, make_page, parse_place
from rpcdataloader.wire.credentials import load_credentials
from tests.conftest import wait_until
from tests.unit.wire.test_status import NODE

TOKEN = b"a-token-for-the-page-of-the-test"
RIGHT = {"Authorization": f"Bearer {TOKEN.decode()}"}
ANYWHERE = parse_place("0")


class Looks:
    """Gives documents, an exception in place of one, and ends when told to."""

    def __init__(self):
        self.error = None
        self.is_over = False
        self.count = 0

    def __call__(self):
        if self.is_over:
            raise KeyboardInterrupt
        self.count += 1
        if self.error is not None:
            raise self.error
        return make_document(1000.0 + self.count, [NodeAnswer("node01:6543", NODE)], {}, {})


@contextlib.contextmanager
def running(place=ANYWHERE):
    looks, server = Looks(), StatusServer(place, TOKEN)

    def serve():
        with contextlib.suppress(KeyboardInterrupt):
            server.serve(looks, 0.02)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        wait_until(lambda: looks.count > 1)
        yield server, looks
    finally:
        looks.is_over = True
        thread.join()
        assert not [thread for thread in threading.enumerate() if thread.name == "rpcdl-serve"]


def get(server, path, host=None, method="GET", **headers):
    """Status, headers and body."""
    address, port = server.server_address[:2]
    with contextlib.closing(http.client.HTTPConnection(address, port, timeout=10)) as connection:
        connection.putrequest(method, path, skip_host=True)
        for name, value in {"Host": host or f"localhost:{port}", **RIGHT, **headers}.items():
            connection.putheader(name, value)
        connection.endheaders()
        reply = connection.getresponse()
        return reply.status, reply.headers, reply.read()


def test_answers():
    with running() as (server, looks):
        assert urllib.request.urlopen(server.url, timeout=10).status == 200
        status, headers, body = get(server, "/metrics")
        assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert b'rpcdataloader_batches_total{node="node01:6543"} 8\n' in body
        document = json.loads(get(server, "/json?x=1")[2])
        assert (document["schema"], document["nodes"][0]["tasks"]) == (1, 8)
        wait_until(lambda: len(json.loads(get(server, "/history")[2])["time"]) >= 2)
        count = looks.count
        wait_until(lambda: looks.count > count + 1)
        assert json.loads(get(server, "/json")[2])["time_unix_seconds"] > document["time_unix_seconds"]
        for path in "/nothing", "/page.html", "/../page.html", "/%2e%2e/page.html":
            assert get(server, path)[0] == 404
        assert get(server, "/metrics", method="HEAD")[::2] == (200, b"")
        assert get(server, "/json", method="POST")[0] == 501


def test_page_has_all_that_it_needs_and_may_do_nothing_else():
    with running() as (server, _looks):
        _status, headers, body = get(server, "/")
    text = body.decode()
    assert "var uPlot=" in text
    assert "Leon Sorokin" in Path(serving.__file__).with_name("page").joinpath("uPlot.LICENSE").read_text()
    assert not re.findall(r'(?:src|href)="(?!data:,)', text)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(| on\w+=", text)
    policy = headers["Content-Security-Policy"]
    assert policy == make_page()[1]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert policy.count("'sha256-") == text.count("<style>") + text.count("<script>") == 4
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_token_opens_all_but_the_page_which_tells_nothing():
    with running() as (server, _looks):
        assert get(server, "/", host="gpu01.cluster", Authorization="")[0] == 200
        for path in PATHS[1:]:
            for shown in "", "Bearer wrong", TOKEN.decode():
                status, headers, body = get(server, path, host="evil.example", Authorization=shown)
                assert (status, headers["WWW-Authenticate"], b"node01" in body) == (401, "Bearer", False)
            assert get(server, path, Authorization="Bearer \xff")[0] == 401
            assert get(server, path, host="gpu01.cluster")[0] == 200
        assert get(server, f"/json?token={TOKEN.decode()}", Authorization="")[0] == 401


def test_look_that_fails_is_said_once_and_counted_and_its_answers_are_not_the_old_ones(capsys):
    with running() as (server, looks):
        looks.error = OSError("a broken exporter")
        wait_until(lambda: get(server, "/metrics")[0] == 503)
        count = looks.count
        wait_until(lambda: looks.count > count + 2)
        assert get(server, "/")[0] == 200
        looks.error = None
        wait_until(lambda: get(server, "/metrics")[0] == 200)
        failures = re.search(
            rb"^rpcdataloader_exporter_failures_total (\d+)$", get(server, "/metrics")[2], re.MULTILINE
        )
        assert failures
        assert int(failures[1]) >= 3
    assert capsys.readouterr().err.count("a broken exporter") == 1


def test_place():
    assert str(parse_place("9100")) == "127.0.0.1:9100"
    assert (parse_place("[::1]:0").host, parse_place("[::1]:0").port) == ("::1", 0)
    for text in "", "node01", "unix:/socket", "a:b:1", "127.0.0.1:70000", "-1", "*:0":
        with pytest.raises(ValueError, match=f"cannot read the address '{re.escape(text)}': write PORT"):
            parse_place(text)


def in_file(folder: Path, token: bytes) -> dict[str, str]:
    """The environment that names a file with this token."""
    (folder / "token").touch(0o600)
    (folder / "token").write_bytes(token)
    return {"RPCDATALOADER_STATUS_TOKEN_FILE": str(folder / "token")}


def test_token_comes_from_a_file_of_ones_own(tmp_path):
    assert find_token({}) is None
    assert find_token(in_file(tmp_path, TOKEN + b"\n")) == TOKEN
    with pytest.raises(AuthenticationError, match="RPCDATALOADER_STATUS_TOKEN_FILE is empty"):
        find_token({"RPCDATALOADER_STATUS_TOKEN_FILE": ""})


# What is said of other files is in wire/test_credentials.py.
@pytest.mark.parametrize(
    ("token", "problem"),
    [
        (b"short", r"token\) is shorter than 16"),
        ("thé-token-for-the-page".encode(), "must be printable ASCII, to fit into an HTTP header"),
        (b"a token of\ntwo lines", "must be printable ASCII, to fit into an HTTP header"),
        (None, "is the secret of the node servers"),
    ],
)
def test_token_that_cannot_be_used_is_refused(token, problem, tmp_path):
    with pytest.raises(AuthenticationError, match=problem):
        find_token(in_file(tmp_path, token or load_credentials().secret))


def test_requests_that_are_slow_are_cut_off(monkeypatch):
    monkeypatch.setattr(serving, "_REQUEST_TIMEOUT", 0.5)
    with running() as (server, _looks), socket.create_connection(server.server_address[:2]) as slow:
        # Bytes that come one by one win no time.
        with contextlib.suppress(OSError):
            while not (select.select([slow], [], [], 0.05)[0] and slow.recv(1) == b""):
                slow.sendall(b"E")
        wait_until(lambda: not server._strangers)


@pytest.mark.parametrize("sent", [b"", b"G", b"GET / HTTP/1.1\r\nA: "])
def test_connections_without_the_token_keep_nobody_out(monkeypatch, sent):
    monkeypatch.setattr(serving, "_MAX_STRANGERS", 4)
    with running() as (server, _looks), contextlib.ExitStack() as opened:
        strangers = []
        for count in range(1, 10):
            strangers.append(opened.enter_context(socket.create_connection(server.server_address[:2])))
            strangers[-1].sendall(sent)
            wait_until(lambda count=count: len(server._strangers) == min(count, 4))
        for old in strangers[:5]:
            assert old.recv(1) == b""
        for _ in range(8):
            assert get(server, "/metrics")[0] == 200
        opened.close()
        wait_until(lambda: not server._strangers)


def test_request_with_the_token_keeps_its_connection_until_it_is_answered(monkeypatch):
    monkeypatch.setattr(serving, "_MAX_STRANGERS", 1)
    with running() as (server, _looks), contextlib.ExitStack() as opened:
        answers, asked, go_on = server.answers, threading.Event(), threading.Event()

        class Waiting(dict):
            def __contains__(self, path):
                asked.set()
                return go_on.wait(10)

        monkeypatch.setattr(type(server), "answers", property(lambda _self: Waiting(answers), lambda *_: None), False)
        found = []
        thread = threading.Thread(target=lambda: found.append(get(server, "/json")[0]))
        thread.start()
        assert asked.wait(10)
        for _ in range(3):
            opened.enter_context(socket.create_connection(server.server_address[:2]))
        wait_until(lambda: server._strangers)
        go_on.set()
        thread.join()
        assert found == [200]
