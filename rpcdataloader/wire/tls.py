"""TLS: the files of both sides, and a stream with the seam of :class:`~rpcdataloader.wire.transport.Stream`.

Each side shows a certificate, and checks the other's against a CA. Unusable files are refused before a socket exists,
and named: a missing or damaged file, a key of another certificate, a key that other users can read.

Unlike ``ssl.SSLSocket``, which refuses receive flags and ``sendmsg``, and whose waiting ``recv`` blocks a sending
thread, OpenSSL works on buffers in memory here. Its lock is held for a piece of at most ``CHUNK_BYTES`` and never
during a system call, so that both directions wait for the network independently.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import stat
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rpcdataloader.errors import ConnectionLostError, RemoteProtocolError, RPCError
from rpcdataloader.host import safe_files
from rpcdataloader.host.safe_files import Flaw, UnsafeFileError
from rpcdataloader.wire.handshake import TlsError
from rpcdataloader.wire.transport import Deadline, Stream

# The unit of one system call and of one hold of the lock: some 50 us of encryption.
CHUNK_BYTES = 128 * 1024

# A record holds at most 2^14 bytes, plus at most 256 more and a header of 5 on the wire.
_MAX_RECORD_BYTES = 2**14 + 256 + 5

# Types of record that an answer may begin with: an alert, or the handshake.
_FIRST_BYTES = (b"\x15", b"\x16")

# What is wrong with the other side's certificate, by OpenSSL's code (X509_V_ERR_...).
_OTHER_NAME = "is not for {host}; connect to a name that it was made for, or make one with subjectAltName="
_FAULTS = {
    9: "is not valid yet; is the clock of one of the machines wrong?",
    10: "has expired; renew it (or is the clock of this machine wrong?)",
    26: "was made for another purpose; make one with extendedKeyUsage={purpose}, or without any",
    62: _OTHER_NAME + "DNS:{host}",
    64: _OTHER_NAME + "IP:{host}",
}
_UNKNOWN_SIGNER = "is not signed by a CA in {ca} ({problem}); give both sides certificates of the same CA"

# What the other side has against this one, by a part of OpenSSL's reason.
_REFUSALS = {
    "CERTIFICATE_EXPIRED": "refused {mine}: it has expired, or is not valid yet; renew it",
    "UNKNOWN_CA": "refused {mine}: it is not signed by a CA that the other side knows; "
    "give both sides certificates of the same CA",
    "CERTIFICATE_REQUIRED": "asks for a certificate, and this side has shown none",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "has shown no certificate; it needs one that {ca} has signed",
}

CERT_VARIABLE = "RPCDATALOADER_TLS_CERT"
KEY_VARIABLE = "RPCDATALOADER_TLS_KEY"
CA_VARIABLE = "RPCDATALOADER_TLS_CA"
VARIABLES = f"{CERT_VARIABLE}, {KEY_VARIABLE} and {CA_VARIABLE}"

# A certificate has about a thousand bytes, and so has each of a bundle's.
_MAX_FILE_BYTES = 2**22


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of three PEM files; absolute, since sessions change the folder."""

    cert: str  # certificate that this side shows, followed by those between it and the CA, if any
    key: str
    ca: str  # one or more certificates; one of them must have signed the other side's

    def load(self, role: Literal["client", "server"]) -> TlsCredentials:
        """Read the files.

        Raises:
            TlsError: A file cannot be used; the message says which, and what to do.
        """
        for what, path in (("certificate", self.cert), ("key", self.key), ("CA", self.ca)):
            _check_file(what, path)
        if role == "server":
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.verify_mode = ssl.CERT_REQUIRED
            # Connections are never resumed. In TLS 1.3 a ticket would be a record after the handshake without a
            # message, and a polling client would take it for one.
            context.num_tickets = 0
            context.options |= ssl.OP_NO_TICKET
        else:
            # Requests a certificate, and compares its names with the address.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        try:
            context.load_cert_chain(self.cert, self.key, self._refuse_passphrase)
        except ssl.SSLError as exc:
            if exc.reason == "KEY_VALUES_MISMATCH":
                raise TlsError(
                    f"the TLS key {self.key} does not belong to the certificate {self.cert}; name two that were made "
                    "together"
                ) from exc
            raise TlsError(
                f"the TLS certificate {self.cert} and the key {self.key} cannot be used ({reason_of(exc)}); "
                "both must be in PEM format"
            ) from exc
        try:
            context.load_verify_locations(self.ca)
        except ssl.SSLError as exc:
            raise TlsError(
                f"the TLS CA file {self.ca} cannot be used ({reason_of(exc)}); it must hold certificates in PEM format"
            ) from exc
        return TlsCredentials(context, self)

    def _refuse_passphrase(self) -> str:
        raise TlsError(
            f"the TLS key {self.key} is protected by a passphrase, which this process cannot ask for; "
            f"store it without: openssl pkey -in {self.key} -out NEW_FILE"
        )


@dataclass(frozen=True, slots=True)
class TlsCredentials:
    """Certificates and key of one side, loaded."""

    context: ssl.SSLContext
    files: TlsFiles


def name_files(names: tuple[str, str, str], values: tuple[str, str, str]) -> TlsFiles | None:
    """The files that options or variables name; None if all are empty.

    Args:
        names: Names of the options, for messages: certificate, key, CA.
        values: The paths, or ``""``.

    Raises:
        ValueError: Only some are given.
    """
    if not any(values):
        return None
    missing = [name for name, value in zip(names, values, strict=True) if not value]
    if missing:
        given = [name for name in names if name not in missing]
        raise ValueError(
            f"{' and '.join(given)} given without {' and '.join(missing)}: TLS needs all three, "
            "since each side shows a certificate and checks the other's"
        )
    return TlsFiles(*(os.path.abspath(os.path.expanduser(value)) for value in values))


def client_tls(environ: Mapping[str, str] = os.environ) -> TlsCredentials | None:
    """The client's TLS credentials from the files that three environment variables name; None if they are unset.

    Raises:
        ValueError: Only some of the variables are set.
        AuthenticationError: The files cannot be used.
    """
    names = CERT_VARIABLE, KEY_VARIABLE, CA_VARIABLE
    cert, key, ca = (environ.get(name, "") for name in names)
    files = name_files(names, (cert, key, ca))
    return None if files is None else files.load("client")


def _check_file(what: str, path: str) -> None:
    # ssl's error for a missing file does not name it.
    try:
        data = safe_files.read(path, _MAX_FILE_BYTES, stat.S_IRWXO if what == "key" else 0, any_owner=True)
        is_pem = len(data) <= _MAX_FILE_BYTES
    except OSError as exc:
        raise TlsError(f"the TLS {what} file {path} cannot be read: {exc.strerror}") from exc
    except UnsafeFileError as exc:
        if exc.flaw is Flaw.MODE:
            raise TlsError(
                f"the TLS key file {path} {exc}; if no other user has read it, run: chmod 600 {path}"
            ) from None
        is_pem = False
    if not is_pem:
        raise TlsError(f"the TLS {what} file {path} is not a PEM file; name one")


def reason_of(exc: ssl.SSLError) -> str:
    """OpenSSL's reason, in words."""
    return (exc.reason or exc.strerror or str(exc)).lower().replace("_", " ")


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
            try:
                self._tls.do_handshake()
                self._agreed = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as exc:
                with contextlib.suppress(RPCError):
                    self._flush()  # the alert, which tells the other side
                raise self._translate(exc) from exc
            self._flush()
            if self._agreed:
                return
            if not answered:
                first = bytearray(1)
                if self._recv([memoryview(first)], socket.MSG_PEEK) and bytes(first) not in _FIRST_BYTES:
                    raise AnsweredInClearError
                answered = True
            if not self._receive(0):
                raise ConnectionLostError(f"{self.name} closed the connection during the handshake of TLS")

    def send(self, pieces: Sequence[bytes | bytearray | memoryview]) -> None:
        """Encrypt and send all of ``pieces`` in order; one thread at a time."""
        for piece in pieces:
            rest = memoryview(piece).cast("B")
            while rest:
                try:
                    with self._lock:
                        rest = rest[self._tls.write(rest[:CHUNK_BYTES]) :]
                except ssl.SSLError as exc:
                    raise ConnectionLostError(
                        f"connection to {self.name} lost while sending: {reason_of(exc)}"
                    ) from exc
                if self._outgoing.pending >= CHUNK_BYTES:  # small pieces travel together
                    self._flush()
        self._flush()

    def _flush(self) -> None:
        with self._lock:
            data = self._outgoing.read()
        if data:
            super().send([data])

    def recv_into(self, views: Sequence[memoryview]) -> int:
        """Decrypt each record into ``views``; under a :meth:`limit`, returns with the available bytes.

        Raises:
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
        reason, ca = exc.reason or "", self._files.ca
        if isinstance(exc, ssl.SSLCertVerificationError):
            purpose = "clientAuth" if self._host is None else "serverAuth"
            fault = _FAULTS.get(exc.verify_code, _UNKNOWN_SIGNER)
            fault = fault.format(host=self._host, purpose=purpose, ca=ca, problem=exc.verify_message)
            return TlsError(f"the certificate of {self.name} {fault}")
        mine = f"this side's certificate ({self._files.cert})"
        for part, refusal in _REFUSALS.items():
            if part in reason:
                return TlsError(f"{self.name} {refusal.format(mine=mine, ca=ca)}")
        if "BAD_CERTIFICATE" in reason and self._host is None:
            return TlsError(f"{self.name} refused {mine}: it is not for the name or address that the client used")
        if "ALERT" in reason and "RECORD_MAC" not in reason:
            return TlsError(f"{self.name} refused TLS with this side ({reason_of(exc)})")
        if not self._agreed:
            return TlsError(
                f"{self.name} and this side cannot agree on TLS ({reason_of(exc)}); 1.2 is the oldest allowed"
            )
        return RemoteProtocolError(
            f"something from {self.name} was altered on its way, and nothing of it was used ({reason_of(exc)})"
        )
