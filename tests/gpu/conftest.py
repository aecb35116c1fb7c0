"""What the tests on a real device share."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def driver() -> None:
    """The driver opens its descriptors, and the profiler its own, before tests look what is left behind."""
    if torch.cuda.is_available():
        with torch.profiler.profile():
            torch.empty(1, pin_memory=True).to("cuda", non_blocking=True)
            torch.cuda.synchronize()
