"""The state of the three global random generators: python's, numpy's and torch's.

A dataset that draws random numbers in its constructor is built from the state that the trainer was in, so that it is
the same on every node, and the same as one that the trainer had built.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def get_states() -> tuple[Any, ...]:
    """The states of the generators of this process; they can be pickled, about 10 KB."""
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state().numpy().tobytes()


def set_states(states: tuple[Any, ...]) -> None:
    """Put the generators of this process into ``states``."""
    python_state, numpy_state, torch_state = states
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    torch.default_generator.set_state(torch.frombuffer(bytearray(torch_state), dtype=torch.uint8))
