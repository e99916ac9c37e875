"""What a validation logs, apart from all that was logged before."""

from __future__ import annotations

import lightning.pytorch as pl
from torch import Tensor


class ValidationMetrics:
    """Finds the metrics of one validation: Lightning keeps the last value of every metric, however old."""

    def __init__(self) -> None:
        self._before: dict[str, Tensor] = {}

    def begin(self, trainer: pl.Trainer) -> None:
        """Note what was logged before the validation."""
        self._before = dict(trainer.callback_metrics)

    def end(self, trainer: pl.Trainer) -> dict[str, float]:
        """What it has logged since."""
        before, self._before = self._before, {}
        return {name: float(v) for name, v in trainer.callback_metrics.items() if v is not before.get(name)}
