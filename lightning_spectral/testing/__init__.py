"""Contract tests for methods of your own: they raise ``AssertionError`` where a rule is broken."""

from lightning_spectral.testing.designs import check_design
from lightning_spectral.testing.layers import check_sharded_layer
from lightning_spectral.testing.partitioners import check_partitioner
from lightning_spectral.testing.strategies import check_strategy

__all__ = ["check_design", "check_partitioner", "check_sharded_layer", "check_strategy"]
