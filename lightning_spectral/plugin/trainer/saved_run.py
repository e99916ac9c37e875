"""The checkpoints of a federation: whole rounds of all of its models, and what must match for one to be resumed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.io import TorchCheckpointIO

from lightning_spectral.plugin.callbacks import RoundHistory
from lightning_spectral.plugin.federation.federation import Federation
from lightning_spectral.plugin.federation.unfinished_rounds import (
    KeptRound,
    begin_anew,
    count_round,
    dumped,
    finish_epoch,
)
from lightning_spectral.plugin.host import Share
from lightning_spectral.plugin.lightning.checkpoint_files import NOTHING_NEW
from lightning_spectral.plugin.lightning.checkpoints import check_checkpoint, settle_progress
from lightning_spectral.plugin.lightning.logs import NewlyLogged, log_for_the_epoch, logged_for_the_epoch
from lightning_spectral.plugin.lightning.saved_modules import OF_MODELS, given_arguments, write_arguments, write_hparams
from lightning_spectral.plugin.lightning.trial_saves import check_can_be_saved
from lightning_spectral.protocol.records import WorkUnit

Checkpoint = dict[str, Any]
OF_A_RUN = ("callbacks", "optimizer_states", "lr_schedulers")  # what a checkpoint of weights alone lacks


@dataclass
class RoundProgress:
    """How far a fit has come, besides the server's last step.

    Attributes:
        batch_ended: The last round whose server's step is no longer the last thing that has happened.
        validated: The last round after which the server was validated.
        ended: The last round whose epoch has ended, for all but callbacks that save.
        kept: The last finished round as it is saved until its epoch has ended.
        logged: Tells a round's metrics from those of earlier rounds.
        resumed: The checkpoint that the run resumes from, until all of it is restored; ``None`` in a new run.
        begun: Whether training has begun: all is restored.
    """

    batch_ended: int = -1
    validated: int = -1
    ended: int = -1
    kept: KeptRound | None = None
    logged: NewlyLogged = field(default_factory=NewlyLogged)
    resumed: Checkpoint | None = None
    begun: bool = False


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

    @property
    def has_resumed(self) -> bool:
        """Whether the run goes on from a checkpoint, of a run that had begun."""
        return self.progress.resumed is not None and NOTHING_NEW not in self.progress.resumed

    def begin(self) -> None:
        self.progress, self._federation.last_stepped = RoundProgress(), -1

    def try_saving(self) -> None:
        """Before anything is trained, raise an error if a checkpoint that this run is to save could not be written."""
        trainer = self._trainer
        if trainer.checkpoint_callbacks and isinstance(trainer.strategy.checkpoint_io, TorchCheckpointIO):
            for checkpoint in dumped(trainer).values():
                check_can_be_saved(checkpoint)

    def keep(self) -> None:
        """Keep the round in which the servers have just stepped, if anything may save it before its epoch has ended."""
        if self._federation.last_stepped == (now := self._federation.runtime.round_idx):
            self.progress.kept = KeptRound(self._trainer) if self._trainer.checkpoint_callbacks else None
            self.progress.batch_ended = now

    def write(self, checkpoint: Checkpoint, configuration: dict[str, str | int]) -> None:
        """Call the users' hooks, save the configuration, and make the progress count whole rounds."""
        members, progress = self._federation.members, self.progress
        if self._trainer.interrupted and not progress.begun and self._write_as_resumed(checkpoint):
            return
        engines = [engine for member in members.values() if (engine := member.engine_or_none) is not None]
        is_open = any(engine.round_is_open for engine in engines)
        is_unfinished = not is_open and self._is_unfinished()
        if is_unfinished and progress.kept is not None and self._is_disturbed() and progress.kept.replace(checkpoint):
            return
        for engine in engines:
            engine.check_server_rests()
        write_arguments(checkpoint, self._given)
        for name, member in members.items():
            with own_checkpoint(checkpoint, name) as own:
                write_hparams(own, member.owner.module)
                member.owner.module.on_save_checkpoint(own)
        checkpoint["federation"] = configuration
        self._federation.write(checkpoint)
        checkpoint["federation_metrics"] = progress.logged.split(self._trainer)
        settle_progress(checkpoint, round_is_over=not (is_open or is_unfinished), server_has_stepped=is_unfinished)
        if is_unfinished:
            now = self._federation.runtime.round_idx
            checkpoint["federation_pending"] = logged_for_the_epoch(self._trainer)
            checkpoint["federation_unfinished"] = {
                "units": [tuple(unit) for unit in self._federation.cohorts.units(now)],
                "batch_ended": progress.batch_ended == now,
                "validated": progress.validated == now and not self._trainer.interrupted,
            }

    def _write_as_resumed(self, checkpoint: Checkpoint) -> bool:
        """Write what a run resumes from that ends before all of it is restored; false if it is not known."""
        loaded = self.progress.resumed or self._trainer._checkpoint_connector._loaded_checkpoint
        if not loaded:
            checkpoint[NOTHING_NEW] = True
            return False
        lacking = () if "callbacks" in checkpoint else OF_A_RUN
        checkpoint.clear()
        checkpoint.update({name: entry for name, entry in loaded.items() if name not in lacking})
        return True

    def _is_unfinished(self) -> bool:
        """Whether the servers have stepped in a round whose epoch has not ended, or in ending fails."""
        now = self._federation.runtime.round_idx
        return self._federation.last_stepped == now and (self._trainer.interrupted or self.progress.ended != now)

    def _is_disturbed(self) -> bool:
        """Whether some hooks may have acted on the round and others not: one has failed, or validation is running."""
        is_validated = self.progress.validated == self._federation.runtime.round_idx
        return self._trainer.interrupted or (self._trainer.validating and not is_validated)

    def read(self, checkpoint: Checkpoint, configuration: dict[str, str | int]) -> None:
        """Check that the configuration is unchanged, and restore what is restored before training starts."""
        check_checkpoint(checkpoint, configuration)
        self.progress.resumed = dict(checkpoint)  # as it is before users' hooks
        self._federation.read(checkpoint)

    def call_user_hooks(self, checkpoint: Checkpoint) -> None:
        for name, member in self._federation.members.items():
            with own_checkpoint(checkpoint, name) as own:
                member.owner.module.on_load_checkpoint(own)

    def go_on(self, host: pl.LightningModule) -> None:
        """In a resumed run, restore what Lightning does not save, and finish a round that has yet to be validated."""
        saved, trainer = self.progress.resumed, self._trainer
        if saved is None:
            self.progress.logged.mark(trainer)
            self.progress.begun = True
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
        if (unfinished := saved.get("federation_unfinished")) is not None:
            log_for_the_epoch(host, saved["federation_pending"])
            share = self._share_to_finish(**unfinished)
        else:
            self.progress.logged.mark(trainer)
        self.progress.resumed, self.progress.begun = None, True
        if unfinished is not None:
            self.keep()
            finish_epoch(trainer, share, is_validated=unfinished["validated"])

    def end(self) -> None:
        """Show what was logged last in a resumed run of which nothing was left to train."""
        for metrics in (self.progress.resumed or {}).get("federation_metrics", ()):
            self._trainer.callback_metrics.update(metrics)

    def _share_to_finish(self, units: Sequence[Sequence[Any]], batch_ended: bool, validated: bool) -> Share | None:
        """Count a round as trained; return its batch, if its hooks have yet to be called."""
        federation, progress = self._federation, self.progress
        federation.last_stepped = now = federation.runtime.round_idx
        progress.batch_ended, progress.validated = (now if done else -1 for done in (batch_ended, validated))
        federation.cohorts.resume(now, [WorkUnit(*unit) for unit in units])
        count_round(self._trainer)
        return None if batch_ended else federation.cohorts.share(now)


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
