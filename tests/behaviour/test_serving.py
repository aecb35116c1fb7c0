"""``python -m rpcdataloader.status --serve``, with a real pool behind it, and a browser and Prometheus before it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest

from rpcdataloader import RPCDataloader, RPCDataset, rpc_async
from tests.conftest import TIMEOUT_SCALE, close_client, wait_until
from tests.support.browser import CHROMIUM, open_tab
from tests.support.causes import Causes
from tests.support.clocks import shorten
from tests.support.peers import Report, session_of
from tests.unit.wire.test_status import LOOP

pytestmark = pytest.mark.usefixtures("clean_client", "often")

PROMPTLY = 20 * TIMEOUT_SCALE
READY = re.compile(r"rpcdataloader status (http://127\.0\.0\.1:\d+/)(#\S+)? pid=(\d+)\n")
TOKEN = "a-token-of-the-test-suite"
EVIL = "<img src=x onerror=document.title='owned'>"

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")


@pytest.fixture
def often(monkeypatch):
    """Reports come often."""
    shorten(monkeypatch, "reports")


@contextlib.contextmanager
def serving(*arguments, token=TOKEN):
    """Start the exporter at a port of the kernel's choice; gives its URL, with the token if it makes one."""
    command = [sys.executable, "-m", "rpcdataloader.status", *arguments, "--serve", "0", "--watch", "0.2"]
    with contextlib.ExitStack() as stack:
        variables = {}
        if token:
            file = stack.enter_context(tempfile.NamedTemporaryFile("w"))
            file.write(token)
            file.flush()
            variables["RPCDATALOADER_STATUS_TOKEN_FILE"] = file.name
        process = stack.enter_context(
            subprocess.Popen(
                command, env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
        try:
            line = process.stdout.readline()
            match = READY.fullmatch(line)
            assert match, line + process.stderr.read()
            assert int(match[3]) == process.pid
            yield match[1] + (match[2] or "")
        finally:
            process.send_signal(signal.SIGTERM)
            rest, errors = process.communicate(timeout=PROMPTLY)
    assert (process.returncode, rest, errors) == (0, "", "")


@contextlib.contextmanager
def training(server, kind=Causes):
    """Iterate over a loader with two workers, which take 20 ms for a batch, in a thread."""
    is_over = threading.Event()
    loader = RPCDataloader(RPCDataset([server.address], kind, stall=0.02), batch_size=None)

    def train():
        for _batch in loader:
            if is_over.is_set():
                break
            time.sleep(0.003)  # the training step

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def get(url, token=TOKEN):
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=PROMPTLY) as reply:
        return reply.read().decode()


def metrics_of(url, token=TOKEN):
    """Values by series; nothing before the first look."""
    try:
        lines = [line for line in get(f"{url}metrics", token).splitlines() if not line.startswith("#")]
    except urllib.error.HTTPError as error:
        error.close()
        return {}
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_metrics_of_a_real_pool(serve):
    server = serve("--num-workers", "2")
    labels = f'client="{socket.gethostname()}",rank=""'
    bound = f'rpcdataloader_client_bound{{{labels},bound="workers"}}'
    with serving(server.address) as url, training(server):
        wait_until(lambda: bound in metrics_of(url), 30)
        found = metrics_of(url)
        assert 0.05 < found[f"rpcdataloader_client_wait_ratio{{{labels}}}"] < 1
        assert found[f"rpcdataloader_client_workers{{{labels}}}"] == 2
        assert found["rpcdataloader_workers_wanted"] > 2
        series = f'rpcdataloader_batches_total{{node="{server.address}"}}'
        before = found[series]
        wait_until(lambda: metrics_of(url)[series] > before)
        (node,) = json.loads(get(f"{url}json"))["nodes"]
        os.kill(node["clients"][0]["workers"][0]["pid"], signal.SIGKILL)
        wait_until(lambda: metrics_of(url)[f'rpcdataloader_ended_workers_total{{node="{server.address}"}}'] == 1)


def test_token_is_made_and_printed_with_the_address():
    with serving("127.0.0.1:1", token=None) as address:
        url, _, token = address.partition("#")
        assert len(token) >= 32
        wait_until(lambda: metrics_of(url, token), PROMPTLY)
        for other in "", TOKEN:
            with pytest.raises(urllib.error.HTTPError, match="401") as error:
                get(f"{url}metrics", other)
            error.value.close()


# --- in a browser


@needs_chromium
def test_page_asks_for_its_token_and_shows_what_happens_as_text(serve, tmp_path, monkeypatch):
    server = serve("--num-workers", "2")
    shown = "document.querySelector('#clients')?.textContent.includes('No training process')"
    with serving(server.address) as url, open_tab(tmp_path / "profile") as tab:
        for wrong in url, f"{url}#wrong", f"{url}#100%":
            tab.open(wrong)
            tab.wait_for("!document.querySelector('#login').hidden")
            assert tab.run("document.querySelector('#content').hidden")
        tab.run(f"document.querySelector('#token').value = {TOKEN!r}; document.querySelector('#login').requestSubmit()")
        tab.wait_for(shown)
        tab.run("sessionStorage.clear()")
        tab.open(f"{url}#{TOKEN}")
        tab.wait_for(shown)
        assert tab.run("location.href") == url
        tab.open(url)  # the tab remembers it
        tab.wait_for(shown)
        tab.errors.clear()  # of what was refused
        with training(server):
            tab.wait_for("document.querySelector('.client .badge')?.textContent === 'workers'")
            assert f"{socket.gethostname()}:{os.getpid()}" in tab.text(".client h3")
            assert "without the loader" in tab.text(".client p")
            assert 0.1 < tab.run("document.querySelector('meter').value") < 1
            assert tab.run("document.querySelectorAll('canvas').length") == 3
            # Values change.
            tab.run("document.querySelector('.cell').focus()")
            before = tab.text("#detail")
            assert f"of {socket.gethostname()}:{os.getpid()} on {server.address}: " in before
            tab.wait_for(f"document.querySelector('#detail').textContent !== {json.dumps(before)}")
            # A keyboard is enough.
            tab.press("ArrowRight")
            assert tab.run("[...document.querySelectorAll('.cell')].indexOf(document.activeElement)") == 1
            # A killed worker shows up, and so does the one in its place.
            pid = int(re.search(r"\(pid (\d+)\)", tab.text("#detail"))[1])
            os.kill(pid, signal.SIGKILL)
            tab.wait_for("document.querySelectorAll('.cell').length === 3")
            assert tab.text(".cell.odd") == "\N{MULTIPLICATION SIGN}"
            assert "ended" in tab.text("#detail")
            assert tab.run("document.activeElement.className").startswith("cell")
            cells = tab.text("#nodes td").split("\n")
            assert (cells[1], cells[3], cells[-1]) == ("ready", "2", "1")
        # A client that leaves goes.
        close_client()
        tab.wait_for("!document.querySelector('.client, .cell')")
        # Nothing that is sent becomes HTML.
        with monkeypatch.context() as patch:
            patch.setenv("SLURM_JOB_ID", EVIL)
            with training(server, type(EVIL, (Causes,), {})):
                tab.wait_for(f"document.querySelector('.client')?.textContent.includes({json.dumps(EVIL)})")
                assert "onerror" in tab.text(".client h3")  # the job
            close_client()
            with pytest.raises(ValueError, match="onerror"):
                rpc_async(server.address, fail, (EVIL,)).wait()
            session_of(server.address).report(
                Report.of([dataclasses.replace(LOOP, text=EVIL, dataset=EVIL, bound="script")])
            )
            tab.wait_for("document.querySelector('.badge')?.textContent === 'script'")
        assert tab.run("document.querySelectorAll('img').length") == 0
        assert tab.run("document.title") == "rpcdataloader status"
        # The browser would not let it, either.
        forbidden = f"try {{ document.body.innerHTML = {json.dumps(EVIL)} }} catch (e) {{ e.message }}"
        assert tab.errors == []
        assert "TrustedHTML" in tab.run(forbidden)
        tab.errors.clear()
        # The node server goes, and then the exporter.
        server.stop()
        tab.wait_for("document.querySelector('#nodes').textContent.includes('unreachable')")
        assert tab.errors == []
        tab.run("fetch = () => Promise.reject(new TypeError())")
        tab.wait_for("document.querySelector('#alarm').textContent.includes('does not answer')")


def fail(text):
    raise ValueError(text)
