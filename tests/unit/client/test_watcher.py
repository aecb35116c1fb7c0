"""Being told of servers that come and go."""

from __future__ import annotations

import os
import queue
import threading
import time

import pytest

from rpcdataloader.client.register import Register, RegisterWatcher
from rpcdataloader.errors import ConnectError
from rpcdataloader.wire.address import Address
from rpcdataloader.wire.status import MAX_SILENCE
from tests.conftest import TIMEOUT_SCALE, wait_until
from tests.unit.client.test_register import age, server, write

LIMIT = 10 * TIMEOUT_SCALE
A, B, C = (Address(name, 6543) for name in "abc")


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "rpcdl-register"]


@pytest.fixture
def watcher(tmp_path, monkeypatch):
    monkeypatch.setattr(Register, "pause", 0.01)
    watcher = RegisterWatcher(Register(str(tmp_path)))
    yield watcher
    watcher.close()
    assert not threads()


class Changes:
    """What was reported."""

    def __init__(self):
        self._queue = queue.SimpleQueue()

    def __call__(self, added, removed):
        self._queue.put((added, removed))

    def next(self):
        return self._queue.get(timeout=LIMIT)

    def none(self):
        return self._queue.empty()


@pytest.fixture
def changes():
    return Changes()


def looks(watcher, number=3):
    """Wait until it has looked some more times."""
    seen = []
    look = watcher._lookup.look
    watcher._lookup.look = lambda: seen.append(look()) or seen[-1]
    wait_until(lambda: len(seen) >= number)
    watcher._lookup.look = look


# --- watching


def test_servers_that_come_and_go_are_reported(tmp_path, watcher, changes):
    watcher.watch((), changes)
    path = write(tmp_path, server("a"))
    assert changes.next() == ((A,), ())
    path.unlink()
    assert changes.next() == ((), (A,))


def test_first_report_is_the_difference_from_what_is_known(tmp_path, watcher, changes):
    for name in "cba":
        write(tmp_path, server(name, started=ord(name)))
    watcher.watch([Address("gone", 1), B], changes)
    assert changes.next() == ((A, C), (Address("gone", 1),))


def test_nothing_is_reported_where_nothing_has_changed(tmp_path, watcher, changes):
    write(tmp_path, server("a"))
    watcher.watch([A], changes)
    looks(watcher)
    assert changes.none()


def test_server_that_was_started_again_has_gone_and_come(tmp_path, watcher, changes):
    path = write(tmp_path, server("a"))
    watcher.watch([A], changes)
    looks(watcher)
    new = write(tmp_path, server("a", started=2.0, pid=5000))
    assert changes.next() == ((A,), (A,))
    path.unlink()
    looks(watcher)
    assert changes.none()
    new.unlink()
    assert changes.next() == ((), (A,))


def test_server_that_is_killed_is_reported_when_it_has_been_silent(tmp_path, watcher, changes, monkeypatch):
    path = write(tmp_path, server("a"))
    watcher.watch([A], changes)
    looks(watcher)
    later = time.monotonic() + MAX_SILENCE + 1
    monkeypatch.setattr("rpcdataloader.client.register.time.monotonic", lambda: later)
    assert changes.next() == ((), (A,))
    age(path, 5)
    assert changes.next() == ((A,), ())


def test_files_that_are_not_whole_are_not_reported_until_they_are(tmp_path, watcher, changes):
    whole = server("a")
    path = write(tmp_path, whole)
    watcher.watch((), changes)
    assert changes.next() == ((A,), ())
    path.unlink()
    assert changes.next() == ((), (A,))
    for content in (b"", whole.encode()[:30]):
        path.touch(mode=0o600)
        path.write_bytes(content)
        looks(watcher)
        assert changes.none()
    path.write_bytes(whole.encode())
    assert changes.next() == ((A,), ())


def test_directory_may_come_and_go(tmp_path, changes, monkeypatch):
    monkeypatch.setattr(Register, "pause", 0.01)
    folder = tmp_path / "pool"
    watcher = RegisterWatcher(Register(str(folder)))
    watcher.watch((), changes)
    looks(watcher)
    folder.mkdir()
    path = write(folder, server("a"))
    assert changes.next() == ((A,), ())
    path.unlink()
    folder.rmdir()
    assert changes.next() == ((), (A,))
    watcher.close()


# --- one thread for all


def test_all_watches_share_a_thread_that_ends_with_the_last(tmp_path, watcher, changes):
    other = Changes()
    watcher.watch((), changes)
    watcher.watch((), other)
    path = write(tmp_path, server("a"))
    assert changes.next() == other.next() == ((A,), ())
    assert len(threads()) == 1
    watcher.end(changes)
    watcher.end(changes)
    path.unlink()
    assert other.next() == ((), (A,))
    assert changes.none()
    watcher.end(other)
    wait_until(lambda: not threads())
    watcher.watch([A], changes)
    assert changes.next() == ((), (A,))


def test_new_watch_is_told_at_once(tmp_path, watcher, changes, monkeypatch):
    monkeypatch.setattr(Register, "pause", 3600.0)
    write(tmp_path, server("a"))
    watcher.watch((), changes)
    assert changes.next() == ((A,), ())
    other = Changes()
    watcher.watch((), other)
    assert other.next() == ((A,), ())


def test_watch_may_be_closed_by_what_it_calls(tmp_path, watcher, changes):
    def once(added, removed):
        watcher.end(once)
        changes(added, removed)

    watcher.watch((), once)
    path = write(tmp_path, server("a"))
    assert changes.next() == ((A,), ())
    path.unlink()
    wait_until(lambda: not threads())
    assert changes.none()


def test_watch_that_another_one_closes_is_not_told_what_was_just_seen(tmp_path, watcher, changes):
    def close_the_other(added, removed):
        watcher.end(not_told)
        changes(added, removed)

    not_told = Changes()
    watcher.watch((), close_the_other)
    watcher.watch((), not_told)
    path = write(tmp_path, server("a"))
    assert changes.next() == ((A,), ())
    path.unlink()
    assert changes.next() == ((), (A,))
    assert not_told.none()


def test_report_that_raises_is_logged_and_stops_nothing(tmp_path, watcher, changes, caplog):
    def fail(_added, _removed):
        raise ValueError("a mistake")

    watcher.watch((), fail)
    watcher.watch((), changes)
    write(tmp_path, server("a"))
    assert changes.next() == ((A,), ())
    assert "a mistake" in caplog.text


def test_close_ends_watches_and_the_thread(tmp_path, watcher, changes):
    watcher.watch((), changes)
    watcher.close()
    assert not threads()
    write(tmp_path, server("a"))
    watcher.end(changes)
    watcher.watch((), changes)
    watcher.end(changes)
    assert not threads()
    assert changes.none()


def test_watch_can_be_closed_in_a_fork(watcher, changes, monkeypatch):
    """Though the lock may have been taken by a thread that is not there."""
    watcher.watch((), changes)
    held, enough = threading.Event(), threading.Event()

    def hold():
        with watcher._condition:
            held.set()
            enough.wait(LIMIT)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(LIMIT)
    watcher.forget_in_child()
    watcher.end(changes)
    with monkeypatch.context() as patch:
        patch.setattr("rpcdataloader.client.register.JOIN_TIMEOUT", 0.1)  # for the thread, which there is here
        watcher.close()
    assert thread.is_alive()
    enough.set()
    thread.join()


# --- the servers now


def test_find_gives_those_that_are_there(tmp_path, watcher):
    write(tmp_path, server("b", 1.0))
    write(tmp_path, server("a", 2.0))
    assert watcher.find(LIMIT) == (server("b", 1.0), server("a", 2.0))


def test_find_waits_for_the_first_with_one_line_in_the_log(tmp_path, watcher, caplog):
    looking = threading.Event()
    found = queue.SimpleQueue()
    look = watcher._lookup.look

    def looked():
        try:
            return look()
        finally:
            looking.set()

    watcher._lookup.look = looked
    thread = threading.Thread(target=lambda: found.put(watcher.find(LIMIT)))
    thread.start()
    assert looking.wait(LIMIT)
    write(tmp_path, server("a"))
    assert found.get(timeout=LIMIT) == (server("a"),)
    thread.join()
    (line,) = [record.getMessage() for record in caplog.records if "waiting" in record.getMessage()]
    assert line == f"waiting for a node server to be registered in {tmp_path}, for at most {LIMIT:g} s"


def test_find_says_where_it_has_looked_and_what_was_not_used(tmp_path, watcher):
    path = write(tmp_path, server("a"))
    age(path, MAX_SILENCE + 10)
    with pytest.raises(ConnectError) as caught:
        watcher.find(0.1)
    assert str(caught.value) == (
        f"no node server is registered in {tmp_path}, and none came within 0.1 s ({path.name}: its server is silent); "
        f"start some with: python -m rpcdataloader.launch --register {tmp_path}"
    )


def test_find_shows_no_more_than_text_of_names_that_somebody_else_has_chosen(tmp_path, watcher):
    (tmp_path / "a\n\x1b[31mready.server.json").mkdir()
    with pytest.raises(ConnectError, match=r"\(a\?\?\[31mready\.server\.json: it is not a regular file\)"):
        watcher.find(0.1)


def test_find_waits_for_a_directory_as_well(tmp_path):
    missing = os.path.join(tmp_path, "missing")
    with pytest.raises(ConnectError, match=f"no node server is registered in {missing}, and none came within 0.05 s;"):
        RegisterWatcher(Register(missing)).find(0.05)
