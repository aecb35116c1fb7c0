"""Copies to a device, seen with a driver that is made up."""

from __future__ import annotations

import contextlib
import functools
import weakref
from unittest.mock import Mock

import torch

from rpcdataloader.loader.copying import Carrier
from tests.support.devices import FakePinned


class Driver:
    """What torch has for each type of device; copies are done when their event says so."""

    def __init__(self):
        self.events = []
        self.waits = []  # for the end of which copies

    def Stream(self, device=None):
        return device

    def Event(self, enable_timing=False):  # noqa: ARG002
        event = Mock(query=Mock(return_value=False))
        event.synchronize = functools.partial(self.waits.append, len(self.events))
        self.events.append(event)
        return event

    def device(self, _device):
        return contextlib.nullcontext()

    stream = device


def test_blocks_are_kept_until_their_copies_are_done():
    driver = Driver()
    carrier = Carrier(torch.device("cpu"), FakePinned(), driver)
    freed = []
    for number in range(3):
        block = torch.zeros(100, dtype=torch.uint8)
        weakref.finalize(block, freed.append, number)
        carrier.copy([block])
        del block
    driver.events[1].query.return_value = True
    assert not freed
    carrier.copy([torch.zeros(1, dtype=torch.uint8)])
    assert freed == [1]
    del carrier
    assert sorted(freed) == [0, 1, 2]
    assert driver.waits == [0, 2, 3]
