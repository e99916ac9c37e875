"""Logs the metrics of a finished round to callbacks, progress bar and loggers at once."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import lightning.pytorch as pl
import torch

from lightning_spectral.protocol.records import LoggedValue, RoundSummary
from lightning_spectral.server.metrics import logged_by_clients, round_metrics


def log_round(trainer: pl.Trainer, summaries: Sequence[RoundSummary]) -> None:
    """Log a round's own metrics and the means of what its clients logged, for all models.

    ``LightningModule.log`` would keep an object for each metric and visit all of them after every client. A round's
    values are complete when it ends, so they go directly to where `log` would put them: to ``callback_metrics`` for
    checkpoints, early stopping and schedulers, and to each logger as one row.

    Raises:
        ValueError: If clients logged a value under the name of one of the round's own metrics.
    """
    own: dict[str, float] = {}
    clients: dict[str, LoggedValue] = {}
    for summary in summaries:
        own.update(round_metrics(summary))
        clients.update(logged_by_clients(summary))
    if taken := sorted(own.keys() & clients.keys()):
        raise ValueError(
            f"`training_step` logs {', '.join(taken)}, under which the federation logs a metric of its own; choose "
            "another name."
        )
    values = {**own, **{name: entry.value for name, entry in clients.items()}}
    hidden = {name for name, entry in clients.items() if name not in own and not entry.logger}
    trainer.progress_bar_metrics.update({name: entry.value for name, entry in clients.items() if entry.prog_bar})
    log_values(trainer, summaries[0].round_idx, values, hidden)


def log_values(trainer: pl.Trainer, round_idx: int, values: Mapping[str, float], hidden: Container[str] = ()) -> None:
    """Log values of a finished round to callbacks at once, and to each logger, unless hidden, as one row."""
    tensors = dict(zip(values, torch.tensor(list(values.values()), dtype=torch.float64).unbind(), strict=True))
    logged = {name: value for name, value in values.items() if name not in hidden}
    trainer.callback_metrics.update(tensors)
    trainer.logged_metrics.update({name: tensors[name] for name in logged})
    for logger in trainer.loggers:
        logger.log_metrics({**logged, "epoch": round_idx}, step=round_idx)
        logger.save()
