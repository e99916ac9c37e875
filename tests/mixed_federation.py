"""A federation of clients with two keep ratios, for tests that have a Trainer of their own."""

from typing import Any

import lightning.pytorch as pl

import lightning_spectral as ls

MIXED = ls.SpectralSharding(ls.Collective(), keep_ratio={0.3: 0.5, 0.6: 0.5})


def federate(module: pl.LightningModule, **options: Any) -> ls.FederatedModule:
    """A module, trained on four clients a round."""
    settings: dict[str, Any] = {"algorithm": MIXED, "clients_per_round": 4, **options}
    return ls.FederatedModule(module, **settings)
