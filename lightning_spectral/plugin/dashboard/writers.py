"""Writes a dashboard's records to a logger, with one function for each logger that can hold them."""

from __future__ import annotations

import csv
import io
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

from lightning_spectral.plugin.dashboard.records import Cell, Curve, Drawing, Histogram, Record, Table

Write = Callable[[int, Sequence[Record]], None]


def writers_of(loggers: Iterable[Logger]) -> list[Write]:
    """Functions that write a round's records to each logger that can hold any, given the round and the records."""
    return [make(logger) for logger in loggers for kind, make in WRITERS.items() if isinstance(logger, kind)]


def prefixed(logger: TensorBoardLogger | WandbLogger, name: str) -> str:
    """The name of a metric in a logger, which may put a prefix before all names."""
    return f"{logger._prefix}{logger.LOGGER_JOIN_CHAR}{name}" if logger._prefix else name


class WandbWriter:
    """Logs histograms, tables and pictures as one row, and each point of curves as one, with its axis.

    No row has a ``step=``: wandb drops rows whose step goes backwards.
    """

    def __init__(self, logger: WandbLogger) -> None:
        self.logger = logger
        self._defined: set[str] = set()

    def __call__(self, round_idx: int, records: Sequence[Record]) -> None:
        row: dict[str, Any] = {}
        for record in records:
            if isinstance(record, Curve):
                self._define(record)
                self.logger.log_metrics({**record.values, record.axis: record.at, "fl/round": float(round_idx)})
            else:
                row[record.name] = _for_wandb(record)
        if row:
            self.logger.log_metrics({**row, "fl/round": float(round_idx)})

    def _define(self, curve: Curve) -> None:
        """Give each curve its axis, once, and by its name: wandb does not specify which of two patterns wins."""
        for name in curve.values.keys() - self._defined:
            axis = prefixed(self.logger, curve.axis)
            self.logger.experiment.define_metric(prefixed(self.logger, name), step_metric=axis)
            self._defined.add(name)


def _for_wandb(record: Histogram | Table | Drawing) -> Any:
    import wandb

    if isinstance(record, Histogram):
        return wandb.Histogram(np_histogram=(np.array(record.counts), np.array(record.edges)))
    if isinstance(record, Drawing):
        return wandb.Image(record.pixels)
    return wandb.Table(columns=list(record.columns), data=[list(cells) for cells in record.rows])


def write_tensorboard(logger: TensorBoardLogger, round_idx: int, records: Sequence[Record]) -> None:
    """Add histograms, tables as text, and curves with their axis, in whole units, as the step."""
    for record in records:
        if isinstance(record, Histogram):
            _add_histogram(logger.experiment, prefixed(logger, record.name), record, round_idx)
        elif isinstance(record, Table):
            logger.experiment.add_text(prefixed(logger, record.name), _markdown(record), round_idx)
        elif isinstance(record, Drawing):
            name = prefixed(logger, record.name)
            logger.experiment.add_image(name, record.pixels, round_idx, dataformats="HWC")
        else:
            logger.log_metrics(record.values, step=round(record.at))


def _add_histogram(writer: Any, name: str, record: Histogram, round_idx: int) -> None:
    """Add bins as they are; TensorBoard's own sums are those of their centres."""
    centres = [(left + right) / 2 for left, right in zip(record.edges, record.edges[1:], strict=False)]
    weighed = list(zip(record.counts, centres, strict=True))
    writer.add_histogram_raw(
        name,
        min=record.edges[0],
        max=record.edges[-1],
        num=sum(record.counts),
        sum=math.fsum(count * centre for count, centre in weighed),
        sum_squares=math.fsum(count * centre**2 for count, centre in weighed),
        bucket_limits=list(record.edges[1:]),
        bucket_counts=list(record.counts),
        global_step=round_idx,
    )


def _markdown(record: Table) -> str:
    lines = [record.columns, ["---"] * len(record.columns), *record.rows]
    return "\n".join(f"| {' | '.join(map(_shown, line))} |" for line in lines)


def _shown(cell: Cell) -> str:
    return "" if cell is None else f"{cell:.6g}" if isinstance(cell, float) else str(cell)


def write_csv(logger: CSVLogger, round_idx: int, records: Sequence[Record]) -> None:
    """Write every table to a file of its own, and all histograms to one file, next to ``metrics.csv``.

    Each file belongs to one round, so a resumed run overwrites it. ``metrics.csv`` has the columns of all curves.
    """
    tables = [record for record in records if isinstance(record, Table)]
    if histograms := [record for record in records if isinstance(record, Histogram)]:
        tables.append(_as_table(histograms))
    for table in tables:
        file = f"{table.name.replace('tables/', '')}_{round_idx:06d}.csv"
        _write_file(os.path.join(logger.log_dir, "dashboard", file), table)


def remove_stale(loggers: Iterable[Logger], round_idx: int) -> None:
    """Remove the files of a round and of later ones, which an earlier fit left in the folder of a `CSVLogger`.

    `CSVLogger` replaces the ``metrics.csv`` of another logger, and the files of two fits would be read as one run.
    """
    for logger in loggers:
        if isinstance(logger, CSVLogger):
            _remove_stale_files(logger, round_idx)


def _remove_stale_files(logger: CSVLogger, round_idx: int) -> None:
    folder = os.path.join(logger.log_dir, "dashboard")
    files = get_filesystem(folder)
    if files.isfile(logger.experiment.metrics_file_path) or not files.isdir(folder):
        return  # the logger of an earlier fit goes on, or there is none
    for path in files.find(folder):
        found = re.fullmatch(r".+_(\d{6,})\.csv", os.path.basename(path))
        if found and int(found[1]) >= round_idx:
            files.rm_file(path)


def _as_table(histograms: Sequence[Histogram]) -> Table:
    rows = [
        (histogram.name, left, right, count)
        for histogram in histograms
        for left, right, count in zip(histogram.edges, histogram.edges[1:], histogram.counts, strict=False)
    ]
    return Table("histograms", ("histogram", "left", "right", "count"), tuple(rows))


def _write_file(path: str, table: Table) -> None:
    text = io.StringIO(newline="")
    csv.writer(text).writerows([table.columns, *table.rows])
    files = get_filesystem(path)
    files.makedirs(os.path.dirname(path), exist_ok=True)
    with files.open(path, "w", newline="") as file:
        file.write(text.getvalue())


WRITERS: dict[type[Logger], Callable[..., Write]] = {
    CSVLogger: lambda logger: partial(write_csv, logger),
    TensorBoardLogger: lambda logger: partial(write_tensorboard, logger),
    WandbLogger: WandbWriter,
}
