"""The round's boundaries as callbacks: each says when; the engine knows what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

if TYPE_CHECKING:
    from lightning_spectral.federated.records import ClientTask
    from lightning_spectral.module import FederatedModule


class SVDRefresh(pl.Callback):
    """At the start of a round: look at the server's weights once, for this round's cohort.

    For spectral sharding this factorises every sharded layer and computes inclusion probabilities, multipliers and
    the fitted design of each keep ratio. `FederatedModule` installs it; an instance of your own replaces that one.
    """

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: FederatedModule) -> None:  # type: ignore[override]
        """Open the round for the clients that Lightning will run (`limit_train_batches` may cut the cohort)."""
        cohort = pl_module.cohort(trainer.current_epoch)
        pl_module.engine.open_round(cohort[: int(trainer.num_training_batches)])


class SubmodelSampling(pl.Callback):
    """Before a client trains: draw its terms and load them into the sub-model of its keep ratio."""

    def on_train_batch_start(  # type: ignore[override]
        self, trainer: pl.Trainer, pl_module: FederatedModule, batch: ClientTask, batch_idx: int
    ) -> None:
        """Send the client its sub-model."""
        pl_module.download = pl_module.engine.send(batch)


class Aggregation(pl.Callback):
    """After a client trained: add its update to the running sums. After the last one: one server step."""

    def on_train_batch_end(  # type: ignore[override]
        self, trainer: pl.Trainer, pl_module: FederatedModule, outputs: Any, batch: ClientTask, batch_idx: int
    ) -> None:
        """Receive the client's update; finish the round when it was the last."""
        pl_module.engine.receive(batch, pl_module.download, outputs["local_result"])
        if trainer.is_last_batch:
            pl_module.finish_round(pl_module.engine.close_round(batch.round_idx))
