"""Where values go: those of a finished round, and those that a user's module logs."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_spectral.plugin.user_hooks import redirect, replaced
from lightning_spectral.protocol.records import RoundSummary
from lightning_spectral.server.metrics import ALWAYS, logged_by_clients, round_metrics


def log_round(trainer: pl.Trainer, summaries: Sequence[RoundSummary]) -> None:
    """Log a round's own metrics and the means of what its clients logged, for all models.

    ``LightningModule.log`` would keep an object for each metric and visit all of them after every client. A round's
    values are complete when it ends, so they go directly to where `log` would put them: to ``callback_metrics`` for
    checkpoints, early stopping and schedulers, and to each logger as one row.
    """
    own = {name: value for summary in summaries for name, value in round_metrics(summary).items()}
    clients = {name: entry for summary in summaries for name, entry in logged_by_clients(summary).items()}
    _check_free("`training_step`", own.keys() & clients.keys())
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


@dataclass(eq=False)
class NewlyLogged:
    """Tells values logged since some moment from older ones: Lightning keeps the last value of every metric."""

    _before: Mapping[str, torch.Tensor] = field(default_factory=dict, init=False)

    def mark(self, trainer: pl.Trainer) -> None:
        """Treat what is logged from now on as new."""
        self._before = dict(trainer.callback_metrics)

    def split(self, trainer: pl.Trainer) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return the old and the new values on the CPU, by name; new ones remain new."""
        old: dict[str, torch.Tensor] = {}
        new: dict[str, torch.Tensor] = {}
        for name, value in trainer.callback_metrics.items():
            (old if value is self._before.get(name) else new)[name] = torch.as_tensor(value).detach().cpu()
        return old, new

    def take(self, trainer: pl.Trainer) -> dict[str, float]:
        """Return the new values by name, and treat them as old from now on."""
        before = self._before
        self.mark(trainer)
        return {name: float(value) for name, value in self._before.items() if value is not before.get(name)}


def logged_for_the_epoch(trainer: pl.Trainer) -> dict[str, tuple[torch.Tensor, dict[str, bool]]]:
    """What was logged in training for the end of the epoch, when Lightning shows it, with where, by name."""
    found = trainer.fit_loop.epoch_loop._results.metrics(on_step=False)
    destinations: dict[str, Any] = {"logger": found["log"], "prog_bar": found["pbar"]}
    return {
        name: (torch.as_tensor(value).cpu(), {option: name in shown for option, shown in destinations.items()})
        for name, value in found["callback"].items()
    }


def log_for_the_epoch(
    module: pl.LightningModule, values: Mapping[str, tuple[torch.Tensor, Mapping[str, bool]]]
) -> None:
    """Log again what `logged_for_the_epoch` has found, in a run that ends the epoch."""
    for name, (value, shown) in values.items():
        options: dict[str, Any] = {**shown, "logger": shown["logger"] and bool(module.trainer.loggers)}
        module.log(name, value, on_step=False, on_epoch=True, batch_size=1, **options)


def show_epoch(trainer: pl.Trainer) -> None:
    """Show callbacks and loggers what was logged for the epoch, as Lightning would after the callbacks that save."""
    batches = trainer.fit_loop.epoch_loop
    trainer._logger_connector.on_epoch_end()
    step = batches._batches_that_stepped - 1  # that of the epoch's other rows
    with replaced(batches, _batches_that_stepped=step):
        trainer._logger_connector.update_train_epoch_metrics()


@contextmanager
def forwarded_logging(module: pl.LightningModule, to: pl.LightningModule) -> Iterator[None]:
    """Forward ``module.log``, which ``log_dict`` calls, within the block to the module that Lightning trains."""

    def log(name: str, value: Any, *args: Any, **options: Any) -> None:
        _check_free("An evaluation hook", ALWAYS & {name})
        to.log(name, value, *args, **options)

    with replaced(module, __class__=type(module)):  # which is another one, if it overrides `log`
        redirect(module, {"log": log})
        try:
            yield
        finally:
            vars(module).pop("log", None)


def _check_free(by: str, taken: Iterable[str]) -> None:
    if taken := sorted(taken):
        raise ValueError(
            f"{by} logs {', '.join(taken)}, under which the federation logs a metric of its own; choose another name."
        )
