"""What of a Trainer's own settings federated training cannot honour."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelPruning

REFUSED_CALLBACKS: Mapping[type[pl.Callback], str] = MappingProxyType(
    {
        BatchSizeFinder: "it would try sizes on whole rounds; set FederatedDataModule(batch_size=...)",
        LearningRateFinder: "it would move the server's learning rate in every round; set that of clients in "
        "`configure_optimizers`",
        ModelPruning: "it would change the server's layers, and clients' copies keep the old ones; prune the trained "
        "module after the fit",
    }
)


def check_rounds(trainer: pl.Trainer) -> None:
    """Raise ``TypeError`` unless the number of rounds is an ``int``, which Lightning asserts without a word."""
    if not isinstance(trainer.max_epochs, int):
        raise TypeError(
            f"`max_epochs` must be an int, the number of rounds, or -1 for no limit, got {trainer.max_epochs!r}."
        )


def check_callbacks(trainer: pl.Trainer) -> None:
    """Raise ``ValueError`` if a callback, or the Tuner, which adds one, does what a federation cannot have done."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, remedy in REFUSED_CALLBACKS.items():
            if isinstance(callback, kind):
                raise ValueError(f"`{type(callback).__name__}` cannot be used with a federation: {remedy}.")
