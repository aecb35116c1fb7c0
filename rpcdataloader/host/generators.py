"""The state of the three global random generators: python's, numpy's and torch's.

A dataset that draws random numbers in its constructor is built from the trainer's state, so that it is the same on
every node, and the same as one built in the trainer.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def get_states() -> tuple[Any, ...]:
    """The states of this process's generators; picklable, about 10 KB."""
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state().numpy().tobytes()


def set_states(states: tuple[Any, ...]) -> None:
    """Put the generators of this process into ``states``."""
    python_state, numpy_state, torch_state = states
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    torch.default_generator.set_state(torch.frombuffer(bytearray(torch_state), dtype=torch.uint8))


def states_to_plain(states: tuple[Any, ...]) -> dict[str, Any]:
    """The states as numbers, strings and lists, for files that may hold only these."""
    (version, python_state, gauss), numpy_state, torch_state = states
    name, key, *rest = numpy_state
    return {
        "python": [version, list(python_state), gauss],
        "numpy": [name, key.tolist(), *rest],
        "torch": torch_state.hex(),
    }


def states_from_plain(plain: dict[str, Any]) -> tuple[Any, ...]:
    """The states again."""
    version, python_state, gauss = plain["python"]
    return (version, tuple(python_state), gauss), tuple(plain["numpy"]), bytes.fromhex(plain["torch"])
