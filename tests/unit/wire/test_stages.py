"""The durations that a worker sends beside a reply."""

from __future__ import annotations

import math

import pytest

from rpcdataloader.errors import RemoteProtocolError
from rpcdataloader.wire.messages import STAGES_BYTES, Stages


def test_stages_keep_their_values_in_28_bytes():
    stages = Stages(*(number / 4 for number in range(9)))
    assert len(stages.pack()) == STAGES_BYTES == 28
    assert Stages.unpack(memoryview(stages.pack())).with_timings((stages.fetch, stages.collate)) == stages
    assert stages.task == stages.fetch + stages.collate + stages.encode


def test_golden_bytes():
    packed = Stages(idle=1.0, encode=2.0, runqueue=0.5, cpus=2.0).pack()
    assert packed.hex() == "0000803f00000040" + "00000000" + "0000003f" + "00000000" + "00000040" + "00000000"


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, -math.inf, 1e30])
def test_impossible_durations_count_as_nothing(value):
    assert Stages.unpack(Stages(encode=value, cpu=1.0).pack()) == Stages(cpu=1.0)
    assert Stages().with_timings((value, 1.0)) == Stages(collate=1.0)


@pytest.mark.parametrize("size", [0, 27, 29])
def test_another_length_is_refused(size):
    with pytest.raises(RemoteProtocolError, match=f"stages of {size} bytes instead of 28"):
        Stages.unpack(bytes(size))
