"""What a federation's checkpoint holds besides weights, and what must match for it to be resumed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.utilities.data import AttributeDict

from lightning_spectral.plugin.callbacks import RoundHistory
from lightning_spectral.plugin.checkpoint_archive import check_loadable
from lightning_spectral.plugin.checkpoints import (
    TRAINER_SETTINGS,
    as_one_batch,
    check_checkpoint,
    settle_progress,
)
from lightning_spectral.plugin.data import FederatedDataModule
from lightning_spectral.plugin.fixed_arguments import FixedArguments
from lightning_spectral.plugin.precision import convert_now
from lightning_spectral.plugin.round_hooks import RoundHooks
from lightning_spectral.plugin.run_config import data_config
from lightning_spectral.plugin.saved_modules import given_arguments, write_arguments
from lightning_spectral.plugin.unfinished_rounds import BeforeValidation, begin_anew, finish_epoch

Checkpoint = dict[str, Any]
RESTORED_LATER = ("federation_metrics", "federation_schedules", "federation_validated")


class SavedRounds(FixedArguments, RoundHooks):
    """The checkpoints of a federation: whole rounds, of all of its models."""

    _resumed: Checkpoint | None

    def __init__(self) -> None:
        super().__init__()
        self._given = given_arguments()

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Build the federation and load its weights, as for any LightningModule.

        The checkpoint of a LightningCLI run contains all that is needed. For any other checkpoint, pass the modules and
        the federation's arguments that differ from the defaults. `load_user_module` loads only your own module.

        Args:
            checkpoint_path: The checkpoint.
            *args: As for any LightningModule.
            **kwargs: As for any LightningModule, including arguments of the federation.

        Raises:
            TypeError: If an argument is missing.
            ValueError: If the file is empty, incomplete or damaged.
            RuntimeError: If the weights do not fit, or belong to another algorithm.
        """
        check_loadable(checkpoint_path)
        try:
            return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)
        except RuntimeError as error:
            if ' key(s) in state_dict: "state.' not in str(error):
                raise
            raise RuntimeError(
                "The checkpoint has state of another algorithm, or lacks that of this one: pass the one of the run, "
                f"{cls.__name__}.load_from_checkpoint(path, algorithm=...), or load your own module alone: "
                f"load_user_module(path, YourModule). {error}"
            ) from error
        except TypeError as error:
            missing = str(error).partition(f"{cls.__name__}.__init__() missing ")[2]
            if not missing:
                raise
            raise TypeError(
                f"Only the checkpoint of a LightningCLI run says how to build a {cls.__name__}; this one lacks "
                f"{missing}: pass it, {cls.__name__}.load_from_checkpoint(path, ...=...), or load your own module "
                "alone: load_user_module(path, YourModule)."
            ) from error

    @property
    def hparams_initial(self) -> AttributeDict:
        """The settings that Lightning sends to loggers when a run starts; they include the data, once it is dealt."""
        found = super().hparams_initial
        if self._trainer is None or self.trainer.state.fn != "fit":
            return found
        data = {name: self._data_or_none(name) for name in self.members}
        configs = {name: data_config(one) for name, one in data.items() if one is not None}
        return AttributeDict({**found, "data": configs.get("", configs)}) if configs else found

    def configuration(self) -> dict[str, str | int]:
        """The settings that must match for a checkpoint to be resumed, apart from the data."""
        raise NotImplementedError

    def full_configuration(self) -> dict[str, str | int]:
        """The settings that must match for a checkpoint to be resumed, and across all processes."""
        found = self.configuration()
        for name, member in self.members.items():
            prefix = f"{name}: " if name else ""
            data = self._data_or_none(name)
            if data is not None:
                found[f"{prefix}batch_size"] = data.batch_size
                found[f"{prefix}drop_last"] = data.drop_last
                found[f"{prefix}partition"] = member.data.partition.fingerprint()
        return found | self._trainer_settings()

    def _trainer_settings(self) -> dict[str, str | int]:
        """Settings of the Trainer that change a run's result; none for a quick try, which can continue any run."""
        trainer = self.trainer
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return {}
        settings = self._limit, trainer.overfit_batches or 0.0, trainer.precision  # type: ignore[attr-defined]
        return dict(zip(TRAINER_SETTINGS, map(str, settings), strict=True))  # as text, because a limit of 1 is not 1.0

    def _data_or_none(self, name: str) -> FederatedDataModule | None:
        """One model's data; ``None`` when evaluating with the user's own loader."""
        raise NotImplementedError

    def on_save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Call the user's hook, save the configuration, and make the progress count whole rounds.

        Raises:
            RoundError: If the server's step was interrupted, so that its weights belong to no round.
        """
        engines = [member._engine for member in self.members.values() if member._engine is not None]
        for engine in engines:
            engine.check_server_rests()
        for name, member in self.members.items():
            with own_checkpoint(checkpoint, name) as own:
                member.module.on_save_checkpoint(own)
        write_arguments(checkpoint, self._given, {name: member.module for name, member in self.members.items()})
        checkpoint["federation"] = self.full_configuration()
        if clients := {key: entry for member in self.members.values() for key, entry in member.stored().items()}:
            checkpoint["federation_clients"] = clients
        if frozen := {name: record for name, member in self.members.items() if (record := member.frozen())}:
            checkpoint["federation_frozen"] = frozen
        if unreached := {name: m.unreached for name, m in self.members.items() if m.unreached is not None}:
            checkpoint["federation_unreached"] = unreached
        if decisions := {name: dict(m.decisions) for name, m in self.members.items() if m.decisions}:
            checkpoint["federation_decisions"] = decisions
        if self._sampled is not None and (known := self._sampled.state_dict()):
            checkpoint["federation_sampler"] = known
        checkpoint["federation_schedules"] = {name: m.schedules.state_dict() for name, m in self.members.items()}
        checkpoint["federation_metrics"] = self._rounds.logged.split(self.trainer)
        self._settle(checkpoint, round_is_open=any(engine.round_is_open for engine in engines))

    def _settle(self, checkpoint: Checkpoint, *, round_is_open: bool) -> None:
        """Make the checkpoint hold whole rounds; it says if the last one still has to be validated.

        After an error in validation, some callbacks may have counted it and others not: none has, in the checkpoint.
        """
        rounds, is_current = self._rounds, self._rounds.stepped == self.current_epoch
        failed = self.trainer.interrupted
        is_unfinished = not round_is_open and is_current and (failed or rounds.ended != self.current_epoch)
        settle_progress(
            checkpoint, round_is_over=not (round_is_open or is_unfinished), server_has_stepped=is_unfinished
        )
        if is_unfinished:
            checkpoint["federation_validated"] = not failed and rounds.validated == self.current_epoch
            if failed and rounds.before_validation is not None:
                rounds.before_validation.write(checkpoint)

    def on_load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Check that the configuration is unchanged, restore clients' state, and call the user's hook.

        Lightning restores weights before it converts the module to the Trainer's precision, which would round those of
        ``"64-true"``.

        Raises:
            ValueError: If a fit is resumed from a checkpoint of another configuration.
        """
        if self._trainer is not None and self.trainer.state.fn == "fit":
            check_checkpoint(checkpoint, self.full_configuration())
            as_one_batch(checkpoint)
            self._resumed = {name: checkpoint[name] for name in RESTORED_LATER if name in checkpoint}
            clients = checkpoint.get("federation_clients", {})
            frozen, unreached = checkpoint.get("federation_frozen", {}), checkpoint.get("federation_unreached", {})
            decisions = checkpoint.get("federation_decisions", {})
            for name, member in self.members.items():
                member.restore(clients, frozen.get(name, {}), unreached.get(name), decisions.get(name, {}))
            if self._sampled is not None:
                self._sampled.load_state_dict(checkpoint.get("federation_sampler", {}))
        for name, member in self.members.items():
            with own_checkpoint(checkpoint, name) as own:
                member.module.on_load_checkpoint(own)
        if self._trainer is not None:
            convert_now(self, self.trainer.precision_plugin)

    def on_train_start(self) -> None:
        """Call the user's hook, and go on with a resumed run."""
        super().on_train_start()
        if self._resumed is not None:
            self._go_on(self._resumed)

    def _go_on(self, saved: Checkpoint) -> None:
        """Restore what Lightning does not save, and finish a round that still has to be validated."""
        for name, state in saved.get("federation_schedules", {}).items():
            self.members[name].schedules.load_state_dict(state)
        before, in_the_round = saved.get("federation_metrics", ({}, {}))
        metrics = self.trainer.callback_metrics
        metrics.update(before)
        self._rounds.logged.mark(self.trainer)
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, RoundHistory):
                callback.on_train_epoch_start(self.trainer, self)
        metrics.update(in_the_round)
        begin_anew(self.trainer)
        if "federation_validated" in saved:
            self._rounds.stepped = self.current_epoch
            self._rounds.before_validation = BeforeValidation.of(self.trainer, self._rounds.logged)
            finish_epoch(self.trainer, is_validated=saved["federation_validated"])


@contextmanager
def own_checkpoint(checkpoint: Checkpoint, name: str) -> Iterator[Checkpoint]:
    """The checkpoint as a user's hook expects it: one model's weights, and its own entries.

    What the hook adds, and what it changes in the weights, is kept separate from other models.

    Example:
        >>> checkpoint = {"state_dict": {"models.words.module.w": 1, "models.images.module.w": 2}}
        >>> with own_checkpoint(checkpoint, "words") as own:
        ...     own["vocabulary"] = own["state_dict"].pop("module.w")
        >>> checkpoint
        {'state_dict': {'models.images.module.w': 2}, 'federation_models': {'words': {'vocabulary': 1}}}
    """
    if not name:
        yield checkpoint
        return
    prefix = f"models.{name}."
    weights = checkpoint.get("state_dict", {})
    mine = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
    entries = checkpoint.get("federation_models", {}).get(name, {})
    own = {**checkpoint, **entries, "state_dict": mine}
    yield own
    for key in [key for key in weights if key.startswith(prefix)]:
        del weights[key]
    weights.update({prefix + key: value for key, value in mine.items()})
    if added := {key: value for key, value in own.items() if key not in checkpoint}:
        checkpoint.setdefault("federation_models", {})[name] = added
