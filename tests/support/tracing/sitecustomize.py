"""In a process that has this folder on its path: notes the lines of the package that it runs.

``SPINE_PACKAGE`` is the folder of the package, ``SPINE_NOTES`` one for the notes: a file for each module, with a byte
for each line, which is 1 once a process has run it. They are mapped, since many processes end without a word.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading

PACKAGE, NOTES = os.environ["SPINE_PACKAGE"] + os.sep, os.environ["SPINE_NOTES"]
MOST_LINES = 1 << 13


def _notes_of(file, known={}):  # noqa: B006  # what it remembers
    if file not in known:
        name = os.path.join(NOTES, file.removeprefix(PACKAGE).replace(os.sep, ":"))
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, MOST_LINES)
        known[file] = mmap.mmap(descriptor, MOST_LINES)
        os.close(descriptor)
    return known[file]


def _trace(frame, _event, _argument):
    if not frame.f_code.co_filename.startswith(PACKAGE):
        return None
    notes = _notes_of(frame.f_code.co_filename)

    def note(frame, _event, _argument):
        notes[frame.f_lineno] = 1
        return note

    return note(frame, "", None)


threading.settrace(_trace)
sys.settrace(_trace)

# It is no module of the script, whose source would be sent.
__spec__ = None  # type: ignore[assignment]
