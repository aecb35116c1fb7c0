"""Requests for the stacks of a session's workers, and their answers."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select

import pytest

from rpcdataloader.server.events import Link
from rpcdataloader.server.stacks import StackFile, WorkerStacks


class FakeStacks(WorkerStacks):
    """Those of a worker that does not exist, so that they are hopeless at once."""

    def __init__(self, number):
        super().__init__()
        link, theirs = Link.pair()
        theirs.close()
        self.watch(2**30 + number, number, link)  # above the kernel's largest process id
        self.link = link

    def close(self):
        super().close()
        self.link.close()


@pytest.fixture
def stacks():
    made = [FakeStacks(1), FakeStacks(2)]
    yield made
    for stack in made:
        stack.close()


@contextlib.contextmanager
def looking(stacks):
    """What a status gate has: a function that gives what it was told so far, and one whether there is more to come."""
    told, (ended, pipe) = os.memfd_create("test"), os.pipe()
    file = StackFile(stacks, os.dup(told), pipe)
    poll = select.poll()
    poll.register(ended)

    def told_so_far():
        lines = os.pread(told, 2**20, 0).splitlines()
        return dict(map(json.loads, lines))

    try:
        yield told_so_far, lambda: not poll.poll(0), file
    finally:
        os.close(told)
        os.close(ended)


def text_of(stack, number):
    return f"worker {number} (pid {stack.pid}): state: gone\nno Python stack: it has ended"


def test_file_has_a_line_per_worker_and_ends_with_the_last(stacks):
    with looking(stacks) as (told, is_open, _file):
        stacks[0].finish()
        assert (told(), is_open()) == ({stacks[0].pid: text_of(stacks[0], 1)}, True)
        assert [stack.is_asked for stack in stacks] == [False, True]
        stacks[1].finish()
        assert told()[stacks[1].pid] == text_of(stacks[1], 2)
        assert not is_open()


def test_worker_that_ends_is_waited_for_no_longer(stacks):
    with looking(stacks) as (told, is_open, _file):
        stacks[1].finish()
        stacks[0].answer("worker 1 has ended")
        assert told()[stacks[0].pid] == "worker 1 has ended"
        assert not is_open()


def test_all_who_ask_get_the_same_stacks(stacks):
    with looking(stacks) as (first, _, _), looking(stacks) as (second, _, _):
        texts = []
        stacks[0].ask(texts.append)
        for stack in stacks:
            stack.finish()
        assert first() == second() == {stack.pid: text_of(stack, number) for number, stack in enumerate(stacks, 1)}
        assert texts == [first()[stacks[0].pid]]


def test_session_without_workers_answers_at_once():
    with looking([]) as (told, is_open, _file):
        assert (told(), is_open()) == ({}, False)


def test_forked_worker_keeps_no_file_open(stacks):
    with looking(stacks) as (_told, is_open, file):
        assert is_open()
        file.close()
        assert not is_open()


def test_limit_on_the_size_of_files_costs_the_stack_and_not_the_session(stacks):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with looking(stacks) as (told, is_open, _file):
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        try:
            for stack in stacks:
                stack.finish()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert (told(), is_open()) == ({}, False)
