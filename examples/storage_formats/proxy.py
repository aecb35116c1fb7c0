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
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT)
        self._thread = threading.Thread(target=self._run, name="proxy")
        self.endpoint = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._main = self._loop.create_task(self._serve())
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._main)
        while others := asyncio.all_tasks(self._loop):
            for task in others:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*others, return_exceptions=True))
        self._loop.run_until_complete(asyncio.sleep(0))  # transports close their sockets
        self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, sock=self._socket)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            server.close()  # not wait_closed(), which waits for clients

    async def _connected(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        try:
            await self._relay(client, to_client)
        except asyncio.CancelledError:  # the proxy ends; asyncio's streams complain of a task that says so
            to_client.transport.abort()
        except OSError:
            pass  # the store is down, and so is its port for the client
        finally:
            to_client.close()

    async def _relay(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        sock = to_client.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, min(int(self._link.rate), 0xFFFFFFFF))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * CHUNK)
        store, to_store = await asyncio.open_connection("127.0.0.1", self._store_port, limit=2 * CHUNK)
        tasks = [
            asyncio.ensure_future(self._pass_requests(client, to_store, to_client)),
            asyncio.ensure_future(self._pass_answers(store, to_client)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            to_store.transport.abort()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pass_requests(
        self, client: asyncio.StreamReader, to_store: asyncio.StreamWriter, to_client: asyncio.StreamWriter
    ) -> None:
        while True:
            request = await client.readuntil(b"\r\n\r\n")
            if not request.startswith((b"GET ", b"HEAD ")):
                to_client.write(REFUSAL)
                await to_client.drain()
                return
            await asyncio.sleep(self._link.latency)
            to_store.write(request)
            await to_store.drain()

    async def _pass_answers(self, store: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        while chunk := await store.read(CHUNK):
            await asyncio.sleep(self._bucket.take(len(chunk), time.monotonic()))
            to_client.write(chunk)
            await to_client.drain()
