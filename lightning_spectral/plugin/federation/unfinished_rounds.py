"""Rounds in which the server has stepped but whose validation is missing: what is saved of them, and how they end."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_spectral.plugin.callbacks import CommunicationLedger, RoundHistory
from lightning_spectral.plugin.callbacks.newly_logged import NewlyLogged

RECORDERS = (RoundHistory, CommunicationLedger)  # validating a round again leaves them as they are


@dataclass(frozen=True)
class BeforeValidation:
    """What validation and the end of an epoch may change, as it was before: for a checkpoint if one of them fails.

    Attributes:
        callbacks: State of the callbacks, by Lightning's keys.
        schedulers: State of each learning-rate scheduler.
        groups: Options of each optimizer's parameter groups, which schedulers change.
        metrics: What had been logged before the round and in it, by name.
    """

    callbacks: Mapping[str, Any]
    schedulers: list[dict[str, Any]]
    groups: list[list[dict[str, Any]]]
    metrics: tuple[dict[str, Tensor], dict[str, Tensor]]

    @classmethod
    def of(cls, trainer: pl.Trainer, logged: NewlyLogged) -> BeforeValidation:
        """Copy the state of a Trainer.

        Args:
            trainer: The Trainer.
            logged: Tells the round's metrics from earlier ones.
        """
        callbacks = [one for one in trainer.callbacks if not isinstance(one, RECORDERS)]  # type: ignore[attr-defined]
        found = {callback.state_key: callback.state_dict() for callback in callbacks}
        schedulers = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
        groups = [[_options(group) for group in optimizer.param_groups] for optimizer in trainer.optimizers]
        states = {key: state for key, state in found.items() if state}
        return cls(*copy.deepcopy((states, schedulers, groups)), logged.split(trainer))

    def write(self, checkpoint: dict[str, Any]) -> None:
        """Replace what a checkpoint says about all this; one that holds only weights says nothing."""
        checkpoint["federation_metrics"] = self.metrics
        if "callbacks" not in checkpoint:
            return
        checkpoint["callbacks"].update(self.callbacks)
        checkpoint["lr_schedulers"] = self.schedulers
        for state, groups in zip(checkpoint["optimizer_states"], self.groups, strict=True):
            state["param_groups"] = [
                {**saved, **group} for saved, group in zip(state["param_groups"], groups, strict=True)
            ]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def begin_anew(trainer: pl.Trainer) -> None:
    """Begin the next epoch as any other: between two epochs, nothing is left for Lightning to repeat.

    With ``max_steps`` it otherwise looks for an epoch to complete. Older checkpoints do have one.
    """
    batches = trainer.fit_loop.epoch_loop
    if batches.batch_progress.current.ready == 0:
        batches.restarting = False


def finish_epoch(trainer: pl.Trainer, *, is_validated: bool) -> None:
    """Validate a round in which the server has stepped, if that is due, and end its epoch, as Lightning would have.

    The Trainer's progress is that of the end of the previous epoch.

    Args:
        trainer: The Trainer of a resumed run that has just started.
        is_validated: Whether validation had ended before the checkpoint was written.
    """
    epochs, batches = trainer.fit_loop, trainer.fit_loop.epoch_loop
    epochs.epoch_progress.increment_ready()
    epochs.epoch_progress.increment_started()
    batches.manual_optimization.optim_step_progress.increment_ready()
    batches.manual_optimization.optim_step_progress.increment_completed()
    _count_batches(batches.batch_progress, int(trainer.num_training_batches))
    fetcher: Any = epochs._data_fetcher
    own, trainer.limit_val_batches = trainer.limit_val_batches, 0 if is_validated else trainer.limit_val_batches
    try:
        batches.on_advance_end(fetcher)
    finally:
        trainer.limit_val_batches = own
    _end_iteration(batches)
    epochs.on_advance_end()
    _end_iteration(epochs)


def _count_batches(progress: Any, number: int) -> None:
    """Count the batches of an epoch that has ended; Lightning before 2.5 has no method for it."""
    for counts in (progress.total, progress.current):
        for name, count in vars(counts).items():
            setattr(counts, name, count + number)
    progress.is_last_batch = True


def _end_iteration(loop: Any) -> None:
    """Let a loop forget that it was restarted, as Lightning does after each iteration; before 2.5, without a method."""
    if hasattr(loop, "on_iteration_done"):
        loop.on_iteration_done()
    else:
        loop.restarting = False


def call_all(calls: Iterable[Callable[[], None]]) -> None:
    """Call every function, even if an earlier one fails, and then raise the first error."""
    errors: list[BaseException] = []
    for call in calls:
        try:
            call()
        except BaseException as error:  # Ctrl-C in one callback must not keep the round from the others
            errors.append(error)
    if errors:
        raise errors[0]
