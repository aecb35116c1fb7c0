"""``python -m rpcdataloader.launch``: run a node server on this machine.

Once clients can connect, one line appears on standard output::

    rpcdataloader ready node07:6543 num_workers=32 pid=4711

Everything else goes to the log, on standard error.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from rpcdataloader.host.trust import search_current_folder

if __name__ == "__main__":  # modules beside a checkout of the package, perhaps torch
    search_current_folder()

# Before torch and numpy are imported below: their thread pools would make this process's forks unsafe.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_variable] = "1"
# jemalloc comes with pyarrow, and would start a thread as soon as that is imported.
os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")

from rpcdataloader import __version__  # noqa: E402
from rpcdataloader.errors import RPCError  # noqa: E402
from rpcdataloader.host.output import JournalFormatter, Output, is_journal  # noqa: E402
from rpcdataloader.server.run import run_server  # noqa: E402
from rpcdataloader.server.settings import ServerSettings  # noqa: E402
from rpcdataloader.wire.credentials import INSECURE, load_credentials, receive_credentials  # noqa: E402

logger = logging.getLogger("rpcdataloader.server")


_DESCRIPTION = "Serve dataset loading on this machine: worker processes for the training processes that connect."

_EPILOG = (
    "The secret comes from --token-file, RPCDATALOADER_TOKEN_FILE, RPCDATALOADER_TOKEN, or else from "
    "~/.config/rpcdataloader/token, which is created on first use. SIGTERM drains, a second SIGTERM ends at once."
)

# Options that are no settings of the node server.
_OWN_OPTIONS: dict[str, dict[str, Any]] = {
    "--token-file": {
        "metavar": "FILE",
        "help": "read the secret from this file, which other users must not be able to read; - reads the first line of "
        "standard input (default: none)",
    },
    "--insecure": {
        "action": "store_true",
        "help": "require no secret: only this user can connect to a Unix socket, but every user who reaches a TCP "
        "port, other users of this machine included, can run code as you (default: off)",
    },
    "--exit-with-stdin": {
        "action": "store_true",
        "help": "drain when standard input ends, or falls silent for 60 seconds after its first byte: ties the server "
        "to the ssh connection, or the program, that started it (default: off)",
    },
    "--log-level": {
        "choices": ("debug", "info", "warning", "error"),
        "default": "info",
        "metavar": "LEVEL",
        "help": "lowest level to log: debug adds each worker, info each client, then warning and error "
        "(default: %(default)s)",
    },
}


def make_parser() -> argparse.ArgumentParser:
    """The command line; options, help texts and defaults come from the settings."""
    # No abbreviations, which keeps users from writing a secret on the command line, as --token.
    parser = argparse.ArgumentParser("python -m rpcdataloader.launch", allow_abbrev=False, description=_DESCRIPTION)
    parser.epilog = _EPILOG
    for field in fields(ServerSettings):
        option = "--" + field.name.replace("_", "-")
        text = str(field.metadata["help"]).replace("%", "%%")
        if field.name == "preload":
            parser.add_argument(option, type=_names, default=(), metavar="MODULE,...", help=text + " (default: none)")
        else:
            kind = type(field.default)
            shown = "" if field.default in ("", None) else " (default: %(default)s)"
            metavar = field.metadata.get("metavar") or {str: field.name.upper(), int: "N", float: "SECONDS"}[kind]
            parser.add_argument(option, type=kind, default=field.default, metavar=metavar, help=text + shown)
    for option, keywords in _OWN_OPTIONS.items():
        parser.add_argument(option, **keywords)
    parser.add_argument("--version", action="version", version=f"rpcdataloader {__version__}")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server; returns the exit status: 0 after a drain, 1 for a failed start, 2 for wrong arguments."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    _begin()
    insecure, token_file = options.insecure, options.token_file
    try:
        settings = ServerSettings(**{field.name: getattr(options, field.name) for field in fields(ServerSettings)})
        if sys.stdin is None and (options.exit_with_stdin or token_file == "-"):
            raise ValueError("--exit-with-stdin and --token-file - need a standard input, and it is closed")
        if insecure and token_file:
            raise ValueError("--token-file and --insecure contradict each other")
    except ValueError as exc:
        parser.error(str(exc))
    try:
        text = "%(levelname)s %(name)s[%(process)d] %(message)s"
        form = JournalFormatter(text) if is_journal(2) else logging.Formatter(f"%(asctime)s {text}")
        log = _begin_log(options.log_level, form)
        if insecure:
            credentials = INSECURE
        elif token_file == "-":
            credentials = receive_credentials(sys.stdin.fileno())
        else:
            credentials = load_credentials(token_file=token_file)
        if (unsafe := search_current_folder()) is not None:
            logger.warning(
                "%s: modules and configuration of other users may be there; python -m has searched it already for this "
                "package, and `rpcdataloader launch` does not",
                unsafe,
            )
            os.chdir(os.sep)
        lifeline = os.dup(sys.stdin.fileno()) if options.exit_with_stdin else None
        run_server(settings, credentials, log=log, ready=functools.partial(print, flush=True), lifeline=lifeline)
    except (RPCError, OSError, ImportError, ValueError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    return 0


def _begin() -> None:
    # A thread that starts this process passes on its mask, and the client's threads block all signals.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # Started with ``>&-``, as daemons are, it would give the numbers of standard output to its pipes.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _begin_log(level: str, form: logging.Formatter) -> Output:
    log = Output(2)
    handler = logging.StreamHandler(log)
    handler.setFormatter(form)
    logging.basicConfig(handlers=[handler])
    logging.getLogger("rpcdataloader").setLevel(level.upper())
    return log


if __name__ == "__main__":
    sys.exit(main())
