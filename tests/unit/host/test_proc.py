"""What the kernel says of processes, connections and memory."""

from __future__ import annotations

import os
import subprocess
import sys

from rpcdataloader.host.resources import ProcessUse, memory_bytes, process_use


def test_kernel_is_asked_about_a_process():
    use = process_use(os.getpid())
    assert use.state in "RS"
    assert use.cpu_seconds > 0
    assert use.memory_bytes > 10**6
    assert process_use(2**22 + 1) == ProcessUse()


def test_name_of_a_process_may_hold_any_bytes():
    with subprocess.Popen(
        [sys.executable, "-c", "open('/proc/self/comm', 'wb').write(b'\\xff) R'); print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert process_use(process.pid).memory_bytes > 10**6
        process.communicate(b"\n")


def test_kernel_is_asked_for_memory():
    memory = memory_bytes()
    assert 0 < memory["MemAvailable"] <= memory["MemTotal"]
    assert memory_bytes("MemTotal:       2 kB\nHugePages_Total:  7\n") == {"MemTotal": 2048}
