"""``workers="dns://pool:6543"``: nodes that come and go as the answers of a DNS server do.

The DNS server, the node servers and the trainer have a network and a ``resolv.conf`` of their own, so that the resolver
of the system is what asks. It takes root.
"""

from __future__ import annotations

import pytest

from tests.conftest import TIMEOUT_SCALE
from tests.support.clocks import in_script

# Moves into a network and a file system of its own.
MOVE = """
import ctypes, os, subprocess, sys
CLONE_NEWNS, CLONE_NEWNET = 0x20000, 0x40000000
if ctypes.CDLL(None).unshare(CLONE_NEWNS | CLONE_NEWNET):
    sys.exit("no network of our own")
mount = f"mount --make-rprivate / && mount --bind {sys.argv[1]} /etc/resolv.conf"
subprocess.run(f"{mount} && ip link set lo up", shell=True, check=True)
os.environ["RPCDATALOADER_CONNECT_TIMEOUT"] = "1"
"""

SCRIPT = """
import itertools, os, signal, socket, subprocess, sys, threading
from rpcdataloader import RPCDataloader, RPCDataset, launch as command
from rpcdataloader.errors import ConnectError

processes = {}

def launch(host):
    "A fork: importing torch would be most of the work."
    readable, writable = os.pipe()
    if not (pid := os.fork()):
        os.dup2(writable, 1)
        os.closerange(3, 100)
        os._exit(command.main(["--host", host, "--port", "6543", "--num-workers", "1"]))
    os.close(writable)
    with open(readable, "rb") as output:
        assert output.readline().startswith(b"rpcdataloader ready " + host.encode() + b":6543")
    processes[host] = pid

for host in "127.0.0.2", "127.0.0.3":
    launch(host)

hosts, asked = [], set()  # what the DNS server answers, and the names that it was asked for

def answer(query):
    end = query.index(b"\\0", 12) + 5
    asked.add(query[13:end - 5])
    found = hosts if query[end - 3] == 1 else []  # a question for IPv4
    records = [b"\\xc0\\x0c\\0\\x01\\0\\x01\\0\\0\\0\\0\\0\\x04" + socket.inet_aton(host) for host in found]
    flags = b"\\x81\\x80" if hosts else b"\\x81\\x83"  # there is no such name
    return query[:2] + flags + b"\\0\\x01\\0" + bytes([len(records)]) + bytes(4) + query[12:end] + b"".join(records)

server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))

def serve():
    while True:
        query, peer = server.recvfrom(512)
        server.sendto(answer(query), peer)

threading.Thread(target=serve, daemon=True).start()
class Hosted:
    "Which node server a sample comes from."
    def __len__(self):
        return 1000000

    def __getitem__(self, index):
        with open(f"/proc/{os.getppid()}/stat") as file:
            return index, int(file.read().rpartition(")")[2].split()[1])

def load_from(*hosts):
    "Load until the last samples come from these, and from no others."
    wanted, pids = {processes[host] for host in hosts}, []
    while len(pids) < 20 or set(pids[-20:]) != wanted:
        index, pid = next(iterator)
        assert int(index) == next(numbers)
        pids.append(int(pid))

def status():
    command = [sys.executable, "-m", "rpcdataloader.status", "dns://pool:6543"]
    return subprocess.run(command, capture_output=True, text=True)

try:
    hosts.append("127.0.0.2")
    iterator = iter(RPCDataloader(RPCDataset("dns://pool:6543", Hosted), batch_size=1))
    numbers = itertools.count()
    load_from("127.0.0.2")
    hosts.append("127.0.0.3")
    load_from("127.0.0.2", "127.0.0.3")
    print("came")
    hosts.remove("127.0.0.2")
    load_from("127.0.0.3")
    print("went")
    told = status()
    print(told.returncode, "127.0.0.3:6543" in told.stdout, "127.0.0.2:6543" in told.stdout)
    del iterator
    hosts.clear()
    print(*status().stdout.splitlines()[1:], sep=", ")
    try:
        RPCDataset("dns://pool:6543", Hosted)
    except ConnectError as exc:
        print(exc)
finally:
    for pid in processes.values():
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
print(sorted(asked))
"""


def test_names_that_come_and_go_are_nodes_that_come_and_go(zygote, tmp_path):
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:5\n")
    script = zygote.start(MOVE + in_script("names") + SCRIPT, tmp_path / "resolv.conf", ends_quickly=True)
    ended = script.wait(110 * TIMEOUT_SCALE)
    if "no network of our own" in ended.errors:
        pytest.skip("it takes root")
    assert ended.output.splitlines() == [
        "came",
        "went",
        "0 True False",
        "dns://pool:6543: no node server found, ignored pool: Name or service not known",
        "no node server is behind the name pool, and none came within 1 s (pool: Name or service not known); does it "
        "exist, and are the node servers ready?",
        "[b'pool']",
    ], ended.errors
