"""What a dashboard writes to wandb and TensorBoard, through Lightning's loggers."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

from lightning_spectral.plugin.dashboard.records import Drawing, Histogram, Shown, Table
from lightning_spectral.plugin.trainer import num_rounds

PAGES = TensorBoardLogger | WandbLogger  # loggers that have pages of their own
BYTES = "fl/bytes_total"


def prefixed(logger: PAGES, name: str) -> str:
    """The name of a metric in a logger, which may put a prefix before all names."""
    return f"{logger._prefix}{logger.LOGGER_JOIN_CHAR}{name}" if logger._prefix else name


def show(logger: PAGES, round_idx: int, records: Sequence[Shown]) -> None:
    """Log histograms, drawings and, in wandb, tables of a round.

    No row has a ``step=``: wandb drops rows whose step goes backwards.
    """
    if isinstance(logger, WandbLogger):
        logger.log_metrics({**{one.name: _for_wandb(one) for one in records}, "fl/round": float(round_idx)})
        return
    for one in records:
        if isinstance(one, Histogram):
            _add_histogram(logger.experiment, prefixed(logger, one.name), one, round_idx)
        elif isinstance(one, Drawing):
            logger.experiment.add_image(prefixed(logger, one.name), one.pixels, round_idx, dataformats="HWC")


def draw_over_bytes(
    logger: PAGES, round_idx: int, values: Mapping[str, float], num_bytes: int, drawn: Container[str]
) -> None:
    """Log the next point of curves over all bytes sent so far, in TensorBoard as the step.

    Each gets its axis before its first point, and by its name: wandb does not specify which of two patterns wins.
    """
    curves = {f"over_bytes/{name}": value for name, value in values.items()}
    if isinstance(logger, TensorBoardLogger):
        logger.log_metrics(curves, step=num_bytes)
        return
    for name in values:
        if name not in drawn:
            axis = prefixed(logger, BYTES)
            logger.experiment.define_metric(prefixed(logger, f"over_bytes/{name}"), step_metric=axis)
    logger.log_metrics({**curves, BYTES: float(num_bytes), "fl/round": float(round_idx)})


def summarize(logger: WandbLogger, columns: Mapping[str, Sequence[float]]) -> None:
    """Put ``M/min`` and ``M/max`` of every metric M into wandb's summary, by which its tables sort runs.

    They have names of their own, since a summary that wandb computes replaces the metric's last value.
    """
    for name, values in columns.items():
        ends = {"min": min(values), "max": max(values)}
        logger.experiment.summary.update({prefixed(logger, f"{name}/{end}"): value for end, value in ends.items()})


def run_settings(trainer: pl.Trainer) -> dict[str, Any]:
    """What distinguishes runs besides their settings: the version of this package, and how long and where they run.

    They are no settings, since a resumed run may have other ones.
    """
    try:
        installed = version("lightning-spectral")
    except PackageNotFoundError:  # a copy of the sources
        installed = "not installed"
    return {"run": {"version": installed, "rounds": num_rounds(trainer), "devices": trainer.world_size}}


def _for_wandb(record: Shown) -> Any:
    import wandb

    if isinstance(record, Histogram):
        return wandb.Histogram(np_histogram=(np.array(record.counts), np.array(record.edges)))
    if isinstance(record, Table):
        return wandb.Table(columns=list(record.columns), data=[list(cells) for cells in record.rows])
    return wandb.Image(record.pixels)


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
