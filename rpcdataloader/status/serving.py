"""``status --serve``: the same looks as a live page, as JSON, and as metrics for Prometheus.

One thread looks, and leaves ready-made answers; requests only read these. So nothing that a browser or a scraper does
reaches a node server. Without a token, only loopback addresses are served, and only to requests that name one: a page
on the web whose name was made to point there (DNS rebinding) gets nothing.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import errno
import hashlib
import hmac
import http.server
import ipaddress
import json
import math
import os
import re
import socket
import socketserver
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rpcdataloader.errors import AuthenticationError
from rpcdataloader.status import metrics
from rpcdataloader.status.report import Tree
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.credentials import client_credentials, load_credentials

TOKEN_VARIABLE = "RPCDATALOADER_STATUS_TOKEN"
TOKEN_FILE_VARIABLE = "RPCDATALOADER_STATUS_TOKEN_FILE"

PATHS = ("/", "/metrics", "/json", "/history")

# Seconds that a client may take for its request and the answer, and how many requests are under way at most; others
# find their connections closed. A peer without a token could hold up all of them otherwise.
_REQUEST_TIMEOUT = 10
_MAX_REQUESTS = 64

_PAGE = Path(__file__).with_name("page")


def parse_place(text: str) -> Address:
    """Read ``[HOST:]PORT``; port 0 is any free one.

    Raises:
        ValueError: It is something else.
    """
    host, _, port = text.rpartition(":")
    address = Address.parse(f"{host or '127.0.0.1'}:{'1' if port == '0' else port}")
    if address.is_unix:
        raise ValueError(f"cannot read the address {text!r}: browsers need a port; write port or host:port")
    return dataclasses.replace(address, port=0) if port == "0" else address


def find_token(environ: Mapping[str, str] = os.environ) -> bytes | None:
    """The token that requests must show; None if none is set.

    Raises:
        AuthenticationError: It cannot be trusted, or is the secret of the node servers, which HTTP would give away.
    """
    path, text = environ.get(TOKEN_FILE_VARIABLE), environ.get(TOKEN_VARIABLE)
    if path is None and text is None:
        return None
    name = TOKEN_VARIABLE if path is None else TOKEN_FILE_VARIABLE
    try:
        found = load_credentials(token=text if path is None else None, token_file=path, environ={})
    except AuthenticationError as exc:
        raise AuthenticationError(f"{name}: {exc}") from None
    if hmac.compare_digest(found.secret, client_credentials(Address("localhost")).secret):
        raise AuthenticationError(f"{name} is the secret of the node servers, which lets run code there: take another")
    return found.secret


def make_page() -> tuple[bytes, str]:
    """The live page with all that it needs, and the policy that lets it do nothing else."""
    text = (_PAGE / "page.html").read_text("utf-8")
    for name in "uPlot.min.css", "uPlot.iife.min.js":
        text = text.replace(f"/* {name} */", (_PAGE / name).read_text("utf-8"))
    parts: dict[str, list[str]] = {"style": [], "script": []}
    for tag, content in re.findall(r"<(style|script)>(.*?)</\1>", text, re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        parts[tag].append(f"'sha256-{digest}'")
    sources = "; ".join(f"{tag}-src {' '.join(digests)}" for tag, digests in parts.items())
    return text.encode(), (
        f"default-src 'none'; {sources}; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )


class StatusServer(socketserver.ThreadingTCPServer):
    """Answers requests from what the last look has left.

    Args:
        token: What requests must show; None for none.

    Attributes:
        answers: Body and content type by path; those of a look are missing before the first, and after a failed one.

    Raises:
        ValueError: The address is no loopback address, and there is no token; or nothing can listen there.
    """

    allow_reuse_address = True
    allow_reuse_port = False  # or a second one would take half of the requests
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, place: Address, token: bytes | None) -> None:
        self.token = token
        page, self.policy = make_page()
        self.answers = {"/": (page, "text/html; charset=utf-8")}
        self._num_failures = 0
        self._room = threading.Semaphore(_MAX_REQUESTS)
        try:
            found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
            self.address_family, *_, listen = found[0]
            if token is None and not _is_loopback(str(Address(str(listen[0])))):
                raise ValueError(
                    f"{place.host} can be reached from other machines: set {TOKEN_FILE_VARIABLE} to a file with a "
                    "token that requests must show, or serve at 127.0.0.1"
                )
            super().__init__((str(listen[0]), place.port), _Handler)
        except OSError as exc:
            in_use = exc.errno == errno.EADDRINUSE
            advice = "; another program has that port, perhaps a second --serve: name another port" if in_use else ""
            raise ValueError(f"cannot serve at {place}: {exc.strerror}{advice}") from None

    @property
    def url(self) -> str:
        """Where it is."""
        host, port = self.server_address[:2]
        return f"http://{Address(str(host), int(port))}/"

    def serve(self, look: Callable[[], Tree], interval: float) -> None:
        """Look again and again, until an exception ends it.

        Args:
            look: Gives a document.
            interval: Seconds between two looks.
        """
        history = History(interval)
        threading.Thread(target=self.serve_forever, name="rpcdl-serve", daemon=True).start()
        try:
            while True:
                found = {"/": self.answers["/"]}
                try:
                    document = look()
                    history.add(document)
                    found["/metrics"] = metrics.as_metrics(document, self._num_failures).encode(), metrics.CONTENT_TYPE
                    for path, tree in {"/json": document, "/history": history.as_columns()}.items():
                        found[path] = json.dumps(tree).encode(), "application/json"
                except Exception:
                    self._fail("look at the node servers")
                self.answers = found
                time.sleep(interval)
        finally:
            self.shutdown()
            self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, if there is room for one more."""
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, within the time that there is for it."""
        timer = threading.Timer(_REQUEST_TIMEOUT, _cut_off, [request])
        timer.daemon = True
        timer.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            timer.cancel()
            self._room.release()

    def _fail(self, what: str) -> None:
        self._num_failures += 1
        if self._num_failures == 1:
            sys.stderr.write(f"cannot {what}; this goes on, and is not said again:\n{traceback.format_exc()}")

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002
        """A request has failed; not of interest if its client has gone."""
        if not isinstance(sys.exc_info()[1], OSError):
            self._fail("answer a request")


class _Handler(http.server.BaseHTTPRequestHandler):
    server: StatusServer
    server_version, sys_version = "rpcdataloader", ""
    timeout = _REQUEST_TIMEOUT

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if self.server.token is None and not _is_loopback(self.headers.get("Host", "")):
            self._send(403, "without a token, this is only for http://localhost and http://127.0.0.1\n")
        elif path != "/" and not self._shows_token():  # the page itself tells nothing
            self._send(401, "show the token: Authorization: Bearer TOKEN\n")
        elif path not in PATHS:
            self._send(404, f"there is nothing here but {', '.join(PATHS)}\n")
        elif path not in (answers := self.server.answers):
            self._send(503, "there is no look at the node servers now\n")
        else:
            self._send(200, *answers[path])

    do_HEAD = do_GET

    def _shows_token(self) -> bool:
        token, shown = self.server.token, self.headers.get("Authorization", "").encode(errors="replace")
        return token is None or hmac.compare_digest(shown, b"Bearer " + token)

    def _send(self, status: int, body: bytes | str, kind: str = "text/plain; charset=utf-8") -> None:
        content = body if isinstance(body, bytes) else body.encode()
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Content-Security-Policy": self.server.policy,
            "Cache-Control": "no-store",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "WWW-Authenticate": "Bearer",
            "X-Content-Type-Options": "nosniff",
        }
        self.send_response(status)
        for name, value in headers.items():
            if status == 401 or name != "WWW-Authenticate":
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a scraper comes every few seconds."""


def _cut_off(request: socket.socket) -> None:
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


def _is_loopback(place: str) -> bool:
    """Whether a host, with or without a port, is this machine whatever the name servers say."""
    try:
        host = urlsplit(f"//{place}").hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


SECONDS = 900.0

# More lines cannot be told apart.
_MAX_CLIENTS = 7


class History:
    """Points in memory, of which the oldest go.

    Args:
        interval: Seconds between two looks.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._points: deque[Tree] = deque(maxlen=max(2, math.ceil(SECONDS / interval)))

    def add(self, document: Tree) -> None:
        """Keep what matters of a look; its rates, only if they are over the time since the one before."""
        nodes = [node for node in document["nodes"] if node["interval_seconds"]]
        waits = {_name(client): client["loops"][0]["wait_share"] for client in document["clients"] if client["loops"]}
        point: Tree = {"time": document["time_unix_seconds"], "waits": waits}
        for name in "tasks", "sent_bytes":
            point[name] = sum(node[f"{name}_per_second"] for node in nodes) if nodes else None
        self._points.append(point)

    def as_columns(self) -> Tree:
        """Times, rates, and for those present clients that wait most, how much: lists of the same length.

        With them comes the interval between two looks.
        """
        # The last look has them in that order.
        names = list(self._points[-1]["waits"])[:_MAX_CLIENTS] if self._points else []
        columns: Tree = {name: [point[name] for point in self._points] for name in ("time", "tasks", "sent_bytes")}
        columns["interval_seconds"] = self._interval
        columns["waits"] = {name: [point["waits"].get(name) for point in self._points] for name in sorted(names)}
        return columns


def _name(client: Tree) -> str:
    rank = "" if client["rank"] is None else f" rank {client['rank']}"
    return f"{client['host']}:{client['pid']}{rank}"
