"""What compares runs in a logger's own pages: best values in wandb's summary, and TensorBoard's pages for a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from lightning_spectral.plugin.dashboard.writers import prefixed
from lightning_spectral.plugin.lightning.round_counting import num_rounds

Extremes = dict[str, tuple[float, float]]
# TensorBoard's "Custom scalars" page: charts of the metrics whose names match a pattern
CHARTS = {
    "metrics over bytes sent": ["Multiline", ["over_bytes/.*"]],
    "loss": ["Multiline", [r"^(.*/)?fl/loss$"]],
    "bytes in a round": ["Multiline", [r"fl/bytes_(down|up)$"]],
    "quality of sub-models": ["Multiline", [r"fl/(discrepancy|client_error|terms_visited)$"]],
}


def run_settings(trainer: pl.Trainer) -> dict[str, Any]:
    """What distinguishes runs besides their settings: the version of this package, and how long and where they run.

    They are no settings in ``hparams.yaml``, since a resumed run may have other ones.
    """
    try:
        installed = version("lightning-spectral")
    except PackageNotFoundError:  # a copy of the sources
        installed = "not installed"
    return {"run": {"version": installed, "rounds": num_rounds(trainer), "devices": trainer.world_size}}


def extended(extremes: Extremes, values: Mapping[str, float]) -> Extremes:
    """The lowest and highest value of each metric so far, with those of another round.

    Example:
        >>> extended({"acc": (0.1, 0.3)}, {"acc": 0.2, "loss": 1.0})
        {'acc': (0.1, 0.3), 'loss': (1.0, 1.0)}
    """
    found = dict(extremes)
    for name, value in values.items():
        low, high = found.get(name, (value, value))
        found[name] = (min(low, value), max(high, value))
    return found


def summarize(loggers: Iterable[Logger], extremes: Extremes) -> None:
    """Put ``M/min`` and ``M/max`` of every metric M into wandb's summary, by which its tables sort runs.

    They have names of their own, since a summary that wandb computes replaces the metric's last value.
    """
    for logger in loggers:
        if isinstance(logger, WandbLogger) and extremes:
            found = {
                prefixed(logger, f"{name}/{end}"): value
                for name, pair in extremes.items()
                for end, value in zip(("min", "max"), pair, strict=True)
            }
            logger.experiment.summary.update(found)


def begin_pages(loggers: Iterable[Logger]) -> None:
    """Lay out TensorBoard's custom scalars, and keep Lightning from announcing ``hp_metric`` as the only metric."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger._default_hp_metric = False
            logger.experiment.add_custom_scalars({"Federation": CHARTS})


def announce_metrics(trainer: pl.Trainer, names: Iterable[str]) -> None:
    """Tell TensorBoard's HPARAMS page the run's settings, and which metrics to show of it; it reads their last values.

    A page shows the first announcement of a run alone, so this is called once, when all names are known.
    """
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            from torch.utils.tensorboard.summary import hparams

            settings = dict(_flat({**logger.hparams, **run_settings(trainer)}))
            metrics = {prefixed(logger, name): 0.0 for name in names}
            for summary in hparams(settings, metrics):  # type: ignore[no-untyped-call]
                logger.experiment._get_file_writer().add_summary(summary)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value if isinstance(value, bool | int | float | str) else str(value)
