"""The checkpoints of a federation: whole rounds of all of its models, and what must match for one to be resumed."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.mixins import hparams_mixin
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.parsing import clean_namespace
from torch import nn

from lightning_spectral.errors import RoundError
from lightning_spectral.plugin.callbacks import RoundHistory
from lightning_spectral.plugin.checkpoint_files import ARGUMENTS, HPARAMS, NOTHING_NEW, OF_MODELS, write_hparams
from lightning_spectral.plugin.federation import Federation
from lightning_spectral.plugin.logs import NewlyLogged, log_for_the_epoch, logged_for_the_epoch
from lightning_spectral.plugin.user_hooks import Share, replaced
from lightning_spectral.protocol.records import WorkUnit

Checkpoint = dict[str, Any]
OF_A_RUN = ("callbacks", "optimizer_states", "lr_schedulers")  # what a checkpoint of weights alone lacks
LASTING = ("federation", ARGUMENTS, HPARAMS)  # what nothing changes between two server steps
FEDERATION = "federation_lasting"  # entry of what lasts from round to round besides weights
STEPPED = ("algorithm", "schedules")  # of these, what something may change before the next server step
REMEDIES = {
    "callbacks": "leave it out of what that callback's `state_dict` returns",
    "state_dict": "leave it out of what your module's `state_dict` or `get_extra_state` returns",
    HPARAMS: "leave it out: self.save_hyperparameters(ignore=[...])",
}


class SavedRun:
    """Writes and reads the checkpoints of a federation.

    Hooks of callbacks and of users come after the servers' step: validation, which may run on other weights, and the
    end of the epoch. If one of them fails, or saves while weights and records are about to change, some have counted
    the round and others not. The checkpoint is then that of right after the step, whatever hook is running, and a
    resumed run calls all of them.

    Attributes:
        batch_ended: The last round whose server's step is no longer the last thing that has happened.
        validated: The last round after which the server was validated.
        ended: The last round whose epoch has ended, for all but callbacks that save.
        kept: The last finished round as it would be saved right after the step, by whether that is weights alone; kept
            until its epoch has ended, if any callback saves.
        logged: Tells a round's metrics from those of earlier rounds.
        resumed: The checkpoint that the run resumes from, until all of it is restored; ``None`` in a new run.
        begun: Whether training has begun: all is restored.
    """

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        # what LightningCLI is building the federation from, if it does; there is no public way to ask
        given = getattr(hparams_mixin, "_given_hyperparameters", None)
        self._given = dict(given.get() or {}) if given is not None else {}
        self.begin()

    def begin(self) -> None:
        """Begin a fit, before its first round."""
        self.batch_ended = self.validated = self.ended = self._federation.last_stepped = -1
        self.kept: dict[bool, Checkpoint] = {}
        self._federation.begin()
        self.logged = NewlyLogged()
        self.resumed: Checkpoint | None = None
        self.begun = False

    @property
    def _trainer(self) -> pl.Trainer:
        return self._federation.runtime.trainer

    @property
    def has_resumed(self) -> bool:
        """Whether the run continues one that had begun, from a checkpoint."""
        return self.resumed is not None and NOTHING_NEW not in self.resumed

    def keep(self) -> None:
        """Keep the round in which the servers have just stepped, if anything may save it before its epoch has ended."""
        if self._federation.last_stepped == (now := self._federation.runtime.round_idx):
            histories = [one for one in self._trainer.callbacks if isinstance(one, RoundHistory)]  # type: ignore[attr-defined]
            records = {one.state_key for one in histories}  # which are new whenever they are asked for, and grow
            memo: dict[int, Any] = {}  # of both kinds: tensors that share memory are copied once
            self.kept = {}
            for kind, found in _dumped(self._trainer).items():
                lasting = [found.get(name) for name in LASTING]
                lasting += [state for key, state in found.get("callbacks", {}).items() if key in records]
                models = found.get(FEDERATION, {}).get("models", {}).values()
                lasting += [part for model in models for name, part in model.items() if name not in STEPPED]
                memo.update({id(value): value for value in lasting})
                self.kept[kind] = copy.deepcopy(found, memo)
            self.batch_ended = now

    def write(self, checkpoint: Checkpoint, configuration: dict[str, str | int]) -> None:
        """Call the users' hooks, save the configuration, and make the progress count whole rounds."""
        federation, interrupted = self._federation, self._trainer.interrupted
        if interrupted and not self.begun and self._write_as_resumed(checkpoint):
            return
        now = federation.runtime.round_idx
        engines = [m.engine_or_none for m in federation.members.values() if m.engine_or_none is not None]
        is_open = any(engine.round_is_open for engine in engines)
        # whether the servers have stepped in a round whose epoch has not ended, or in ending fails
        is_unfinished = not is_open and federation.last_stepped == now and (interrupted or self.ended != now)
        # whether some hooks may have acted on it and others not: one has failed, or validation is running
        is_disturbed = is_unfinished and (interrupted or (self._trainer.validating and self.validated != now))
        if is_disturbed and (kept := self.kept.get("callbacks" not in checkpoint)) is not None:
            checkpoint.clear()
            checkpoint.update(kept)
            return
        if any(engine.server_is_stepping for engine in engines):
            raise RoundError(
                "The server's step was interrupted: its weights belong to no round and are not saved. Resume from the "
                "last checkpoint."
            )
        for entry in (ARGUMENTS, f"{ARGUMENTS}_name"):  # what Lightning has put there is for loggers: no arguments
            checkpoint.pop(entry, None)
        if self._given:
            checkpoint[ARGUMENTS] = dict(self._given)
        for name, member in federation.members.items():
            with own_checkpoint(checkpoint, name) as own:
                write_hparams(own, member.module)
                member.module.on_save_checkpoint(own)
        checkpoint["federation"] = configuration
        checkpoint[FEDERATION] = federation.state_dict()
        checkpoint["federation_metrics"] = self.logged.split(self._trainer)
        _settle_progress(checkpoint, round_is_over=not (is_open or is_unfinished), server_has_stepped=is_unfinished)
        if is_unfinished:
            checkpoint["federation_pending"] = logged_for_the_epoch(self._trainer)
            checkpoint["federation_unfinished"] = {
                "units": [tuple(unit) for unit in federation.cohorts.units(now)],
                "batch_ended": self.batch_ended == now,
                "validated": self.validated == now and not interrupted,
            }

    def _write_as_resumed(self, checkpoint: Checkpoint) -> bool:
        """Write the checkpoint that a run resumes from, if it ends before restoring it; false if unknown."""
        if not (loaded := self.resumed or self._trainer._checkpoint_connector._loaded_checkpoint):
            checkpoint[NOTHING_NEW] = True
            return False
        lacking = () if "callbacks" in checkpoint else OF_A_RUN
        checkpoint.clear()
        checkpoint.update({name: entry for name, entry in loaded.items() if name not in lacking})
        return True

    def start_training(self, host: pl.LightningModule) -> None:
        """In a resumed run, restore what Lightning does not save, and finish a round that has yet to be validated.

        Before anything is trained, raise an error if a checkpoint that this run is to save could not be written.
        """
        saved, trainer = self.resumed, self._trainer
        for member in self._federation.members.values():
            clean_namespace(member.module.hparams)  # again: what makes optimizers may no longer pickle once called
        if isinstance(trainer.strategy.checkpoint_io, TorchCheckpointIO):
            for checkpoint in _dumped(trainer).values():
                check_can_be_saved(checkpoint)
        if saved is None:
            self.logged.mark(trainer)
            self.begun = True
            return
        before, in_the_round = saved.get("federation_metrics", ({}, {}))
        trainer.callback_metrics.update(before)
        self.logged.mark(trainer)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, RoundHistory):
                callback.on_train_epoch_start(trainer, host)
        trainer.callback_metrics.update(in_the_round)
        # between two epochs nothing is left for Lightning to repeat, which with `max_steps` looks for an epoch to end
        batches = trainer.fit_loop.epoch_loop
        if batches.batch_progress.current.ready == 0:
            batches.restarting = False
        if (unfinished := saved.get("federation_unfinished")) is not None:
            log_for_the_epoch(host, saved["federation_pending"])
            share = self._count_round(**unfinished)
        else:
            self.logged.mark(trainer)
        self.resumed, self.begun = None, True
        if unfinished is not None:
            self.keep()
            _finish_epoch(trainer, share, is_validated=unfinished["validated"])

    def end(self) -> None:
        """Show what was logged last in a resumed run of which nothing was left to train."""
        for metrics in (self.resumed or {}).get("federation_metrics", ()):
            self._trainer.callback_metrics.update(metrics)

    def _count_round(self, units: Sequence[Sequence[Any]], batch_ended: bool, validated: bool) -> Share | None:
        """Count a round that has yet to be finished as trained, in the progress, which is that of the previous epoch.

        Return the round's batch, if its hooks have yet to be called.
        """
        federation, loop = self._federation, self._trainer.fit_loop
        federation.last_stepped = now = federation.runtime.round_idx
        self.batch_ended, self.validated = (now if done else -1 for done in (batch_ended, validated))
        federation.cohorts.resume(now, [WorkUnit(*unit) for unit in units])
        loop.epoch_progress.increment_ready()
        loop.epoch_progress.increment_started()
        steps, batches = loop.epoch_loop.manual_optimization.optim_step_progress, loop.epoch_loop.batch_progress
        steps.increment_ready()
        steps.increment_completed()
        for counts in (batches.total, batches.current):  # Lightning before 2.5 has no method for it
            for name, count in vars(counts).items():
                setattr(counts, name, count + int(self._trainer.num_training_batches))
        batches.is_last_batch = True
        return None if batch_ended else federation.cohorts.share(now)


def _dumped(trainer: pl.Trainer) -> dict[bool, Checkpoint]:
    """What the Trainer's callbacks would save now, by whether it is weights alone."""
    kinds = {bool(getattr(callback, "save_weights_only", False)) for callback in trainer.checkpoint_callbacks}
    return {kind: trainer._checkpoint_connector.dump_checkpoint(weights_only=kind) for kind in sorted(kinds)}


def _settle_progress(checkpoint: Checkpoint, *, round_is_over: bool, server_has_stepped: bool) -> None:
    """Make a checkpoint hold whole rounds, as if it had been written between two epochs.

    The server's weights change only when a round closes, and what clients have sent so far is not saved. An open round
    therefore counts as not begun, and is repeated from its first client. A round in which the server has stepped, but
    whose validation or epoch has not ended, counts as not begun either: `_finish_epoch` then does the rest of it.
    """
    progress = checkpoint["loops"]["fit_loop"]
    epochs, batches = progress["epoch_progress"], progress["epoch_loop.batch_progress"]
    steps = progress["epoch_loop.manual_optimization.optim_step_progress"]["total"]
    for counts in (epochs["total"], epochs["current"]):
        finished = counts["processed"] if round_is_over else counts["completed"]
        counts.update(ready=finished, started=finished, processed=finished, completed=finished)
    if not round_is_over:
        for name, count in batches["current"].items():
            batches["total"][name] -= count
        if server_has_stepped:
            steps.update({name: count - 1 for name, count in steps.items()})
    batches["current"] = dict.fromkeys(batches["current"], 0)
    batches["is_last_batch"] = False
    progress["epoch_loop.state_dict"]["_batches_that_stepped"] = steps["completed"]


def _finish_epoch(trainer: pl.Trainer, share: Share | None, *, is_validated: bool) -> None:
    """Do the rest of a round in which the server has stepped, as Lightning would have.

    The resumed run has just begun and counts the round as trained; ``share`` is its batch, if hooks have yet to see it.
    """
    epochs, batches = trainer.fit_loop, trainer.fit_loop.epoch_loop
    if share is not None:
        trainer._logger_connector.on_batch_start(share)
        call._call_callback_hooks(trainer, "on_train_batch_end", None, share, 0)
        call._call_lightning_module_hook(trainer, "on_train_batch_end", None, share, 0)
        trainer._logger_connector.on_batch_end()
        trainer._logger_connector.update_train_step_metrics()
    fetcher: Any = epochs._data_fetcher
    with replaced(trainer, limit_val_batches=0 if is_validated else trainer.limit_val_batches):
        batches.on_advance_end(fetcher)
    _end_iteration(batches)
    epochs.on_advance_end()
    _end_iteration(epochs)


def _end_iteration(loop: Any) -> None:
    """Let a loop forget that it was restarted, as Lightning does after each iteration; before 2.5, without a method."""
    if hasattr(loop, "on_iteration_done"):
        loop.on_iteration_done()
    else:
        loop.restarting = False


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
    own = {**checkpoint, **checkpoint.get(OF_MODELS, {}).get(name, {}), "state_dict": mine}
    yield own
    for key in [key for key in weights if key.startswith(prefix)]:
        del weights[key]
    weights.update({prefix + key: value for key, value in mine.items()})
    added = {key: value for key, value in own.items() if key not in checkpoint}
    checkpoint.setdefault(OF_MODELS, {})[name] = added


def check_can_be_saved(checkpoint: Mapping[str, Any]) -> None:
    """Raise ``ValueError``, with its place, if anything in a checkpoint but its tensors cannot be pickled."""
    if (error := _pickling_error(checkpoint)) is None:
        return
    keys: list[Any] = []
    value: Any = checkpoint
    while isinstance(value, Mapping | list | tuple):  # go to the innermost value that cannot be pickled
        entries = value.items() if isinstance(value, Mapping) else enumerate(value)
        key, inner = next((entry for entry in entries if _pickling_error(entry[1]) is not None), (None, None))
        if inner is None:
            break
        keys.append(key)
        value = inner
    remedy = REMEDIES.get(keys[0] if keys else "", "leave it out of what `on_save_checkpoint` adds")
    raise ValueError(
        f"The run could not save a checkpoint: checkpoint{''.join(f'[{key!r}]' for key in keys)} cannot be pickled, "
        f"got {type(value).__name__}; {remedy}, or train without checkpoints: Trainer(enable_checkpointing=False). "
        f"{type(error).__name__}: {error}"
    ) from error


def _pickling_error(value: Any) -> Exception | None:
    try:
        _TrialPickler(io.BytesIO(), protocol=2).dump(value)  # torch's protocol
    except Exception as error:  # whatever `__reduce__` and `__getstate__` raise
        return error
    return None


class _TrialPickler(pickle.Pickler):
    """Treats tensors and their storages as written, as torch writes them outside of the pickle."""

    def persistent_id(self, value: Any) -> str | None:
        return "elsewhere" if type(value) in (torch.Tensor, nn.Parameter) or torch.is_storage(value) else None
