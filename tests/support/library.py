"""Large libraries, imported by the tests that need them: each process of a test run would import them to collect."""

from __future__ import annotations

import gc
import importlib
import importlib.util
from typing import Any

import pytest


class Library:
    """A module that is imported when something of it is asked for.

    Args:
        name: Of the module.
        needs: The library without which it cannot be imported; its tests are skipped then.
    """

    def __init__(self, name: str, needs: str = "") -> None:
        if importlib.util.find_spec(needs or name) is None:
            pytest.skip(f"{needs or name} is not installed", allow_module_level=True)
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_", "pytest")):  # pytest looks for marks and fixtures in everything that it collects
            raise AttributeError(name)
        module = importlib.import_module(self._name)
        gc.freeze()  # as ``frozen_heap`` does, for what has come since
        vars(self).update(vars(module))
        return getattr(module, name)
