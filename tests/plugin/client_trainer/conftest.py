"""How a client's own Trainer is tried in these tests."""

from functools import partial

import pytest
from both_engines import MIXED
from federation import Fit


@pytest.fixture
def fit(fit: Fit) -> Fit:
    """Fits of two rounds, in which each client has its own Trainer."""
    return partial(fit, algorithm=MIXED, max_epochs=2, client_engine="trainer")
