"""TLS: the files of both sides, and a transport with the seam of :class:`~rpcdataloader.wire.transport.Transport`.

Each side shows a certificate, and checks the other's against a CA. Unusable files are refused before a socket exists,
and so is a key that other users can read. Errors have OpenSSL's words, and name the files.

Unlike ``ssl.SSLSocket``, which refuses receive flags and ``sendmsg``, and whose waiting ``recv`` blocks a sending
thread, OpenSSL works on buffers in memory here. Its lock is held for a piece of at most ``CHUNK_BYTES`` and never
during a system call, so that both directions wait for the network independently.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import stat
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rpcdataloader.errors import ConnectionLostError, RemoteProtocolError, RPCError
from rpcdataloader.host.locks import Lock
from rpcdataloader.host.trust import UnsafeFileError, read_safely
from rpcdataloader.wire.frames import as_bytes
from rpcdataloader.wire.handshake import IN_CLEAR, TlsError
from rpcdataloader.wire.transport import Deadline, Transport, Views

# The unit of one system call and of one hold of the lock: some 50 us of encryption.
CHUNK_BYTES = 128 * 1024

# A record holds at most 2^14 bytes, plus at most 256 more and a header of 5 on the wire.
_MAX_RECORD_BYTES = 2**14 + 256 + 5

CERT_VARIABLE = "RPCDATALOADER_TLS_CERT"
KEY_VARIABLE = "RPCDATALOADER_TLS_KEY"
CA_VARIABLE = "RPCDATALOADER_TLS_CA"
VARIABLES = f"{CERT_VARIABLE}, {KEY_VARIABLE} and {CA_VARIABLE}"


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
        _check_key(self.key)
        # OpenSSL names no files.
        with _named(f"certificate {self.cert} and the key {self.key}"):
            context.load_cert_chain(self.cert, self.key, self._refuse_passphrase)
        with _named(f"CA file {self.ca}"):
            context.load_verify_locations(self.ca)
        return TlsCredentials(context, self)

    def _refuse_passphrase(self) -> str:
        raise TlsError(f"the TLS key {self.key} is protected by a passphrase, which this process cannot ask for")


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


def client_tls(environ: Mapping[str, str] = os.environ) -> TlsFiles | None:
    """The client's files that three environment variables name, which can be used; None if they are unset.

    Raises:
        ValueError: Only some of the variables are set.
        AuthenticationError: The files cannot be used.
    """
    names = CERT_VARIABLE, KEY_VARIABLE, CA_VARIABLE
    cert, key, ca = (environ.get(name, "") for name in names)
    files = name_files(names, (cert, key, ca))
    if files is not None:
        files.load("client")  # each connection does so again; here errors come before anything is started
    return files


def _check_key(path: str) -> None:
    try:
        read_safely(path, 0, stat.S_IRWXO, any_owner=True)
    except OSError as exc:
        raise TlsError(f"the TLS key {path} cannot be used: {exc.strerror}") from exc
    except UnsafeFileError as exc:
        raise TlsError(f"the TLS key {path} {exc}") from None


@contextlib.contextmanager
def _named(files: str) -> Iterator[None]:
    try:
        yield
    except OSError as exc:  # ssl.SSLError among them
        raise TlsError(f"the TLS {files} cannot be used: {reason_of(exc)}") from exc


def reason_of(exc: OSError) -> str:
    """OpenSSL's own words."""
    if isinstance(exc, ssl.SSLCertVerificationError):
        return f"the other side's certificate: {exc.verify_message}"
    reason = getattr(exc, "reason", None)
    return reason.lower().replace("_", " ") if reason else exc.strerror or str(exc)


class TlsTransport(Transport):
    """A transport over TLS, which takes over the socket of ``transport``. :meth:`shake_hands` comes first.

    As with a plain transport, one thread sends while another receives, and the end is a plain one, too. TLS's own
    notice (close_notify) is not sent, because OpenSSL would drop data still to be received, and is not needed, because
    messages have lengths, and a drain ends with one that says so.

    Args:
        transport: Connected transport without any TLS traffic yet.
        credentials: This side's credentials, loaded for its role.
        host: Name or address that the server's certificate must be for; None on the server's side.
    """

    def __init__(self, transport: Transport, credentials: TlsCredentials, host: str | None = None) -> None:
        super().__init__(transport._sock, transport.name)
        self._traffic = transport._traffic
        self._files = credentials.files
        self._deadline = Deadline(None)
        self._agreed = False
        self._plain: deque[bytes | bytearray | memoryview] = deque()  # to encrypt
        self._ended = False  # the peer has said so, in TLS's terms
        self._received = memoryview(bytearray(CHUNK_BYTES))
        # Guards the two buffers and their users. Reentrant: a finalizer, in the middle of a receive, may warn, and a
        # session sends that to its client at once.
        self._lock = Lock()
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

    def shake_hands(self, deadline: Deadline, in_clear: Callable[[], object] = lambda: None) -> None:
        """Agree on keys, and check the certificate of the other side.

        Args:
            in_clear: Function to call when the other side answers without TLS, as a refusal does. It reads the answer.

        Raises:
            TlsError: One side does not accept the other.
            ConnectionLostError: The peer is gone.
            RPCTimeoutError: The deadline has passed.
        """
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
            if not self._traffic[0] and self.peek() == IN_CLEAR:
                in_clear()
            if not self._receive(0):
                raise ConnectionLostError(f"{self.name} closed the connection during the handshake of TLS")

    def send(self, pieces: Views) -> None:
        """Encrypt and send all of ``pieces`` in order; one thread at a time."""
        super().send(())
        self._plain.extend(pieces)
        while encrypted := self._encrypt():
            super().send([encrypted])

    def send_now(self, pieces: Views) -> bool:
        """Encrypt and send what the kernel takes without a wait; see :meth:`Transport.send_now`."""
        self._plain.extend(pieces)
        while encrypted := self._encrypt():
            if not super().send_now([encrypted]):
                return False
        return True

    def _encrypt(self) -> bytes:
        """Encrypt further pieces, about :data:`CHUNK_BYTES` of them; empty if there are none."""
        try:
            while self._plain and self._outgoing.pending < CHUNK_BYTES:  # small pieces travel together
                if not (piece := as_bytes(self._plain.popleft())):
                    continue
                with self._lock:
                    size = self._tls.write(piece[:CHUNK_BYTES])
                if size < len(piece):
                    self._plain.appendleft(piece[size:])
        except ssl.SSLError as exc:
            raise ConnectionLostError(f"connection to {self.name} lost while sending: {reason_of(exc)}") from exc
        with self._lock:
            return self._outgoing.read()

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
        reason = reason_of(exc)
        # In TLS 1.3, the server refuses a certificate after the client's part of the handshake is over.
        is_refusal = "ALERT" in (exc.reason or "") and "RECORD_MAC" not in exc.reason
        if is_refusal or not self._agreed:
            files = f"here: certificate {self._files.cert}, CA {self._files.ca}"
            return TlsError(f"TLS failed: {reason} ({files})")
        return RemoteProtocolError(
            f"something from {self.name} was altered on its way, and nothing of it was used ({reason})"
        )
