"""Trainers that print nothing: what a run did is read from its callbacks."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import lightning.pytorch as pl


def quiet_trainer(num_rounds: int, callbacks: Sequence[pl.Callback], every: int | None = None) -> pl.Trainer:
    """Return a Trainer for the CPU that writes and prints nothing.

    Args:
        num_rounds: Number of rounds.
        callbacks: Its callbacks.
        every: Number of rounds between two evaluations; ``None`` for no evaluation.
    """
    return pl.Trainer(
        max_epochs=num_rounds,
        accelerator="cpu",
        logger=False,
        callbacks=list(callbacks),
        limit_val_batches=0 if every is None else 1.0,
        check_val_every_n_epoch=every or 1,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )


def silence_lightning() -> None:
    """Silence Lightning's messages about every Trainer, except for errors."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
