"""``python -m rpcdataloader.check --workers``: the steps to a first batch, and the first that fails."""

from __future__ import annotations

import contextlib
import re
import socket
import sys
import threading
import types
from importlib.machinery import ModuleSpec

import pytest

from rpcdataloader import RPCDataloader
from rpcdataloader.__main__ import main
from rpcdataloader.check import __main__ as command
from rpcdataloader.check import way
from rpcdataloader.wire import channel, connecting
from tests.support.crew import wait_for_crew
from tests.support.datasets import Numbers
from tests.support.programs import run_original, run_sshd, serve_files

pytestmark = pytest.mark.usefixtures("clean_client")

DATASET = """
import torch
from torch.utils.data import Dataset

class Data(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.rand(3), index

class Missing(Data):
    def __init__(self):
        open("/data/that/is/nowhere")

class Uneven(Data):
    def __getitem__(self, index):
        return torch.zeros(index)
"""


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """Check node servers, with a module or without; gives the exit status, and lines as level, name and text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delitem(sys.modules, "checked_nodes", raising=False)
    monkeypatch.setattr(way, "_MOST_BYTES", 4 << 20)  # half a second on each end
    (tmp_path / "checked_nodes.py").write_text(DATASET)

    def check(workers, *arguments):
        status = main(["check", *arguments, "--workers", workers])
        *lines, summary = capsys.readouterr().out.splitlines()
        found = [re.fullmatch(r"(\S+) +(\S+) +(\S.*)", line).groups() for line in lines if line[0] != " "]
        assert summary.endswith(("works", "works remotely")) == (status == 0)
        return status, found

    return check


def failure(found):
    """Name and text of the only failure, which is the last answer."""
    (failed,) = [answer[1:] for answer in found if answer[0] == "FAILED"]
    assert found[-1][1:] == failed
    return failed


def test_all_steps_to_a_node_that_works(check, shared_server):
    status, found = check(shared_server.address)
    assert status == 0
    assert [name for _level, name, _text in found] == ["server", "room", "session", "link"]
    assert {level for level, name, _text in found if name != "room"} == {"ok"}  # other tests keep it busy
    texts = {name: text for _level, name, text in found}
    assert re.fullmatch(
        rf"{shared_server.address}: rpcdataloader \S+, Python 3\.\S+, torch \S+, without TLS", texts["server"]
    )
    assert re.search(
        r"\d+ workers on \d+ CPUs with a load of \S+; \d+ connections in use; \S+ GB of memory", texts["room"]
    )
    assert re.search(r": [\d,]+ MB/s to one worker, or \S+ Gbit/s$", texts["link"])


def test_dataset_is_checked_after_the_nodes_and_on_those_that_work(check, shared_server, closed_port):
    status, found = check(f"{closed_port},{shared_server.address}", "checked_nodes:Data")
    assert status == 1
    names = [name for _level, name, _text in found]
    assert names[names.index("module") :] == [
        *("module", "link", "builds", "builds", "samples", "batch", "repeats", "size", "speed", "most", "expect"),
    ]
    assert [(level, text.startswith(closed_port)) for level, name, text in found if name == "port"] == [
        ("FAILED", True)
    ]
    texts = {name: text for _level, name, text in found}
    assert re.search(r"workers that the slowest link can carry: \d+", texts["most"])


@pytest.mark.parametrize(("link", "expected"), [(8e3, 400.0), (1e3, 50.0)])
def test_rate_of_all_workers_is_told_and_limited_by_the_link(link, expected, monkeypatch):
    """Samples of 20 bytes, each of which takes a worker 10 ms, and four workers."""
    told = {}
    monkeypatch.setattr(command, "_load", lambda *_: [(0.01, 20)] * 8)
    facts = command.Facts("Data of 8 samples", 8, None, "")
    dataset = types.SimpleNamespace(facts=facts)
    command._time(dataset, None, link, 4, lambda _level, name, text: told.update({name: text}))
    limited = ", as much as that link carries" if expected == 50 else ""
    assert told["expect"] == f"at most {expected} samples/s of all 4 workers{limited}"


def test_name_that_does_not_resolve(check):
    assert "nohost.invalid does not resolve" in failure(check("nohost.invalid:6543")[1])[1]


def test_silent_name_server(check, monkeypatch):
    answer = threading.Event()
    monkeypatch.setattr(way, "_RESOLVE_TIMEOUT", 0.1)
    monkeypatch.setattr(way, "look_up", lambda *_: answer.wait() and [])
    name, text = failure(check("node01:6543")[1])
    answer.set()
    assert (name, "no name server has told within 0.1 s where node01 is" in text) == ("name", True)


def test_name_of_this_machine_that_is_no_name_elsewhere(check, monkeypatch):
    monkeypatch.setattr(way, "look_up", lambda *_: [(0, 0, 0, "", ("127.0.1.1", 1))])
    monkeypatch.setattr(connecting, "look_up", lambda *_: [(socket.AF_INET, 0, 0, "", ("127.0.0.1", 1))])
    level, name, text = check("node01:6543")[1][0]
    assert (level, name) == ("note", "name")
    assert "node01 is 127.0.1.1, which is this machine itself" in text


def test_refused(check, closed_port):
    name, text = failure(check(closed_port)[1])
    assert (name, "connection refused (is `python -m rpcdataloader.launch` running there" in text) == ("port", True)


def test_dropped(check, monkeypatch, silent_port):
    monkeypatch.setattr(way, "_ASK_TIMEOUT", 0.2)
    name, text = failure(check(silent_port)[1])
    assert (name, "does a firewall drop the port?" in text) == ("port", True)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (serve_files, "an HTTP server answers there"),
        (run_original, "a worker of the original RPCDataloader listens there"),
        (run_sshd, "an SSH server answers there"),
    ],
)
def test_another_program(check, other, said):
    with contextlib.ExitStack() as stack:
        name, text = failure(check("{}:{}".format(*other(stack)))[1])
    assert (name, said in text) == ("program", True)


def test_program_that_says_nothing(check, monkeypatch):
    monkeypatch.setattr(way, "_ASK_TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        name, text = failure(check("{}:{}".format(*listener.getsockname()))[1])
    assert (name, "did not finish the handshake in time" in text) == ("program", True)


def test_other_secret(check, shared_server, other_secret, monkeypatch):
    monkeypatch.setenv("RPCDATALOADER_TOKEN_FILE", str(other_secret))
    name, text = failure(check(shared_server.address)[1])
    assert (name, f"this client's secret: file {other_secret}" in text) == ("secret", True)


def test_missing_secret(check, shared_server, monkeypatch):
    monkeypatch.setenv("RPCDATALOADER_TOKEN_FILE", "/nowhere/token")
    name, text = failure(check(shared_server.address)[1])
    assert (name, "the token file /nowhere/token does not exist" in text) == ("secret", True)


def options(folder):
    return [f"--tls-cert={folder}/node.pem", f"--tls-key={folder}/node.key", f"--tls-ca={folder}/ca.pem"]


def test_server_that_wants_tls(check, serve, certificates):
    name, text = failure(check(serve(*options(certificates)).address)[1])
    assert (name, "requires TLS" in text) == ("TLS", True)


@pytest.mark.parametrize("ca", ["ca", "stranger"])
def test_client_that_wants_tls(check, serve, certificates, monkeypatch, ca):
    """Of a server without, and of one whose certificate is of another authority."""
    for variable, file in ("CERT", "node.pem"), ("KEY", "node.key"), ("CA", f"{ca}.pem"):
        monkeypatch.setenv(f"RPCDATALOADER_TLS_{variable}", f"{certificates}/{file}")
    server = serve(*([] if ca == "ca" else options(certificates)))
    name, _text = failure(check(server.address)[1])
    assert name == "TLS"


@pytest.mark.parametrize(
    ("version", "value", "said"),
    [
        ("python_version", "3.9.1", "use the same minor version of Python on both sides"),
        ("numpy", "1.26.4", "install the same major version of numpy on both sides"),
        ("protocol", 1, "install the same version of rpcdataloader on both sides"),
    ],
)
def test_versions_that_do_not_fit(check, shared_server, monkeypatch, version, value, said):
    change_identity(monkeypatch, **{version: value})
    name, text = failure(check(shared_server.address)[1])
    assert (name, said in text) == ("versions", True)


def test_versions_that_may_matter(check, shared_server, monkeypatch):
    change_identity(monkeypatch, torch="2.4.0")
    status, found = check(shared_server.address)
    assert status == 0
    (text,) = [text for level, name, text in found if (level, name) == ("note", "versions")]
    assert text.startswith(f"{shared_server.address}: torch: 2.4.0 here, 2.")


def change_identity(monkeypatch, **changed):
    """Let this process say of itself that it has these versions."""
    real = channel.Identity
    monkeypatch.setattr(channel, "Identity", lambda **values: real(**{**values, **changed}))


def test_full_node(check, serve):
    server = serve("--num-workers", "1", "--max-connections", "1")
    iterator = iter(RPCDataloader(Numbers(1000), workers=server.address, num_workers=1))
    wait_for_crew(iterator, 1)
    name, text = failure(check(server.address)[1])
    assert name == "room"
    assert re.search(r"all 1 connections are in use, by \S+ \(process \d+\)", text)


def test_module_that_is_here_alone(check, shared_server, monkeypatch):
    module = types.ModuleType("only_here")
    module.__spec__ = ModuleSpec("only_here", None, origin="/home/me/only_here.py")
    monkeypatch.setitem(sys.modules, "only_here", module)
    name, text = failure(check(shared_server.address, "only_here:Data")[1])
    assert name == "module"
    assert "only_here is not there; here it is /home/me/only_here.py: put it on a file system that both see" in text


def test_module_that_is_nowhere(check, shared_server):
    name, text = failure(check(shared_server.address, "chekced_nodes:Data")[1])
    assert (name, "chekced_nodes is not there, nor here: is the name right?" in text) == ("module", True)


def test_module_of_another_content(check, shared_server, monkeypatch):
    call = way._call

    def answer(address, name, function, *given):
        found = call(address, name, function, *given)
        return found._replace(digest="another") if name == "session" else found

    monkeypatch.setattr(way, "_call", answer)
    status, found = check(shared_server.address, "checked_nodes:Data")
    assert status == 0
    (text,) = [text for level, name, text in found if (level, name) == ("note", "module")]
    assert "checked_nodes is another file there: " in text


def test_folder_that_is_not_there(check, shared_server, monkeypatch):
    monkeypatch.setattr(way.os, "getcwd", lambda: "/home/me/training")
    status, found = check(shared_server.address)
    assert status == 0
    assert any(level == "note" and "/home/me/training is not there" in text for level, _name, text in found)


def test_node_that_is_lost_while_its_link_is_measured(check, shared_server, second_server, monkeypatch):
    call = way._call

    def answer(address, name, function, *given):
        if name == "link" and str(address) == second_server.address:
            raise way.Failure(name, "ConnectionLostError: it has ended")
        return call(address, name, function, *given)

    monkeypatch.setattr(way, "_call", answer)
    status, found = check(f"{second_server.address},{shared_server.address}")
    assert status == 1
    links = [(level, text.partition(": ")[0]) for level, name, text in found if name == "link"]
    assert links == [("FAILED", second_server.address), ("ok", shared_server.address)]


def test_path_that_is_not_there(check, shared_server):
    name, text = failure(check(shared_server.address, "checked_nodes:Missing")[1])
    assert (name, "FileNotFoundError" in text) == ("builds", True)


def test_samples_of_which_torch_makes_no_batch(check, shared_server):
    status, found = check(shared_server.address, "checked_nodes:Uneven")
    assert status == 0
    ((level, text),) = [(level, text) for level, name, text in found if name == "batch"]
    assert level == "note"
    assert "torch's default collate fails, RuntimeError: " in text
    assert "or give the loader a collate_fn" in text
