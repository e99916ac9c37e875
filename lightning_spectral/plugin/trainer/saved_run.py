"""The checkpoints of a federation: whole rounds of all of its models, and what must match for one to be resumed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl

from lightning_spectral.plugin.callbacks import RoundHistory
from lightning_spectral.plugin.callbacks.newly_logged import NewlyLogged
from lightning_spectral.plugin.federation.federation import Federation
from lightning_spectral.plugin.federation.unfinished_rounds import BeforeValidation, begin_anew, finish_epoch
from lightning_spectral.plugin.lightning.checkpoints import check_checkpoint, settle_progress
from lightning_spectral.plugin.lightning.saved_modules import OF_MODELS, given_arguments, write_arguments, write_hparams

Checkpoint = dict[str, Any]
RESTORED_LATER = ("federation_metrics", "federation_schedules", "federation_validated")


@dataclass
class RoundProgress:
    """How far a fit has come, besides the server's last step.

    Attributes:
        validated: The last round after which the server was validated.
        ended: The last round whose epoch has ended, for all but callbacks that save.
        before_validation: State before the validation of the last finished round.
        logged: Tells a round's metrics from those of earlier rounds.
        resumed: What is restored once training starts; ``None`` in a new run.
    """

    validated: int = -1
    ended: int = -1
    before_validation: BeforeValidation | None = None
    logged: NewlyLogged = field(default_factory=NewlyLogged)
    resumed: Checkpoint | None = None


class SavedRun:
    """Writes and reads the checkpoints of a federation."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._given = given_arguments()
        self.progress = RoundProgress()

    @property
    def _trainer(self) -> pl.Trainer:
        trainer: pl.Trainer = self._federation.runtime.trainer
        return trainer

    def begin(self) -> None:
        self.progress, self._federation.last_stepped = RoundProgress(), -1

    def write(self, checkpoint: Checkpoint, configuration: dict[str, str | int]) -> None:
        """Call the users' hooks, save the configuration, and make the progress count whole rounds."""
        members = self._federation.members
        write_arguments(checkpoint, self._given)
        engines = [engine for member in members.values() if (engine := member.engine_or_none) is not None]
        for engine in engines:
            engine.check_server_rests()
        for name, member in members.items():
            with own_checkpoint(checkpoint, name) as own:
                write_hparams(own, member.owner.module)
                member.owner.module.on_save_checkpoint(own)
        checkpoint["federation"] = configuration
        self._federation.write(checkpoint)
        checkpoint["federation_metrics"] = self.progress.logged.split(self._trainer)
        self._settle(checkpoint, round_is_open=any(engine.round_is_open for engine in engines))

    def _settle(self, checkpoint: Checkpoint, *, round_is_open: bool) -> None:
        """Make the checkpoint hold whole rounds; it says if the last one still has to be validated.

        After an error in validation, some callbacks may have counted it and others not: none has, in the checkpoint.
        """
        now, failed, progress = self._federation.runtime.round_idx, self._trainer.interrupted, self.progress
        is_unfinished = not round_is_open and self._federation.last_stepped == now and (failed or progress.ended != now)
        settle_progress(
            checkpoint, round_is_over=not (round_is_open or is_unfinished), server_has_stepped=is_unfinished
        )
        if is_unfinished:
            checkpoint["federation_validated"] = not failed and progress.validated == now
            if failed and progress.before_validation is not None:
                progress.before_validation.write(checkpoint)

    def read(self, checkpoint: Checkpoint, configuration: dict[str, str | int]) -> None:
        """Check that the configuration is unchanged, and restore what is restored before training starts."""
        check_checkpoint(checkpoint, configuration)
        self.progress.resumed = {name: checkpoint[name] for name in RESTORED_LATER if name in checkpoint}
        self._federation.read(checkpoint)

    def call_user_hooks(self, checkpoint: Checkpoint) -> None:
        for name, member in self._federation.members.items():
            with own_checkpoint(checkpoint, name) as own:
                member.owner.module.on_load_checkpoint(own)

    def go_on(self, host: pl.LightningModule) -> None:
        """In a resumed run, restore what Lightning does not save, and finish a round that has yet to be validated."""
        saved, trainer = self.progress.resumed, self._trainer
        if saved is None:
            return
        for name, state in saved.get("federation_schedules", {}).items():
            self._federation.members[name].schedules.load_state_dict(state)
        before, in_the_round = saved.get("federation_metrics", ({}, {}))
        trainer.callback_metrics.update(before)
        self.progress.logged.mark(trainer)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, RoundHistory):
                callback.on_train_epoch_start(trainer, host)
        trainer.callback_metrics.update(in_the_round)
        begin_anew(trainer)
        if "federation_validated" in saved:
            self._federation.last_stepped = self._federation.runtime.round_idx
            self.progress.before_validation = BeforeValidation.of(trainer, self.progress.logged)
            finish_epoch(trainer, is_validated=saved["federation_validated"])


@contextmanager
def own_checkpoint(checkpoint: Checkpoint, name: str) -> Iterator[Checkpoint]:
    """The checkpoint as a user's hook expects it: one model's weights, and its own entries.

    What the hook adds, and what it changes in the weights, is kept separate from other models.

    Example:
        >>> checkpoint = {"state_dict": {"models.words.w": 1, "models.images.w": 2}}
        >>> with own_checkpoint(checkpoint, "words") as own:
        ...     own["vocabulary"] = own["state_dict"].pop("w")
        >>> checkpoint
        {'state_dict': {'models.images.w': 2}, 'federation_models': {'words': {'vocabulary': 1}}}
    """
    if not name:
        yield checkpoint
        return
    prefix = f"models.{name}."
    weights = checkpoint.get("state_dict", {})
    mine = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
    entries = checkpoint.get(OF_MODELS, {}).get(name, {})
    own = {**checkpoint, **entries, "state_dict": mine}
    yield own
    for key in [key for key in weights if key.startswith(prefix)]:
        del weights[key]
    weights.update({prefix + key: value for key, value in mine.items()})
    added = {key: value for key, value in own.items() if key not in checkpoint}
    checkpoint.setdefault(OF_MODELS, {})[name] = added
