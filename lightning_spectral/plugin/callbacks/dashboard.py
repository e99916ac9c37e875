"""Shows what a round's metrics leave out: in wandb, in TensorBoard, and in the record of the run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import groupby, islice
from typing import Any, TypeAlias

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from torch import Tensor

from lightning_spectral.algorithms.base import Observed
from lightning_spectral.algorithms.term_draws import TermDraws
from lightning_spectral.errors import warn
from lightning_spectral.partition import report
from lightning_spectral.plugin.callbacks.diagnostics import SpectralDiagnostics
from lightning_spectral.plugin.callbacks.record import RoundHistory, history_of
from lightning_spectral.plugin.callbacks.round_callback import RoundCallback
from lightning_spectral.plugin.data import FederatedDataModule, MultiModelDataModule
from lightning_spectral.plugin.trainer import num_rounds
from lightning_spectral.plugin.user_hooks import Host
from lightning_spectral.protocol.records import RoundSummary
from lightning_spectral.report.runs import Histogram, Table
from lightning_spectral.server.metrics import mean_loss

Pages: TypeAlias = TensorBoardLogger | WandbLogger  # loggers that have pages of their own
Pixels: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]  # red, green and blue, shape ``(height, width, 3)``
Shown: TypeAlias = dict[str, Histogram | Table | Pixels]  # by name, for any logger
BYTES = "fl/bytes_total"
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

    - ``tables/clients``: one row per client, with the `RoundCallback.client_columns` of other callbacks.
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

    shows_clients = True

    def __init__(self, every_n_rounds: int = 10) -> None:
        self._diagnostics = SpectralDiagnostics(every_n_rounds)  # which checks the argument
        self.every_n_rounds = every_n_rounds
        self._history = RoundHistory()  # until there is a fit
        self._opened: dict[str, Any] = {}
        self._finished: list[tuple[RoundSummary, Shown]] = []
        self._drawn: set[str] = set()
        self._shows = self._draws = False

    @property
    def total_bytes(self) -> int:
        """Bytes of all rounds so far and of all models, in both directions."""
        return self._history.bytes_sent()

    def on_fit_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        self._history = history_of(trainer) or RoundHistory()
        self._opened, self._finished, self._drawn = {}, [], set()  # left by a fit that failed
        writes = trainer.is_global_zero and not trainer.fast_dev_run
        if writes and not trainer.loggers:
            warn(NO_LOGGER)
        self._shows = writes and bool(trainer.loggers) and isinstance(pl_module, Host)
        has_pages = any(isinstance(logger, Pages) for logger in trainer.loggers)
        self._draws = self._shows and has_pages and find_spec("matplotlib") is not None

    def on_train_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch > 0 or not self._draws:
            return
        from lightning_spectral.report.printed import printed

        data = trainer.datamodule
        for model, one in (data.modules if isinstance(data, MultiModelDataModule) else {"": data}).items():
            if isinstance(one, FederatedDataModule):  # clients on other machines have their examples there
                split = report(one.partition, one.labels if one.partitioner.needs_labels else None)
                with printed(None, 8.0, 3.0) as figure:
                    split.plot(figure.subplots())
                self._show(trainer, {f"{model}/pictures/partition".lstrip("/"): _pixels(figure)})

    def on_round_start(self, trainer: pl.Trainer, pl_module: Any, opened: Any) -> None:
        if self._diagnostics.is_due(trainer.current_epoch):
            if self._source(trainer) is self._diagnostics:
                self._diagnostics.on_round_start(trainer, pl_module, opened)
            if self._shows:
                self._opened[pl_module.name] = opened

    def _source(self, trainer: Any) -> SpectralDiagnostics:
        """The callback that computes the layers' figures in this round: one alone, even if the user has added it."""
        others = [callback for callback in trainer.callbacks if isinstance(callback, SpectralDiagnostics)]
        return next((other for other in others if other.is_due(trainer.current_epoch)), self._diagnostics)

    def on_round_end(self, trainer: pl.Trainer, pl_module: Any, summary: RoundSummary) -> None:
        if summary.model:
            _log(pl_module, self._history.bytes_sent(summary.model))
        if (opened := self._opened.pop(summary.model, None)) is not None:
            figures = self._source(trainer).by_layer.get(summary.model, {})
            shown = of_algorithm(opened.observed(), summary.round_idx, figures, self._draws)
            self._finished.append((summary, shown))

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._history.rows and trainer.state.fn == "fit" and not trainer.sanity_checking:
            _log(pl_module, self.total_bytes)  # so that any logger can plot the metrics over them

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if not self._history.rows:
            return
        _log(pl_module, self.total_bytes)  # the model has been validated
        self._history.take_logged(trainer)
        if self._shows:
            self._draw_over_bytes(trainer)
            every: Shown = {}
            for summary, shown in self._finished:
                if summary.clients:
                    known = [one.client_columns(summary) for one in trainer.callbacks if isinstance(one, RoundCallback)]
                    names = pl_module.data_of(summary.model).held_out.names
                    shown["tables/clients"] = client_table(summary, known, names)
                    shown["tables/keep_ratios"] = keep_ratio_table(summary)
                every |= {summary.metric(name): one for name, one in shown.items()}
            self._show(trainer, every)
        self._finished = []

    def _draw_over_bytes(self, trainer: pl.Trainer) -> None:
        """Log the round's loss and what validation has found over all bytes sent so far, in TensorBoard as the step."""
        history, row, num_bytes = self._history, self._history.rows[-1], self.total_bytes
        values = {name: row[name] for name in history.outcomes([row]) if math.isfinite(row[name])}
        curves = {f"over_bytes/{name}": value for name, value in values.items()}
        for logger in trainer.loggers if values else ():
            if isinstance(logger, TensorBoardLogger):
                logger.log_metrics(curves, step=num_bytes)
            elif isinstance(logger, WandbLogger):
                for name in (name for name in values if name not in self._drawn):
                    # by its name, and before its first point: wandb does not specify which of two patterns wins
                    curve = prefixed(logger, f"over_bytes/{name}")
                    logger.experiment.define_metric(curve, step_metric=prefixed(logger, BYTES))
                logger.log_metrics({**curves, BYTES: float(num_bytes), "fl/round": float(trainer.current_epoch)})
                for name in values:
                    column = [value for value in history.column(name) if math.isfinite(value)]
                    # names of their own: a summary that wandb computes replaces the metric's last value
                    ends = {f"{name}/min": min(column), f"{name}/max": max(column)}
                    logger.experiment.summary.update({prefixed(logger, end): value for end, value in ends.items()})
        self._drawn |= values.keys()

    def _show(self, trainer: pl.Trainer, shown: Shown) -> None:
        for logger in trainer.loggers if shown else ():
            if isinstance(logger, Pages):
                show(logger, trainer.current_epoch, shown)
        tables = {name: one._asdict() for name, one in shown.items() if isinstance(one, Table)}
        bins = {name: one._asdict() for name, one in shown.items() if isinstance(one, Histogram)}
        if tables or bins:
            self._history.append({"round": trainer.current_epoch, "tables": tables, "histograms": bins})


def _log(module: Any, num_bytes: int) -> None:
    module.log(BYTES, torch.tensor(num_bytes).double(), on_step=False, on_epoch=True, batch_size=1)


def histogram(values: Tensor, *, num_bins: int = 64) -> Histogram:
    """Count the finite ones of some values in bins of equal width between the smallest and the largest."""
    flat = values.detach().flatten().double().cpu()
    counts, edges = torch.histogram(flat[flat.isfinite()], num_bins)
    return Histogram(tuple(edges.tolist()), tuple(int(count) for count in counts))


def table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """Make a table with the columns of all rows, in order of first appearance; cells that are not finite are empty."""
    known = [
        {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()}
        for row in rows
    ]
    columns = tuple(dict.fromkeys(column for row in known for column in row))
    return Table(columns, tuple(tuple(row.get(column) for column in columns) for row in known))


def client_table(
    summary: RoundSummary, more: Sequence[Mapping[str, Mapping[int, float]]], names: Sequence[str] = ()
) -> Table:
    """One row per client of a model's round, in the cohort's order, with ``more`` columns by title and client."""
    titles = {title: values for columns in more for title, values in columns.items()}
    return table(
        {
            "round": client.round_idx,
            "client": client.client_id,
            **({"name": names[client.client_id]} if names else {}),
            "keep_ratio": client.keep_ratio,
            "examples": client.num_examples,
            "steps": client.num_steps,
            "loss": client.loss,
            "bytes_down": client.downlink_bytes,
            "bytes_up": client.uplink_bytes,
            "seconds": client.seconds,
            "virtual_seconds": client.virtual_seconds,
            "left_out": client.left_out or "",
            **({} if client.example_epsilon is None else {"example_epsilon": client.example_epsilon}),
            **{title: values.get(client.client_id) for title, values in titles.items()},
        }
        for client in summary.clients
    )


def keep_ratio_table(summary: RoundSummary) -> Table:
    """One row per keep ratio of a round's clients, ascending."""
    outcomes = sorted(summary.clients, key=lambda client: client.keep_ratio)
    groups = [replace(summary, clients=tuple(own)) for _, own in groupby(outcomes, lambda client: client.keep_ratio)]
    return table(
        {
            "round": summary.round_idx,
            "keep_ratio": group.clients[0].keep_ratio,
            "clients": len(group.averaged),
            "clients_left_out": len(group.clients) - len(group.averaged),
            "examples": sum(client.num_examples for client in group.averaged),
            "loss": mean_loss(group),
            "bytes_down": sum(client.downlink_bytes for client in group.clients),
            "bytes_up": sum(client.uplink_bytes for client in group.clients),
        }
        for group in groups
    )


def of_algorithm(observed: Observed, round_idx: int, figures: Mapping[str, Mapping[str, float]], draws: bool) -> Shown:
    """All there is to show of a model's finished round, apart from its clients.

    For sharded layers, a table with further ``figures``, and histograms; else the histograms of other tensors.
    """
    layers, visited = observed.term_draws, observed.visited_terms
    if not layers:
        return {name: histogram(values) for name, values in observed.histograms.items()}
    shown, rows = Shown(), []
    for name, layer in layers.items():
        shown[f"singular_values/{name}"] = histogram(layer.singular_values)
        for ratio, plan in layer.groups.items():
            shown[f"inclusion_probs/{name}/{ratio:g}"] = histogram(plan.inclusion_probs)
            shown[f"multipliers/{name}/{ratio:g}"] = histogram(plan.multipliers[plan.inclusion_probs > 0])
        row = {
            "round": round_idx,
            "layer": name,
            "terms": len(layer.singular_values),
            "terms_visited": float(visited[name].double().mean()),
            "largest_singular_value": float(layer.singular_values.max()),
            **figures.get(name, {}),
        }
        rows.append(row)
    pictures: Shown = {"pictures/spectra": spectra_picture(layers)} if draws else {}
    return {**shown, "tables/layers": table(rows), **pictures}


def spectra_picture(layers: Mapping[str, TermDraws]) -> Pixels:
    """Draw the singular values of each sharded layer as shares of its largest one, over the share of its terms."""
    from lightning_spectral.report.printed import draw_line, legend_above, look, printed

    with printed(None, 8.0, 4.0) as figure:
        axes = figure.add_subplot(xlabel="share of the terms", ylabel="share of the largest", ylim=(0.0, 1.05))
        for index, (name, layer) in enumerate(islice(layers.items(), 42)):  # so many look different
            values = layer.singular_values.detach().double().cpu().numpy()
            heights = values / values.max() if values.max() > 0 else values
            draw_line(axes, np.arange(1, len(values) + 1) / len(values), heights, look(index), name)
        legend_above(figure, columns=3)
    return _pixels(figure)


def _pixels(figure: Any) -> Pixels:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    pixels: Pixels = np.asarray(canvas.buffer_rgba())[..., :3].copy()
    return pixels


def prefixed(logger: Pages, name: str) -> str:
    """The name of a metric in a logger, which may put a prefix before all names."""
    return f"{logger._prefix}{logger.LOGGER_JOIN_CHAR}{name}" if logger._prefix else name


def show(logger: Pages, round_idx: int, shown: Shown) -> None:
    """Log histograms, pictures and, in wandb, tables of a round."""
    if isinstance(logger, WandbLogger):
        import wandb

        row: dict[str, Any] = {"fl/round": float(round_idx)}
        for name, one in shown.items():
            if isinstance(one, Histogram):
                row[name] = wandb.Histogram(np_histogram=(np.array(one.counts), np.array(one.edges)))
            elif isinstance(one, Table):
                row[name] = wandb.Table(columns=list(one.columns), data=[list(cells) for cells in one.rows])
            else:
                row[name] = wandb.Image(one)
        logger.log_metrics(row)
        return
    for name, one in shown.items():
        if isinstance(one, Histogram):
            centres = [(left + right) / 2 for left, right in zip(one.edges, one.edges[1:], strict=False)]
            weighed = list(zip(one.counts, centres, strict=True))
            logger.experiment.add_histogram_raw(  # bins as they are; TensorBoard's own sums are those of their centres
                prefixed(logger, name),
                min=one.edges[0],
                max=one.edges[-1],
                num=sum(one.counts),
                sum=math.fsum(count * centre for count, centre in weighed),
                sum_squares=math.fsum(count * centre**2 for count, centre in weighed),
                bucket_limits=list(one.edges[1:]),
                bucket_counts=list(one.counts),
                global_step=round_idx,
            )
        elif isinstance(one, np.ndarray):
            logger.experiment.add_image(prefixed(logger, name), one, round_idx, dataformats="HWC")


class WandbRounds(pl.Callback):
    """Makes ``fl/round`` the x axis of every metric of a `WandbLogger`; without one it does nothing.

    Metrics are logged without ``step=``: wandb drops rows whose step goes backwards. The version of this package and
    the numbers of rounds and devices go to the run's config; a resumed run may have others, so they are no settings.
    """

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        try:
            installed = version("lightning-spectral")
        except PackageNotFoundError:  # a copy of the sources
            installed = "not installed"
        run = {"version": installed, "rounds": num_rounds(trainer), "devices": trainer.world_size}
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                axis = prefixed(logger, "fl/round")
                logger.experiment.define_metric(axis)
                logger.experiment.define_metric("*", step_metric=axis, step_sync=True)
                logger.experiment.config.update({"run": run}, allow_val_change=True)
