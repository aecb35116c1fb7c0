"""Arranging what faulthandler writes."""

from __future__ import annotations

from rpcdataloader.server.stacks import MAX_CHARACTERS, arrange

PACKAGE = "/lib/rpcdataloader"
LIB = "/lib/python3.11"

OWN = f"""\
Thread 0x000000000000000b (most recent call first):
  File "{PACKAGE}/wire/channel.py", line 7 in recv
  File "{PACKAGE}/server/worker.py", line 204 in _watch
  File "{LIB}/threading.py", line 982 in run
"""
TIMER = f"""\
Thread 0x000000000000000d (most recent call first):
  File "{LIB}/threading.py", line 1399 in run
"""
CURRENT = f"""\
Current thread 0x000000000000000c (most recent call first):
  File "/home/data.py", line 3 in count
  File "{LIB}/threading.py", line 982 in run
"""
MAIN = f"""\
Thread 0x000000000000000a [python] (most recent call first):
  File "/home/data.py", line 9 in __getitem__
  File "{PACKAGE}/loader/remote.py", line 30 in fetch
  File "{PACKAGE}/server/worker.py", line 250 in _execute
  File "{PACKAGE}/server/session.py", line 12 in run
  File "<frozen runpy>", line 88 in _run_code
"""


def test_user_code_first_without_what_is_ours():
    assert arrange("\n".join([OWN, TIMER, CURRENT, MAIN]), 0xA, PACKAGE) == (
        "Main thread (most recent call first):\n"
        '  File "/home/data.py", line 9 in __getitem__\n'
        f'  File "{PACKAGE}/loader/remote.py", line 30 in fetch\n'
        f'  File "{PACKAGE}/server/worker.py", line 250 in _execute\n'
        "\n"
        "Thread 0xc (most recent call first):\n"
        '  File "/home/data.py", line 3 in count\n'
        f'  File "{LIB}/threading.py", line 982 in run'
    )


def test_folder_of_the_package_is_not_a_beginning_of_another_name():
    other = OWN.replace(PACKAGE, f"{PACKAGE}_plugins")
    assert f"{PACKAGE}_plugins/server/worker.py" in arrange(other, 0xA, PACKAGE)
    assert "threading.py" in arrange(other, 0xA, PACKAGE)


def test_thread_without_frames_is_kept():
    assert arrange("Thread 0x0d (most recent call first):\n  <no Python frame>\n", 0xA, PACKAGE) == (
        "Thread 0xd (most recent call first):\n  <no Python frame>"
    )


def test_nothing_is_nothing():
    assert arrange("", 0xA, PACKAGE) == ""
    assert arrange("something else\n", 0xA, PACKAGE) == ""


def test_text_is_cut():
    deep = MAIN.replace("  File", '  File "/home/data.py", line 9 in recurse\n' * 1000 + "  File", 1)
    text = arrange("\n".join([CURRENT, deep]), 0xA, PACKAGE)
    assert text.startswith("Main thread")
    assert text.endswith("\n... (cut here)")
    assert len(text) < MAX_CHARACTERS + 20
