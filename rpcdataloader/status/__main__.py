"""From the command line over questions to text. Imports no torch: a probe must be cheap."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from rpcdataloader.errors import AuthenticationError
from rpcdataloader.status.asking import Asker, Places
from rpcdataloader.status.report import Tree, make_document
from rpcdataloader.status.text import as_text
from rpcdataloader.wire.certificates import client_tls

# The alternate screen of a terminal, which keeps the user's screen, without wrapping long lines.
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?7l", "\x1b[?7h\x1b[?1049l"
# Cursor to the upper left corner; clear the rest of a line; clear the rest of the screen.
_HOME, _END_OF_LINE, _END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m rpcdataloader.status",
        allow_abbrev=False,
        description="State of node servers: their clients, what these wait for, their workers, and the work done.",
        epilog="Exit status: 0 if all node servers are ready, 1 if one is unreachable or drains, or if "
        "none is found, 2 for a wrong command line, secret, certificate or version. Secret and certificates "
        "come from the same variables as for a training script: RPCDATALOADER_TOKEN_FILE and so on.",
    )
    parser.add_argument(
        "places",
        nargs="*",
        metavar="ADDRESS",
        help="host:port, [v6]:port, unix:/path, several separated by commas, or the @DIRECTORY where they "
        "register (default: RPCDATALOADER_WORKERS)",
    )
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_seconds,
        const=2.0,
        metavar="SECONDS",
        help="refresh every SECONDS (default: %(const)g), until Ctrl-C; on a terminal's alternate screen",
    )
    parser.add_argument(
        "--serve",
        metavar="[HOST:]PORT",
        help="serve a live page, and metrics for Prometheus at /metrics, until Ctrl-C; refreshed every 2 s, or as "
        "--watch says (default of HOST: 127.0.0.1; others need RPCDATALOADER_STATUS_TOKEN_FILE)",
    )
    parser.add_argument("--workers", action="store_true", help="show every client and worker")
    parser.add_argument("--why", action="store_true", help="show the numbers behind what training loops wait for")
    parser.add_argument("--json", action="store_true", help="print one JSON document per refresh (default: text)")
    parser.add_argument("--stacks", action="store_true", help="show the Python stack of each worker; implies --workers")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=5.0,
        metavar="SECONDS",
        help="time limit for each node server's answer (default: %(default)g)",
    )
    return parser


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= threading.TIMEOUT_MAX or math.isnan(seconds):
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text}")
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Look once or repeatedly; returns the exit status of the last look."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        places = Places(options.places)
        asker = Asker(client_tls(), options.timeout)
    except (ValueError, AuthenticationError) as exc:
        parser.error(str(exc))
    if options.serve is not None:
        try:
            return _serve(parser, options, places, asker)
        finally:
            asker.close()
    document: Tree | None = None
    redraw = options.watch is not None and not options.json and sys.stdout.isatty()
    try:
        with _alternate_screen() if redraw else contextlib.nullcontext():
            while True:
                addresses, ignored = places.look()
                answers = asker.ask(addresses, stacks=options.stacks)
                before, document = document, make_document(time.time(), answers, ignored, document)
                if options.json:
                    text = json.dumps(document) + "\n"
                else:
                    nowhere = () if addresses else places.registers()
                    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(document["time_unix_seconds"]))
                    workers = options.workers or options.stacks
                    text = as_text(document, when, nowhere=nowhere, workers=workers, why=options.why)
                    text = _fit(text) if redraw else text if before is None else "\n" + text
                sys.stdout.write(text)
                sys.stdout.flush()
                if options.watch is None:
                    break
                time.sleep(options.watch)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:
        # The reader has closed the pipe; the rest of the buffer must not be written at exit.
        sys.stdout = None
    finally:
        asker.close()
    return 1 if document is None else int(document["exit_status"])


def _serve(parser: argparse.ArgumentParser, options: argparse.Namespace, places: Places, asker: Asker) -> int:
    # Not imported for a probe.
    from rpcdataloader.status import serving

    if options.workers or options.json or options.why or options.stacks:
        parser.error("--serve shows all but stacks: leave --workers, --json, --why and --stacks out")
    try:
        server = serving.StatusServer(serving.parse_place(options.serve), serving.find_token())
    except (ValueError, AuthenticationError) as exc:
        parser.error(f"--serve: {exc}")
    before: list[Tree] = []

    def look() -> Tree:
        addresses, ignored = places.look()
        before[:] = [make_document(time.time(), asker.ask(addresses, stacks=False), ignored, *before)]
        return before[0]

    with contextlib.suppress(KeyboardInterrupt):
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        sys.stdout.write(f"rpcdataloader status {server.url} pid={os.getpid()}\n")
        sys.stdout.flush()
        server.serve(look, options.watch or 2.0)
    return 0


@contextlib.contextmanager
def _alternate_screen() -> Iterator[None]:
    """Use the alternate screen, and leave it in any case, even on SIGTERM."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        sys.stdout.write(_ENTER)
        yield
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()


def _fit(text: str) -> str:
    """Return as much of the beginning of a text as the screen holds."""
    lines = text.strip("\n").splitlines()
    room = os.get_terminal_size(sys.stdout.fileno()).lines or len(lines)  # 0 if unknown
    if len(lines) > room:
        lines[room - 1 :] = [f"... {len(lines) - room + 1} more lines than fit this terminal"]
    return _HOME + f"{_END_OF_LINE}\n".join(lines) + _END_OF_LINE + _END_OF_SCREEN


if __name__ == "__main__":
    sys.exit(main())
