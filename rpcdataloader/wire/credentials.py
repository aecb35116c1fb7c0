"""The source of the shared secret.

Invariant: a secret that another user could know, or could have chosen, is refused, and no secret appears in a repr or
an error message. The environment stays as it is, for programs that a training script starts; only sessions, which run a
client's code, remove ``RPCDATALOADER_TOKEN`` from theirs.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rpcdataloader.errors import AuthenticationError
from rpcdataloader.host.trust import UnsafeFileError, read_safely
from rpcdataloader.wire.address import Address

TOKEN_VARIABLE = "RPCDATALOADER_TOKEN"
TOKEN_FILE_VARIABLE = "RPCDATALOADER_TOKEN_FILE"
INSECURE_VARIABLE = "RPCDATALOADER_INSECURE"

# Stands for a secret on sides that were told to go without; it is public. The protocol is the same as with a secret, so
# there is nothing to negotiate, and an attacker on the path cannot talk the sides into a weaker one.
INSECURE_SECRET = b"rpcdataloader insecure"

# An attacker who records a handshake can try guesses offline, so a word or a pin is no secret. Ours have 43 characters.
_MIN_TOKEN_BYTES = 16
# The file may be the wrong one, such as a data set: its size is limited before it is read.
_MAX_TOKEN_BYTES = 4096

# Secrets of a pool's node servers.
_of_addresses: dict[Address, Credentials] = {}


@dataclass(frozen=True, slots=True)
class Credentials:
    """A secret and its source."""

    secret: bytes = field(repr=False)  # key of the handshake
    source: str  # for messages

    @property
    def fingerprint(self) -> str:
        """Eight characters that identify a secret, to compare both sides'; ``"none"`` without a secret."""
        if self.insecure:
            return "none"
        return hashlib.sha256(b"rpcdataloader fingerprint\0" + self.secret).hexdigest()[:8]

    @property
    def insecure(self) -> bool:
        """Whether the secret is the public one."""
        return self.secret == INSECURE_SECRET


INSECURE = Credentials(INSECURE_SECRET, "insecure")


def load_credentials(token_file: str | None = None, environ: Mapping[str, str] = os.environ) -> Credentials:
    """Find the secret: ``--token-file``, the environment, else the file in the user's configuration.

    That file is created on first use. All processes and machines that share a home directory share the file.

    Args:
        token_file: Value of ``--token-file``; None without that option.
        environ: Environment with ``RPCDATALOADER_TOKEN_FILE`` and ``RPCDATALOADER_TOKEN``.

    Raises:
        AuthenticationError: There is no secret, or it cannot be trusted; the message says what to do.
    """
    if token_file is not None:
        return read_secret(token_file, "--token-file")
    if (token_file := environ.get(TOKEN_FILE_VARIABLE)) is not None:
        return read_secret(token_file, TOKEN_FILE_VARIABLE)
    if (token := environ.get(TOKEN_VARIABLE)) is not None:
        return check_secret(token, f"environment variable {TOKEN_VARIABLE}")
    path = _default_path(environ)
    if not os.path.exists(path):
        _create(path)
    return read_secret(str(path), TOKEN_FILE_VARIABLE)


def read_secret(path: str, name: str) -> Credentials:
    """Read a secret from the file at ``path``, as the option or variable ``name`` says.

    Raises:
        AuthenticationError: The file is missing, or cannot be trusted; the message says what to do.
    """
    if not path:
        raise AuthenticationError(f"{name} is empty; name a file with the secret in it, or leave it out")
    path = os.path.abspath(os.path.expanduser(path))
    try:
        data = read_safely(path, _MAX_TOKEN_BYTES, stat.S_IRWXG | stat.S_IRWXO)
    except FileNotFoundError:
        raise AuthenticationError(f"the token file {path} does not exist; {_HOW_TO_CREATE}") from None
    except OSError as error:
        raise AuthenticationError(
            f"the token file {path} cannot be read: {error.strerror}; set {name} to another file"
        ) from error
    except UnsafeFileError as error:
        raise AuthenticationError(f"the token file {path} {error}, or set {name} to another file") from None
    return check_secret(data, f"file {path}")


def check_secret(token: str | bytes, source: str) -> Credentials:
    """Check a secret from any ``source``; raises ``AuthenticationError`` if it is useless."""
    # Editors and echo put a line break at the end of a file.
    secret = os.fsencode(token).rstrip()
    if not secret:
        problem = "is empty"
    elif len(secret) < _MIN_TOKEN_BYTES:
        problem = f"is shorter than {_MIN_TOKEN_BYTES} characters"
    elif len(secret) > _MAX_TOKEN_BYTES:
        problem = f"is longer than {_MAX_TOKEN_BYTES} characters"
    # HMAC pads keys with zero bytes, so zero bytes at the end of a secret do not count.
    elif secret.rstrip(b"\0") == INSECURE_SECRET:
        problem = "is the public one of --insecure"
    else:
        return Credentials(secret, source)
    raise AuthenticationError(f"the secret ({source}) {problem}; {_HOW_TO_CREATE}")


def receive_credentials(descriptor: int) -> Credentials:
    """Read the secret from the first line of standard input, a pipe or socket, and nothing after that line.

    Raises:
        AuthenticationError: The line is no secret.
    """
    line = b""
    while not line.endswith(b"\n") and len(line) <= _MAX_TOKEN_BYTES and (byte := os.read(descriptor, 1)):
        line += byte
    return check_secret(line, "standard input")


def remember_credentials(address: Address, credentials: Credentials) -> None:
    """Use this secret for an address from now on, in place of the environment's."""
    _of_addresses[address] = credentials


def forget_credentials(credentials: Credentials) -> None:
    """Use the environment's secret again for all addresses that this one was remembered for."""
    for address in [address for address, remembered in list(_of_addresses.items()) if remembered == credentials]:
        del _of_addresses[address]


def client_credentials(address: Address, environ: Mapping[str, str] = os.environ) -> Credentials:
    """The secret for a connection to ``address``: a pool's; none with ``RPCDATALOADER_INSECURE=1``.

    Raises:
        AuthenticationError: See :func:`load_credentials`.
        ValueError: ``RPCDATALOADER_INSECURE`` has another value.
    """
    if address in _of_addresses:
        return _of_addresses[address]
    allowed = environ.get(INSECURE_VARIABLE)
    if allowed not in (None, "1"):
        raise ValueError(f"{INSECURE_VARIABLE} is {allowed!r}; set it to 1, or unset it")
    return load_credentials(environ=environ) if allowed is None else INSECURE


_HOW_TO_CREATE = (
    'create it with: (umask 077; python -c "import secrets; print(secrets.token_urlsafe())" > FILE), '
    "the same on both sides"
)


def _default_path(environ: Mapping[str, str]) -> Path:
    config = Path(environ.get("XDG_CONFIG_HOME", ""))
    if not config.is_absolute():  # the XDG specification says to ignore relative ones
        config = Path(environ.get("HOME") or os.path.expanduser("~")) / ".config"
    return config / "rpcdataloader" / "token"


def _create(path: Path) -> None:
    """Create a token file with a new secret, unless another process has done so meanwhile.

    All tasks of a job may get here at once, on several machines that share the directory. Each writes its own file, and
    linking it to the final name succeeds for only one of them; so the file is complete from its first moment (opened
    with O_EXCL, it would be empty at first).
    """
    try:
        # The home directory itself is not created: a secret in a new one would be shared with no other machine.
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
