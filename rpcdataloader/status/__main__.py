"""From the command line over questions to all node servers at once to text. Imports no torch: a probe must be cheap."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from rpcdataloader.client.discovery import Inline, Local, ask_status, find_workers
from rpcdataloader.errors import AuthenticationError, RemoteProtocolError, RPCError
from rpcdataloader.status.report import NodeAnswer, Tree, as_text, make_document
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.credentials import client_credentials
from rpcdataloader.wire.register import Lookup, Register
from rpcdataloader.wire.tls import TlsFiles, client_tls
from rpcdataloader.wire.transport import Deadline

# The alternate screen of a terminal, which keeps the user's screen, without wrapping long lines.
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?7l", "\x1b[?7h\x1b[?1049l"
# Cursor to the upper left corner; clear the rest of a line; clear the rest of the screen.
_HOME, _END_OF_LINE, _END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"

# Seconds between two looks while this machine's clock may be wrong.
_UNSURE_PAUSE = 0.5

# Of seconds: poll() of any system takes as many milliseconds.
_MAX_SECONDS = 1e6


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m rpcdataloader.status",
        allow_abbrev=False,
        description="State of node servers: their clients, what these wait for, their workers, and the work done.",
        epilog="Exit status: 0 if all node servers are ready, 1 if one is unreachable, or a "
        "directory has none registered, 2 for a wrong command line, secret, certificate or version, or if the output "
        "cannot be written. Secret and certificates come from the same variables as for a training script: "
        "RPCDATALOADER_TOKEN_FILE and so on.",
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
        "--watch says (default of HOST: 127.0.0.1); prints its address with a new token, unless "
        "RPCDATALOADER_STATUS_TOKEN_FILE names one",
    )
    parser.add_argument("--workers", action="store_true", help="show every client and worker")
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
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) <= _MAX_SECONDS:
            return seconds
    raise argparse.ArgumentTypeError(f"expected a number of seconds above 0 and below {_MAX_SECONDS:g}, got {text}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Look once or repeatedly; returns the exit status of the last look."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if sys.stdout is None:
        parser.error("standard output is closed")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for what datasets say
    try:
        nodes = Nodes(options.places, client_tls(), options.timeout)
    except (ValueError, AuthenticationError) as exc:
        parser.error(str(exc))
    if options.serve is None:
        return _show(options, nodes)
    if options.workers or options.json or options.stacks:
        parser.error("--serve shows all but stacks: leave --workers, --json and --stacks out")
    _serve(parser, options, nodes)
    return 0


def _show(options: argparse.Namespace, nodes: Nodes) -> int:
    redraw = options.watch is not None and not options.json and sys.stdout.isatty()
    separator = ""
    try:
        with _alternate_screen() if redraw else contextlib.nullcontext():
            while True:
                document = nodes.look(stacks=options.stacks)
                if options.json:
                    text = json.dumps(document) + "\n"
                else:
                    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(document["time_unix_seconds"]))
                    workers = options.workers or options.stacks
                    text = as_text(document, when, nowhere=nodes.nowhere, workers=workers)
                    text = _fit(text) if redraw else separator + text
                    separator = "\n"
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
    except OSError as exc:
        sys.stdout = None
        sys.stderr.write(f"cannot write the status: {exc.strerror}\n")
        return 2
    return 1 if nodes.document is None else int(nodes.document["exit_status"])


def _serve(parser: argparse.ArgumentParser, options: argparse.Namespace, nodes: Nodes) -> None:
    # Not imported for a probe.
    from rpcdataloader.status import serving

    try:
        found = serving.find_token()
        token = found or secrets.token_urlsafe().encode()
        server = serving.StatusServer(serving.parse_place(options.serve), token)
    except (ValueError, AuthenticationError) as exc:
        parser.error(f"--serve: {exc}")
    with contextlib.suppress(KeyboardInterrupt):
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        shown = "" if found else f"#{token.decode()}"
        sys.stdout.write(f"rpcdataloader status {server.url}{shown} pid={os.getpid()}\n")
        sys.stdout.flush()
        server.serve(nodes.look, options.watch or 2.0)


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


class Nodes:
    """Node servers that are looked at repeatedly.

    Args:
        places: Places as in ``workers=``; empty for those of the environment.
        timeout: Seconds that each answer may take.

    Attributes:
        document: Result of the last look; None before the first one.
        nowhere: Directories and names in which the last look found no node server.

    Raises:
        ValueError: No node server is named, an address is malformed, or a place has no node server of its own.
    """

    def __init__(self, places: Sequence[str], tls: TlsFiles | None, timeout: float) -> None:
        self.document: Tree | None = None
        self.nowhere: list[str] = []
        self._answered: dict[str, Tree] = {}  # the nodes of the last look, each at its last answer, by address
        self._tls = tls
        self._timeout = timeout
        self._places: list[Address | Lookup] = []
        for where in map(find_workers, places) if places else [find_workers(None)]:
            if where is None:
                raise ValueError("name a node server, or set RPCDATALOADER_WORKERS")
            if isinstance(where, (Inline, Local)):
                raise ValueError(f"{where} belongs to one training process; name node servers by address")
            self._places += [*where.addresses, *(lookup.open() for lookup in where.lookups)]

    def look(self, *, stacks: bool = False) -> Tree:
        """Ask the node servers that are named, and those that are registered now; each once, in this order."""
        found: list[Address] = []
        nowhere: list[Lookup] = []
        problems: dict[str, str] = {}
        for place in self._places:
            if isinstance(place, Address):
                found.append(place)
            else:
                there = place.look()
                while isinstance(place, Register) and not there and place.is_unsure:
                    time.sleep(_UNSURE_PAUSE)
                    there = place.look()
                found += there
                nowhere += [] if there else [place]
                # The path of a directory stands for the directory itself.
                folder = place.directory if isinstance(place, Register) else ""
                problems |= {os.path.join(folder, name): reason for name, reason in place.problems.items()}
        self.nowhere = list(map(str, nowhere))
        answers = self.ask(list(dict.fromkeys(found)), stacks=stacks)
        is_complete = not self.nowhere
        self.document = make_document(time.time(), answers, problems, self._answered, is_complete=is_complete)
        self._answered = {
            node["address"]: node if "pid" in node else self._answered.get(node["address"], node)
            for node in self.document["nodes"]
        }
        return self.document

    def ask(self, addresses: Sequence[Address], *, stacks: bool) -> list[NodeAnswer]:
        """Ask all node servers, and wait for the slowest."""
        answers: dict[Address, NodeAnswer] = {}

        def ask(address: Address) -> None:
            answers[address] = self._ask(address, stacks)

        # Not joined at the end: a thread may be resolving a name, which cannot be ended.
        threads = [
            threading.Thread(target=ask, args=[address], name=f"rpcdl-status {address}", daemon=True)
            for address in addresses
        ]
        deadline = Deadline(self._timeout + 1)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(deadline.remaining())
        return [answers.get(address) or self._late(address) for address in addresses]

    def _ask(self, address: Address, stacks: bool) -> NodeAnswer:
        deadline = Deadline(self._timeout)
        try:
            status, channel = ask_status(address, client_credentials(address), self._tls, deadline, stacks=stacks)
            return NodeAnswer(str(address), status, version=channel.peer.rpcdataloader)
        except TimeoutError:  # includes RPCTimeoutError
            return self._late(address)
        except (RPCError, ValueError) as exc:
            # Waiting does not help: another version, perhaps of Python, or another program on that port; a ValueError
            # is about a malformed variable.
            is_refused = isinstance(exc, (AuthenticationError, RemoteProtocolError, ValueError))
            return NodeAnswer(str(address), error=str(exc), is_refused=is_refused)

    def _late(self, address: Address) -> NodeAnswer:
        return NodeAnswer(str(address), error=f"{address} did not answer within {self._timeout:g} s")


if __name__ == "__main__":
    sys.exit(main())
