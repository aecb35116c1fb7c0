"""Where the shared secret comes from.

Invariant: a secret that somebody else could know, or could have chosen, is refused rather than used, and no secret
appears in a repr, an error message or, once it has been read, in the environment that child processes inherit.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rpcdataloader.errors import AuthenticationError
from rpcdataloader.host import safe_files
from rpcdataloader.host.safe_files import Flaw, UnsafeFileError
from rpcdataloader.wire.address import Address

TOKEN_VARIABLE = "RPCDATALOADER_TOKEN"
TOKEN_FILE_VARIABLE = "RPCDATALOADER_TOKEN_FILE"
INSECURE_VARIABLE = "RPCDATALOADER_INSECURE"

# What both sides use in place of a secret when they were told to go without: everybody knows it. The protocol is the
# same as with a secret, so there is no negotiation, and nobody on the path can talk the sides into a weaker one.
INSECURE_SECRET = b"rpcdataloader insecure"

# Whoever records a handshake can try guesses offline, so a word or a pin is no secret. Ours have 43 characters.
_MIN_TOKEN_BYTES = 16
# Somebody named the wrong file; do not read a data set into memory to find out.
_MAX_TOKEN_BYTES = 4096

# Secrets of node servers that a pool has started.
_of_addresses: dict[Address, Credentials] = {}

# RPCDATALOADER_TOKEN, once it has been taken out of the environment. Set once, to a value that does not change.
_environment_token: str | None = None


@dataclass(frozen=True, slots=True)
class Credentials:
    """A secret, and where it came from.

    Attributes:
        secret: Key of the handshake; not shown by ``repr``.
        source: For messages: where the secret came from.
    """

    secret: bytes = field(repr=False)
    source: str

    @property
    def fingerprint(self) -> str:
        """Eight characters to compare the secrets of two sides by; ``"none"`` without a secret."""
        if self.insecure:
            return "none"
        return hashlib.sha256(b"rpcdataloader fingerprint\0" + self.secret).hexdigest()[:8]

    @property
    def insecure(self) -> bool:
        """Whether everybody knows the secret."""
        return self.secret == INSECURE_SECRET


INSECURE = Credentials(INSECURE_SECRET, "insecure")


def load_credentials(
    token: str | bytes | None = None,
    token_file: str | os.PathLike[str] | None = None,
    environ: MutableMapping[str, str] = os.environ,
) -> Credentials:
    """Find the secret: ``token``, ``token_file``, the environment, else the file in the user's configuration.

    That file is created on first use. It is the same for all processes, and all machines, that share a home directory.

    Args:
        environ: ``RPCDATALOADER_TOKEN_FILE`` and ``RPCDATALOADER_TOKEN`` are looked up here. The latter is removed,
            whether it is used or not, and remembered for later calls.

    Raises:
        AuthenticationError: There is no secret, or it cannot be trusted; the message says what to do.
        ValueError: Both ``token`` and ``token_file`` are given.
    """
    token_from_environment = _take_environment_token(environ)
    if token is not None and token_file is not None:
        raise ValueError("give token or token_file, not both")
    if token is not None:
        return _credentials(token, "argument")
    if token_file is None:
        token_file = environ.get(TOKEN_FILE_VARIABLE)
        if token_file == "":
            raise AuthenticationError(f"{TOKEN_FILE_VARIABLE} is empty; name a file with the secret in it, or unset it")
    if token_file is not None:
        path = Path(token_file).expanduser()
        credentials = _read(path)
    elif token_from_environment is not None:
        return _credentials(token_from_environment, f"environment variable {TOKEN_VARIABLE}")
    else:
        path = _default_path(environ)
        credentials = _read(path)
        if credentials is None:
            _create(path)
            credentials = _read(path)
    if credentials is None:
        raise AuthenticationError(f"the token file {path} does not exist; {_HOW_TO_CREATE}")
    return credentials


def receive_credentials(descriptor: int, environ: MutableMapping[str, str] = os.environ) -> Credentials:
    """Read the secret from the first line of a pipe or socket, and nothing that comes after that line.

    Args:
        descriptor: Where the line comes from; standard input, for messages.
        environ: ``RPCDATALOADER_TOKEN`` is removed from here, as by :func:`load_credentials`.

    Raises:
        AuthenticationError: The line is no secret.
    """
    _take_environment_token(environ)
    line = b""
    while not line.endswith(b"\n") and len(line) <= _MAX_TOKEN_BYTES and (byte := os.read(descriptor, 1)):
        line += byte
    return _credentials(line, "standard input")


def remember_credentials(address: Address, credentials: Credentials) -> None:
    """Use this secret for an address from now on, whatever the environment says."""
    _of_addresses[address] = credentials


def client_credentials(address: Address, environ: MutableMapping[str, str] = os.environ) -> Credentials:
    """The secret for a connection to ``address``: that of a pool; none where ``RPCDATALOADER_INSECURE`` allows that.

    Args:
        environ: ``RPCDATALOADER_INSECURE`` is ``unix`` (no secret on Unix sockets) or ``tcp`` (none at all).

    Raises:
        AuthenticationError: As :func:`load_credentials`.
        ValueError: ``RPCDATALOADER_INSECURE`` is something else.
    """
    if address in _of_addresses:
        return _of_addresses[address]
    allowed = environ.get(INSECURE_VARIABLE)
    if allowed not in (None, "unix", "tcp"):
        raise ValueError(f"{INSECURE_VARIABLE} is {allowed!r}; set it to unix or tcp, or unset it")
    if allowed == "tcp" or (allowed == "unix" and address.is_unix):
        return INSECURE
    return load_credentials(environ=environ)


_HOW_TO_CREATE = (
    'create it with: (umask 077; python -c "import secrets; print(secrets.token_urlsafe())" > FILE), '
    "the same on all machines"
)


def _take_environment_token(environ: MutableMapping[str, str]) -> str | None:
    global _environment_token
    token = environ.pop(TOKEN_VARIABLE, None)
    if token is not None:
        _environment_token = token
    return _environment_token


def _credentials(token: str | bytes, source: str) -> Credentials:
    """Check what does not depend on where the secret came from."""
    if not isinstance(token, (str, bytes)):
        raise TypeError(f"token must be str or bytes, not {type(token).__name__}")
    # Editors and echo put a line break at the end of a file.
    secret = (token.encode() if isinstance(token, str) else token).rstrip()
    if not secret:
        raise AuthenticationError(f"the secret ({source}) is empty; {_HOW_TO_CREATE}")
    if not _MIN_TOKEN_BYTES <= len(secret) <= _MAX_TOKEN_BYTES:
        size = "shorter" if len(secret) < _MIN_TOKEN_BYTES else "longer"
        limit = _MIN_TOKEN_BYTES if len(secret) < _MIN_TOKEN_BYTES else _MAX_TOKEN_BYTES
        raise AuthenticationError(f"the secret ({source}) is {size} than {limit} characters; {_HOW_TO_CREATE}")
    # HMAC pads keys with zero bytes, so a secret that ends in some equals one without.
    if secret.rstrip(b"\0") == INSECURE_SECRET:
        raise AuthenticationError(f"the secret ({source}) is the one that everybody knows; {_HOW_TO_CREATE}")
    return Credentials(secret, source)


def _default_path(environ: Mapping[str, str]) -> Path:
    config = Path(environ.get("XDG_CONFIG_HOME", ""))
    if not config.is_absolute():  # the XDG specification says to ignore relative ones
        config = Path(environ.get("HOME") or os.path.expanduser("~")) / ".config"
    return config / "rpcdataloader" / "token"


def _read(path: Path) -> Credentials | None:
    """Read a token file; None when there is none, AuthenticationError when it is not to be trusted."""
    try:
        data = safe_files.read(path, _MAX_TOKEN_BYTES, stat.S_IRWXG | stat.S_IRWXO)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AuthenticationError(
            f"the token file {path} cannot be read: {error.strerror}; "
            f"make it yours and readable, or set {TOKEN_FILE_VARIABLE} to another file"
        ) from error
    except UnsafeFileError as error:
        advice = {
            Flaw.KIND: f"; set {TOKEN_FILE_VARIABLE} to one",
            Flaw.OWNER: ", who could read and change it; use a file of your own",
            Flaw.MODE: f"; if nobody can have read it, run: chmod 600 {path}",
        }[error.flaw]
        raise AuthenticationError(f"the token file {path} {error}{advice}") from None
    return _credentials(data, f"file {path}")


def _create(path: Path) -> None:
    """Create a token file with a new secret, unless somebody else has done so by then.

    All tasks of a job may get here at once, on several machines that share the directory. Each writes a file of its
    own, and linking it to its final name succeeds for one of them only; so the file is complete as soon as it can be
    seen (opened with O_EXCL, it would be seen empty at first).
    """
    try:
        # Not the home directory itself: where that is missing, a secret in it would be shared with nobody.
        path.parent.parent.mkdir(mode=0o700, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=".token-", dir=path.parent)  # of mode 0600
        try:
            with open(descriptor, "w") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
                file.flush()
                os.fsync(descriptor)
            with suppress(FileExistsError):
                os.link(temporary, path)
        finally:
            os.unlink(temporary)
    except OSError as error:
        raise AuthenticationError(
            f"the token file {path} cannot be created: {error.strerror}; "
            f"set {TOKEN_FILE_VARIABLE} to a file with a secret in it, {_HOW_TO_CREATE}"
        ) from error
