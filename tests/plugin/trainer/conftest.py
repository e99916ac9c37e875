"""How these tests train under Lightning's Trainer."""

from functools import partial

import pytest
from federation import Fit
from mixed_federation import MIXED


@pytest.fixture
def fit(fit: Fit) -> Fit:
    return partial(fit, algorithm=MIXED)
