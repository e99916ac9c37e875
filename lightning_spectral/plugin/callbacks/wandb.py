"""Plots every metric of Weights & Biases against the round."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.loggers import WandbLogger

from lightning_spectral.plugin.dashboard.writers import prefixed


class WandbRounds(pl.Callback):
    """Makes ``fl/round`` the x axis of every metric of a `WandbLogger`; without one it does nothing.

    Metrics are never logged with ``step=``: wandb drops rows whose step goes backwards.
    """

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Define the axis once the run exists."""
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                axis = prefixed(logger, "fl/round")
                logger.experiment.define_metric(axis)
                logger.experiment.define_metric("*", step_metric=axis, step_sync=True)
