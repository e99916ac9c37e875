"""Callback hooks for rounds and clients, which Lightning does not have, and the boundaries of a round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import lightning.pytorch as pl

from lightning_spectral.errors import warn
from lightning_spectral.plugin.user_hooks import Host
from lightning_spectral.protocol.records import RoundSummary
from lightning_spectral.server.round import Turn


class RoundCallback(pl.Callback):
    """A callback with hooks around each round and around each client's turn.

    A process gets all its clients of a round as one batch, so that Lightning's own ``on_train_batch_start`` and
    ``on_train_batch_end`` are called once a round.

    Example:
        >>> class PrintRounds(RoundCallback):
        ...     def on_round_end(self, trainer, pl_module, summary):
        ...         print(summary.round_idx, len(summary.clients))

    Attributes:
        reads_clients: Whether it reads clients' data, or figures or updates of single clients, by other means than its
            hooks; filters that hide single clients refuse it.
        shows_clients: Whether it shows single clients; `ClientPrivacy` refuses it.
    """

    reads_clients: ClassVar[bool] = False
    shows_clients: ClassVar[bool] = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit" and not isinstance(pl_module, Host):
            warn(
                f"{type(self).__name__} acts on federated rounds, but {type(pl_module).__name__} trains on batches: "
                "wrap the module, FederatedModule(module, clients_per_round=...), or leave out the callback."
            )

    def on_round_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, opened: Any) -> None:
        """Called once a round is open; ``opened`` is what `ServerHalf.open` returned."""

    def on_client_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, turn: Turn) -> None:
        """Called when a client was sent its download, ``turn.download``, in the process that trains it.

        By default clients train one after another. Other executors may start several before the first one ends.
        """

    def on_client_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, turn: Turn) -> None:
        """Called when a client's upload has arrived, before it is received, in the process that trained it.

        Called once for every client of the round, in the order of arrival; ``turn.upload`` is what ``turn.unit`` sent.
        """

    def on_cohort_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round_idx: int) -> None:
        """Called once per round, when this process's clients are done."""

    def on_round_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, summary: RoundSummary) -> None:
        """Called once per round, after the server's step and before validation."""

    def client_columns(self, summary: RoundSummary) -> Mapping[str, Mapping[int, float]]:
        """Columns for `RoundDashboard`'s table: what this callback knows about a round's clients, by client.

        Called for each model at the end of some rounds, in one process, after validation.
        """
        return {}


class SVDRefresh(pl.Callback):
    """Opens a round: prepares it for its cohort from the server's weights.

    For spectral sharding this factorises every sharded layer and computes inclusion probabilities, multipliers and
    the fitted design of each keep ratio. `FederatedModule` installs it; an instance of your own replaces it.
    """

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.start_round(trainer.current_epoch)


class SubmodelSampling(RoundCallback):
    """Draws a client's terms and sends them, before all other round callbacks act, whatever its position."""

    def on_client_start(self, trainer: pl.Trainer, pl_module: Any, turn: Turn) -> None:
        turn.send()


class Aggregation(RoundCallback):
    """Adds each client's update to the running sums after its training, and steps the server when all are there.

    This happens in Lightning's training step: ``global_step`` is the number of finished rounds, and callbacks see the
    aggregated model at ``on_train_batch_end``. It acts after all other round callbacks, whatever its position.
    """

    def on_client_end(self, trainer: pl.Trainer, pl_module: Any, turn: Turn) -> None:
        turn.receive()

    def on_cohort_end(self, trainer: pl.Trainer, pl_module: Any, round_idx: int) -> None:
        pl_module.finish_round()
