"""The values that were logged since some moment, whatever logged them."""

from __future__ import annotations

from collections.abc import Mapping

import lightning.pytorch as pl
import torch
from torch import Tensor


class NewlyLogged:
    """Tells new values from old ones: Lightning keeps the last value of every metric, however old."""

    def __init__(self) -> None:
        self._before: Mapping[str, Tensor] = {}

    def mark(self, trainer: pl.Trainer) -> None:
        """Treat what is logged from now on as new."""
        self._before = dict(trainer.callback_metrics)

    def split(self, trainer: pl.Trainer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the old and the new values on the CPU, by name; new ones remain new."""
        old: dict[str, Tensor] = {}
        new: dict[str, Tensor] = {}
        for name, value in trainer.callback_metrics.items():
            (old if value is self._before.get(name) else new)[name] = torch.as_tensor(value).detach().cpu()
        return old, new

    def take(self, trainer: pl.Trainer) -> dict[str, float]:
        """Return the new values by name, and treat them as old from now on."""
        before = self._before
        self.mark(trainer)
        return {name: float(value) for name, value in self._before.items() if value is not before.get(name)}
