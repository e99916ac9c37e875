"""Contract tests for your own methods, which raise ``AssertionError`` if a rule is broken."""

from lightning_spectral.testing.algorithms import check_algorithm
from lightning_spectral.testing.channels import check_channel_choice
from lightning_spectral.testing.designs import check_design
from lightning_spectral.testing.layers import check_sharded_layer
from lightning_spectral.testing.partitioners import check_partitioner
from lightning_spectral.testing.samplers import check_sampler
from lightning_spectral.testing.strategies import check_strategy

__all__ = [
    "check_algorithm",
    "check_channel_choice",
    "check_design",
    "check_partitioner",
    "check_sampler",
    "check_sharded_layer",
    "check_strategy",
]
