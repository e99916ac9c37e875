"""Shows what a round's metrics do not say: in wandb, in TensorBoard, and in the record of the run."""

from __future__ import annotations

import math
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import WandbLogger

from lightning_spectral.errors import SpectralWarning
from lightning_spectral.partition import report
from lightning_spectral.plugin.callbacks.diagnostics import SpectralDiagnostics
from lightning_spectral.plugin.callbacks.record import RoundHistory
from lightning_spectral.plugin.callbacks.round_callback import RoundCallback
from lightning_spectral.plugin.dashboard.drawings import can_draw, partition_drawing
from lightning_spectral.plugin.dashboard.loggers import (
    BYTES,
    PAGES,
    draw_over_bytes,
    prefixed,
    run_settings,
    show,
    summarize,
)
from lightning_spectral.plugin.dashboard.records import Histogram, Shown, Table, of_model
from lightning_spectral.plugin.dashboard.tables import algorithm_records, client_table, keep_ratio_table
from lightning_spectral.plugin.data import FederatedDataModule, MultiModelDataModule
from lightning_spectral.plugin.host import Trained, is_host
from lightning_spectral.protocol.records import RoundSummary

NO_LOGGER = (
    "RoundDashboard shows clients, spectra and draws in the record of a run, in wandb and in TensorBoard, and the "
    "Trainer has no logger, so it will only count bytes; add one, Trainer(logger=...), or leave the callback out."
)


class RoundDashboard(RoundCallback):
    """Shows clients, spectra, draws and metrics over bytes.

    In every round:

    - ``fl/bytes_total``: bytes of all rounds so far, in both directions, as a metric of the Trainer.
    - ``over_bytes/M`` for ``fl/loss`` and every validation metric M: M over ``fl/bytes_total``.

    Every ``every_n_rounds`` rounds:

    - ``tables/clients``: one row per client, with the columns that other callbacks add through
      `RoundCallback.client_columns`.
    - ``tables/keep_ratios``: one row per keep ratio of the cohort.
    - With `SpectralSharding`, histograms of ``singular_values/<layer>``, ``inclusion_probs/<layer>/<keep ratio>`` and
      ``multipliers/<layer>/<keep ratio>``; ``tables/layers`` with discrepancy, coverage and effective ranks of each
      layer; and what `SpectralDiagnostics` logs, if that callback does not act itself.
    - With `Zampling`, a histogram of ``probs``, the probabilities after the round.
    - ``pictures/spectra``, and before the first round ``pictures/partition``, if matplotlib is installed.

    Tables and histograms are in ``rounds.jsonl``, the record of the run that `RoundHistory` writes; without a history,
    the Trainer gets one. A `WandbLogger`, offline or not, has all of it, curves with their axis, and ``M/min`` and
    ``M/max`` of ``fl/loss`` and every validation metric M in its summary. A ``TensorBoardLogger`` has histograms,
    pictures, and curves whose step is the number of bytes. With several models, names begin with the model's name,
    except for ``fl/bytes_total``, which counts the bytes of all models, and ``over_bytes``.

    Args:
        every_n_rounds: Show histograms, tables and pictures of rounds 0, n, 2n, ...

    Example:
        >>> dashboard = RoundDashboard(every_n_rounds=10)  # Trainer(callbacks=[dashboard], logger=WandbLogger(...))
    """

    def __init__(self, every_n_rounds: int = 10) -> None:
        self._diagnostics = SpectralDiagnostics(every_n_rounds)  # which checks the argument
        self.every_n_rounds = every_n_rounds
        self._history: RoundHistory | None = None
        self._opened: dict[str, Any] = {}
        self._summaries: list[RoundSummary] = []
        self._records: list[Shown] = []
        self._drawn: set[str] = set()
        self._shows = self._draws = False

    @property
    def total_bytes(self) -> int:
        """Bytes of all rounds so far and of all models, in both directions."""
        return 0 if self._history is None else self._history.bytes_sent()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        self._history = next((one for one in callbacks if isinstance(one, RoundHistory)), None)
        self._opened, self._summaries, self._records = {}, [], []  # left by a fit that failed
        self._drawn = set()
        is_quick = bool(trainer.fast_dev_run)  # type: ignore[attr-defined]
        if trainer.is_global_zero and not (trainer.loggers or is_quick):
            warnings.warn(NO_LOGGER, SpectralWarning, stacklevel=2)
        self._shows = trainer.is_global_zero and bool(trainer.loggers) and is_host(pl_module) and not is_quick
        self._draws = self._shows and can_draw() and any(isinstance(logger, PAGES) for logger in trainer.loggers)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 0 and self._draws:
            self._show(trainer, _partitions(trainer))

    def on_round_start(self, trainer: pl.Trainer, pl_module: Trained, opened: Any) -> None:  # type: ignore[override]
        if self._diagnostics.is_due(trainer.current_epoch):
            if self._source(trainer) is self._diagnostics:
                self._diagnostics.on_round_start(trainer, pl_module, opened)
            if self._shows:
                self._opened[pl_module.name] = opened

    def _source(self, trainer: pl.Trainer) -> SpectralDiagnostics:
        """The callback that computes the layers' figures in this round: one alone, even if the user has added it."""
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        others = [callback for callback in callbacks if isinstance(callback, SpectralDiagnostics)]
        return next((other for other in others if other.is_due(trainer.current_epoch)), self._diagnostics)

    def on_round_end(self, trainer: pl.Trainer, pl_module: Trained, summary: RoundSummary) -> None:  # type: ignore[override]
        if summary.model and self._history is not None:
            _log(pl_module, self._history.bytes_sent(summary.model))
        if self._shows and self._diagnostics.is_due(summary.round_idx):
            self._summaries.append(summary)
        if (opened := self._opened.pop(summary.model, None)) is not None:
            figures = self._source(trainer).by_layer.get(summary.model, {})
            shown = algorithm_records(opened, pl_module.state, summary.round_idx, figures, self._draws)
            self._records += of_model(summary.model, shown)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._history is not None and trainer.state.fn == "fit" and not trainer.sanity_checking:
            _log(pl_module, self.total_bytes)  # so that any logger can plot the metrics over them

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._history is None or not self._history.rows:
            return
        _log(pl_module, self.total_bytes)  # the model has been validated
        self._history.take_logged(trainer)
        if self._shows:
            self._draw(trainer, self._history)
            for summary in self._summaries:
                self._records += of_model(summary.model, self._tables(trainer, summary))
            self._show(trainer, self._records)
        self._summaries, self._records = [], []

    def _draw(self, trainer: pl.Trainer, history: RoundHistory) -> None:
        """Draw the round's loss and what validation has found over the bytes sent."""
        row, names = history.rows[-1], history.outcomes(history.rows[-1:])
        values = {name: row[name] for name in names if math.isfinite(row[name])}
        for logger in trainer.loggers:
            if isinstance(logger, PAGES) and values:
                draw_over_bytes(logger, trainer.current_epoch, values, self.total_bytes, self._drawn)
            if isinstance(logger, WandbLogger):
                columns = {name: [value for value in history.column(name) if math.isfinite(value)] for name in values}
                summarize(logger, columns)
        self._drawn |= values.keys()

    def _show(self, trainer: pl.Trainer, records: list[Shown]) -> None:
        if not records:
            return
        for logger in trainer.loggers:
            if isinstance(logger, PAGES):
                show(logger, trainer.current_epoch, records)
        if self._history is not None:
            tables = {one.name: {"columns": one.columns, "rows": one.rows} for one in records if isinstance(one, Table)}
            bins = {
                one.name: {"edges": one.edges, "counts": one.counts} for one in records if isinstance(one, Histogram)
            }
            self._history.show(trainer.current_epoch, tables=tables, histograms=bins)

    def _tables(self, trainer: pl.Trainer, summary: RoundSummary) -> list[Table]:
        if not summary.clients:
            return []
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        known = [callback.client_columns(summary) for callback in callbacks if isinstance(callback, RoundCallback)]
        return [client_table(summary, known), keep_ratio_table(summary)]


def _partitions(trainer: pl.Trainer) -> list[Shown]:
    """A picture of how the data of each model is dealt; by class where the split needed to know the classes."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    found: list[Shown] = []
    for model, one in (data.modules if isinstance(data, MultiModelDataModule) else {"": data}).items():
        if isinstance(one, FederatedDataModule):  # clients on other machines have their examples there
            split = report(one.partition, one.labels if one.partitioner.needs_labels else None)
            found += of_model(model, [partition_drawing(split)])
    return found


def _log(module: Trained | pl.LightningModule, num_bytes: int) -> None:
    module.log(BYTES, torch.tensor(num_bytes).double(), on_step=False, on_epoch=True, batch_size=1)


class WandbRounds(pl.Callback):
    """Makes ``fl/round`` the x axis of every metric of a `WandbLogger`; without one it does nothing.

    It also adds the version of this package and the numbers of rounds and devices to the run's config.

    Metrics are never logged with ``step=``: wandb drops rows whose step goes backwards.
    """

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                axis = prefixed(logger, "fl/round")
                logger.experiment.define_metric(axis)
                logger.experiment.define_metric("*", step_metric=axis, step_sync=True)
                logger.experiment.config.update(run_settings(trainer), allow_val_change=True)
