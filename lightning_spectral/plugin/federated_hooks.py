"""Lightning's hooks of a federation, of one model or several: each is passed on to the users' modules or the rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import AttributeDict
from lightning.pytorch.utilities.parsing import clean_namespace

from lightning_spectral.algorithms import Algorithm
from lightning_spectral.participation import Population, Sampler, UniformParticipation
from lightning_spectral.plugin.checks.run import (
    check_clipping,
    check_member,
    check_own_optimizers,
    check_same_everywhere,
    check_stage,
    check_trainer,
    warn_of_recompilations,
)
from lightning_spectral.plugin.checks.sampler import check_limit, check_over_selection
from lightning_spectral.plugin.data.run_config import data_config
from lightning_spectral.plugin.data.server_data import ServerData
from lightning_spectral.plugin.federation.federation import ALONE, Federation
from lightning_spectral.plugin.federation.interfaces import is_absolute
from lightning_spectral.plugin.federation.member import Member
from lightning_spectral.plugin.host import Host, Share
from lightning_spectral.plugin.lightning.checkpoint_files import check_loadable, handle_whole_files
from lightning_spectral.plugin.lightning.checkpoints import TRAINER_SETTINGS
from lightning_spectral.plugin.lightning.client_parallel import ClientParallelStrategy, log_options, processes_of
from lightning_spectral.plugin.lightning.fixed_arguments import FixedArguments
from lightning_spectral.plugin.lightning.logs import show_epoch
from lightning_spectral.plugin.lightning.precision import convert_now, full_precision
from lightning_spectral.plugin.lightning.saved_modules import ARGUMENTS
from lightning_spectral.plugin.lightning.user_view import UserView
from lightning_spectral.plugin.trainer.forwarded_hooks import ForwardedHooks
from lightning_spectral.plugin.trainer.runtime import TrainerRuntime, with_boundaries
from lightning_spectral.plugin.trainer.saved_run import SavedRun
from lightning_spectral.protocol.records import WorkUnit
from lightning_spectral.server.client_directory import ClientDirectory
from lightning_spectral.server.processes import Processes

Checkpoint = dict[str, Any]


class FederatedHooks(FixedArguments, UserView, ForwardedHooks, Host):
    """What Lightning calls of a federation; `FederatedModule` and `MultiModelModule` say who is in it."""

    # Where Lightning looks for what builds the federation; the usual entries are those of the user's module.
    CHECKPOINT_HYPER_PARAMS_KEY = ARGUMENTS
    CHECKPOINT_HYPER_PARAMS_NAME = f"{ARGUMENTS}_name"
    CHECKPOINT_HYPER_PARAMS_TYPE = f"{ARGUMENTS}_type"

    seed: int
    participation: UniformParticipation | Sampler | None
    federation: Federation
    _runtime: TrainerRuntime
    _saved: SavedRun
    _default_dtype: torch.dtype

    def _federate(self, members: Mapping[str, Member]) -> None:
        """Found the federation, at the end of the constructor."""
        self.automatic_optimization = False
        self._runtime = TrainerRuntime(self)
        self.federation = Federation(self, members, self._runtime)
        self._saved = SavedRun(self.federation)
        self._default_dtype = torch.get_default_dtype()

    def data_of(self, name: str) -> ServerData:
        raise NotImplementedError

    def data_or_none(self, name: str) -> ServerData | None:
        """One model's data; ``None`` when evaluating with the user's own loader."""
        raise NotImplementedError

    def population(self) -> Population:
        raise NotImplementedError

    def available_for(self, name: str) -> torch.Tensor | None:
        """Whether each client can train a model, if it has examples of it; ``None`` if all can."""
        return None

    def configuration(self) -> dict[str, str | int]:
        """The settings that must match for a checkpoint to be resumed, apart from the data."""
        raise NotImplementedError

    def clients_of(self, name: str, algorithm: Algorithm) -> ClientDirectory:
        """What is known of one model's clients, with the capacities that an algorithm gives them."""
        data = self.data_of(name)
        capacities = algorithm.keep_ratios(data.num_clients, self.federation.members[name].owner.seed)
        return data.client_directory(capacities, self.available_for(name))

    # -- a run

    def configure_callbacks(self) -> list[pl.Callback]:
        """The users' callbacks, then the round's boundaries that the Trainer does not have yet."""
        handle_whole_files(self.trainer)  # before anything can fail
        if self.trainer.state.fn == "fit":
            self._saved.begin()
        check_clipping(self.trainer)  # here, because Lightning refuses it before `setup`, with its own message
        configured = [member.owner.module.configure_callbacks() for member in self.federation.members.values()]
        own = [callback for found in configured for callback in (found if isinstance(found, Iterable) else [found])]
        return with_boundaries(self.trainer, own)

    def prepare_data(self) -> None:
        for member in self.federation.members.values():
            member.owner.module.prepare_data()

    def setup(self, stage: str) -> None:
        self.federation.take_members()
        for member in self.federation.members.values():
            clean_namespace(member.owner.module.hparams)  # as Lightning does for the module that it knows
            member.owner.module.setup(stage)
            check_stage(stage, member.owner.module)
        if stage == "fit":
            self._runtime.begin()
            check_trainer(self.trainer)
            check_own_optimizers(self)
            for name, member in self.federation.members.items():
                self._check_member(member, self.data_of(name))
        self.move_batches()

    def _check_member(self, member: Member, data: ServerData) -> None:
        owner = member.owner
        check_member(owner.module, data, self.participation, owner.faults, owner.local_hooks)
        capacities = owner.algorithm.keep_ratios(data.num_clients, owner.seed)
        warn_of_recompilations(owner.module, len(capacities.values))
        check_over_selection(owner.conditions, absolute=is_absolute(self.participation))
        owner.conditions.check(data.num_clients, self.federation.cohorts.usual_size)

    def move_batches(self) -> None:
        raise NotImplementedError

    def teardown(self, stage: str) -> None:
        for member in self.federation.members.values():
            member.end_fit()
            member.owner.module.teardown(stage)

    def configure_optimizers(self) -> Any:
        """Return each model's server optimizer and the user's own, which clients' are modelled on."""
        optimizers: list[Any] = []
        schedulers: list[dict[str, Any]] = []
        for name, member in self.federation.members.items():
            made = member.make_optimizers()
            optimizers += member.optimizers
            names = (f"{name}/{s.name or 'lr'}" if name else s.name for s in made)
            schedulers += [{"scheduler": s.scheduler, "name": own} for s, own in zip(made, names, strict=True)]
        return optimizers, schedulers

    def cut_cohort(self, limit: int | float) -> None:
        if isinstance(self.participation, Sampler):
            check_limit(limit, self.trainer)
        self.federation.cohorts.begin(limit)

    def on_fit_start(self) -> None:
        """Check that all processes are set up for the same run, and begin it for every model."""
        self._default_dtype = torch.get_default_dtype()
        check_same_everywhere(self.processes, self.full_configuration())
        self.federation.begin_fit(self._saved.has_resumed)

    def on_train_start(self) -> None:
        self.call_users("on_train_start")
        self._saved.try_saving()
        self._saved.go_on(self)

    def on_train_end(self) -> None:
        """Report what the first rounds have shown, and call the users' hooks."""
        for member in self.federation.members.values():
            member.first_rounds.finish()
        self.call_users("on_train_end")

    def on_fit_end(self) -> None:
        self._saved.end()
        self.call_users("on_fit_end")

    # -- a round

    @property
    def processes(self) -> Processes:
        return processes_of(self.trainer)

    def cohort(self, round_idx: int) -> list[WorkUnit]:
        """The units of a round, as a pure function of the seed, the round and what the sampler has seen."""
        return self.federation.cohorts.units(round_idx)

    def share(self, round_idx: int) -> Share:
        return self.federation.cohorts.share(round_idx)

    def start_round(self, round_idx: int) -> None:
        self._runtime.note_shares(round_idx)
        self._saved.progress.kept = None
        self.federation.start_round(round_idx)

    def training_step(self, batch: Share, batch_idx: int) -> None:
        self._runtime.note_shares(batch.round_idx, batch)
        with full_precision(self.device, self._default_dtype):
            self.federation.play(batch)
            self._runtime.end_if_told()
            for callback in self._runtime.round_callbacks():
                callback.on_cohort_end(self.trainer, self, batch.round_idx)

    def finish_round(self) -> None:
        """Finish the round of every model, and keep it as it is saved, even if a callback has failed to hear of it."""
        try:
            self.federation.finish_round()
        finally:
            self._saved.keep()

    def abandon_round(self) -> None:
        self.federation.abandon_round()

    def on_train_batch_end(self, outputs: Any, batch: Share, batch_idx: int) -> None:
        """Stop all processes together, as soon as any of them is asked to, or received SIGTERM."""
        strategy = self.trainer.strategy
        if isinstance(strategy, ClientParallelStrategy):
            strategy.end_if_told()
            strategy.note_shares(batch.round_idx)
        self.trainer.should_stop = strategy.reduce_boolean_decision(self.trainer.should_stop, all=False)

    def on_train_epoch_end(self) -> None:
        """Step the schedules that wait for a metric, which is available now, and let loggers have the round.

        Callbacks that save are called after this: what they save must be complete, and need not be logged again.
        """
        if self.federation.last_stepped == self.current_epoch:
            for member in self.federation.members.values():
                member.schedules.step_on(self.trainer.callback_metrics, self.current_epoch)
        show_epoch(self.trainer)
        self._saved.progress.ended = self.current_epoch
        self._saved.progress.logged.mark(self.trainer)

    def on_validation_epoch_end(self) -> None:
        self.call_users("on_validation_epoch_end")
        if self.trainer.state.fn == "fit" and not self.trainer.sanity_checking:
            self.log("fl/round", float(self.current_epoch), batch_size=1)
            self._saved.progress.validated = self.current_epoch

    # -- checkpoints and loggers

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Build the federation and load its weights, as for any LightningModule.

        The checkpoint of a LightningCLI run contains all that is needed. For any other checkpoint, pass the modules and
        the federation's arguments that differ from the defaults. Your own module's ``load_from_checkpoint`` loads that
        alone; of several, `load_user_module` does.

        Raises:
            TypeError: If an argument is missing.
            ValueError: If the file is empty, incomplete or damaged.
            RuntimeError: If the weights do not fit, or belong to another algorithm.
        """
        check_loadable(checkpoint_path)
        try:
            return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)
        except TypeError as error:
            missing = str(error).partition(f"{cls.__name__}.__init__() missing ")[2]
            if not missing:
                raise
            raise TypeError(
                f"Only the checkpoint of a LightningCLI run says how to build a {cls.__name__}; this one lacks "
                f"{missing}: pass it, {cls.__name__}.load_from_checkpoint(path, ...=...), or load your own module "
                f"alone: {ALONE}."
            ) from error

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Log a value, without a warning that it is not synchronised: it is the same in all processes."""
        super().log(name, value, *args, **{**options, **log_options(self)})

    @property
    def hparams_initial(self) -> AttributeDict:
        """The settings that Lightning sends to loggers when a run starts; they include the data, once it is dealt."""
        found = super().hparams_initial
        if self._trainer is None or self.trainer.state.fn != "fit":
            return found
        data = {name: self.data_or_none(name) for name in self.federation.members}
        configs = {name: data_config(one) for name, one in data.items() if one is not None}
        return AttributeDict({**found, "data": configs.get("", configs)}) if configs else found

    def full_configuration(self) -> dict[str, str | int]:
        """The settings that must match for a checkpoint to be resumed, and across all processes."""
        found = self.configuration()
        for name in self.federation.members:
            prefix = f"{name}: " if name else ""
            if (data := self.data_or_none(name)) is not None:
                found |= {f"{prefix}{setting}": value for setting, value in data.configuration().items()}
        return found | self._trainer_settings()

    def _trainer_settings(self) -> dict[str, str | int]:
        """Settings of the Trainer that change a run's result; none for a quick try, which can continue any run."""
        trainer, limit = self.trainer, self.federation.cohorts.limit
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return {}
        settings = limit, trainer.overfit_batches or 0.0, trainer.precision  # type: ignore[attr-defined]
        return dict(zip(TRAINER_SETTINGS, map(str, settings), strict=True))  # as text, because a limit of 1 is not 1.0

    def on_save_checkpoint(self, checkpoint: Checkpoint) -> None:
        self._saved.write(checkpoint, self.full_configuration())

    def on_load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Check that the configuration is unchanged, restore clients' and algorithms' state, and call the users' hooks.

        Lightning restores weights before it converts the module to the Trainer's precision, which would round those of
        ``"64-true"``.
        """
        if self._trainer is not None and self.trainer.state.fn == "fit":
            self._saved.read(checkpoint, self.full_configuration())
        self._saved.call_user_hooks(checkpoint)
        if self._trainer is not None:
            convert_now(self, self.trainer.precision_plugin)
        self.federation.load_states(checkpoint)
