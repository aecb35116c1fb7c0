"""Fixtures of the tests that stand beside the examples which they run."""

from __future__ import annotations

from tests.conftest import clean_client, frozen_heap, library_zygote, own_modules, shared_server, token_file, zygote

__all__ = ["clean_client", "frozen_heap", "library_zygote", "own_modules", "shared_server", "token_file", "zygote"]
