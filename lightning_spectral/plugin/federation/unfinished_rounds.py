"""Rounds in which the server has stepped but whose validation is missing: what is saved of them, and how they end."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer import call

from lightning_spectral.plugin.callbacks import CommunicationLedger, RoundHistory
from lightning_spectral.plugin.host import Share
from lightning_spectral.plugin.lightning.saved_modules import ARGUMENTS, HPARAMS

LASTING = ("federation", "federation_clients", ARGUMENTS, HPARAMS)  # what nothing changes between two server steps
RECORDERS = (RoundHistory, CommunicationLedger)  # their state is new whenever it is asked for, and grows


class KeptRound:
    """All that a checkpoint says of a round in which the server has stepped, as it was right after the step.

    Hooks of callbacks and of users come after it: validation, which may run on other weights, and the end of the epoch.
    If one of them fails, or saves while weights and records are about to change, some have counted the round and others
    not. The checkpoint is then this one, whatever hook is running, and a resumed run calls all of them.

    Args:
        trainer: The Trainer; its callbacks that save decide what is kept, and what is not saved is not kept.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        memo: dict[int, Any] = {}  # of both kinds: tensors that share memory are copied once
        self._by_kind = {kind: _copied(found, trainer, memo) for kind, found in dumped(trainer).items()}

    def replace(self, checkpoint: dict[str, Any]) -> bool:
        """Make a checkpoint this one, with or without what only a resumed run needs; false if that is not kept."""
        kept = self._by_kind.get("callbacks" not in checkpoint)
        if kept is None:
            return False
        checkpoint.clear()
        checkpoint.update(kept)
        return True


def dumped(trainer: pl.Trainer) -> dict[bool, dict[str, Any]]:
    """What the Trainer's callbacks would save now, by whether it is weights alone."""
    kinds = {bool(getattr(callback, "save_weights_only", False)) for callback in trainer.checkpoint_callbacks}
    return {kind: trainer._checkpoint_connector.dump_checkpoint(weights_only=kind) for kind in sorted(kinds)}


def _copied(checkpoint: dict[str, Any], trainer: pl.Trainer, memo: dict[int, Any]) -> dict[str, Any]:
    records = {one.state_key for one in trainer.callbacks if isinstance(one, RECORDERS)}  # type: ignore[attr-defined]
    lasting = [checkpoint.get(name) for name in LASTING]
    lasting += [state for key, state in checkpoint.get("callbacks", {}).items() if key in records]
    memo.update({id(value): value for value in lasting})
    return copy.deepcopy(checkpoint, memo)


def begin_anew(trainer: pl.Trainer) -> None:
    """Begin the next epoch as any other: between two epochs, nothing is left for Lightning to repeat.

    With ``max_steps`` it otherwise looks for an epoch to complete.
    """
    batches = trainer.fit_loop.epoch_loop
    if batches.batch_progress.current.ready == 0:
        batches.restarting = False


def finish_epoch(trainer: pl.Trainer, share: Share | None, *, is_validated: bool) -> None:
    """Do the rest of a round in which the server has stepped, as Lightning would have.

    Args:
        trainer: The Trainer of a resumed run that has just started, which counts the round as trained: `count_round`.
        share: The round's batch, if its hooks have yet to be called.
        is_validated: Whether validation had ended before the checkpoint was written.
    """
    epochs, batches = trainer.fit_loop, trainer.fit_loop.epoch_loop
    if share is not None:
        trainer._logger_connector.on_batch_start(share)
        call._call_callback_hooks(trainer, "on_train_batch_end", None, share, 0)
        call._call_lightning_module_hook(trainer, "on_train_batch_end", None, share, 0)
        trainer._logger_connector.on_batch_end()
        trainer._logger_connector.update_train_step_metrics()
    fetcher: Any = epochs._data_fetcher
    own, trainer.limit_val_batches = trainer.limit_val_batches, 0 if is_validated else trainer.limit_val_batches
    try:
        batches.on_advance_end(fetcher)
    finally:
        trainer.limit_val_batches = own
    _end_iteration(batches)
    epochs.on_advance_end()
    _end_iteration(epochs)


def count_round(trainer: pl.Trainer) -> None:
    """Count a round as trained in the progress of a resumed run, which is that of the end of the previous epoch."""
    epochs, batches = trainer.fit_loop, trainer.fit_loop.epoch_loop
    epochs.epoch_progress.increment_ready()
    epochs.epoch_progress.increment_started()
    batches.manual_optimization.optim_step_progress.increment_ready()
    batches.manual_optimization.optim_step_progress.increment_completed()
    _count_batches(batches.batch_progress, int(trainer.num_training_batches))


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
    for each in calls:
        try:
            each()
        except BaseException as error:  # Ctrl-C in one callback must not keep the round from the others
            errors.append(error)
    if errors:
        raise errors[0]
