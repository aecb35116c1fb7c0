"""The files of mutual TLS: a certificate and its key, which this side shows, and the CA that vouches for the other.

Invariant: what cannot work is refused here, before a socket exists, and named: a file that is missing or damaged, a
key of another certificate, a key that every user can read.
"""

from __future__ import annotations

import os
import ssl
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rpcdataloader.host import safe_files
from rpcdataloader.host.safe_files import Flaw, UnsafeFileError
from rpcdataloader.wire.handshake import TlsError

CERT_VARIABLE = "RPCDATALOADER_TLS_CERT"
KEY_VARIABLE = "RPCDATALOADER_TLS_KEY"
CA_VARIABLE = "RPCDATALOADER_TLS_CA"

# A certificate has about a thousand bytes, and so has each of a bundle's.
_MAX_FILE_BYTES = 2**22


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of three PEM files; absolute, since sessions change the folder.

    Attributes:
        cert: What this side shows, with the certificates between it and the CA behind it, if there are any.
        ca: One or more certificates; the other side's must be signed by one of them.
    """

    cert: str
    key: str
    ca: str

    def load(self, role: Literal["client", "server"]) -> TlsCredentials:
        """Read the files.

        Raises:
            TlsError: They cannot be used; the message says which, and what to do.
        """
        for what, path in (("certificate", self.cert), ("key", self.key), ("CA", self.ca)):
            _check_file(what, path)
        if role == "server":
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.verify_mode = ssl.CERT_REQUIRED
            # Connections are never resumed. In TLS 1.3 a ticket would be a record after the handshake that holds no
            # message, and a client that polls would take it for one.
            context.num_tickets = 0
            context.options |= ssl.OP_NO_TICKET
        else:
            # Asks for a certificate, and compares its names with the address.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        try:
            context.load_cert_chain(self.cert, self.key, self._refuse_passphrase)
        except ssl.SSLError as exc:
            if exc.reason == "KEY_VALUES_MISMATCH":
                raise TlsError(
                    f"the TLS key {self.key} does not belong to the certificate {self.cert}; name the two that were "
                    "made together"
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
            f"the TLS key {self.key} is protected by a passphrase, which nobody is there to type; "
            f"store it without: openssl pkey -in {self.key} -out NEW_FILE"
        )


@dataclass(frozen=True, slots=True)
class TlsCredentials:
    """Certificates and key of one side, loaded."""

    context: ssl.SSLContext
    files: TlsFiles


def name_files(names: tuple[str, str, str], values: tuple[str, str, str]) -> TlsFiles | None:
    """The files that an option or a variable each names; None where none does.

    Args:
        names: Of the options, for messages: certificate, key, CA.
        values: The paths, or ``""``.

    Raises:
        ValueError: Some are given, and some are missing.
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
    """What a client uses on TCP: the files that three environment variables name; None without these.

    Raises:
        ValueError: Some of the variables are missing.
        AuthenticationError: The files cannot be used.
    """
    names = CERT_VARIABLE, KEY_VARIABLE, CA_VARIABLE
    cert, key, ca = (environ.get(name, "") for name in names)
    files = name_files(names, (cert, key, ca))
    return None if files is None else files.load("client")


def _check_file(what: str, path: str) -> None:
    # What ssl says of a file that is missing does not name it.
    try:
        data = safe_files.read(path, _MAX_FILE_BYTES, stat.S_IRWXO if what == "key" else 0, any_owner=True)
    except OSError as exc:
        raise TlsError(f"the TLS {what} file {path} cannot be read: {exc.strerror}") from exc
    except UnsafeFileError as exc:
        if exc.flaw is Flaw.MODE:
            raise TlsError(
                f"the TLS key file {path} {exc}; if nobody can have read it, run: chmod 600 {path}"
            ) from None
        data = None
    if data is None or len(data) > _MAX_FILE_BYTES:
        raise TlsError(f"the TLS {what} file {path} is not a PEM file; name one")


def reason_of(exc: ssl.SSLError) -> str:
    """What OpenSSL says, in words."""
    return (exc.reason or exc.strerror or str(exc)).lower().replace("_", " ")
