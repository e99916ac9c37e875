"""Logs the progress of a run whose progress bar is not drawn, in lines."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_only

from lightning_spectral.arguments import Number
from lightning_spectral.plugin.callbacks.newly_logged import NewlyLogged
from lightning_spectral.plugin.callbacks.progress import loss_title, megabytes
from lightning_spectral.plugin.callbacks.round_callback import RoundCallback
from lightning_spectral.plugin.dashboard.tables import round_bytes
from lightning_spectral.plugin.lightning.round_counting import num_rounds
from lightning_spectral.protocol.records import RoundSummary
from lightning_spectral.server.metrics import mean_loss

LOGGER = "lightning.pytorch.rounds"  # writes where Lightning's messages go


class RoundLines(RoundCallback):
    """Where no progress bar is drawn, logs a line about the finished round every now and then.

    ``Round 31/60: loss 0.348, accuracy 0.9, 61.2 MB so far, 1.3 s a round, 37.7 s left``

    Every federation has this callback by default: a run of under ten seconds logs nothing, a longer one logs a line
    every ten seconds and one for its last round. Validation metrics are those of the last validation since the previous
    line. Only the first process logs lines. They go where Lightning's messages go, at level INFO, through the logger
    ``"lightning.pytorch.rounds"``. An instance of your own replaces the default one.

    Args:
        every_n_seconds: Minimum number of seconds between two lines; 0 for a line in every round, ``math.inf`` for
            none.

    Example:
        >>> lines = RoundLines(every_n_seconds=60)  # Trainer(callbacks=[lines], enable_progress_bar=False)
    """

    def __init__(self, every_n_seconds: float = 10.0) -> None:
        self.every_n_seconds: float = Number(at_least=0, finite=False)("every_n_seconds", every_n_seconds)
        self._bytes = 0
        self._first_round = 0
        self._start = self._last = 0.0
        self._has_logged = False
        self._losses: dict[str, float] = {}
        self._new = NewlyLogged()
        self._validated: dict[str, float] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._first_round, self._has_logged = trainer.current_epoch, False
        self._start = self._last = time.perf_counter()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._losses = {}

    def on_round_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, summary: RoundSummary) -> None:
        self._bytes += round_bytes(summary)
        if summary.averaged:
            self._losses[loss_title(summary.model)] = mean_loss(summary)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._new.mark(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validated = {name: value for name, value in self._new.take(trainer).items() if name != "fl/round"}

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        now, is_last = time.perf_counter(), trainer.current_epoch + 1 == num_rounds(trainer)
        is_due = now - self._last >= self.every_n_seconds or (is_last and self._has_logged)
        if is_due and not draws_bar(trainer):
            _log(", ".join(self._parts(trainer, now - self._start)))
            self._last, self._has_logged, self._validated = now, True, {}

    def _parts(self, trainer: pl.Trainer, elapsed: float) -> Iterator[str]:
        round_idx, total = trainer.current_epoch, num_rounds(trainer)
        values = [f"{name} {value:.3g}" for name, value in {**self._losses, **self._validated}.items()]
        yield f"Round {round_idx + 1}" + ("" if total is None else f"/{total}") + (f": {values[0]}" if values else "")
        yield from values[1:]
        yield f"{megabytes(self._bytes)} so far"
        seconds = elapsed / (round_idx + 1 - self._first_round)
        yield f"{seconds:.3g} s a round"
        if total is not None:
            yield f"{duration(seconds * (total - round_idx - 1))} left"

    def state_dict(self) -> dict[str, Any]:
        return {"bytes": self._bytes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._bytes = state_dict["bytes"]


@rank_zero_only
def _log(line: str) -> None:
    logging.getLogger(LOGGER).info(line)


def draws_bar(trainer: pl.Trainer) -> bool:
    """Whether a Trainer's progress bar is drawn; a `RoundProgressBar` needs a terminal or a notebook."""
    bar = trainer.progress_bar_callback
    return bar is not None and not getattr(bar, "is_disabled", False)


def duration(seconds: float) -> str:
    """A duration in hours, minutes and seconds, with tenths if it is short.

    Example:
        >>> duration(12.34), duration(3725)
        ('12.3 s', '1:02:05')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
