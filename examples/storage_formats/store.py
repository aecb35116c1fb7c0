"""An object store on this machine: SeaweedFS, for as long as the command runs."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from examples.storage_formats.errors import StudyError
from examples.storage_formats.processes import Child, wait_for
from examples.storage_formats.storage import get_client

BUCKET = "storage-formats"

# Each of them listens on a port for HTTP and on one for gRPC. weed cannot be told to let the kernel choose.
PARTS = ("s3", "master", "volume", "filer", "admin")


def find_program(name: str, extra: str) -> str:
    """The path of a program that pip has installed with ``extra``."""
    path = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if path is None:
        raise StudyError(f"there is no program {name}: {extra}")
    return path


class Store:
    """SeaweedFS on loopback, which keeps its files in ``folder``.

    Credentials are random numbers, and are set in the environment of this process by :func:`running`.
    """

    def __init__(self, folder: Path, log: Path) -> None:
        self._program = find_program("weed", "pip install --group formats, or name a store of yours with --endpoint")
        self._folder, self._log = folder, log
        self._child: Child | None = None
        self._ports = _find_free_ports(2 * len(PARTS))
        self.port = self._ports[0]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.credentials = {"AWS_ACCESS_KEY_ID": secrets.token_hex(8), "AWS_SECRET_ACCESS_KEY": secrets.token_hex(16)}

    def start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        keys = dict(zip(("accessKey", "secretKey"), self.credentials.values(), strict=True))
        actions = ["Admin", "Read", "Write", "List"]
        config = self._folder / "s3.json"
        config.touch(0o600)
        config.write_text(json.dumps({"identities": [{"name": "study", "credentials": [keys], "actions": actions}]}))
        # By default, weed listens on all interfaces, with web pages, and reports to its makers.
        options = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false", "-admin.ui=false", "-webdav=false"]
        options += ["-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={config}", f"-dir={self._folder}"]
        for place, part in enumerate(PARTS):
            options += [f"-{part}.port={self._ports[2 * place]}", f"-{part}.port.grpc={self._ports[2 * place + 1]}"]
        self._child = Child([self._program, "mini", *options], self._log)
        wait_for(self._child, self._answers, "the object store")

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(self.endpoint, timeout=5).close()
        except urllib.error.HTTPError as error:
            error.close()
            return error.code == 403  # it knows who may ask
        except OSError:
            return False
        return True

    @property
    def cpu_seconds(self) -> float:
        assert self._child is not None
        return self._child.cpu_seconds

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop()

    def kill(self) -> None:
        """End it as a power failure would."""
        assert self._child is not None
        self._child.kill()


@contextlib.contextmanager
def running(store: Store) -> Iterator[Store]:
    """Start ``store`` and make the bucket, with its credentials in the environment; stop it at the end."""
    with environment(AWS_DEFAULT_REGION="us-east-1", **store.credentials):
        try:
            store.start()
            client = get_client(store.endpoint)
            with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists):
                client.create_bucket(Bucket=BUCKET)
            yield store
        finally:
            store.stop()


@contextlib.contextmanager
def environment(**changes: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _find_free_ports(number: int) -> list[int]:
    """Ports that are free now. Should another program take one before weed does, its start fails and says so."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [sock.getsockname()[1] for sock in sockets]
