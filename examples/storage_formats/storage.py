"""Objects of an S3 bucket, read with boto3 and with errors that name bucket, key and sample.

Credentials are boto3's: from the environment (``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``) or its files. They are
never sent to workers, which look for them on their own machine.
"""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, IncompleteReadError
from botocore.exceptions import ConnectionError as NotConnectedError
from urllib3.exceptions import HTTPError

from examples.storage_formats.errors import SampleError, StudyError, UnavailableError

# boto3 tries to begin a request this many times; its pauses double up to 20 s, and add up to half a minute.
REQUEST_ATTEMPTS = 8

# A transfer that broke off goes on where it was. Each of these tries has the attempts above.
TRANSFER_ATTEMPTS = 4

# Connections of one process: as many as threads read in it.
CONNECTIONS = 64

# No connection, one that was lost, and answers that have begun and do not end.
LOST = (HTTPClientError, NotConnectedError, IncompleteReadError, HTTPError)


@dataclass(frozen=True)
class Location:
    """A folder of a bucket.

    Attributes:
        endpoint: URL of the S3 service.
        bucket: Name of the bucket.
        prefix: Beginning of all keys, such as ``"study/"``; may be empty.
    """

    endpoint: str
    bucket: str
    prefix: str = ""

    def url(self, key: str) -> str:
        return f"s3://{self.bucket}/{self.prefix}{key}"


@functools.lru_cache
def get_client(endpoint: str) -> Any:
    """The client of this process for ``endpoint``.

    Making one takes 0.1 s of CPU time, so datasets do it in their constructor, and workers inherit it by a fork.
    """
    config = Config(
        retries={"mode": "standard", "total_max_attempts": REQUEST_ATTEMPTS},
        max_pool_connections=CONNECTIONS,
        connect_timeout=10,
        read_timeout=60,
        s3={"addressing_style": "path"},
    )
    try:
        client = boto3.Session().client("s3", endpoint_url=endpoint, config=config)
    except (BotoCoreError, ValueError) as error:
        raise StudyError(f"no S3 client for {endpoint!r}: {error}") from error
    # Connections that it had before the fork belong to the parent. After close(), a client opens others.
    os.register_at_fork(after_in_child=client.close)
    return client


def may_pass(error: Exception) -> bool:
    """Whether the storage did not answer, or broke off, or has trouble of its own."""
    if isinstance(error, ClientError):
        return bool(error.response["ResponseMetadata"]["HTTPStatusCode"] >= 500)
    return isinstance(error, LOST)


def explain(error: Exception, url: str, what: str) -> SampleError:
    """The exception that says that ``what`` (such as ``"sample 12"``) was to be read from ``url``."""
    kind = UnavailableError if may_pass(error) else SampleError
    return kind(f"{what} cannot be read from {url}: {type(error).__name__}: {error}")


class ObjectStream(io.RawIOBase):
    """Reads one object from its beginning to its end, through one request unless the connection is lost."""

    def __init__(self, location: Location, key: str) -> None:
        self._client = get_client(location.endpoint)
        self._where = {"Bucket": location.bucket, "Key": location.prefix + key}
        self._body: Any = None
        self._offset = 0
        self._persist(self._open)

    def _persist(self, action: Callable[[], None]) -> None:
        for attempt in range(1, TRANSFER_ATTEMPTS + 1):
            try:
                return action()
            except Exception as error:
                self.abandon()
                if attempt == TRANSFER_ATTEMPTS or not may_pass(error):
                    raise

    def _open(self) -> None:
        rest = {"Range": f"bytes={self._offset}-"} if self._offset else {}
        answer = self._client.get_object(**self._where, **rest)
        self._body = answer["Body"]
        self.size = self._offset + answer["ContentLength"]

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        begin = self._offset

        def read() -> None:
            if self._body is None:
                self._open()
            self._offset += self._body.readinto(buffer)
            if self._offset == begin:
                raise IncompleteReadError(actual_bytes=self._offset, expected_bytes=self.size)

        if self._offset < self.size:
            self._persist(read)
        return self._offset - begin

    def abandon(self) -> None:
        """Close the connection, if there is one."""
        if self._body is not None:
            self._body.close()
            self._body = None

    def close(self) -> None:
        if not self.closed:
            self.abandon()
        super().close()


def read_object(location: Location, key: str) -> bytearray:
    """The whole object."""
    with ObjectStream(location, key) as stream:
        content = bytearray(stream.size)
        view, num_read = memoryview(content), 0
        while num_read < len(content):
            num_read += stream.readinto(view[num_read:])
    return content


def open_object(location: Location, key: str) -> io.BufferedReader:
    """The object as a file that is read from its beginning to its end."""
    return io.BufferedReader(ObjectStream(location, key), 1 << 18)
