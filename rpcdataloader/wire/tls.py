"""A stream over TLS: the same seam as :class:`~rpcdataloader.wire.transport.Stream`, with the bytes encrypted.

Unlike ``ssl.SSLSocket``, which refuses receive flags and ``sendmsg``, and whose waiting ``recv`` blocks a sending
thread, OpenSSL works on buffers in memory here. Its lock is held for a piece of at most ``CHUNK_BYTES`` and never
during a system call, so that both directions wait for the network independently.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Sequence

from rpcdataloader.errors import ConnectionLostError, RemoteProtocolError, RPCError
from rpcdataloader.wire.certificates import TlsCredentials, reason_of
from rpcdataloader.wire.handshake import TlsError
from rpcdataloader.wire.transport import Deadline, Stream

# The unit of one system call and of one hold of the lock: some 50 us of encryption.
CHUNK_BYTES = 128 * 1024

# A record holds at most 2^14 bytes, plus at most 256 more and a header of 5 on the wire.
_MAX_RECORD_BYTES = 2**14 + 256 + 5

# Types of record that an answer may begin with: an alert, or the handshake.
_FIRST_BYTES = (b"\x15", b"\x16")

# OpenSSL's codes for faults of the other side's certificate (X509_V_ERR_...).
_NOT_YET_VALID, _EXPIRED, _WRONG_PURPOSE, _OTHER_HOST, _OTHER_ADDRESS = 9, 10, 26, 62, 64


class AnsweredInClearError(Exception):
    """The peer sent something that is not TLS, which stays unread."""


class TlsStream(Stream):
    """A stream over TLS, which takes over the socket of ``stream``. :meth:`shake_hands` comes first.

    As with a plain stream, one thread sends while another receives, and the end is a plain one, too: TLS's own notice
    (close_notify) is not sent, because OpenSSL would drop data still to be received, and is not needed, because
    messages have lengths, and a drain ends with one that says so.

    Args:
        stream: Connected stream without any TLS traffic yet.
        credentials: This side's credentials, loaded for its role.
        host: Name or address that the server's certificate must be for; None on the server's side.
    """

    def __init__(self, stream: Stream, credentials: TlsCredentials, host: str | None = None) -> None:
        super().__init__(stream._sock, stream.name, stream._traffic)
        self._files = credentials.files
        self._host = host
        self._deadline = Deadline(None)
        self._agreed = False
        self._ended = False  # the peer has said so, in TLS's terms
        self._received = memoryview(bytearray(CHUNK_BYTES))
        # Guards the two buffers and their users. Reentrant: a finalizer, in the middle of a receive, may warn, and a
        # session sends that to its client at once.
        self._lock = threading.RLock()
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = credentials.context.wrap_bio(
            self._incoming,
            self._outgoing,
            server_side=host is None,
            # The zone of a link-local address has a meaning on this machine only.
            server_hostname=None if host is None else host.partition("%")[0],
        )

    def limit(self, deadline: Deadline) -> None:
        """Bound later sends and receives."""
        self._deadline = deadline
        super().limit(deadline)

    def shake_hands(self, deadline: Deadline) -> None:
        """Agree on keys, and check the certificate of the other side.

        Raises:
            TlsError: One side does not accept the other.
            AnsweredInClearError: The server does not speak TLS; the plain stream has its answer.
            ConnectionLostError: The peer is gone.
            RPCTimeoutError: The deadline has passed.
        """
        answered = self._host is None
        while True:
            self.limit(deadline)
            problem: RPCError | None = None
            done = False
            try:
                self._tls.do_handshake()
                done = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as exc:
                problem = self._translate(exc)
                problem.__cause__ = exc
            # After a problem, this is the alert that tells the other side.
            if data := self._outgoing.read():
                with contextlib.suppress(RPCError) if problem else contextlib.nullcontext():
                    super().send([data])
            if problem is not None:
                raise problem
            if done:
                self._agreed = True
                return
            if not answered:
                first = bytearray(1)
                if self._recv([memoryview(first)], socket.MSG_PEEK) and bytes(first) not in _FIRST_BYTES:
                    raise AnsweredInClearError
                answered = True
            if not self._receive(0):
                raise ConnectionLostError(f"{self.name} closed the connection during the handshake of TLS")

    def send(self, pieces: Sequence[bytes | bytearray | memoryview]) -> None:
        """Encrypt and send all of ``pieces`` in order; one thread at a time.

        Raises:
            ConnectionLostError: The peer is gone.
        """
        for piece in pieces:
            rest = memoryview(piece).cast("B")
            while rest:
                data = b""
                try:
                    with self._lock:
                        rest = rest[self._tls.write(rest[:CHUNK_BYTES]) :]
                        # Small pieces travel together.
                        if self._outgoing.pending >= CHUNK_BYTES:
                            data = self._outgoing.read()
                except ssl.SSLError as exc:
                    raise ConnectionLostError(
                        f"connection to {self.name} lost while sending: {reason_of(exc)}"
                    ) from exc
                if data:
                    super().send([data])
        with self._lock:
            data = self._outgoing.read()
        if data:
            super().send([data])

    def recv_into(self, views: Sequence[memoryview]) -> int:
        """Fill ``views`` in order; returns how many bytes arrived: all of them, fewer, or 0 at the end of file.

        Each record is decrypted in place. Under a :meth:`limit`, returns with the available bytes.

        Raises:
            ConnectionLostError: The kernel reported an error.
            RemoteProtocolError: The bytes were altered on their way.
            TlsError: The other side does not accept this one's certificate.
        """
        missing = sum(map(len, views))
        filled = 0
        for view in views:
            while view:
                size = self._decrypt(view)
                if size is None:
                    if (filled and self._deadline.timeout is not None) or not self._receive(missing - filled):
                        return filled
                elif size == 0:
                    return filled
                else:
                    filled += size
                    view = view[size:]
        return filled

    def _decrypt(self, view: memoryview) -> int | None:
        """Decrypt at most one record into ``view``; 0 after the peer's last one, None if more must be received."""
        try:
            with self._lock:
                # Cheaper than the exception, with which most waits would begin.
                if not self._incoming.pending and not self._tls.pending() and not self._ended:
                    return None
                size: int = self._tls.read(len(view), view)  # type: ignore[assignment]  # into a buffer: a number
        except ssl.SSLWantReadError:
            return None
        except ssl.SSLZeroReturnError:
            self._ended = True
            return 0
        except ssl.SSLError as exc:
            raise self._translate(exc) from exc
        self._ended = size == 0
        return size

    def _receive(self, missing: int) -> bool:
        """Receive what is available, or wait for some; returns False at the end of file.

        Args:
            missing: Number of bytes of the message that have not been decrypted. All but those of a partly received
                record come with at least that many bytes, so a wait for them at once, without the GIL, is safe.
        """
        sure = min(missing - _MAX_RECORD_BYTES, CHUNK_BYTES)
        if self._deadline.timeout is not None:
            self.limit(self._deadline)
        size = self._recv([self._received[:sure]]) if sure > 0 else self._recv([self._received], 0)
        with self._lock:
            self._incoming.write(self._received[:size])
        return size > 0

    @property
    def has_unread(self) -> bool:
        """Whether received bytes wait for the reader, perhaps only the first part of a message."""
        with self._lock:
            return bool(self._incoming.pending or self._tls.pending())

    def read_ahead(self) -> None:
        """Does nothing: whole records are received in any case."""

    def _translate(self, exc: ssl.SSLError) -> RPCError:
        if isinstance(exc, ssl.SSLCertVerificationError):
            return TlsError(self._describe_certificate(exc))
        reason = exc.reason or ""
        mine = f"this side's certificate ({self._files.cert})"
        if "CERTIFICATE_EXPIRED" in reason:
            return TlsError(f"{self.name} refused {mine}: it has expired, or is not valid yet; renew it")
        if "UNKNOWN_CA" in reason:
            return TlsError(
                f"{self.name} refused {mine}: it is not signed by a CA that the other side knows; "
                "give both sides certificates of the same CA"
            )
        if "BAD_CERTIFICATE" in reason and self._host is None:
            return TlsError(f"{self.name} refused {mine}: it is not for the name or address that the client used")
        if "CERTIFICATE_REQUIRED" in reason:
            return TlsError(f"{self.name} asks for a certificate, and this side has shown none")
        if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
            return TlsError(f"{self.name} has shown no certificate; it needs one that {self._files.ca} has signed")
        if "ALERT" in reason and "RECORD_MAC" not in reason:
            return TlsError(f"{self.name} refused TLS with this side ({reason_of(exc)})")
        if not self._agreed:
            return TlsError(
                f"{self.name} and this side cannot agree on TLS ({reason_of(exc)}); 1.2 is the oldest allowed"
            )
        return RemoteProtocolError(
            f"something from {self.name} was altered on its way, and nothing of it was used ({reason_of(exc)})"
        )

    def _describe_certificate(self, exc: ssl.SSLCertVerificationError) -> str:
        certificate = f"the certificate of {self.name}"
        if exc.verify_code == _EXPIRED:
            return f"{certificate} has expired; renew it (or is the clock of this machine wrong?)"
        if exc.verify_code == _NOT_YET_VALID:
            return f"{certificate} is not valid yet; is the clock of one of the machines wrong?"
        if exc.verify_code == _WRONG_PURPOSE:
            purpose = "clientAuth" if self._host is None else "serverAuth"
            return (
                f"{certificate} was made for another purpose; make one with extendedKeyUsage={purpose}, or without any"
            )
        if exc.verify_code in (_OTHER_HOST, _OTHER_ADDRESS):
            kind = "IP" if exc.verify_code == _OTHER_ADDRESS else "DNS"
            return (
                f"{certificate} is not for {self._host}; connect to a name that it was made for, or make one with "
                f"subjectAltName={kind}:{self._host}"
            )
        return (
            f"{certificate} is not signed by a CA in {self._files.ca} ({exc.verify_message}); "
            "give both sides certificates of the same CA"
        )
