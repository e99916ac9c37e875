"""Which cases of a parametrised test run by default, and which only with the slow tests."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(kept: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """All cases, of which those that are not ``kept`` are slow."""
    return [
        case if case in kept else pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.slow)
        for case in cases
    ]
