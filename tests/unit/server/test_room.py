"""How much may wait in a worker."""

from __future__ import annotations

import threading

from rpcdataloader.server.room import Room


def test_one_may_wait_whatever_its_size():
    room = Room(10)
    room.take(1000)
    assert not room.is_full
    room.wait()
    room.take(0)
    assert room.is_full


def test_many_small_ones_may_wait():
    room = Room(10)
    for _ in range(10):
        room.take(1)
    assert not room.is_full
    room.take(1)
    assert room.is_full
    room.leave(1)
    assert not room.is_full


def test_who_waits_goes_on_when_there_is_room_again():
    room = Room(10)
    for _ in range(3):
        room.take(8)
    went_on = threading.Event()
    thread = threading.Thread(target=lambda: (room.wait(), went_on.set()))
    thread.start()
    room.leave(8)
    assert room.is_full
    assert not went_on.is_set()
    room.leave(8)
    thread.join(10)
    assert went_on.is_set()
