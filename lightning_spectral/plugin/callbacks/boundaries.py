"""The round's boundaries as callbacks: each says when; the engine knows what."""

from __future__ import annotations

import lightning.pytorch as pl

from lightning_spectral.plugin.callbacks.round_callback import RoundCallback
from lightning_spectral.plugin.host import Host, Slot
from lightning_spectral.server.turn import Turn


class SVDRefresh(pl.Callback):
    """At the start of a round: look at the server's weights once, for this round's cohort.

    For spectral sharding this factorises every sharded layer and computes inclusion probabilities, multipliers and
    the fitted design of each keep ratio. `FederatedModule` installs it; an instance of your own replaces that one.
    """

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Host) -> None:  # type: ignore[override]
        """Open the round for its cohort."""
        pl_module.start_round(trainer.current_epoch)


class SubmodelSampling(pl.Callback):
    """Before a client trains: draw its terms and send them."""

    def on_train_batch_start(  # type: ignore[override]
        self, trainer: pl.Trainer, pl_module: Host, batch: Slot, batch_idx: int
    ) -> None:
        """Send the client its sub-model."""
        pl_module.send(batch)


class Aggregation(RoundCallback):
    """After a client trained: add its update to the running sums. After the last one: one server step.

    This happens inside Lightning's training step, where an optimizer's step counts: ``global_step`` is the number of
    finished rounds, and every other callback already sees the aggregated model at ``on_train_batch_end``. Wherever it
    stands in the Trainer's list, it acts after all other round callbacks.
    """

    def on_client_end(self, trainer: pl.Trainer, pl_module: Host, turn: Turn) -> None:  # type: ignore[override]
        """Receive the client's update."""
        turn.receive()

    def on_cohort_end(self, trainer: pl.Trainer, pl_module: Host, round_idx: int) -> None:  # type: ignore[override]
        """Finish the round."""
        pl_module.finish_round()
