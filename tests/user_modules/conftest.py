"""How users' modules are trained in these tests."""

from functools import partial

import pytest
from federation import Fit

import lightning_spectral as ls


@pytest.fixture
def fit(fit: Fit) -> Fit:
    """Fits of two rounds, each with three clients that hold half the terms."""
    return partial(fit, algorithm=ls.SpectralSharding(keep_ratio=0.5), clients_per_round=3, max_epochs=2)
