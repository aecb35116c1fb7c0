"""The proxy of the storage study: slow by as much as it should be, and transparent otherwise."""

from __future__ import annotations

import http.client
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

from examples.storage_formats.plan import Link
from examples.storage_formats.proxy import Proxy, TokenBucket

CONTENT = bytes(range(256)) * 1200
FAST = 1e9


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT)

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = False

    def handle_error(self, *_):  # a client that has gone
        pass


@pytest.fixture
def port():
    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def read(proxy, number=1):
    """Ask ``number`` times on one connection; returns the seconds that it took."""
    connection = http.client.HTTPConnection(urlsplit(proxy.endpoint).netloc, timeout=60)
    begin = time.monotonic()
    try:
        for _ in range(number):
            connection.request("GET", "/")
            assert connection.getresponse().read() == CONTENT
        return time.monotonic() - begin
    finally:
        connection.close()


def test_every_request_waits_for_the_latency(port):
    with Proxy(port, Link(0.1, FAST, FAST)) as proxy:
        assert read(proxy, 5) >= 0.5


def test_a_connection_has_its_rate_however_much_all_of_them_may_have(port):
    with Proxy(port, Link(0, 1e6, FAST)) as proxy, ThreadPoolExecutor(4) as pool:
        # What the kernel has sent is paced, and what it holds for the client has been.
        assert min(pool.map(read, [proxy] * 4)) >= 0.8 * len(CONTENT) / 1e6


def test_all_connections_share_the_rate_in_all(port):
    with Proxy(port, Link(0, 1e6, 1e6)) as proxy, ThreadPoolExecutor(4) as pool:
        assert max(pool.map(read, [proxy] * 4)) >= 0.9 * 4 * len(CONTENT) / 1e6


def test_without_limits_it_is_not_in_the_way(port):
    with Proxy(port, Link(0, FAST, FAST)) as proxy:
        assert read(proxy, 3) < 30


def test_requests_that_write_are_refused(port):
    with Proxy(port, Link(0, FAST, FAST)) as proxy:
        connection = http.client.HTTPConnection(urlsplit(proxy.endpoint).netloc, timeout=60)
        connection.request("PUT", "/")
        assert connection.getresponse().status == 405
        connection.close()


def test_connection_is_closed_when_the_store_is_down(port):
    with Proxy(port, Link(0, FAST, FAST)) as proxy:
        proxy._store_port = 1  # where nothing listens
        with pytest.raises(ConnectionError):
            read(proxy)


def test_clients_that_are_connected_do_not_keep_it_from_ending(port):
    with Proxy(port, Link(0, 1e4, FAST)) as proxy:
        connection = http.client.HTTPConnection(urlsplit(proxy.endpoint).netloc, timeout=60)
        connection.request("GET", "/")
    connection.close()
    assert "proxy" not in {thread.name for thread in threading.enumerate()}


def test_bucket_books_one_after_the_other_and_saves_nothing_up():
    bucket = TokenBucket(100)
    assert bucket.take(50, now=10) == pytest.approx(0.5)
    assert bucket.take(50, now=10) == pytest.approx(1.0)
    assert bucket.take(100, now=20) == pytest.approx(1.0)
