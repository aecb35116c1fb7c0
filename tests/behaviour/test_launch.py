"""The command line: every option has its effect, or is refused by name; and ``run_worker``."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import rpcdataloader
from rpcdataloader import __main__ as commands
from rpcdataloader import launch, rpc_async, run_worker
from rpcdataloader.errors import ConnectError
from rpcdataloader.host.resources import available_cpus
from tests.behaviour.test_server import call
from tests.conftest import READY_LINE, TIMEOUT_SCALE, occupied
from tests.support.clocks import in_server

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("clean_client")


@pytest.fixture
def fails(capsys):
    """Run the command line, which is expected to fail; gives the exit status and the message."""

    def fails(*options):
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
        package = logging.getLogger("rpcdataloader")
        level = package.level
        try:
            status = launch.main(options)
        except SystemExit as exc:
            status = exc.code
        finally:
            package.setLevel(level)
            for number, handler in handlers.items():
                signal.signal(number, handler)
        out, err = capsys.readouterr()
        assert out == ""
        return status, err

    return fails


# --- help


@pytest.mark.parametrize("command", commands.COMMANDS)
def test_every_command_is_listed_and_its_help_has_all_options(command, capsys):
    parser = importlib.import_module(commands.COMMANDS[command][0]).make_parser()
    assert all(action.help for action in parser._actions)
    options = [option for action in parser._actions for option in action.option_strings]
    for words, expected in (["--help"], [f"\n  {command} "]), ([command, "--help"], [parser.prog, *options]):
        with pytest.raises(SystemExit) as exited:
            commands.main(words)
        assert exited.value.code == 0
        shown = capsys.readouterr().out
        assert all(text in shown for text in expected)


@pytest.mark.parametrize("words", [["--version"], ["launch", "--version"]])
def test_version_is_printed(words, capsys):
    with pytest.raises(SystemExit) as exited:
        commands.main(words)
    assert exited.value.code == 0
    assert capsys.readouterr().out == f"rpcdataloader {rpcdataloader.__version__}\n"


@pytest.mark.parametrize("words", [[], ["lauch"], ["--port", "1"], ["status", "--no-such-option"]])
def test_unknown_commands_and_options_are_refused(words, capsys):
    with pytest.raises(SystemExit) as exited:
        commands.main(words)
    assert exited.value.code == 2
    assert capsys.readouterr().err.startswith("usage: ")


# --- what it logs


@pytest.mark.parametrize("is_journal", [False, True])
def test_each_line_of_the_log_has_one_time_and_in_the_journal_a_priority(serve, is_journal):
    """systemd sets the variable for what it starts, also where standard error then goes somewhere else."""
    inode = "file.st_ino" if is_journal else "0"
    server = serve(before=f"file = os.fstat(2); os.environ['JOURNAL_STREAM'] = f'{{file.st_dev}}:{{{inode}}}'")
    rpc_async(server.address, warn).wait()
    server.logged(r"WARNING tests\[\d+\] from a worker")
    os.kill(rpc_async(server.address, os.getpid).wait(), signal.SIGKILL)
    server.logged("WARNING .* was killed by SIGKILL")
    time = "" if is_journal else r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} "
    for line in server.log.splitlines():
        parts = re.match(rf"(\[\S+ client \S+ worker 1\] )?((<\d>)?){time}([A-Z]+) [\w.]+\[\d+\] [a-z]", line)
        printed = re.match(r"\[\S+ client \S+ worker 1\] <0>printed$", line)
        assert parts or printed, line
        if parts:
            priority = {"INFO": "<6>", "WARNING": "<4>"}[parts[4]]
            assert parts[2] == (priority if is_journal and not parts[1] else ""), line


def warn():
    os.write(1, b"<0>printed\n")
    logging.getLogger("tests").warning("from a worker")


# --- where it listens


def test_real_command_line_prints_one_ready_line_and_serves():
    """As a daemon, without standard input and log."""
    command = ["sh", "-c", 'exec "$@" <&- 2>&-', "sh", sys.executable, "-m", "rpcdataloader.launch"]
    command += ["--port", "0", "--num-workers", "3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            match = READY_LINE.fullmatch(process.stdout.readline())
            assert match
            address, num_workers, pid = match.groups()
            assert (address.rpartition(":")[0], num_workers, pid) == ("127.0.0.1", "3", str(process.pid))
            # No fork imports what batches need, and no collection in one visits what torch has made.
            session, num_frozen, is_imported = rpc_async(
                address, lambda: (os.getppid(), gc.get_freeze_count(), "rpcdataloader.fetch.remote" in sys.modules)
            ).wait()
            assert session in occupied(process.pid)
            assert is_imported
            assert num_frozen > 50_000
            process.send_signal(signal.SIGTERM)
            assert process.wait(20 * TIMEOUT_SCALE) == 0
            assert process.stdout.read() == ""
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("options", "address"),
    [(["--host", "127.0.0.1", "--advertise", "localhost"], r"localhost:\d+"), (["--host", "::1"], r"\[::1\]:\d+")],
)
def test_address_of_the_ready_line_leads_there(serve, options, address):
    server = serve("--port", "0", *options)
    assert re.fullmatch(address, server.address)
    assert server.num_workers == available_cpus()
    assert call(server, os.getpid) > 0


def test_unix_socket_is_private_and_goes_with_the_server(serve, tmp_path):
    folder = tmp_path / ("long" * 50)
    folder.mkdir()
    path = folder / "socket"
    server = serve("--host", f"unix:{path}")
    assert server.address == f"unix:{path}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert call(server, os.getpid) > 0
    path.chmod(0o660)  # for a group
    server.stop()
    assert not path.exists()


# --- what it offers


def test_preloaded_modules_are_imported_once_in_the_server_and_print_into_its_log(serve, tmp_path):
    (tmp_path / "preloaded_one.py").write_text(
        "import os; pid = os.getpid(); print('hello'); os.write(1, b'as of a library of C\\n')"
    )
    (tmp_path / "preloaded_two.py").write_text("import os; pid = os.getpid()")
    server = serve("--preload", "preloaded_one, preloaded_two", before=f"sys.path.append({str(tmp_path)!r})")
    imported = lambda: [sys.modules[f"preloaded_{name}"].pid for name in ("one", "two")]  # noqa: E731  # sent by value
    assert call(server, imported) == [server.pid, server.pid]
    for line in "hello", "as of a library of C":
        server.logged(f"(?m)^{line}$")


MAIN = "from rpcdataloader.__main__ import main; raise SystemExit(main())"


@pytest.mark.parametrize(
    ("command", "more"),
    [
        (["-m", "rpcdataloader.launch"], ["", "relative"]),
        (["-P", "-c", MAIN, "launch"], []),
    ],
)
def test_nothing_is_imported_from_a_folder_where_others_may_write_not_even_by_sessions(command, more, tmp_path):
    """As Slurm leaves a job in /tmp, where the folder of the job is missing."""
    if "-P" in command and sys.version_info < (3, 11):
        command = command[1:]
    tmp_path.chmod(0o1777)
    for name in "argparse", "logging", "torch":
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a module of another user')")
    (tmp_path / "later.py").touch()
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "mine.py").touch()
    path = os.pathsep.join([*more, str(ROOT), str(tmp_path / "own")])
    command = [sys.executable, *command, "--port", "0", "--num-workers", "1", "--register", "pool", "--preload", "mine"]
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment
    ) as process:
        try:
            match = READY_LINE.fullmatch(process.stdout.readline())
            assert match, process.stderr.read()
            assert [path.suffix for path in (tmp_path / "pool").iterdir()] == [".json"]
            found = rpc_async(match[1], lambda: (importlib.util.find_spec("later"), sys.path)).wait()
            assert found[0] is None
            assert str(tmp_path / "own") in found[1]
            assert not {str(tmp_path), str(tmp_path / "relative")} & {*found[1]}
            assert os.readlink(f"/proc/{process.pid}/cwd") == "/"
        finally:
            process.terminate()
            _, log = process.communicate()
    assert f"WARNING rpcdataloader.server[{process.pid}] {tmp_path} is not used, as it is writable by others" in log


# --- secrets


def test_without_a_secret_on_tcp(serve, monkeypatch):
    server = serve("--insecure")
    monkeypatch.setenv("RPCDATALOADER_INSECURE", "1")
    assert call(server, os.getpid) > 0
    assert f"WARNING rpcdataloader.server[{server.pid}] no secret is required: every user who reaches" in server.log


# --- standard input


def test_server_drains_when_its_standard_input_falls_silent(serve, fifo):
    """Its end, and a secret in its first line, are in ``test_ssh``."""
    never_ends = f"os.dup2(os.open({fifo!r}, os.O_RDWR), 0)"
    server = serve("--exit-with-stdin", before=f"{never_ends}; {in_server('lifeline')}")
    assert call(server, os.getpid) > 0  # it waits for the first byte for ever
    Path(fifo).write_bytes(b"\n")
    assert server.wait() == 0
    assert "the owner of this server has gone" in server.log


# --- refusals


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--port", "70000"], "port must be 0 to 65535 or FIRST-LAST, but is '70000'"),
        (["--num-workers", "-1"], "num_workers must not be negative, but is -1"),
        (["--grace", "inf"], "grace must be a number of seconds"),
        (["--max-tasks-per-worker", "-1"], "max_tasks_per_worker must not be negative, but is -1"),
        (["--host", ""], "host is empty; write 0.0.0.0"),
        (["--host", "unix:relative"], "a Unix socket needs an absolute path"),
        (["--host", "unix:/x", "--port", "7000"], "a Unix socket takes neither port nor advertise"),
        (["--log-level", "loud"], "--log-level: invalid choice: 'loud'"),
        (["--insecure", "--token-file", "/y"], "--token-file and --insecure contradict each other"),
        (["--token", "secret"], "unrecognized arguments: --token"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_started(fails, options, problem):
    status, message = fails(*options)
    assert status == 2
    assert problem in message


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--host", "192.0.2.1", "--port", "0"], "cannot listen on 192.0.2.1 port 0: Cannot assign requested address"),
        (["--port", "0", "--advertise", "no..host"], "no..host, does not resolve here (not a valid host name)"),
        (["--port", "0", "--register", "/no/such/pool"], "cannot register in /no/such/pool: No such file"),
        (["--port", "0", "--preload", "no_module"], "cannot preload no_module: No module named 'no_module'"),
        (["--token-file", "/no/such/token"], "the token file /no/such/token does not exist; create it with"),
    ],
)
def test_server_that_cannot_start_says_why(fails, options, problem):
    status, message = fails(*options)
    assert status == 1
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    assert problem in message


# --- run_worker


def test_run_worker_raises_what_keeps_it_from_starting():
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        with pytest.raises(ConnectError, match=f"cannot listen on 127.0.0.1: port {port} in use"):
            run_worker("127.0.0.1", port)
