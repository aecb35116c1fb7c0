from __future__ import annotations

import threading
import weakref

import pytest

from rpcdataloader.errors import LocalProtocolError
from rpcdataloader.server.requests import HandleTable


class Thing:
    pass


@pytest.fixture
def table():
    return HandleTable()


def test_objects_are_held_by_new_handles(table):
    one, other = Thing(), Thing()
    handles = [table.add(one), table.add(other), table.add(one), table.add(None), table.add(None)]
    assert handles == [1, 2, 3, 4, 5]
    assert [table[handle] for handle in handles] == [one, other, one, None, None]
    assert len(table) == 5


def test_object_goes_with_its_last_handle(table):
    thing = Thing()
    reference = weakref.ref(thing)
    handles = [table.add(thing), table.add(thing)]
    del thing
    table.release(handles[:1])
    assert reference() is table[handles[1]]
    table.release(handles[1:])
    assert reference() is None
    assert len(table) == 0


def test_released_handle_is_never_used_again(table):
    stale = table.add(Thing())
    table.release([stale])
    assert table.add(Thing()) != stale
    with pytest.raises(LocalProtocolError, match=f"no object with handle {stale} on this worker"):
        table[stale]


def test_unknown_handles_are_released_in_peace(table):
    kept = table.add(Thing())
    table.release([5, 5, 2**63])
    table.release([])
    assert len(table) == 1
    assert type(table[kept]) is Thing


def test_destructors_may_use_the_table(table):
    class Nested:
        def __del__(self):
            added.append(table.add("of a destructor"))
            table.release([inner])

    added: list[int] = []
    inner = table.add(Thing())
    table.release([table.add(Nested())])
    assert [table[handle] for handle in added] == ["of a destructor"]
    assert len(table) == 1


def test_destructors_run_in_the_thread_that_releases(table):
    class Noted:
        def __del__(self):
            threads.append(threading.current_thread())

    threads: list[threading.Thread] = []
    handle = table.add(Noted())
    thread = threading.Thread(target=table.release, args=([handle],))
    thread.start()
    thread.join()
    assert threads == [thread]


def test_threads_share_the_table(table):
    def work():
        for _ in range(500):
            mine = [table.add(threading.get_ident()) for _ in range(3)]
            assert {table[handle] for handle in mine} == {threading.get_ident()}
            table.release(mine)
            done.append(mine)

    done: list[list[int]] = []
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(handle for mine in done for handle in mine) == list(range(1, 6001))
    assert len(table) == 0
