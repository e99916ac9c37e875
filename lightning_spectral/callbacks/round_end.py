"""The one hook that Lightning does not have."""

from __future__ import annotations

import lightning.pytorch as pl

from lightning_spectral.federated.records import RoundSummary


class RoundCallback(pl.Callback):
    """A callback that is told how each round ended.

    Example:
        >>> class PrintRounds(RoundCallback):
        ...     def on_round_end(self, trainer, pl_module, summary):
        ...         print(summary.round_idx, len(summary.clients))
    """

    def on_round_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, summary: RoundSummary) -> None:
        """Called once per round, after the server's step and before validation."""
