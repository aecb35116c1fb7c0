"""``python -m rpcdataloader.ssh HOSTFILE``: node servers on hosts reached by ssh, for as long as this process runs.

Once all of them take connections, one line appears on standard output, for the environment of training processes::

    RPCDATALOADER_WORKERS=node01:41235,node02:40117

Each server watches its standard input (``launch --exit-with-stdin``), which comes from this process through ssh, with a
sign of life every few seconds. However this process ends, its servers end with it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import shlex
import signal
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from rpcdataloader.errors import RPCError
from rpcdataloader.host.output import Output
from rpcdataloader.host.trust import is_private, parts_of
from rpcdataloader.starter import Ready, ServerProcess, Told, arguments_of
from rpcdataloader.wire.credentials import load_credentials
from rpcdataloader.wire.messages import printable

# ssh never prompts, and notices a vanished machine within 45 s.
SSH = ("ssh", "-T", *(f"-o{option}" for option in ("BatchMode=yes", "ServerAliveInterval=15", "ServerAliveCountMax=3")))

# Seconds between two attempts to write to a terminal that has stopped.
RETRY_PAUSE = 0.5

# Options of launch that choose the secret; without them, this module chooses.
_SECRETS = ("--token-file", "--insecure")


def parse_hosts(text: str) -> dict[str, list[str]]:
    """Read a host file: one host per line, with optional options of ``launch`` behind it; ``#`` begins a comment.

    Returns:
        Options of ``launch`` by destination for ssh: a name, ``user@name``, or an alias of its configuration.
    """
    hosts: dict[str, list[str]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as exc:
            raise ValueError(f"line {number} cannot be read: {exc}") from None
        if not words:
            continue
        name, *options = words
        if name.startswith("-"):
            raise ValueError(f"line {number} must begin with a host, but begins with {name}")
        if options and not options[0].startswith("-"):
            raise ValueError(f"line {number} has {options[0]!r} after the host: write one host per line")
        if name in hosts:
            raise ValueError(f"line {number} names {name} again: a node server uses all CPUs of its host")
        hosts[name] = options
    if not hosts:
        raise ValueError("it names no host")
    return hosts


def uses_own_secret(options: Sequence[str]) -> bool:
    """Whether options of ``launch`` choose the secret, so that this process sends none."""
    return _has(options, _SECRETS)


# Runs on a host, by its /bin/sh: ``sh -c _START sh python here ...``. Another user who can make a folder of that path
# there can put an interpreter into it, or a pyvenv.cfg beside that or above. So each folder and link on the way must
# belong to this user or root, and no other user may write to it; or it has the owner, group and mode that it has here,
# and only that group may. A sticky folder, such as /tmp, is safe to pass through: other users cannot rename or remove
# what is in it. The host gets one line without exclamation marks, as the login shell may be a csh.
_START = r"""
python=$1; here=$2; shift 2; me=$(id -u); private=;
if [ "$(id -gn)" = "$(id -un)" ]; then private=$(id -g); fi;
refuse() { echo "$1" >&2; echo "$python is not started: other users could have put it there" >&2; exit 126; };
judge() {
    if [ -z "$1" ]; then return; fi;
    judge "${1%/*}" $(($2 + 1));
    status=$(stat -c %u:%g:%a -- "$1") || exit 126;
    case $status in "$me":*) status=me:${status#*:};; esac;
    case $status in me:"$private":*) status=me:mine:${status##*:};; esac;
    case $here in *"|$status $1|"*) status=same:same:${status##*:};; esac;
    case $status in 0:* | me:* | same:*) ;; *) refuse "$1 belongs to user ${status%%:*}";; esac;
    if [ -L "$1" ]; then
        link=$(readlink -- "$1") || exit 126;
        case $link in /*) judge "$link" "$2";; *) judge "${1%/*}/$link" "$2";; esac;
        return;
    fi;
    case $status in *:*:[1357]???) if [ "$2" -gt 2 ]; then return; fi;; esac;
    case $status in
        *[2367] | *:[0-9]*:*[2367]?) refuse "$1 is writable by other users (mode ${status##*:})";;
    esac;
};
cd / || exit;
case $python in */*)
    if [ -e "$python" ]; then judge "$python" 0; else echo "there is no $python" >&2; exit 127; fi;;
esac;
exec "$python" "$@"
"""


def remote_command(python: str, folder: str, options: Sequence[str]) -> str:
    """The command line for the shell of a host, of any kind.

    Args:
        python: Interpreter: a path, or a name for the host's ``PATH``.
        folder: Absolute path of the folder in which relative paths begin.
    """
    own = []
    if not _has(options, ("--host",)):
        own += ["--host", "0.0.0.0"]
    if not _has(options, ("--port",)) and not any("unix:" in option for option in options):
        own += ["--port", "0"]
    if not uses_own_secret(options):
        own += ["--token-file", "-"]
    if os.sep in python:
        python = os.path.join(folder, python)
    words = [python, _describe(python), *arguments_of([*own, *options], folder)]
    return "exec " + shlex.join(["sh", "-c", " ".join(_START.split()), "sh", *words])


def _describe(path: str) -> str:
    """Owner, group and mode of all that leads to a path here, for :data:`_START`."""
    found = "|"
    with contextlib.suppress(OSError):
        for part, status in parts_of(path):
            owner = "me" if status.st_uid == os.geteuid() else status.st_uid
            group = "mine" if owner == "me" and is_private(status.st_gid) else status.st_gid
            found += f"{owner}:{group}:{stat.S_IMODE(status.st_mode):o} {part}|"
    return found


def _has(options: Sequence[str], names: Sequence[str]) -> bool:
    return any(option.partition("=")[0] in names for option in options)


class _Server:
    """A node server behind an ssh process.

    Attributes:
        address: Address for clients; None until the server is ready.
    """

    def __init__(self, host: str, command: str, secret: bytes | None, events: queue.SimpleQueue[_Event]) -> None:
        self.host = host
        self.address: str | None = None
        self.starter = ServerProcess([*SSH, host, command], secret, lambda told: events.put((self, told)), name=host)


# A server with what it tells; no server for a signal to end.
_Event = tuple[_Server | None, Told]


class _Pool:
    """All servers, from their start to their end. The main thread, which handles all events, never waits to write."""

    def __init__(self) -> None:
        self._servers: list[_Server] = []
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._output = Output(1)
        self._errors = Output(2)
        self._is_ending = False
        self._status = 0

    def run(self, orders: Sequence[tuple[str, str, bytes | None]]) -> int:
        """Start a server for each host, command and secret; returns the exit status once the last one has ended."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, lambda *_: self._events.put((None, None)))
        self._servers = [_Server(*order, self._events) for order in orders]
        while self._servers:
            pause = RETRY_PAUSE if self._output.is_waiting or self._errors.is_waiting else None
            with contextlib.suppress(queue.Empty):
                self._handle(*self._events.get(timeout=pause))
            self._output.flush()
            self._errors.flush()
        self._output.finish()
        self._errors.finish()
        return self._status

    def _handle(self, server: _Server | None, told: Told) -> None:
        match server, told:
            case None, _:
                self._on_signal()
            case _Server(), None:
                self._on_end(server)
            case _Server(), Ready(address, num_workers):
                self._on_ready(server, address, num_workers)
            case _Server(host=host), line:
                self._say(printable(f"[{host}] {line}", keep="\t"))  # strangers and datasets have words in a log

    def _say(self, text: str) -> None:
        self._errors.write(f"{text}\n")

    def _drain(self) -> None:
        self._is_ending = True
        for server in self._servers:
            server.starter.close()

    def _on_signal(self) -> None:
        if self._is_ending:
            self._say("not waiting any longer: each node server drains and ends within its --grace")
            for server in self._servers:
                server.starter.process.kill()
            self._servers.clear()
        else:
            self._say(f"ending {len(self._servers)} node servers; interrupt again to stop waiting for them")
            self._drain()

    def _on_ready(self, server: _Server, address: str, num_workers: int) -> None:
        server.address = address
        self._say(f"[{server.host}] ready: {address}, {num_workers} workers")
        addresses = [server.address for server in self._servers if server.address is not None]
        if len(addresses) == len(self._servers) and not self._is_ending:
            self._output.write(f"RPCDATALOADER_WORKERS={','.join(addresses)}\n")

    def _on_end(self, server: _Server) -> None:
        self._servers.remove(server)
        if self._is_ending:
            return
        status = server.starter.process.returncode
        if server.address is None:
            self._status = 1
            self._say(f"error: the node server on {server.host} did not start (exit status {status} of ssh)")
            self._drain()
        else:
            self._say(f"[{server.host}] the node server or its connection has ended (exit status {status} of ssh)")
            if not self._servers:
                self._status = 1
                self._say("error: no node server is left")


def make_parser() -> argparse.ArgumentParser:
    """The command line up to ``--``."""
    parser = argparse.ArgumentParser(
        prog="python -m rpcdataloader.ssh",
        usage="python -m rpcdataloader.ssh [-h] [--python PATH] HOSTFILE [-- LAUNCH OPTION ...]",
        allow_abbrev=False,
        description="Start a node server on each host of a file by ssh, print the value of RPCDATALOADER_WORKERS for "
        "training processes, and end all servers with this process.",
        epilog="Options of python -m rpcdataloader.launch follow -- for all hosts, and a host in its line of the file "
        "for that host. By default, servers listen on a free port of every interface, and get the secret of this "
        "machine's training processes through ssh; with --token-file, each host reads its own file.",
    )
    parser.add_argument("hostfile", metavar="HOSTFILE", help="text file with one host per line, named as for ssh")
    parser.add_argument(
        "--python", metavar="PATH", default=sys.executable, help="interpreter on the hosts (default: %(default)s)"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the servers; return the status: 0 after a signal, 1 if one failed to start or all ended, 2 for usage."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    end = words.index("--") if "--" in words else len(words)
    parser = make_parser()
    args = parser.parse_args(words[:end])
    common = words[end + 1 :]
    try:
        hosts = parse_hosts(Path(args.hostfile).read_text())
    except OSError as exc:
        parser.error(f"the host file {args.hostfile} cannot be read: {exc.strerror}")
    except ValueError as exc:
        parser.error(f"the host file {args.hostfile}: {exc}")
    try:
        orders = []
        for host, own in hosts.items():
            options = [*common, *own]
            secret = None if uses_own_secret(options) else load_credentials().secret
            orders.append((host, remote_command(args.python, os.getcwd(), options), secret))
        return _Pool().run(orders)
    except (RPCError, OSError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
