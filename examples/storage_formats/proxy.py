"""A proxy before the object store that makes it as slow as a distant one.

Each request waits for the latency before it is passed on; each connection has a rate, kept by the kernel
(``SO_MAX_PACING_RATE``); and all of them share one more. Requests are read only as far as needed: no body, one at a
time per connection, which is what boto3 and ``rclone mount --read-only`` do.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from types import TracebackType

from examples.storage_formats.plan import Link

# asm-generic/socket.h; Python has no name for it.
SO_MAX_PACING_RATE = 47

# Small against a second of the rates, so that these are kept, and large against the cost of a call.
CHUNK = 1 << 17

# Of a usual network. The kernel does not pace the first ten segments of a connection, and those of loopback are 64 KiB.
SEGMENT = 1448

REFUSAL = b"HTTP/1.1 405 Method Not Allowed\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class TokenBucket:
    """When the next bytes may go, at ``rate`` bytes per second; ``now`` is in seconds."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free_at = 0.0

    def take(self, num_bytes: int, now: float) -> float:
        """Book ``num_bytes``; returns the seconds to wait for them."""
        self._free_at = max(self._free_at, now) + num_bytes / self._rate
        return self._free_at - now


class Proxy:
    """Listens on a port of loopback, in a thread, from ``with`` to its end.

    Attributes:
        endpoint: URL to use instead of the store's.
    """

    def __init__(self, store_port: int, link: Link) -> None:
        self._store_port, self._link = store_port, link
        self._bucket = TokenBucket(link.total)
        self._loop = asyncio.new_event_loop()
        self._relays: set[asyncio.Task[None]] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT)
        self._listener.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="proxy")
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        # Sockets and not asyncio's streams: a server of these leaves some open if it ends while clients connect.
        self._loop.add_reader(self._listener, self._accept)
        self._loop.run_forever()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        self._loop.run_until_complete(self._end_relays())
        self._loop.close()

    async def _end_relays(self) -> None:
        relays = list(self._relays)
        for relay in relays:
            relay.cancel()
        await asyncio.gather(*relays, return_exceptions=True)
        await asyncio.sleep(0)  # for the callbacks that close

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the client has gone again
            client = self._listener.accept()[0]
            relay = self._loop.create_task(self._relay(client))
            self._relays.add(relay)
            relay.add_done_callback(self._relays.discard)
            # Not in the task itself, which may be cancelled before it begins.
            relay.add_done_callback(lambda _: client.close())

    async def _relay(self, client: socket.socket) -> None:
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, min(int(self._link.rate), 0xFFFFFFFF))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * CHUNK)
        with socket.socket() as store:
            store.setblocking(False)
            try:
                await self._loop.sock_connect(store, ("127.0.0.1", self._store_port))
            except OSError:
                return  # the store is down, and so is its port for the client
            tasks = [
                self._loop.create_task(self._pass_requests(client, store)),
                self._loop.create_task(self._pass_answers(store, client)),
            ]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _pass_requests(self, client: socket.socket, store: socket.socket) -> None:
        request = b""
        while chunk := await self._loop.sock_recv(client, CHUNK):
            request += chunk
            if not request.endswith(b"\r\n\r\n"):
                continue
            if not request.startswith((b"GET ", b"HEAD ")):
                await self._loop.sock_sendall(client, REFUSAL)
                return
            await asyncio.sleep(self._link.latency)
            await self._loop.sock_sendall(store, request)
            request = b""

    async def _pass_answers(self, store: socket.socket, client: socket.socket) -> None:
        buffer = memoryview(bytearray(CHUNK))
        while num_bytes := await self._loop.sock_recv_into(store, buffer):
            await asyncio.sleep(self._bucket.take(num_bytes, time.monotonic()))
            await self._loop.sock_sendall(client, buffer[:num_bytes])
