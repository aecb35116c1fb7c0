"""What faulthandler writes, arranged for a reader: user code first, and nothing that is the same in every worker.

Pure: text in, text out.
"""

from __future__ import annotations

import re

# A recursion in every one of many threads fills pages; what matters stands in front.
MAX_CHARACTERS = 16384

_HEADER = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)\b.*:$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line ')


def arrange(dump: str, main: int, package: str) -> str:
    """Put the main thread first; leave out threads that run no user code, and what lies below user code in the others.

    Args:
        dump: Of all threads, each with its most recent call first.
        main: Identifier of the main thread (:func:`threading.get_ident`).
        package: Folder of this package, as it stands in file names.
    """
    # The text before the first header, then an identifier and the lines below it for each thread.
    _before, *parts = _HEADER.split(dump)
    stacks = [
        (int(ident, 16), text.strip("\n").split("\n")) for ident, text in zip(parts[::2], parts[1::2], strict=True)
    ]
    # Threads come youngest first.
    stacks.sort(key=lambda stack: stack[0] != main)
    arranged = []
    for ident, lines in stacks:
        if ident == main:
            title = "Main thread"
        elif _shows_nothing(lines, package):
            continue
        else:
            title = f"Thread 0x{ident:x}"
        arranged.append("\n".join([f"{title} (most recent call first):", *_without_base(lines, package)]))
    text = "\n\n".join(arranged)
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}\n... (cut here)"


def _file(line: str) -> str:
    match = _FRAME.match(line)
    return match[1] if match else ""


def _shows_nothing(lines: list[str], package: str) -> bool:
    """Whether a thread has no code in it but this package's and that of the standard library's ``threading``."""
    files = [_file(line) for line in lines]
    return all(file.startswith(f"{package}/") or file.endswith("/threading.py") for file in files)


def _without_base(lines: list[str], package: str) -> list[str]:
    """Keep one frame of the server, the one that has called user code or waits for something to do."""
    for position, line in enumerate(lines):
        if _file(line).startswith(f"{package}/server/"):
            return lines[: position + 1]
    return lines
