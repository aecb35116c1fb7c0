"""``status --serve``: a live page, JSON, and metrics for Prometheus.

One thread looks and stores finished answers; requests only read these. So browsers and scrapers never reach a node
server. All but the page, which has no data, is for requests that show the token: other users of the machine, and web
pages whose name was pointed there (DNS rebinding), get nothing.
"""

from __future__ import annotations

import base64
import dataclasses
import errno
import hashlib
import hmac
import http.server
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

from rpcdataloader.errors import AuthenticationError
from rpcdataloader.status.report import METRICS_TYPE, Tree, as_metrics
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.credentials import client_credentials, read_secret
from rpcdataloader.wire.transport import shut_down

TOKEN_FILE_VARIABLE = "RPCDATALOADER_STATUS_TOKEN_FILE"

PATHS = ("/", "/metrics", "/json", "/history")

# Seconds for a client's request and answer, and the most connections that have not shown the token. The oldest makes
# room for a new one, so peers without it can neither occupy all threads nor keep a scraper out: that shows it at once.
_REQUEST_TIMEOUT = 10
_MAX_STRANGERS = 64

_PAGE = Path(__file__).with_name("page")


def parse_place(text: str) -> Address:
    """Read ``[HOST:]PORT``; port 0 is any free one. Raises ``ValueError`` if ``text`` is malformed."""
    host, _, port = text.rpartition(":")
    try:
        address = Address.parse(f"{host or '127.0.0.1'}:{'1' if port == '0' else port}")
    except ValueError:
        address = Address()
    if not address.host:
        raise ValueError(f"cannot read the address {text!r}: write PORT, HOST:PORT or [IPv6 address]:PORT")
    return dataclasses.replace(address, port=0) if port == "0" else address


def find_token(environ: Mapping[str, str] = os.environ) -> bytes | None:
    """Return the user's token for requests; None if none is set.

    Raises:
        AuthenticationError: The token cannot be trusted, does not fit into a header, or equals the secret of the node
            servers, which HTTP would expose.
    """
    if (path := environ.get(TOKEN_FILE_VARIABLE)) is None:
        return None
    found = read_secret(path, TOKEN_FILE_VARIABLE)
    # Browsers and servers disagree on the encoding of a header.
    if not re.fullmatch(rb"[ -~]+", found.secret):
        raise AuthenticationError(f"the token ({found.source}) must be printable ASCII, to fit into an HTTP header")
    if hmac.compare_digest(found.secret, client_credentials(Address("localhost")).secret):
        raise AuthenticationError(
            f"the token ({found.source}) is the secret of the node servers, which permits running code: set another one"
        )
    return found.secret


def make_page() -> tuple[bytes, str]:
    """Return the live page with all that it needs, and a policy that forbids it everything else."""
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
    """Answers requests from the results of the last look.

    Args:
        token: Token that requests must show.

    Attributes:
        answers: Body and content type by path; empty before the first look and after a failed one.

    Raises:
        ValueError: The address cannot be listened on.
    """

    allow_reuse_address = True
    allow_reuse_port = False  # or a second server would take half of the requests
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, place: Address, token: bytes) -> None:
        self.token = token
        page, self.policy = make_page()
        self.answers = {"/": (page, "text/html; charset=utf-8")}
        self._num_failures = 0
        self._lock = threading.Lock()
        self._strangers: dict[Any, None] = {}  # guarded by the lock; connections that have not shown the token, by age
        try:
            found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
            self.address_family, *_, listen = found[0]
            super().__init__((str(listen[0]), place.port), _Handler)
        except OSError as exc:
            in_use = exc.errno == errno.EADDRINUSE
            advice = "; another program has that port, perhaps a second --serve: name another port" if in_use else ""
            raise ValueError(f"cannot serve at {place}: {exc.strerror}{advice}") from None

    @property
    def url(self) -> str:
        """Address of the page."""
        host, port = self.server_address[:2]
        return f"http://{Address(str(host), int(port))}/"

    def serve(self, look: Callable[[], Tree], interval: float) -> None:
        """Refresh the answers with a document every ``interval`` seconds, until an exception ends it."""
        history = History(interval)
        threading.Thread(target=self.serve_forever, name="rpcdl-serve", daemon=True).start()
        try:
            while True:
                found = {"/": self.answers["/"]}
                try:
                    document = look()
                    history.add(document)
                    found["/metrics"] = as_metrics(document, self._num_failures).encode(), METRICS_TYPE
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
        """Answer in a new thread, and end the oldest connection that has not shown the token if there are too many."""
        with self._lock:
            oldest = next(iter(self._strangers)) if len(self._strangers) >= _MAX_STRANGERS else None
            self._strangers.pop(oldest, None)
            self._strangers[request] = None
        if oldest is not None:
            shut_down(oldest)
        super().process_request(request, client_address)

    def has_shown_token(self, request: Any) -> None:
        """Let a connection stay until its answer is sent."""
        with self._lock:
            self._strangers.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self.has_shown_token(request)
        super().shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer within the time limit."""
        timer = threading.Timer(_REQUEST_TIMEOUT, shut_down, [request])
        timer.daemon = True
        timer.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            timer.cancel()

    def _fail(self, what: str) -> None:
        self._num_failures += 1
        if self._num_failures == 1:
            sys.stderr.write(f"cannot {what}; further failures are not reported:\n{traceback.format_exc()}")

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002
        """Report a failed request, unless its client has gone."""
        if not isinstance(sys.exc_info()[1], OSError):
            self._fail("answer a request")


class _Handler(http.server.BaseHTTPRequestHandler):
    server: StatusServer
    server_version, sys_version = "rpcdataloader", ""
    timeout = _REQUEST_TIMEOUT

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path != "/" and not self._shows_token():  # the page itself has no data
            self._send(401, "send the token: Authorization: Bearer TOKEN\n")
        elif path not in PATHS:
            self._send(404, f"unknown path; this server has {', '.join(PATHS)}\n")
        elif path not in (answers := self.server.answers):
            self._send(503, "no data: the last look at the node servers failed, or the first one is still running\n")
        else:
            self._send(200, *answers[path])

    do_HEAD = do_GET

    def _shows_token(self) -> bool:
        shown = self.headers.get("Authorization", "").encode(errors="replace")
        if is_right := hmac.compare_digest(shown, b"Bearer " + self.server.token):
            self.server.has_shown_token(self.connection)
        return is_right

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
        """Log nothing: a scraper comes every few seconds."""


SECONDS = 900.0

# More lines cannot be told apart.
_MAX_CLIENTS = 7


class History:
    """Points in memory, ``interval`` seconds apart; the oldest are dropped."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._points: deque[Tree] = deque(maxlen=max(2, math.ceil(SECONDS / interval)))

    def add(self, document: Tree) -> None:
        """Add the figures of a document; its rates only if they are over the time since the previous look."""
        nodes = [node for node in document["nodes"] if node["interval_seconds"]]
        waits = {_name(client): client["loops"][0]["wait_share"] for client in document["clients"] if client["loops"]}
        point: Tree = {"time": document["time_unix_seconds"], "waits": waits}
        for name in "tasks", "sent_bytes":
            point[name] = sum(node[f"{name}_per_second"] for node in nodes) if nodes else None
        self._points.append(point)

    def as_columns(self) -> Tree:
        """Return times, rates, and the wait shares of the clients that wait most: lists of the same length.

        The interval between two looks is included.
        """
        # The last document has them in that order.
        names = list(self._points[-1]["waits"])[:_MAX_CLIENTS] if self._points else []
        columns: Tree = {name: [point[name] for point in self._points] for name in ("time", "tasks", "sent_bytes")}
        columns["interval_seconds"] = self._interval
        columns["waits"] = {name: [point["waits"].get(name) for point in self._points] for name in sorted(names)}
        return columns


def _name(client: Tree) -> str:
    rank = "" if client["rank"] is None else f" rank {client['rank']}"
    return f"{client['host']}:{client['pid']}{rank}"
