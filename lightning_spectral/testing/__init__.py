"""Contract tests for your own methods, which raise ``AssertionError`` if a rule is broken."""

from lightning_spectral.testing.algorithms import check_algorithm
from lightning_spectral.testing.choices import (
    check_channel_choice,
    check_design,
    check_partitioner,
    check_sampler,
    check_strategy,
)
from lightning_spectral.testing.filters import check_filter
from lightning_spectral.testing.layers import check_sharded_layer

__all__ = [
    "check_algorithm",
    "check_channel_choice",
    "check_design",
    "check_filter",
    "check_partitioner",
    "check_sampler",
    "check_sharded_layer",
    "check_strategy",
]
