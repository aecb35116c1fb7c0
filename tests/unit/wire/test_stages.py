"""The durations that a worker sends beside a reply."""

from __future__ import annotations

import math

import pytest

from rpcdataloader.errors import RemoteProtocolError
from rpcdataloader.wire.stages import Stages


def test_stages_keep_their_values_in_at_most_48_bytes():
    stages = Stages(*(number / 4 for number in range(10)))
    assert len(stages.pack()) == 40
    assert Stages.unpack(memoryview(stages.pack())) == stages
    assert stages.task == stages.fetch + stages.collate + stages.encode


def test_golden_bytes():
    assert Stages(fetch=1.0, buffer_limited=0.5).pack().hex() == "000000000000803f" + "00000000" * 7 + "0000003f"


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, -math.inf, 1e30])
def test_impossible_durations_count_as_nothing(value):
    assert Stages.unpack(Stages(fetch=value, cpu=1.0).pack()) == Stages(cpu=1.0)


@pytest.mark.parametrize("size", [0, 39, 41])
def test_another_length_is_refused(size):
    with pytest.raises(RemoteProtocolError, match=f"stages of {size} bytes instead of 40"):
        Stages.unpack(bytes(size))
