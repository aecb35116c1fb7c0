"""Copies to a device, seen with a driver that is made up."""

from __future__ import annotations

import contextlib
import functools
import weakref
from unittest.mock import Mock

import torch

from rpcdataloader.loader.copying import Carrier
from tests.support.devices import FakePinned


def test_blocks_are_kept_until_their_copies_are_done():
    events, waits, freed = [], [], []  # waits: for the end of which copies

    def make_event(**_options):
        event = Mock(query=Mock(return_value=False))
        event.synchronize = functools.partial(waits.append, len(events))
        events.append(event)
        return event

    driver = Mock(Event=make_event, device=contextlib.nullcontext, stream=contextlib.nullcontext)
    carrier = Carrier(torch.device("cpu"), FakePinned(), driver)
    for number in range(3):
        block = torch.zeros(100, dtype=torch.uint8)
        weakref.finalize(block, freed.append, number)
        carrier.copy([block])
        del block
    events[1].query.return_value = True
    assert not freed
    carrier.copy([torch.zeros(1, dtype=torch.uint8)])
    assert freed == [1]
    del carrier
    assert sorted(freed) == [0, 1, 2]
    assert waits == [0, 2, 3]
