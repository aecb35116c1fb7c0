"""From the command line to questions to text; nothing else. Imports no torch: a probe must be cheap."""

from __future__ import annotations

import argparse
import json
import math
import sys
import threading
import time
from collections.abc import Sequence

from rpcdataloader.errors import AuthenticationError
from rpcdataloader.status.asking import Asker, Places
from rpcdataloader.status.report import Look, as_data, as_text
from rpcdataloader.wire.certificates import client_tls

# Cursor to the upper left corner, and everything away.
_CLEAR = "\x1b[H\x1b[2J\x1b[3J"


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m rpcdataloader.status",
        allow_abbrev=False,
        description="What node servers are doing: their clients, workers, and how much they have done.",
        epilog="Exit status: 0 if all node servers are there and take clients, 1 if one is not reachable or drains, or "
        "if there is none, 2 for a wrong command line, secret, certificate or version. Secret and certificates "
        "come from where a training script takes them: RPCDATALOADER_TOKEN_FILE and so on.",
    )
    parser.add_argument(
        "places",
        nargs="*",
        metavar="ADDRESS",
        help="host:port, [v6]:port, unix:/path, several of them separated by commas, or @DIRECTORY in which they "
        "register (default: RPCDATALOADER_WORKERS)",
    )
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_seconds,
        const=2.0,
        metavar="SECONDS",
        help="look again and again, so often, until Ctrl-C (default: once; %(const)g s if nothing else is said)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON document per look (default: text)")
    parser.add_argument("--stacks", action="store_true", help="show where each worker is in its Python code")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=5.0,
        metavar="SECONDS",
        help="wait so long for the answer of a node server (default: %(default)g)",
    )
    return parser


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= threading.TIMEOUT_MAX or math.isnan(seconds):
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Look, once or again and again; returns the exit status of the last look."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        places = Places(options.places)
        asker = Asker(client_tls(), options.timeout)
    except (ValueError, AuthenticationError) as exc:
        parser.error(str(exc))
    before: Look | None = None
    try:
        while True:
            look = _look(places, asker, stacks=options.stacks)
            _show(look, before, as_json=options.json, redraw=options.watch is not None and sys.stdout.isatty())
            before = look
            if options.watch is None:
                return look.exit_status
            time.sleep(options.watch)
    except KeyboardInterrupt:
        return 1 if before is None else before.exit_status
    except BrokenPipeError:
        # Whoever read this has seen enough; what is left in the buffer must not be tried again at exit.
        sys.stdout = None
        return 1 if before is None else before.exit_status
    finally:
        asker.close()


def _look(places: Places, asker: Asker, *, stacks: bool) -> Look:
    addresses = places.find()
    answers = asker.ask(addresses, stacks=stacks)
    return Look(time.time(), answers, places.problems(), () if addresses else places.names())


def _show(look: Look, before: Look | None, *, as_json: bool, redraw: bool) -> None:
    if as_json:
        text = json.dumps(as_data(look, before)) + "\n"
    else:
        text = as_text(look, before, time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(look.time)))
        if redraw:
            text = _CLEAR + text
        elif before is not None:
            text = "\n" + text
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
