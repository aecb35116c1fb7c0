"""Messages between the processes of a node."""

from __future__ import annotations

import os
import resource
import select
import socket
import subprocess
import sys

import pytest

from rpcdataloader.server.events import Drain, GaveUp, Link, StacksBegun, WantsStacks, WorkerEnded


@pytest.fixture
def pair():
    ours, theirs = Link.pair()
    yield ours, theirs
    ours.close()
    theirs.close()


def fill(link):
    """Post until there is no room; returns how many messages that took."""
    count = 0
    while link.flush():
        link.post(WorkerEnded(count, "x" * 1000))
        count += 1
    return count


def test_messages_keep_their_boundaries_and_order(pair):
    ours, theirs = pair
    for number in range(3):
        assert ours.send(WorkerEnded(number, "é" * number))
    assert [theirs.recv() for _ in range(3)] == [(WorkerEnded(number, "é" * number), []) for number in range(3)]


def test_descriptors_arrive_usable_and_are_not_inherited(pair):
    ours, theirs = pair
    read_end, write_end = os.pipe()
    assert ours.send(WantsStacks(), [read_end, write_end])
    event, (their_read, their_write) = theirs.recv()
    try:
        assert event == WantsStacks()
        os.write(write_end, b"through")
        assert os.read(their_read, 100) == b"through"
        assert not os.get_inheritable(their_read)
        assert not os.get_inheritable(their_write)
    finally:
        for descriptor in (read_end, write_end, their_read, their_write):
            os.close(descriptor)


def test_programs_that_are_started_hold_no_end():
    ours, theirs = Link.pair()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False) as program:
        theirs.close()
        assert ours.recv() is None
        ours.close()
        program.communicate(b"\n")


def test_closed_other_end_reads_as_none_and_takes_nothing(pair):
    ours, theirs = pair
    theirs.close()
    assert ours.recv() is None
    assert ours.recv(wait=False) is None
    assert not ours.send(Drain())
    assert ours.post(Drain())


def test_what_was_sent_before_the_end_is_still_read(pair):
    ours, theirs = pair
    ours.send(GaveUp("last words"))
    ours.close()
    assert theirs.recv() == (GaveUp("last words"), [])
    assert theirs.recv() is None


def test_recv_without_waiting_tells_nothing_yet_from_the_end(pair):
    ours, _theirs = pair
    with pytest.raises(BlockingIOError):
        ours.recv(wait=False)


def test_post_never_waits_and_loses_nothing(pair):
    """The node server posts: a session that is busy for an hour must neither stop it nor miss a word."""
    ours, theirs = pair
    count = fill(ours)
    assert count > 10
    assert not ours.post(Drain())
    received = []
    while not received or received[-1] != Drain():
        received.append(theirs.recv()[0])
        ours.flush()
    assert [event.worker for event in received[:-1]] == [*range(count)]
    assert ours.flush()


def test_offer_passes_descriptors_on_or_says_that_there_is_no_room(pair):
    ours, theirs = pair
    read_end, write_end = os.pipe()
    os.close(write_end)
    assert ours.offer(WantsStacks(), [read_end])
    event, (descriptor,) = theirs.recv()
    assert event == WantsStacks()
    assert os.read(descriptor, 1) == b""
    os.close(descriptor)
    fill(ours)
    assert not ours.offer(WantsStacks(), [read_end])
    ours.post(Drain())
    # What was posted goes first.
    received = []
    while not ours.offer(WantsStacks(), [read_end]):
        received.append(theirs.recv()[0])
    while not received or received[-1] != WantsStacks():
        event, descriptors = theirs.recv()
        received.append(event)
    os.close(descriptors[0])
    assert received[-2:] == [Drain(), WantsStacks()]
    theirs.close()
    assert not ours.offer(WantsStacks(), [read_end])
    os.close(read_end)


def test_room_is_reported_to_whoever_polls(pair):
    ours, theirs = pair
    fill(ours)
    poll = select.poll()
    poll.register(theirs.fileno(), select.POLLIN)
    assert poll.poll(0)


def test_event_comes_without_descriptors_if_none_is_left(pair):
    ours, theirs = pair
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    read_end, write_end = os.pipe()
    ours.send(WantsStacks(), [read_end])
    ours.send(Drain())
    lowest = os.dup(read_end)
    os.close(lowest)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        assert theirs.recv() == (WantsStacks(), [])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(read_end)
        os.close(write_end)
    assert theirs.recv() == (Drain(), [])


def test_some_descriptors_of_several_are_closed_again(pair):
    ours, theirs = pair
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ends = os.pipe()
    ours.send(WantsStacks(), ends)
    lowest = os.dup(0)
    os.close(lowest)
    before = set(os.listdir("/proc/self/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, hard))
        assert theirs.recv() == (WantsStacks(), [])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in ends:
            os.close(descriptor)
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 1  # that of listdir itself


def test_several_processes_may_write_to_one_end(pair):
    """Gates write sockets to the node server's end of a session's link."""
    ours, theirs = pair
    other = Link(socket.socket(fileno=os.dup(ours.fileno())))
    other.send(StacksBegun())
    other.close()
    ours.send(Drain())
    assert [theirs.recv()[0] for _ in range(2)] == [StacksBegun(), Drain()]


@pytest.mark.parametrize(
    "data", [b"{", b"[]", b'{"event": "WorkerEnded", "worker": "1", "reason": ""}', b'{"event": "None"}']
)
def test_what_is_no_event_is_refused_and_its_descriptors_are_closed(pair, data):
    """User code may write to a link, which is a descriptor of its process."""
    ours, theirs = pair
    with socket.socket(fileno=os.dup(ours.fileno())) as sock:
        before = len(os.listdir("/proc/self/fd"))
        socket.send_fds(sock, [data], [0])
        with pytest.raises(ValueError, match=r"is not|unknown event|is missing|is of"):
            theirs.recv()
        assert len(os.listdir("/proc/self/fd")) == before
