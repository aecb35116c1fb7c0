"""TLS between clients and node servers: the same batches, and a clear refusal of whatever does not fit together."""

from __future__ import annotations

import json
import os
import re
import shutil
import ssl
import subprocess
import threading
import time
from pathlib import Path
from shutil import which

import pytest
import torch

from rpcdataloader import RPCDataloader, RPCDataset, launch, rpc_async
from rpcdataloader.__main__ import main
from rpcdataloader.errors import AuthenticationError, ConnectionLostError, RemoteProtocolError
from tests.conftest import TIMEOUT_SCALE, close_client, wait_until
from tests.support.datasets import Filled
from tests.support.peers import preamble, session_of
from tests.support.quick import quick_server
from tests.support.tampering import Bomb, EncryptedProxy, dial, num_loaded

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("clean_client")

# A refusal is an answer, and not a limit of time.
PROMPTLY = 8 * TIMEOUT_SCALE


def options(folder, name="node", ca="ca"):
    return [f"--tls-cert={folder}/{name}.pem", f"--tls-key={folder}/{name}.key", f"--tls-ca={folder}/{ca}.pem"]


def use(monkeypatch, folder, name="node", ca="ca"):
    """Let this process's client use these files."""
    monkeypatch.setenv("RPCDATALOADER_TLS_CERT", f"{folder}/{name}.pem")
    monkeypatch.setenv("RPCDATALOADER_TLS_KEY", f"{folder}/{name}.key")
    monkeypatch.setenv("RPCDATALOADER_TLS_CA", f"{folder}/{ca}.pem")


@pytest.fixture(scope="module")
def server(zygote, certificates):
    with quick_server(zygote, "--num-workers", "2", *options(certificates)) as server:
        yield server
        assert "ERROR" not in server.log
        assert "Traceback" not in server.log


@pytest.fixture(scope="module")
def plain_server(zygote):
    with quick_server(zygote, "--num-workers", "2") as server:
        yield server


def batches(workers):
    """Each of many records."""
    torch.manual_seed(1)
    return list(RPCDataloader(RPCDataset(workers, Filled, 24, 300_000), batch_size=4, shuffle=True, num_workers=2))


def test_loader_delivers_the_same_batches(server, plain_server, certificates, monkeypatch):
    expected = batches(plain_server.address)
    close_client()
    use(monkeypatch, certificates)
    received = batches(server.address)
    assert len(expected) == len(received) == 6
    assert all(map(torch.equal, expected, received))
    assert "over TLS" in server.log


def test_workers_of_this_machine_do_without(certificates, monkeypatch):
    use(monkeypatch, certificates)
    assert len(batches(None)) == 6


def test_status_over_tls(server, certificates, monkeypatch, capsys):
    def look():
        main(["status", server.address, "--json", "--timeout", str(PROMPTLY)])
        (node,) = json.loads(capsys.readouterr().out)["nodes"]
        return node

    assert "RPCDATALOADER_TLS_CERT" in look()["error"]
    use(monkeypatch, certificates)
    rpc_async(server.address, os.getpid).wait()
    node = look()
    assert node["state"] == "ready"
    assert min(node["calls"], node["sent_bytes"]) > 0
    monkeypatch.delenv("RPCDATALOADER_TLS_CA")
    with pytest.raises(SystemExit, match="2"):
        look()


# --- refusals


def refusal_of(address, trace):
    """What the client raises, at once and not in the end; nothing has been unpickled anywhere."""
    start = time.monotonic()
    with pytest.raises(AuthenticationError) as raised:
        rpc_async(address, print, args=(Bomb(trace),)).wait()
    assert time.monotonic() - start < PROMPTLY
    assert num_loaded(trace) == 0
    assert type(raised.value) is AuthenticationError
    assert str(raised.value).startswith(address)
    return str(raised.value)


def test_client_without_tls_is_told_what_the_server_wants(server, trace):
    said = refusal_of(server.address, trace)
    variables = "RPCDATALOADER_TLS_CERT, RPCDATALOADER_TLS_KEY and RPCDATALOADER_TLS_CA"
    assert f"the client does not speak it; set {variables} for the client" in said
    assert "secret" not in said
    server.logged("refused 127.*: this node server requires TLS")


def test_server_without_tls_is_refused(plain_server, certificates, monkeypatch, trace):
    use(monkeypatch, certificates)
    said = refusal_of(plain_server.address, trace)
    assert "the client speaks TLS and this node server does not; start the server with --tls-cert" in said
    assert "secret" not in said
    plain_server.logged("refused 127.*: the client speaks TLS and this node server does not")


@pytest.mark.parametrize(
    ("client", "server", "said", "heard"),
    [
        ("node", "stranger", "unable to get local issuer certificate .*/ca.pem", "unknown ca"),
        ("stranger", "node", "unknown ca .*/stranger.pem", "unable to get local issuer certificate"),
        ("node", "expired", "certificate has expired", "certificate expired .*/expired.pem"),
        ("expired", "node", "certificate expired .*/expired.pem", "certificate has expired"),
        ("node", "elsewhere", "not valid for '127.0.0.1'", "bad certificate .*/elsewhere.pem"),
    ],
)
def test_certificate_that_is_not_accepted(zygote, certificates, monkeypatch, trace, client, server, said, heard):
    with quick_server(zygote, *options(certificates, server)) as node:
        use(monkeypatch, certificates, client)
        assert re.search(said, refusal_of(node.address, trace))
        node.logged(f"WARNING .* refused .*{heard}")
        assert "fingerprint" not in node.log  # the secret is not what is wrong
        assert "Traceback" not in node.log


def test_client_that_shows_no_certificate(server, certificates):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(certificates / "ca.pem")
    with (
        dial(server.address, preamble(tls=True)) as sock,
        context.wrap_socket(sock, server_hostname="localhost") as secure,
        pytest.raises(ssl.SSLError, match="certificate required"),
    ):
        secure.recv(1)
    server.logged(r"refused .*TLS failed: peer did not return a certificate")


def test_renewed_certificates_serve_new_connections(zygote, certificates, monkeypatch, tmp_path, trace, caplog):
    """A server runs for longer than a certificate may be valid."""
    for name in ("expired.pem", "expired.key", "ca.pem"):
        shutil.copy(certificates / name, tmp_path / name.replace("expired", "mine"))
    use(monkeypatch, certificates)
    with quick_server(zygote, *options(tmp_path, "mine")) as server:
        assert "has expired" in refusal_of(server.address, trace)
        shutil.copy(certificates / "node.pem", tmp_path / "mine.pem")
        # Two files cannot be replaced at one moment: a connection in between waits, and is told why.
        call = rpc_async(server.address, os.getppid)
        wait_until(lambda: "cannot use its own certificate and key (key values mismatch)" in caplog.text)
        assert f"for {server.address}: the node server cannot serve this connection now" in caplog.text
        assert not call.done()
        server.logged("refused .*the TLS certificate .*/mine.pem and the key .*/mine.key cannot be used: .*mismatch")
        assert "mine.key" not in caplog.text  # what strangers are told, too
        shutil.copy(certificates / "node.key", tmp_path / "mine.key")
        assert call.wait() in server.processes()
        close_client()
        assert server.log.count("cannot be used") == 1  # and not for each attempt
        assert session_of(server.address).wait().pid in server.processes()
        # A worker, too, reads them: forked by a session that has seen the good ones.
        shutil.copy(certificates / "expired.pem", tmp_path / "mine.pem")
        shutil.copy(certificates / "expired.key", tmp_path / "mine.key")
        with pytest.raises(AuthenticationError, match="has expired"):
            rpc_async(server.address, os.getppid).wait()


def test_trainer_reads_renewed_certificates(server, certificates, monkeypatch, tmp_path, caplog):
    """It, too, may run for longer than they are valid."""
    for name in ("node.pem", "node.key", "ca.pem"):
        shutil.copy(certificates / name, tmp_path / name.replace("node", "mine"))
    use(monkeypatch, tmp_path, "mine")
    loader = RPCDataloader(RPCDataset(server.address, Filled, 24, 10), batch_size=4, num_workers=1)
    assert len(list(loader)) == 6
    shutil.copy(certificates / "stranger.pem", tmp_path / "mine.pem")
    batches = iter(loader)
    wait_until(lambda: re.search("waiting for a worker: .*mine.key cannot be used: .*mismatch", caplog.text))
    shutil.copy(certificates / "node.pem", tmp_path / "mine.pem")
    assert len(list(batches)) == 6
    for end in ("pem", "key"):
        shutil.copy(certificates / f"expired.{end}", tmp_path / f"mine.{end}")
    close_client()
    with pytest.raises(AuthenticationError, match="certificate expired"):
        rpc_async(server.address, os.getpid).wait()


def test_session_ends_when_somebody_changes_what_it_gets(server, certificates, monkeypatch):
    """One bit of the encrypted bytes, late in the connection."""
    use(monkeypatch, certificates)
    harm = threading.Event()

    def flip(direction, data):
        return data[:-1] + bytes([data[-1] ^ (direction == "down" and harm.is_set())])

    with EncryptedProxy(server.address, flip) as proxy:
        assert rpc_async(proxy.address, os.getpid).wait() > 0
        harm.set()
        with pytest.raises((ConnectionLostError, RemoteProtocolError), match="altered on its way"):
            rpc_async(proxy.address, os.getpid).wait()
        close_client()


# --- settings


def test_launch_says_what_is_wrong_before_it_starts_anything(certificates, capsys):
    with pytest.raises(SystemExit):
        launch.main(["--port", "0", f"--tls-cert={certificates}/node.pem"])
    assert "--tls-cert given without --tls-key and --tls-ca: TLS needs all three" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        launch.main(["--host", "unix:/tmp/pool", *options(certificates)])
    assert "a Unix socket needs no TLS: leave out the --tls options" in capsys.readouterr().err


# --- the page


def test_commands_of_the_page_make_certificates_that_work(zygote, tmp_path, monkeypatch):
    version = subprocess.run(["openssl", "version"], capture_output=True, text=True).stdout if which("openssl") else ""
    if not re.match(r"OpenSSL ([3-9]|\d\d)", version):
        pytest.skip("the page is about the openssl command of version 3, which is not here")
    page = (ROOT / "docs/security.md").read_text()
    commands = re.findall(r"^\$ (openssl (?:.*\\\n)*.*)$", page, re.MULTILINE)
    assert len(commands) == 3
    script = "set -e; " + "; ".join(commands).replace("node01.hpc.cluster", "localhost").replace(
        "10.0.0.1", "127.0.0.1"
    )
    subprocess.run(["bash", "-c", script], cwd=tmp_path, check=True, capture_output=True)
    use(monkeypatch, tmp_path)
    with quick_server(zygote, *options(tmp_path)) as server:
        assert rpc_async(server.address, os.getppid).wait() in server.processes()
