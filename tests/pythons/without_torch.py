"""A plugin of pytest for environments without torch: modules of tests that import it are skipped, and not errors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest


class _Absent:
    """Finds no torch, in words that pytest understands."""

    @staticmethod
    def find_spec(
        name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torch":
            raise pytest.skip.Exception("torch is not installed", allow_module_level=True)
        return None


sys.meta_path.append(_Absent())
