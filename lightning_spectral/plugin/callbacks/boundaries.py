"""The boundaries of a round as callbacks: they decide when something happens, the engine decides what."""

from __future__ import annotations

import lightning.pytorch as pl

from lightning_spectral.plugin.callbacks.round_callback import RoundCallback
from lightning_spectral.plugin.host import Host
from lightning_spectral.server.turn import Turn


class SVDRefresh(pl.Callback):
    """Opens a round: prepares it for its cohort from the server's weights.

    For spectral sharding this factorises every sharded layer and computes inclusion probabilities, multipliers and
    the fitted design of each keep ratio. `FederatedModule` installs it; an instance of your own replaces it.
    """

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Host) -> None:  # type: ignore[override]
        """Open the round for its cohort."""
        pl_module.start_round(trainer.current_epoch)


class SubmodelSampling(RoundCallback):
    """Draws a client's terms and sends them, before the client trains.

    It acts before all other round callbacks, whatever its position in the Trainer's list.
    """

    def on_client_start(self, trainer: pl.Trainer, pl_module: Host, turn: Turn) -> None:  # type: ignore[override]
        """Send the client its sub-model."""
        turn.send()


class Aggregation(RoundCallback):
    """Adds each client's update to the running sums after its training, and steps the server when all are there.

    This happens inside Lightning's training step, where optimizer steps are counted: ``global_step`` is the number of
    finished rounds, and every other callback already sees the aggregated model at ``on_train_batch_end``. It acts after
    all other round callbacks, whatever its position in the Trainer's list.
    """

    def on_client_end(self, trainer: pl.Trainer, pl_module: Host, turn: Turn) -> None:  # type: ignore[override]
        """Receive the client's update."""
        turn.receive()

    def on_cohort_end(self, trainer: pl.Trainer, pl_module: Host, round_idx: int) -> None:  # type: ignore[override]
        """Finish the round."""
        pl_module.finish_round()
