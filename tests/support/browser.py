"""A headless Chromium that a test drives by the DevTools protocol, over two pipes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import wait_until

CHROMIUM = shutil.which("chromium")


class Tab:
    """A page. What goes wrong in it is kept in ``errors``: exceptions, and what its policy has forbidden."""

    def __init__(self, requests: int, replies: int) -> None:
        self._requests, self._replies = requests, replies
        self._last = 0
        self._session: str | None = None
        self._received = b""
        self.errors: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in "Page", "Runtime", "Log":
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Ask for something, and wait for the answer."""
        self._last += 1
        request = {"id": self._last, "method": method, "params": params}
        if self._session is not None:
            request["sessionId"] = self._session
        os.write(self._requests, json.dumps(request).encode() + b"\0")
        while (message := self._receive()).get("id") != self._last:
            if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(json.dumps(message["params"]))
        assert "error" not in message, message
        return message["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            data = os.read(self._replies, 65536)
            assert data, "the browser has ended"
            self._received += data
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)

    def run(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def text(self, selector: str) -> str:
        """What a part of the page says; empty if there is none."""
        return self.run(f"[...document.querySelectorAll({selector!r})].map(part => part.textContent).join('\\n')")

    def wait_for(self, expression: str, seconds: float = 30.0) -> None:
        """Wait until an expression is true."""
        wait_until(lambda: self.run(f"Boolean({expression})"), seconds, expression, interval=0.1)

    def press(self, key: str) -> None:
        """Press a key of the keyboard."""
        for kind in "keyDown", "keyUp":
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def open(self, url: str) -> None:
        """Go to a page, also from one that differs in the fragment alone."""
        for target in "about:blank", url:
            self.send("Page.navigate", url=target)
            self.wait_for(f"document.readyState === 'complete' && location.href.startsWith({target.split('#')[0]!r})")


@contextlib.contextmanager
def open_tab(folder: Path) -> Iterator[Tab]:
    """Start a browser with one tab.

    Args:
        folder: For its profile.
    """
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"]
    # The browser reads requests from descriptor 3, and writes replies to 4.
    script = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
    process = subprocess.Popen(
        ["bash", "-c", script, CHROMIUM, *options, f"--user-data-dir={folder}", "about:blank"],
        pass_fds=[theirs_in, theirs_out],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # with all of its processes
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Tab(ours_out, ours_in)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(ours_in)
        os.close(ours_out)
