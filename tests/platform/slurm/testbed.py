"""A real Slurm on this machine, brought up and down by the scripts of a testbed: one GPU node, two CPU nodes.

Each run has a state directory, a port, a bridge and a subnet of its own. Whatever happens to the tests, a shell that
waits for their end takes everything down.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests import conftest
from tests.conftest import descendants, process_name, stat_of
from tests.support import network

ROOT = Path(__file__).parents[3]
# Whoever asks Slurm takes CPU time from its jobs.
wait_until = partial(conftest.wait_until, interval=0.3)

SCRIPTS = Path(os.environ.get("RPCDATALOADER_SLURM_TESTBED", ROOT))


def why_not() -> str | None:
    """Why there can be no Slurm here; None if there can."""
    for name in ("up.sh", "down.sh"):
        if not (SCRIPTS / name).exists():
            return f"RPCDATALOADER_SLURM_TESTBED does not name a folder with {name}"
    if not shutil.which("slurmctld") and not shutil.which("apt-get"):
        return "Slurm is not installed, and there is no apt-get to install it"
    return network.why_not()


def become(user: int) -> list[str]:
    """Words before a command that is to run as another user."""
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _free_subnet() -> str:
    shown = subprocess.run(["ip", "-4", "-o", "address"], capture_output=True, text=True, check=True).stdout
    while re.search(rf" {re.escape(subnet := f'10.{100 + secrets.randbelow(100)}.{secrets.randbelow(256)}')}\.", shown):
        pass
    return subnet


class Testbed:
    """The cluster. It is there once built.

    Args:
        home: Home directory of jobs.
    """

    __test__ = False  # no test, whatever pytest thinks of the name

    def __init__(self, home: Path) -> None:
        # A short path: Unix sockets are in it.
        self.state = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self.bridge = f"sl{secrets.token_hex(3)}"
        env = {
            **os.environ,
            "SLURM_TESTBED_PORT": str(_free_port()),
            "SLURM_TESTBED_BRIDGE": self.bridge,
            "SLURM_TESTBED_SUBNET": _free_subnet(),
        }
        down, wipe = f"{SCRIPTS}/down.sh --state {self.state} --wipe", f"rm -rf {self.state}"
        self._guard = subprocess.Popen(
            ["bash", "-c", f"trap '' INT TERM HUP; read -r; {down}; code=$?; {wipe}; exit $code"],
            stdin=subprocess.PIPE,
            env=env,
            start_new_session=True,
        )
        self.env: dict[str, str] = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(home),
            "PYTHONPATH": str(ROOT),
            "SLURM_CONF": str(self.state / "slurm.conf"),
            "OMP_NUM_THREADS": "1",
        }
        try:
            self._bring_up(env)
        except BaseException:
            self.close()
            raise

    def _bring_up(self, env: dict[str, str]) -> None:
        up = [str(SCRIPTS / "up.sh"), "--state", str(self.state), "--mode", "netns", "--gpus", "8", "--cpus", "32"]
        done = subprocess.run(up, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        # A node is lost after 10 s of silence.
        conf = self.state / "slurm.conf"
        text = conf.read_text().replace("SlurmdTimeout=60", "SlurmdTimeout=10").replace("KillWait=5", "KillWait=2")
        conf.write_text(text)
        self.run("scontrol", "reconfigure")

    def run(self, *command: str) -> str:
        """Run a command of Slurm on the submitting machine; returns what it prints."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, folder: Path, script: str, user: int = 0, **env: str) -> Job:
        """Submit a job that runs in ``folder``."""
        folder.mkdir(exist_ok=True)
        command = [*become(user), "sbatch", "--parsable"]
        env = {**self.env, **env}
        done = subprocess.run(command, input=script, cwd=folder, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return Job(self, int(done.stdout), folder)

    def kill_node(self, node: str) -> None:
        """End everything on a node at once: its daemon, and what the daemon has started."""
        daemon = int((self.state / f"run/slurmd.{node}.pid").read_text())
        space = os.readlink(f"/proc/{daemon}/ns/uts")
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/ns/uts") == space:
                    os.kill(int(pid), signal.SIGKILL)

    def processes(self, *marks: str) -> list[int]:
        """Those that belong to this cluster, and have these words in their environment."""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
                if {*marks} <= {*words} and any(word.startswith(f"SLURM_CONF={self.state}/") for word in words):
                    found.append(int(pid))
        return found

    def close(self) -> None:
        """Take everything down; nothing may be left."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        code = self._guard.wait(60)
        left = {pid: process_name(pid) for pid in self.processes()}
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert not left, f"left running: {left}"
        assert code == 0, f"down.sh ended with {code}"
        assert not self.state.exists()
        for what in ("link", "netns"):
            shown = subprocess.run(["ip", what], capture_output=True, text=True, check=True).stdout
            assert self.bridge not in shown, shown


@dataclass
class Job:
    """A job that was submitted."""

    bed: Testbed
    id: int
    folder: Path

    @property
    def output(self) -> str:
        """What it has printed so far."""
        path = self.folder / f"slurm-{self.id}.out"
        return path.read_text() if path.exists() else ""

    def show(self) -> list[str]:
        """What Slurm says of each of its components."""
        return self.bed.run("scontrol", "-o", "show", "job", str(self.id)).splitlines()

    @property
    def is_requeued(self) -> bool:
        """Whether all its components wait to be started for the second time."""
        return all(" JobState=PENDING " in line and " Restarts=1 " in line for line in self.show())

    @property
    def state(self) -> str:
        """Such as ``COMPLETED 0:0``; that of the first component if it has several."""
        match = re.search(r" JobState=(\w+) .* ExitCode=(\S+) ", self.show()[0])
        assert match
        return f"{match[1]} {match[2]}"

    def wait_for(self, text: str, seconds: float = 120) -> None:
        """Wait until it has printed something."""

        def has_come() -> bool:
            if text in self.output:
                return True
            assert not re.match("COMPLETED|FAILED|CANCELLED", self.state), self.output
            return False

        wait_until(has_come, seconds, f"job {self.id} prints {text!r}")

    def wait(self, seconds: float = 90) -> str:
        """Wait for its end; returns its last state."""
        ongoing = "PENDING|RUNNING|COMPLETING|CONFIGURING"
        wait_until(lambda: not re.match(ongoing, self.state), seconds, str(self))
        return self.state

    def processes(self, word: str = "") -> list[int]:
        """Its processes; only those of Python with ``word`` in their command line, if there is one."""

        def is_chosen(pid: int) -> bool:
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                return not word or (b"python" in words[0] and word.encode() in words)
            return False

        return list(filter(is_chosen, self.bed.processes(f"SLURM_JOB_ID={self.id}")))

    def servers(self) -> list[int]:
        """Process ids of the node servers that have registered in its folder."""
        return [int(json.loads(path.read_text())["pid"]) for path in self.folder.glob("**/*.server.json")]

    def kill_worker(self) -> None:
        """Kill a worker for certain. They come and go with every epoch, so it is stopped before."""

        def kill() -> bool:
            sessions = [session for server in self.servers() for session in descendants(server)]
            for worker in [worker for session in sessions for worker in descendants(session)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGSTOP)
                    wait_until(lambda pid=worker: not set(stat_of(pid)[:1]) & set("RSD"), what="a worker to stop")  # type: ignore[misc]
                    if stat_of(worker)[:1] == ["T"]:
                        os.kill(worker, signal.SIGKILL)
                        return True
            return False

        wait_until(kill, 20, "a worker to kill")

    @contextlib.contextmanager
    def paused(self, word: str) -> Iterator[list[int]]:
        """Its processes, which are stopped, so that others can do what takes time."""
        pids = self.processes(word)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield pids
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
