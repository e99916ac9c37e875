"""Algorithms whose clients get sub-models of a keep ratio."""

# Annotations are evaluated eagerly, as in `base.py`.

from lightning_spectral.algorithms.base import Algorithm
from lightning_spectral.protocol.per_client import Assigned, PerClient, assign, check_num_entries


class ByKeepRatio(Algorithm):
    """An algorithm with a keep ratio: one for all clients, ``{ratio: share of clients}``, or one per client."""

    keep_ratio: PerClient[float]

    def keep_ratios(self, num_clients: int, seed: int) -> Assigned[float]:
        check_num_entries("keep_ratio", self.keep_ratio, num_clients)
        return assign(self.keep_ratio, num_clients, seed, "keep ratios")
