"""The round's boundaries as callbacks: each says when; the engine knows what."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lightning.pytorch as pl

from lightning_spectral.plugin.callbacks.round_callback import RoundCallback

if TYPE_CHECKING:
    from lightning_spectral.client.local_loop import LocalResult
    from lightning_spectral.plugin.module import FederatedModule
    from lightning_spectral.protocol.records import ClientTask, IdleTask


class SVDRefresh(pl.Callback):
    """At the start of a round: look at the server's weights once, for this round's cohort.

    For spectral sharding this factorises every sharded layer and computes inclusion probabilities, multipliers and
    the fitted design of each keep ratio. `FederatedModule` installs it; an instance of your own replaces that one.
    """

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: FederatedModule) -> None:  # type: ignore[override]
        """Open the round for its cohort."""
        client_ids = pl_module.cohort(trainer.current_epoch)
        sizes = pl_module.data.partition.sizes_of(client_ids)
        pl_module.start_round(trainer.current_epoch, dict(zip(client_ids, sizes, strict=True)))


class SubmodelSampling(pl.Callback):
    """Before a client trains: draw its terms and load them into the sub-model of its keep ratio."""

    def on_train_batch_start(  # type: ignore[override]
        self, trainer: pl.Trainer, pl_module: FederatedModule, batch: ClientTask | IdleTask, batch_idx: int
    ) -> None:
        """Send the client its sub-model."""
        engine = pl_module.engine
        if engine.expects(batch):
            with engine.client_turn(batch):
                pl_module.download = engine.send(batch)


class Aggregation(RoundCallback):
    """After a client trained: add its update to the running sums. After the last one: one server step.

    This happens inside Lightning's training step, where an optimizer's step counts: ``global_step`` is the number of
    finished rounds, and every other callback already sees the aggregated model at ``on_train_batch_end``.
    """

    def on_client_end(  # type: ignore[override]
        self, trainer: pl.Trainer, pl_module: FederatedModule, task: ClientTask, result: LocalResult
    ) -> None:
        """Receive the client's update."""
        pl_module.engine.receive(task, pl_module.download, result)

    def on_cohort_end(  # type: ignore[override]
        self, trainer: pl.Trainer, pl_module: FederatedModule, round_idx: int
    ) -> None:
        """Finish the round."""
        pl_module.finish_round(pl_module.engine.close_round(round_idx))
