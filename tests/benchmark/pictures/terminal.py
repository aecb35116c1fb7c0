"""A film of three terminals: two node servers start, a training begins, one node is killed, the training goes on.

Each terminal is a shell on a host of its own: a name, an address of the loopback interface, and an entry in
``/etc/hosts``, all in namespaces that end with the recording. What is typed is a script; what is shown is what the
shells have written, with its times, as recorded in ``docs/figures/terminal.json``; long pauses are shortened. Recording
takes root.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .svg import Picture

ROOT = Path(__file__).resolve().parents[3]
COLUMNS = 86
# Name, and rows of the terminal.
HOSTS = (("node01", 3), ("node02", 8), ("gpu01", 17))

_LAUNCH = "python -m rpcdataloader.launch --host {} 2> log"
_TRAIN = "python examples/digits.py --epochs 9 --workers node01:6543 node02:6543 2>&1 | tee log"
# Terminal, the text that it is typed after, a pause in seconds, what is typed.
_STEPS = (
    (0, (0, "node01$"), 0.3, _LAUNCH.format("node01") + "\n"),
    (1, (1, "node02$"), 0.3, _LAUNCH.format("node02") + " &\n"),
    (1, (1, "rpcdataloader ready"), 0.5, "\n"),
    (2, (0, "rpcdataloader ready"), 0.5, _TRAIN + "\n"),
    (1, (2, "epoch  4"), 0.3, "kill -9 %1\n"),
    (1, (1, "kill -9"), 0.7, "\n"),
    (2, (2, "test accuracy"), 1.0, ""),
)
_KEY_SECONDS = 0.03
_TIMEOUT = 180.0
_END_SECONDS = 4.0  # that the last picture stays
_MAX_PAUSE = 1.5  # Longer ones are shortened to this.

_ROW, _SIZE, _COLUMN, _HEAD = 17, 13, 7.83, 26


def record() -> dict[str, Any]:
    """Run it all in namespaces of its own.

    Raises:
        OSError: This user may not make namespaces.
    """
    if os.getuid() != 0:
        raise OSError("recording the terminals makes namespaces: run it as root")
    with tempfile.TemporaryDirectory(prefix="rpcdl-terminal-") as name:
        result = Path(name) / "terminal.json"
        namespaces = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        subprocess.run([*namespaces, sys.executable, "-m", __name__, name, str(result)], cwd=ROOT, check=True)
        found: dict[str, Any] = json.loads(result.read_text())
    return found


class _Shell:
    """A shell on a host, in a terminal of its own."""

    def __init__(self, name: str, rows: int, home: str) -> None:
        self.text = ""
        pid, self.descriptor = pty.fork()
        if pid == 0:
            env = {
                "HOME": home, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "TERM": "dumb", "LANG": "C.UTF-8", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            os.chdir(Path(home) / name)
            shell = f"hostname {name}; PS1='{name}$ ' exec bash --noprofile --norc --noediting -i"
            os.execvpe("unshare", ["unshare", "--uts", "bash", "-c", shell], env)
        fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, COLUMNS, 0, 0))


def _film(home: str) -> list[tuple[float, int, str]]:
    """Return what was written: the time, the number of the terminal, and the text."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    hosts = Path(home) / "hosts"
    hosts.write_text("127.0.0.1 localhost\n" + "".join(f"127.0.0.{10 + i} {HOSTS[i][0]}\n" for i in range(len(HOSTS))))
    subprocess.run(["mount", "--bind", str(hosts), "/etc/hosts"], check=True)
    for name, _ in HOSTS:
        (Path(home) / name).mkdir()
        (Path(home) / name / "examples").symlink_to(ROOT / "examples")
    shells = [_Shell(name, rows, home) for name, rows in HOSTS]
    events: list[tuple[float, int, str]] = []
    begun = time.monotonic()

    def watch(seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            for descriptor in select.select([shell.descriptor for shell in shells], [], [], left)[0]:
                number = [shell.descriptor for shell in shells].index(descriptor)
                text = os.read(descriptor, 65536).decode(errors="replace")
                shells[number].text += text
                events.append((round(time.monotonic() - begun, 3), number, text))
            # This is the first process of its namespace, which orphans come to.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, os.WNOHANG)

    for number, (seen, wanted), pause, keys in _STEPS:
        deadline = time.monotonic() + _TIMEOUT
        while wanted not in shells[seen].text:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{HOSTS[seen][0]} has not written {wanted!r}: {shells[seen].text[-2000:]!r}")
            watch(0.05)
        watch(pause)
        for key in keys:
            os.write(shells[number].descriptor, key.encode())
            watch(_KEY_SECONDS)
    return events


def screens(pieces: Sequence[tuple[float, str]], columns: int, rows: int) -> Iterator[tuple[float, list[str]]]:
    """Yield the rows of a terminal after each piece of text: line feeds, carriage returns, and nothing else."""
    lines, column = [""], 0
    for moment, text in pieces:
        for character in text:
            if character == "\n":
                lines.append("")
                column = 0
            elif character == "\r":
                column = 0
            elif character >= " ":
                if column == columns:
                    lines.append("")
                    column = 0
                lines[-1] = (lines[-1][:column] + character + lines[-1][column + 1 :]).ljust(column + 1)
                column += 1
        yield moment, [line.rstrip() for line in lines[-rows:]]


def _shown(pieces: Sequence[tuple[float, str]], rows: int) -> Iterator[tuple[int, str, float, float | None]]:
    """Yield row, text, and from when to when it is shown; None as the end for what is shown at the end."""
    now: dict[int, tuple[str, float]] = {}
    for moment, screen in screens(pieces, COLUMNS, rows):
        for row, text in enumerate(screen):
            before, since = now.get(row, ("", 0.0))
            if text != before:
                if before:
                    yield row, before, since, moment
                now[row] = text, moment
    for row, (text, since) in now.items():
        if text:
            yield row, text, since, None


def draw_terminal(found: dict[str, Any]) -> Picture:
    events, now, before = [], 0.0, 0.0
    for moment, number, words in found["events"]:
        now += min(moment - before, _MAX_PAUSE)
        before = moment
        events.append((now, number, words))
    seconds = events[-1][0] + _END_SECONDS
    width = int(32 + COLUMNS * _COLUMN)
    height = 12 + sum(_HEAD + rows * _ROW + 18 for _, rows in HOSTS)
    text = "Two node servers start, a training takes batches from both, one is killed, and the training goes on."
    picture = Picture("Three terminals: a node server is killed during a training", text, width, height)
    top = 12.0
    for number, (name, rows) in enumerate(HOSTS):
        box_height = _HEAD + rows * _ROW + 8
        picture.add(f'<rect x="8" y="{top:.0f}" width="{width - 16}" height="{box_height}" rx="6" fill="#0d1117"/>')
        picture.add(f'<text x="16" y="{top + 17:.0f}" font-size="12" fill="#9198a1">{name}</text>')
        pieces = [(moment, words) for moment, where, words in events if where == number]
        for row, line, since, until in _shown(pieces, rows):
            y = top + _HEAD + row * _ROW + 13
            _add_line(picture, y, line, since / seconds, None if until is None else until / seconds, seconds)
        top += box_height + 10
    return picture


def _add_line(picture: Picture, y: float, line: str, since: float, until: float | None, seconds: float) -> None:
    values, times = ["hidden", "visible"], ["0", f"{since:.4f}"]
    if until is not None:
        values.append("hidden")
        times.append(f"{until:.4f}")
    colour = "#ff7b72" if "kill -9" in line or "Killed" in line else "#e6edf3"
    escaped = line.replace("&", "&amp;").replace("<", "&lt;")
    # Without animation, the last picture is shown.
    picture.add(
        f'<text class="code" x="16" y="{y:.0f}" font-size="{_SIZE}" fill="{colour}" xml:space="preserve" '
        f'visibility="{"visible" if until is None else "hidden"}">{escaped}'
        f'<animate attributeName="visibility" calcMode="discrete" dur="{seconds:.2f}s" repeatCount="indefinite" '
        f'values="{";".join(values)}" keyTimes="{";".join(times)}"/></text>'
    )


def main() -> None:
    home, result = sys.argv[1:]
    # The namespace of processes ends with this one, and so do the shells.
    Path(result).write_text(json.dumps({"columns": COLUMNS, "events": _film(home)}))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    main()
