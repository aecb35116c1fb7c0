"""Settings of a node server: what is accepted, what is refused and how, and what follows from them."""

from __future__ import annotations

import dataclasses
import socket

import pytest

from rpcdataloader.server import settings as module
from rpcdataloader.server.settings import ServerContext, ServerSettings
from rpcdataloader.wire.credentials import INSECURE


def test_defaults_listen_on_this_machine_alone_and_cannot_be_changed():
    settings = ServerSettings()
    assert (settings.host, settings.advertised_host()) == ("127.0.0.1",) * 2
    assert list(settings.ports) == [6543]
    assert (settings.grace, settings.preload) == (30.0, ())
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.host = "0.0.0.0"


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


def test_number_of_workers_is_that_of_the_cpus_unless_given(monkeypatch):
    monkeypatch.setattr(module, "available_cpus", lambda: 7)
    assert ServerSettings().workers == 7
    assert ServerSettings(num_workers=3).workers == 3


@pytest.mark.parametrize(("given", "embedded", "cap"), [(0, False, 12), (5, False, 5), (5, True, None)])
def test_cap_on_workers_is_four_times_their_number_unless_given(given, embedded, cap):
    settings = ServerSettings(num_workers=3, max_connections=given)
    assert ServerContext(settings, INSECURE, settings.workers, None, embedded).max_connections == cap


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_every_interface_is_advertised_by_the_name_of_the_machine(host):
    assert ServerSettings(host=host).advertised_host() == socket.gethostname()
    assert ServerSettings(host=host, advertise="node07-ib").advertised_host() == "node07-ib"


def test_directory_to_register_in_is_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/user")
    assert ServerSettings().register_directory == ""
    assert ServerSettings(register="pool").register_directory == f"{tmp_path}/pool"
    assert ServerSettings(register="~/pool").register_directory == "/home/user/pool"
