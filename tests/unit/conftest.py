"""What tests of sockets share."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def nothing_left():
    """Check that the test closes all that it opens; what others had left may go meanwhile."""
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) <= before
