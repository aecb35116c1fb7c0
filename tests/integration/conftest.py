"""Fixtures of the tests that need servers with options of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from tests.integration.quick import QuickServer, quick_server
from tests.integration.zygote import Zygote


@pytest.fixture(scope="session")
def wide_servers(zygote: Zygote) -> Iterator[list[QuickServer]]:
    """Two node servers with eight workers each, for tests that do them no harm."""
    with contextlib.ExitStack() as stack:
        options = ("--num-workers", "8", "--max-connections", "64")
        yield [stack.enter_context(quick_server(zygote, *options)) for _ in range(2)]


@pytest.fixture
def serve(zygote: Zygote, clean_client: None) -> Iterator[Callable[..., QuickServer]]:  # noqa: ARG001  # ends after
    """Start node servers that end with the test: ``serve("--grace", "1", before="node.GATE_TIMEOUT = 1")``."""
    with contextlib.ExitStack() as stack:
        yield lambda *options, before="": stack.enter_context(quick_server(zygote, *options, before=before))
