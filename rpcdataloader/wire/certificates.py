"""The files of mutual TLS: a certificate and its key, which this side shows, and the CA that signs the other side's.

Invariant: unusable files are refused here, before a socket exists, and named: a missing or damaged file, a key of
another certificate, a key that other users can read.
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
        cert: Certificate that this side shows, followed by those between it and the CA, if any.
        ca: One or more certificates; one of them must have signed the other side's.
    """

    cert: str
    key: str
    ca: str

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
    except OSError as exc:
        raise TlsError(f"the TLS {what} file {path} cannot be read: {exc.strerror}") from exc
    except UnsafeFileError as exc:
        if exc.flaw is Flaw.MODE:
            raise TlsError(
                f"the TLS key file {path} {exc}; if no other user has read it, run: chmod 600 {path}"
            ) from None
        data = None
    if data is None or len(data) > _MAX_FILE_BYTES:
        raise TlsError(f"the TLS {what} file {path} is not a PEM file; name one")


def reason_of(exc: ssl.SSLError) -> str:
    """OpenSSL's reason, in words."""
    return (exc.reason or exc.strerror or str(exc)).lower().replace("_", " ")
