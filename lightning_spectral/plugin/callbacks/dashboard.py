"""Shows in wandb, TensorBoard and CSV files what a round's metrics do not say."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger, WandbLogger

from lightning_spectral.errors import SpectralWarning
from lightning_spectral.partition import report
from lightning_spectral.plugin.callbacks.diagnostics import SpectralDiagnostics
from lightning_spectral.plugin.callbacks.newly_logged import NewlyLogged
from lightning_spectral.plugin.callbacks.round_callback import RoundCallback
from lightning_spectral.plugin.dashboard.drawings import can_draw, partition_drawing
from lightning_spectral.plugin.dashboard.records import Curve, Record, Shown, Table, of_model
from lightning_spectral.plugin.dashboard.run_pages import (
    Extremes,
    announce_metrics,
    begin_pages,
    extended,
    run_settings,
    summarize,
)
from lightning_spectral.plugin.dashboard.tables import algorithm_records, client_table, keep_ratio_table, round_bytes
from lightning_spectral.plugin.dashboard.writers import Write, prefixed, remove_stale, writers_of
from lightning_spectral.plugin.data.data_module import FederatedDataModule
from lightning_spectral.plugin.data.multi_model import MultiModelDataModule
from lightning_spectral.plugin.host import Trained
from lightning_spectral.protocol.records import RoundSummary
from lightning_spectral.server.metrics import mean_loss

BYTES = "fl/bytes_total"
OVER_BYTES = "over_bytes"
NO_LOGGER = (
    "RoundDashboard shows clients, spectra and draws in a WandbLogger, a TensorBoardLogger or a CSVLogger, and the "
    "Trainer has none of them, so it will only count bytes; add one, Trainer(logger=...), or leave the callback out."
)


class RoundDashboard(RoundCallback):
    """Shows clients, spectra, draws and metrics over bytes in each of the Trainer's loggers that can hold them.

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
    - In wandb and TensorBoard, ``pictures/spectra``, and before the first round ``pictures/partition``, if matplotlib
      is installed.

    wandb's summary has ``M/min`` and ``M/max`` of ``fl/loss`` and every validation metric M, TensorBoard's HPARAMS page
    their last values and the bytes, and its custom scalars some charts.

    A `WandbLogger`, offline or not, gets histograms, tables, and curves with their axis. A ``TensorBoardLogger`` gets
    histograms, tables as text, and curves whose step is the number of bytes. A ``CSVLogger`` gets one file per table
    and one file of all histograms in its folder ``dashboard``. With several models, names begin with the model's name,
    except for ``fl/bytes_total``, which counts the bytes of all models, and ``over_bytes``. The bytes are part of the
    checkpoint.

    Args:
        every_n_rounds: Show histograms and tables of rounds 0, n, 2n, ...

    Example:
        >>> dashboard = RoundDashboard(every_n_rounds=10)  # Trainer(callbacks=[dashboard], logger=WandbLogger(...))
    """

    def __init__(self, every_n_rounds: int = 10) -> None:
        self._diagnostics = SpectralDiagnostics(every_n_rounds)  # which checks the argument
        self.every_n_rounds = every_n_rounds
        self._bytes: dict[str, int] = {}
        self._opened: dict[str, Any] = {}
        self._summaries: list[RoundSummary] = []
        self._losses: dict[str, float] = {}
        self._records: list[Shown] = []
        self._extremes: Extremes = {}
        self._has_announced = self._draws = False
        self._new = NewlyLogged()
        self._writers: list[Write] = []

    @property
    def total_bytes(self) -> int:
        """Bytes of all rounds so far and of all models, in both directions."""
        return sum(self._bytes.values())

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._writers = writers_of(trainer.loggers) if trainer.is_global_zero else []
        if trainer.is_global_zero and not (self._writers or trainer.fast_dev_run):  # type: ignore[attr-defined]
            warnings.warn(NO_LOGGER, SpectralWarning, stacklevel=2)
        self._opened, self._summaries, self._records = {}, [], []  # left by a fit that failed
        if trainer.ckpt_path is None:
            self._losses = {}
        self._draws = can_draw() and any(not isinstance(logger, CSVLogger) for logger in trainer.loggers)
        self._has_announced = False
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            begin_pages(trainer.loggers)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:  # what an earlier fit wrote about rounds that are trained again
            remove_stale(trainer.loggers, trainer.current_epoch)
        if trainer.current_epoch == 0:
            self._extremes = {}
            if self._draws and self._writers:
                self._write(0, _partitions(trainer))

    def on_round_start(self, trainer: pl.Trainer, pl_module: Trained, opened: Any) -> None:  # type: ignore[override]
        if self._diagnostics.is_due(trainer.current_epoch):
            if self._source(trainer) is self._diagnostics:
                self._diagnostics.on_round_start(trainer, pl_module, opened)
            if self._writers:
                self._opened[pl_module.name] = opened

    def _source(self, trainer: pl.Trainer) -> SpectralDiagnostics:
        """The callback that computes the layers' figures in this round: one alone, even if the user has added it."""
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        others = [callback for callback in callbacks if isinstance(callback, SpectralDiagnostics)]
        return next((other for other in others if other.is_due(trainer.current_epoch)), self._diagnostics)

    def on_round_end(self, trainer: pl.Trainer, pl_module: Trained, summary: RoundSummary) -> None:  # type: ignore[override]
        before = self._bytes.get(summary.model, 0) if summary.round_idx else 0  # another fit begins at round 0
        self._bytes[summary.model] = before + round_bytes(summary)
        if summary.model:
            _log(pl_module, self._bytes[summary.model])
        self._summaries.append(summary)
        if summary.averaged:
            self._losses[summary.metric("fl/loss")] = mean_loss(summary)
        if (opened := self._opened.pop(summary.model, None)) is not None:
            figures = self._source(trainer).by_layer.get(summary.model, {})
            shown = algorithm_records(opened, pl_module.state, summary.round_idx, figures, self._draws)
            self._records += of_model(summary.model, shown)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._new.mark(trainer)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            _log(pl_module, self.total_bytes)  # so that any logger can plot the metrics over them

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        new = self._new.take(trainer)
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._draw(trainer, {name: value for name, value in new.items() if name not in ("fl/round", BYTES)})

    def _draw(self, trainer: pl.Trainer, values: dict[str, float]) -> None:
        finite = {f"{OVER_BYTES}/{name}": value for name, value in values.items() if math.isfinite(value)}
        if finite:
            self._write(trainer.current_epoch, [Curve(finite, BYTES, float(self.total_bytes))])
            self._extremes = extended(self._extremes, {n.removeprefix(f"{OVER_BYTES}/"): v for n, v in finite.items()})

    def _write(self, round_idx: int, records: Sequence[Record]) -> None:
        for write in self._writers:
            write(round_idx, records)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _log(pl_module, self.total_bytes)  # the model has been validated
        summaries, records = self._summaries, self._records
        self._summaries, self._records = [], []
        losses, self._losses = self._losses, {}
        self._draw(trainer, losses)
        if self._writers and self._diagnostics.is_due(trainer.current_epoch):
            for summary in summaries:
                records += of_model(summary.model, self._tables(trainer, summary))
            self._write(trainer.current_epoch, records)
        if self._writers:
            summarize(trainer.loggers, self._extremes)
            if any("fl/loss" not in name for name in self._extremes):  # the model has been validated
                self._announce(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._writers and self._extremes:
            self._announce(trainer)

    def _announce(self, trainer: pl.Trainer) -> None:
        if not self._has_announced:
            announce_metrics(trainer, [*self._extremes, BYTES])
            self._has_announced = True

    def _tables(self, trainer: pl.Trainer, summary: RoundSummary) -> list[Table]:
        if not summary.clients:
            return []
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        known = [callback.client_columns(summary) for callback in callbacks if isinstance(callback, RoundCallback)]
        return [client_table(summary, known), keep_ratio_table(summary)]

    def state_dict(self) -> dict[str, Any]:
        return {"bytes": dict(self._bytes), "extremes": dict(self._extremes), "losses": dict(self._losses)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._bytes = dict(state_dict["bytes"])
        self._extremes, self._losses = dict(state_dict["extremes"]), dict(state_dict["losses"])


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
