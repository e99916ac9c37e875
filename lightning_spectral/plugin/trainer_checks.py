"""What of a Trainer's own settings federated training cannot honour."""

from __future__ import annotations

import lightning.pytorch as pl


def check_rounds(trainer: pl.Trainer) -> None:
    """Raise ``TypeError`` unless the number of rounds is an ``int``, which Lightning asserts without a word."""
    if not isinstance(trainer.max_epochs, int):
        raise TypeError(
            f"`max_epochs` must be an int, the number of rounds, or -1 for no limit, got {trainer.max_epochs!r}."
        )
