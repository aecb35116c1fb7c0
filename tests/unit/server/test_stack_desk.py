"""Who wants to know where the code of a session's workers is, and what they are told."""

from __future__ import annotations

import contextlib
import os
import resource
import select
from types import SimpleNamespace

import pytest

from rpcdataloader.server.events import WorkerStack
from rpcdataloader.server.stack_desk import ForkedWorker, StackDesk


class FakeStack:
    """Has a stack as soon as it was asked for one, if it is told to."""

    def __init__(self):
        self.is_asked = False
        self.is_ready = False

    def ask(self):
        self.is_asked = True

    def is_done(self):
        return self.is_ready

    def take(self):
        self.is_asked = False
        return "it sleeps"


@pytest.fixture
def workers():
    return {
        number: ForkedWorker(number, "", SimpleNamespace(pid=300 + number), None, FakeStack(), 0.0) for number in (1, 2)
    }


@pytest.fixture
def desk(workers):
    return StackDesk(workers, lambda _id, _text: pytest.fail("the client has not asked"))


@contextlib.contextmanager
def looking(desk):
    """What a status gate has: a function that gives what it was told so far, and one whether there is more to come."""
    told, (ended, pipe) = os.memfd_create("test"), os.pipe()
    desk.ask_all(os.dup(told), pipe)
    poll = select.poll()
    poll.register(ended)

    def stacks():
        lines = os.pread(told, 2**20, 0).splitlines()
        return {stack.pid: stack.text for stack in map(WorkerStack.decode, lines)}

    try:
        yield stacks, lambda: not poll.poll(0)
    finally:
        os.close(told)
        os.close(ended)


def test_look_has_a_line_per_worker_and_ends_with_the_last(desk, workers):
    with looking(desk) as (stacks, is_open):
        workers[1].stack.is_ready = True
        desk.finish(2)
        assert (stacks(), is_open()) == ({301: "worker 1 (pid 301): it sleeps"}, True)
        assert desk.pause is not None
        workers[2].stack.is_ready = True
        desk.finish(2)
        assert stacks()[302] == "worker 2 (pid 302): it sleeps"
        assert not is_open()
        assert desk.pause is None


def test_worker_that_ends_is_waited_for_no_longer(desk, workers):
    with looking(desk) as (stacks, is_open):
        workers[2].stack.is_ready = True
        desk.finish(2)
        desk.ended(workers.pop(1))
        assert stacks()[301] == "it has ended"
        desk.finish(2)
        assert not is_open()


def test_two_looks_have_the_same_stacks(desk, workers):
    with looking(desk) as (first, _), looking(desk) as (second, _):
        for worker in workers.values():
            worker.stack.is_ready = True
        desk.finish(2)
        assert first() == second() != {}


def test_session_without_workers_answers_at_once():
    desk = StackDesk({}, None)
    with looking(desk) as (stacks, is_open):
        desk.finish(0)
        assert (stacks(), is_open()) == ({}, False)


def test_worker_keeps_no_look_open(desk):
    with looking(desk) as (_stacks, is_open):
        assert is_open()
        desk.forget_in_child()
        assert not is_open()


def test_limit_on_the_size_of_files_costs_the_stack_and_not_the_session(desk, workers):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with looking(desk) as (stacks, is_open):
        for worker in workers.values():
            worker.stack.is_ready = True
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        try:
            desk.finish(2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert (stacks(), is_open()) == ({}, False)
