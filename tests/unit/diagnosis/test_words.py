"""Numbers in sentences."""

from __future__ import annotations

import pytest

from rpcdataloader.diagnosis.words import in_bytes, in_digits, say


def in_seconds(number):
    return say("unclear", "pool", {"first_wait_seconds": number}).removeprefix("No batch after ").partition(":")[0]


@pytest.mark.parametrize(
    ("write", "texts"),
    [
        (in_seconds, {0.0: "0 µs", 0.0123: "12.3 ms", 0.9996: "1 s", 2.5: "2.5 s", 1234.5: "1,234 s"}),
        (in_digits, {0: "0", 0.0004: "0", 0.25: "0.25", 12.34: "12.3", 99.96: "100", 1234.5: "1,234"}),
        (in_bytes, {0: "0 B", 999: "999 B", 999.9: "1 kB", 1.5e6: "1.5 MB", 2e9: "2 GB", 5e16: "50,000 TB"}),
    ],
)
def test_numbers(write, texts):
    assert {number: write(number) for number in texts} == texts
