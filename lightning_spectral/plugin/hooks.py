"""Lightning's hooks of a federation, of one model or several: each is passed on to the users' modules or the rounds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import AttributeDict
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.parsing import clean_namespace
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from lightning_spectral.algorithms import Algorithm
from lightning_spectral.algorithms.filter import check_chain
from lightning_spectral.client.local_loop import call_with_accepted
from lightning_spectral.participation.cohorts import ClientDirectory
from lightning_spectral.plugin.callbacks import (
    Aggregation,
    CommunicationLedger,
    RoundDashboard,
    RoundHistory,
    RoundLines,
    SubmodelSampling,
    SVDRefresh,
    WandbRounds,
)
from lightning_spectral.plugin.checkpoint_files import ARGUMENTS, AtomicCheckpointIO, check_loadable
from lightning_spectral.plugin.checkpoints import FEDERATION, Checkpoint, SavedRun, own_checkpoint
from lightning_spectral.plugin.checks import check_callbacks, check_member, check_trainer, warn_of_recompilations
from lightning_spectral.plugin.data import RoundLoader, ServerData
from lightning_spectral.plugin.federation import ALONE, Federation
from lightning_spectral.plugin.logs import forwarded_logging, show_epoch
from lightning_spectral.plugin.member import Member
from lightning_spectral.plugin.processes import ClientParallelStrategy, processes_of
from lightning_spectral.plugin.runtime import Runtime
from lightning_spectral.plugin.settings import (
    TRAINER_SETTINGS,
    FixedArguments,
    Hparams,
    check_checkpoint,
    check_same_everywhere,
    config_of,
)
from lightning_spectral.plugin.trainer import RoundsAsSteps, convert_now, full_precision
from lightning_spectral.plugin.user_hooks import Host, NoOutputs, Share, is_overridden


def passed_on(hook: str, position: int | None = None) -> Callable[..., Any]:
    """Make a method that calls the hook of the same name on the users' modules.

    Args:
        hook: Its name.
        position: That of the dataloader's index among its arguments, which Lightning may leave out: the hook is then
            called on the module to whose data a batch belongs, and otherwise on every module.
    """

    def forward(self: FederatedHooks, *args: Any) -> Any:
        if position is None:
            return self.call_users(hook, *args)
        with self.evaluating(args, position) as (module, own_args):
            return call_with_accepted(getattr(module, hook), *own_args)

    forward.__name__ = forward.__qualname__ = hook
    forward.__doc__ = f"The user's ``{hook}``, on the server's module."
    return forward


class FederatedHooks(FixedArguments, pl.LightningModule, Host):
    """What Lightning calls of a federation; `FederatedModule` and `MultiModelModule` say who is in it.

    Lightning and its callbacks see the parameters, buffers and `state_dict` of the users' modules alone, under the
    users' names. An algorithm's state is not among the weights: callbacks that save, average, freeze or count weights
    do not touch it. It moves with the module, and the federation saves it in an entry of its own.
    """

    # Where Lightning looks for what builds the federation; the usual entries are those of the user's module.
    CHECKPOINT_HYPER_PARAMS_KEY = ARGUMENTS
    CHECKPOINT_HYPER_PARAMS_NAME = f"{ARGUMENTS}_name"
    CHECKPOINT_HYPER_PARAMS_TYPE = f"{ARGUMENTS}_type"

    data_type: type[pl.LightningDataModule]
    data_call: str  # that makes such data

    def _create_federation(self, members: Mapping[str, Member]) -> None:
        """Create the federation, at the end of the constructor."""
        self.automatic_optimization = False
        self.federation = Federation(self, members, Runtime(self))
        self._saved = SavedRun(self.federation)

    # -- who is in it

    @property
    def members(self) -> Mapping[str, Any]:
        """The `FederatedModule` of each model by name; the name is empty if there is only one."""
        return self.federation.members

    @property
    def datamodule(self) -> Any:
        """The Trainer's data module; raises ``TypeError`` unless it has one of the right kind."""
        found = self.trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(found, self.data_type):
            return found
        got = "dataloaders, or nothing" if found is None else type(found).__name__
        raise TypeError(f"{type(self).__name__} needs clients: call trainer.fit(model, {self.data_call}), got {got}.")

    @property
    def data_there(self) -> Mapping[str, ServerData]:
        """Each model's data, by name; none when evaluating with the user's own loader."""
        is_there = isinstance(self.trainer.datamodule, self.data_type)  # type: ignore[attr-defined]
        return {name: self.data_of(name) for name in self.members} if is_there else {}

    def available_for(self, name: str) -> Tensor | None:
        """Whether each client can train a model, if it has examples of it; ``None`` if all can."""
        return None

    def configuration(self) -> dict[str, str | int]:
        """The settings that must match for a checkpoint to be resumed, apart from the data."""
        raise NotImplementedError

    def move_batches(self) -> None:
        """Let the batch hooks of users' modules and data act on evaluation batches."""
        raise NotImplementedError

    def evaluating(self, args: tuple[Any, ...], position: int) -> AbstractContextManager[Any]:
        """Within the block, let the module log to which an evaluation batch belongs; yields it and its own arguments.

        Of the arguments of one of Lightning's hooks, the one at ``position`` is the dataloader's index.
        """
        raise NotImplementedError

    def clients_of(self, name: str, algorithm: Algorithm) -> ClientDirectory:
        data = self.data_of(name)
        capacities = algorithm.capacities.of_clients(data.num_clients, self.members[name].seed)
        return cast(ClientDirectory, data.client_directory(capacities, self.available_for(name)))

    # -- weights, under the names that users know

    @property
    def views(self) -> Mapping[str, pl.LightningModule]:
        """The users' modules, by what precedes the names of their weights."""
        return {f"models.{name}" if name else "": owner.module for name, owner in self.members.items()}

    def named_parameters(self, prefix: str = "", *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self._named("named_parameters", prefix, *args, **options)

    def named_buffers(self, prefix: str = "", *args: Any, **options: Any) -> Iterator[tuple[str, Tensor]]:
        return self._named("named_buffers", prefix, *args, **options)

    def _named(self, method: str, prefix: str, *args: Any, **options: Any) -> Iterator[Any]:
        for own, module in self.views.items():
            yield from getattr(module, method)(".".join(filter(None, (prefix, own))), *args, **options)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        """What the users' own ``state_dict`` return."""
        if (only := self.views.get("")) is not None:
            return only.state_dict(*args, **options)
        prefix, found = options.pop("prefix", ""), options.pop("destination", OrderedDict())
        for own, module in self.views.items():
            found.update({f"{prefix}{own}.{name}": value for name, value in module.state_dict(**options).items()})
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights with the users' own ``load_state_dict``; of several, each has its own ``strict_loading``."""
        options = {"assign": True} if assign else {}  # users who override this rarely know it
        if (only := self.views.get("")) is not None:
            return only.load_state_dict(state_dict, strict, **options)
        unexpected = [name for name in state_dict if not name.startswith(tuple(f"{own}." for own in self.views))]
        if strict and unexpected:
            raise RuntimeError(f"The weights {', '.join(unexpected)} belong to none of {', '.join(self.views)}.")
        missing: list[str] = []
        for own, module in self.views.items():
            prefix = f"{own}."
            part = {name.removeprefix(prefix): v for name, v in state_dict.items() if name.startswith(prefix)}
            found = module.load_state_dict(part, strict and module.strict_loading, **options)
            missing += [prefix + name for name in found.missing_keys]
            unexpected += [prefix + name for name in found.unexpected_keys]
        return _IncompatibleKeys(missing, unexpected)

    @property
    def strict_loading(self) -> bool:
        """Whether all weights must be found, which the user's module decides if there is only one."""
        only = self.views.get("")
        return super().strict_loading if only is None else only.strict_loading

    @strict_loading.setter
    def strict_loading(self, strict_loading: bool) -> None:
        for module in self.views.values():
            module.strict_loading = strict_loading

    # -- hooks of evaluation, and those that run once per run

    validation_step = passed_on("validation_step", 2)
    on_validation_start = passed_on("on_validation_start")
    on_validation_end = passed_on("on_validation_end")
    on_validation_epoch_start = passed_on("on_validation_epoch_start")
    on_validation_batch_start = passed_on("on_validation_batch_start", 2)
    on_validation_batch_end = passed_on("on_validation_batch_end", 3)

    test_step = passed_on("test_step", 2)
    on_test_start = passed_on("on_test_start")
    on_test_end = passed_on("on_test_end")
    on_test_epoch_start = passed_on("on_test_epoch_start")
    on_test_epoch_end = passed_on("on_test_epoch_end")
    on_test_batch_start = passed_on("on_test_batch_start", 2)
    on_test_batch_end = passed_on("on_test_batch_end", 3)

    def call_users(self, hook: str, *args: Any) -> None:
        """Call a hook of every user's module, which logs under the model's name."""
        for owner in self.members.values():
            with forwarded_logging(owner.module, owner):
                call_with_accepted(getattr(owner.module, hook), *args)

    # -- a run

    def configure_callbacks(self) -> list[pl.Callback]:
        """The users' callbacks, then those boundaries of a round that the Trainer does not have yet."""
        trainer: Any = self.trainer
        fits = trainer.state.fn == "fit"
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # before anything fails; a plugin of theirs stays
            trainer.strategy.checkpoint_io = AtomicCheckpointIO()
        if fits:
            self._saved.begin()
        if fits and (clip := trainer.gradient_clip_val):  # here: Lightning refuses it before `setup`, in other words
            raise ValueError(
                f"`Trainer(gradient_clip_val={clip})` would not reach the gradients of clients; give "
                f"FederatedModule(..., local_hooks=[GradientClip({clip})]) instead, which clips by norm in each step."
            )
        configured = [owner.module.configure_callbacks() for owner in self.members.values()]
        own = [callback for found in configured for callback in (found if isinstance(found, Iterable) else [found])]
        callbacks = [*trainer.callbacks, *own]
        if fits:
            for owner in self.members.values():
                check_chain(owner.plan(callbacks=callbacks))
            check_callbacks(callbacks)  # before Lightning refuses some of them with its own messages
        boundaries: list[pl.Callback] = []  # only those with something to do, since Lightning calls all
        if any(isinstance(logger, WandbLogger) for logger in trainer.loggers):
            boundaries.append(WandbRounds())
        if any(isinstance(each, CommunicationLedger | RoundDashboard) for each in callbacks):
            boundaries.append(RoundHistory())
        boundaries += [RoundLines(), RoundsAsSteps(), SVDRefresh(), SubmodelSampling(), Aggregation()]
        lacking = [one for one in boundaries if not any(isinstance(each, type(one)) for each in trainer.callbacks)]
        return [*own, *lacking]

    def prepare_data(self) -> None:
        for owner in self.members.values():
            owner.module.prepare_data()

    def setup(self, stage: str) -> None:
        self.federation.take_members()
        for owner in self.members.values():
            clean_namespace(owner.module.hparams)  # as Lightning does for the module that it knows
            owner.module.setup(stage)
            for asked, step in (("validate", "validation_step"), ("test", "test_step")):
                if stage == asked and not is_overridden(owner.module, step):
                    raise ValueError(f"`Trainer.{asked}` needs `{type(owner.module).__name__}.{step}`; define it.")
        if stage == "fit":
            self.federation.runtime.begin()
            check_trainer(self.trainer)
            self.trainer.fit_loop._data_source.instance = RoundLoader(self)  # in place of what has the examples
            for name, owner in self.members.items():
                data = self.data_of(name)
                check_member(owner, data, self.participation)
                capacities = owner.algorithm.capacities.of_clients(data.num_clients, owner.seed)
                warn_of_recompilations(owner.module, len(capacities.values))
                owner.conditions.check(data.num_clients, self.federation.cohorts.usual_size)
        self.move_batches()

    def teardown(self, stage: str) -> None:
        for member in self.members.values():
            member.engine_or_none, member.stepper, member.templates = None, None, []
            member.module.teardown(stage)

    def configure_optimizers(self) -> Any:
        """Return the users' own optimizers, which clients' are modelled on; those of the servers are the members'."""
        optimizers: list[Any] = []
        schedulers: list[dict[str, Any]] = []
        for name, member in self.members.items():
            for made in member.make_optimizers():
                shown = f"{name}/{made.name or 'lr'}" if name else made.name
                schedulers.append({"scheduler": made.scheduler, "name": shown})
            optimizers += member.templates
        return optimizers, schedulers

    def on_fit_start(self) -> None:
        """Check that all processes are set up for the same run, and begin it for every model."""
        self._default_dtype = torch.get_default_dtype()
        check_same_everywhere(processes_of(self.trainer), self.full_configuration())
        self.federation.begin_fit(self._saved.has_resumed)

    def on_train_start(self) -> None:
        self.call_users("on_train_start")
        self._saved.start_training(self)

    def on_train_end(self) -> None:
        """Report what the first rounds have shown, and call the users' hooks."""
        for member in self.members.values():
            member.first_rounds.finish(member.engine.half)
        self.call_users("on_train_end")

    def on_fit_end(self) -> None:
        self._saved.end()
        self.call_users("on_fit_end")

    # -- a round

    def start_round(self, round_idx: int) -> None:
        """Open the round of every model that some client trains, and call the round callbacks."""
        self.federation.runtime.note_shares(round_idx)
        self._saved.kept = {}
        self.federation.start_round(round_idx)

    def training_step(self, batch: Share, batch_idx: int) -> NoOutputs:
        self.federation.runtime.note_shares(batch.round_idx, batch)
        with full_precision(self.device, self._default_dtype):
            self.federation.play(batch)
            self.federation.runtime.stop_if_signalled()
            self.federation.call("on_cohort_end", self, batch.round_idx)
        return NoOutputs()

    def finish_round(self) -> None:
        """Close the round, step the servers and the schedules, log the round, and keep it as it is saved."""
        try:
            self.federation.finish_round()
        finally:
            self._saved.keep()

    def on_train_batch_end(self, outputs: Any, batch: Share, batch_idx: int) -> None:
        """Stop all processes together, as soon as any of them is asked to, or received SIGTERM."""
        strategy = self.trainer.strategy
        if isinstance(strategy, ClientParallelStrategy):
            strategy.share_sigterm()
            strategy.note_shares(batch.round_idx)
        should_stop = self.trainer.should_stop or self.federation.is_spent
        self.trainer.should_stop = strategy.reduce_boolean_decision(should_stop, all=False)

    def on_train_epoch_end(self) -> None:
        """Step the schedules that wait for a metric, which is available now, and let loggers have the round.

        Callbacks that save are called after this: what they save must be complete, and need not be logged again.
        """
        if self.federation.last_stepped == self.current_epoch:
            for member in self.members.values():
                member.schedules.step_on(self.trainer.callback_metrics, self.current_epoch)
        show_epoch(self.trainer)
        self._saved.ended = self.current_epoch
        self._saved.logged.mark(self.trainer)

    def on_validation_epoch_end(self) -> None:
        self.call_users("on_validation_epoch_end")
        if self.trainer.state.fn == "fit" and not self.trainer.sanity_checking:
            self.log("fl/round", float(self.current_epoch), batch_size=1)
            self._saved.validated = self.current_epoch

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
            if not (missing := str(error).partition(f"{cls.__name__}.__init__() missing ")[2]):
                raise
            raise TypeError(
                f"Only the checkpoint of a LightningCLI run says how to build a {cls.__name__}; this one lacks "
                f"{missing}: pass it, {cls.__name__}.load_from_checkpoint(path, ...=...), or load your own module "
                f"alone: {ALONE}."
            ) from error

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Log a value, without a warning that it is not synchronised: it is the same in all processes."""
        if self._trainer is not None and isinstance(self._trainer.strategy, ClientParallelStrategy):
            options["sync_dist"] = True
        super().log(name, value, *args, **options)

    @property
    def hparams(self) -> AttributeDict:
        """The federation's settings, and the user's hyper-parameters as loggers show them."""
        if not isinstance(found := super().hparams, Hparams):
            self._hparams = found = Hparams(found)
        return found

    @property
    def hparams_initial(self) -> AttributeDict:
        """The settings that Lightning sends to loggers when a run starts; they include the data, once it is dealt."""
        found = super().hparams_initial
        if self._trainer is None or self.trainer.state.fn != "fit":
            return found
        configs = {name: config_of(data, data.settings) for name, data in self.data_there.items()}
        for name in configs:
            if any(each.equal_weights for each in self.members[name].filters):
                configs[name].pop("num_examples", None)
        return AttributeDict({**found, "data": configs.get("", configs)}) if configs else found

    def full_configuration(self) -> dict[str, str | int]:
        """The settings that must match for a checkpoint to be resumed, and across all processes.

        Among them are those of the Trainer that change a result, except in a quick try, which can continue any run.
        """
        found = self.configuration()
        for name, data in self.data_there.items():
            prefix = f"{name}: " if name else ""
            found |= {f"{prefix}{setting}": value for setting, value in data.configuration().items()}
        trainer: Any = self.trainer
        if not trainer.fast_dev_run:
            settings = self.federation.cohorts.limit, trainer.overfit_batches or 0.0, trainer.precision
            found |= zip(TRAINER_SETTINGS, map(str, settings), strict=True)  # as text, because a limit of 1 is not 1.0
        return found

    def on_save_checkpoint(self, checkpoint: Checkpoint) -> None:
        self._saved.write(checkpoint, self.full_configuration())

    def on_load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Check that the configuration is unchanged, restore clients' and algorithms' state, and call the users' hooks.

        Lightning restores weights before it converts the precision of the module, which would round ``"64-true"``.
        """
        if self._trainer is not None and self.trainer.state.fn == "fit":
            check_checkpoint(checkpoint, self.full_configuration())
            self._saved.resumed = dict(checkpoint)  # as it is before users' hooks
        for name, member in self.members.items():
            with own_checkpoint(checkpoint, name) as own:
                member.module.on_load_checkpoint(own)
        if self._trainer is not None:
            convert_now(self, self.trainer.precision_plugin)
        self.federation.load_state_dict(checkpoint.get(FEDERATION, {}))
