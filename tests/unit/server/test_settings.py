"""Settings of a node server: what is accepted, what is refused and how, and what follows from them."""

from __future__ import annotations

import socket
from unittest.mock import Mock

import pytest

from rpcdataloader.server.settings import ServerContext, ServerSettings
from rpcdataloader.wire.credentials import INSECURE


@pytest.mark.parametrize(
    ("port", "ports"),
    [("0", [0]), ("6543", [6543]), ("65535", [65535]), ("7000-7003", [7000, 7001, 7002, 7003]), ("7000-7000", [7000])],
)
def test_ports(port, ports):
    assert list(ServerSettings(port=port).ports) == ports


@pytest.mark.parametrize(
    "port", ["", "x", "65536", "-1", "7001-7000", "0-10", "1-65536", "7000-", "7000:7001", " 7000", "7000,7001", "٣"]
)
def test_bad_ports_are_refused_when_the_settings_are_made(port):
    with pytest.raises(ValueError, match="port must be 0 to 65535 or FIRST-LAST"):
        ServerSettings(port=port)


@pytest.mark.parametrize(("given", "cap"), [(0, 80), (5, 5)])
def test_cap_on_workers_is_sixteen_times_their_number_unless_given(given, cap):
    assert ServerContext(ServerSettings(), INSECURE, 2, Mock()).max_connections == 64
    settings = ServerSettings(num_workers=5, max_connections=given)
    assert ServerContext(settings, INSECURE, settings.workers, Mock()).max_connections == cap


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_every_interface_is_advertised_by_the_name_of_the_machine(host):
    assert ServerSettings(host=host).advertised_host() == socket.gethostname()
    assert ServerSettings(host=host, advertise="node07-ib").advertised_host() == "node07-ib"


def test_directory_to_register_in_is_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/user")
    assert ServerSettings().register == ""
    assert ServerSettings(register="pool").register == f"{tmp_path}/pool"
    assert ServerSettings(register="~/pool").register == "/home/user/pool"
