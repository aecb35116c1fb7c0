"""Indices in messages."""

from __future__ import annotations

from typing import Any

# How many indices of a batch a message shows.
MAX_SHOWN_INDICES = 16


def describe_indices(indices: Any) -> str:
    """An index, or the indices of a batch, of which the first are shown."""
    if isinstance(indices, (list, tuple)) and len(indices) > MAX_SHOWN_INDICES:
        return f"[{', '.join(map(str, indices[:MAX_SHOWN_INDICES]))}, ... {len(indices)} in all]"
    return str(indices)
