from __future__ import annotations

import os
import subprocess
import threading

from tests.benchmark import proc
from tests.benchmark.proc import Switches


def test_counters_and_sizes_are_read():
    status = "Name:\tpython\nvoluntary_ctxt_switches:\t12\nnonvoluntary_ctxt_switches:\t3\n"
    assert proc.parse_switches(status) == (12, 3)
    assert (
        proc.parse_memory("55d0-7ffe ---p 00000000 00:00 0 [rollup]\nRss: 90 kB\nPss: 40 kB\nPss_Dirty: 7 kB\n")
        == 40960
    )
    assert proc.parse_memory("") == 0


def test_switches_of_new_threads_count_and_those_of_threads_that_ended_do_not():
    before = {"1": Switches(10, 1), "2": Switches(5, 5)}
    after = {"1": Switches(14, 2), "3": Switches(3, 0)}
    assert proc.switches_between(before, after) == (7, 1)


def test_waiting_thread_is_seen_in_the_counts():
    before = proc.count_switches()
    asked, answered = threading.Semaphore(0), threading.Semaphore(0)
    ended = threading.Event()

    def answer():
        while asked.acquire() and not ended.is_set():
            answered.release()

    num_threads = proc.count_threads()
    thread = threading.Thread(target=answer)
    thread.start()
    assert proc.count_threads() == num_threads + 1
    for _ in range(20):
        asked.release()
        answered.acquire()
    assert proc.switches_between(before, proc.count_switches()).voluntary >= 20
    ended.set()
    asked.release()
    thread.join()


def test_descriptors_and_processes_are_counted():
    num_open = proc.count_descriptors()
    read, write = os.pipe()
    assert proc.count_descriptors() == num_open + 2
    with subprocess.Popen(["cat"], stdin=read) as child:
        assert child.pid in proc.find_descendants([os.getpid()])
        assert 0 < proc.sum_memory([child.pid]) < 2**30
        os.close(write)
    os.close(read)
    assert child.pid not in proc.find_descendants([os.getpid()])
