"""A device runs the client half of an algorithm, one download after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_spectral.client.batches import ClientData
from lightning_spectral.client.between_clients import KeptAttributes, isolate_metrics
from lightning_spectral.client.local_hooks import BeforeStep
from lightning_spectral.client.local_loop import LocalLoop
from lightning_spectral.client.local_optimizer import LocalOptimizer, OptimizerRecipe
from lightning_spectral.client.local_task import LocalSettings, LocalTask, LocalTrainer, Train
from lightning_spectral.client.side import ClientSide, StepActions
from lightning_spectral.client.training_checks import (
    WATCHED_ROUNDS,
    GradientWatch,
    check_still_own,
    check_untouched,
    discarded_changes,
)
from lightning_spectral.client.user_step import Recorder, log_to
from lightning_spectral.protocol.frozen_base import KeptTensors
from lightning_spectral.protocol.records import Download, Failure, Upload
from lightning_spectral.protocol.rng import GlobalGenerators, derived_seed
from lightning_spectral.protocol.stage_clock import Profile, StageClock

# Advice to the user, by a phrase of the error message from torch
REMEDIES = {
    "Expected more than 1 value per channel": "BatchNorm cannot train on a batch of one example: leave such last "
    "batches out with FederatedDataModule(..., drop_last=True), and give every client, and every batch, at least two "
    "examples.",
    "grad can be implicitly created only for scalar outputs": "`training_step` must return one number; return the mean "
    "of the losses.",
    "element 0 of tensors does not require grad": "The loss of `training_step` depends on nothing that is trained; "
    "compute it from the module's output, without `detach` or `no_grad`, or return None to skip the step.",
}
# Likewise, if the sub-model's parameters have other names or shapes than the module's
OTHER_SHAPES = ("must match the size of tensor", "in loading state_dict for", "doesn't match the broadcast shape")
SMALLER = (
    "Clients of this algorithm hold some layers in a smaller form, whose parameters have other names or shapes. Where "
    "one part is updated from another, as a teacher, a target network or an average of weights is, leave the layers "
    "that it is updated from whole with `exclude`; sharded layers can be read as `layer.weight` instead. Or update it "
    "at the server, in `RoundCallback.on_round_end`."
)


@dataclass(frozen=True, eq=False)
class SubModel:
    """The module of one keep ratio; every client of that ratio trains it in turn.

    Attributes:
        module: A copy of the user's module whose ``log`` is the recorder's.
        optimizers: The user's optimizers over it; exactly one unless the module uses manual optimisation.
        recorder: Records what the module logs.
        train: Runs a client's local epochs on it.
        attributes: What the module keeps on itself, as it was before the first client.
    """

    module: Any
    optimizers: tuple[LocalOptimizer, ...]
    recorder: Recorder
    train: Train
    attributes: KeptAttributes


class Device:
    """Turns a `Download` into an `Upload`, without access to the server or the round.

    A user's dropout and augmentations draw from the process's global generators, which are seeded for each client.
    Where other code shares the process, `generators` must be saved before a round and restored after it.

    Args:
        module: The user's module, from which sub-models are built.
        side: The device half of the algorithm.
        recipes: Recipes of the user's optimizers.
        data: Maps a download to the data of its client.
        settings: Settings shared by the local training of all clients.
        local_trainer: Runs a client's local epochs.
        attach: Called with the recorder of each new sub-model and the sub-model itself, to let it log there, and e.g.
            to attach the Trainer.
        profile: Maps the name of a stage to a context manager that is entered around it.
    """

    def __init__(
        self,
        module: nn.Module,
        side: ClientSide,
        recipes: Sequence[OptimizerRecipe],
        data: Callable[[Download], ClientData],
        settings: LocalSettings,
        local_trainer: LocalTrainer = LocalLoop,
        attach: Callable[[Recorder, Any], None] = log_to,
        profile: Profile = nullcontext,
    ) -> None:
        self.module = module
        self.side = side
        self.recipes = tuple(recipes)
        self.data = data
        self.settings = settings
        self.generators = GlobalGenerators([settings.placement.device])
        self.local_trainer = local_trainer
        self._attach = attach
        self._profile = profile
        self.kept = KeptTensors()
        self._sub_models: dict[float, SubModel] = {}
        self._server_is_checked = False

    def run(self, download: Download) -> Upload:
        """Train for one client; a failure, or the loss of a frozen tensor, is reported in the upload.

        Raises:
            ValueError: If gradients reach the original module's own weights.
        """
        if download.frozen and (missing := self.kept.missing(download)):
            return Upload(download.unit, {}, missing=missing)
        clock = StageClock(self._profile)
        try:
            with clock.measure("load"), _during("loading"):
                download = self.kept.complete(download) if download.frozen else download
                sub_model = self.sub_model(download.capacity)
                sub_model.attributes.restore()
                self.side.load(sub_model.module, download)
            upload = self._train(sub_model, download, clock)
        except _Failed as failed:
            # the failure may have left hooks or attributes on the sub-model: discard it
            self._sub_models.pop(download.capacity, None)
            upload = Upload(download.unit, {}, left_out="error", failure=failed.failure)
        return replace(upload, seconds={stage: clock.seconds[stage] for stage in ("load", "train")})

    def _train(self, sub_model: SubModel, download: Download, clock: StageClock) -> Upload:
        module, hooks = sub_model.module, self.settings.local_hooks
        is_watched = download.round_idx < WATCHED_ROUNDS
        watched = self.side.watched(module) if is_watched else {}
        stage = _during("local training", lambda: _is_smaller(module, self.module))
        with GradientWatch(watched) as watch, clock.measure("train"), stage:
            self.generators.seed(derived_seed(download.seed, "local training", *download.ids))
            task = self._start(sub_model, download)
            with ExitStack() as blocks:
                for hook in hooks if download.local_epochs > 0 else ():
                    blocks.enter_context(hook.while_training(module, task.data))
                result = sub_model.train(task)
        if result.num_steps > 0 and not self._server_is_checked:
            check_untouched(self.module)
            self._server_is_checked = not is_watched
        optimizers = [local.optimizer for local in sub_model.optimizers]
        with _during("local training"):
            for optimizer in optimizers:
                check_still_own(optimizer, module)
        if result.num_steps == 0 and download.local_epochs > 0:
            return Upload(download.unit, {}, loss=result.loss, left_out="no_update")
        with _during("collecting"):
            upload = self.side.collect(module, download)
            logged = {**upload.logged, **sub_model.recorder.finish_client()}
            rows = {name: own for hook in hooks for name, own in hook.untrained_rows(module, task.data).items()}
        sent, returned = download.tensors, upload.tensors
        return replace(
            upload,
            num_steps=result.num_steps,
            loss=result.loss,
            logged=logged,
            untrained_rows=rows,
            unreached=watch.unreached if is_watched and result.num_steps > 0 else None,
            discarded=discarded_changes(module, optimizers, sent, returned) if is_watched else (),
        )

    def _start(self, sub_model: SubModel, download: Download) -> LocalTask:
        """Reset the state of the previous client and prepare the new one's task."""
        for local, options in zip(sub_model.optimizers, download.options, strict=True):
            local.start_client(options)
        sub_model.recorder.start_client()
        actions = self.side.start(sub_model.module, download) or StepActions()
        before_step = [self._before_step(sub_model.module, local.optimizer, actions) for local in sub_model.optimizers]
        around = actions.before_forward, actions.after_forward
        return LocalTask(download, self.data(download), sub_model.recorder, *around, before_step)

    def _before_step(self, module: nn.Module, optimizer: Optimizer, actions: StepActions) -> list[BeforeStep]:
        """Actions before each step: the user's local hooks in order, then the algorithm's."""
        started = [hook.start_client(module, optimizer) for hook in self.settings.local_hooks]
        own = None if actions.before_step is None else partial(actions.before_step, optimizer)
        return [act for act in (*started, own) if act is not None]

    def release(self) -> None:
        """Free what only the last client of a round needed: gradients and optimizer state."""
        for sub_model in self._sub_models.values():
            for local in sub_model.optimizers:
                local.optimizer.zero_grad()
                local.optimizer.state.clear()

    def sub_model(self, capacity: float) -> SubModel:
        """The sub-model of one keep ratio, built for its first client."""
        if capacity not in self._sub_models:
            self._sub_models[capacity] = self._build(capacity)
        return self._sub_models[capacity]

    def _build(self, capacity: float) -> SubModel:
        client: Any = self.side.build(self.module, capacity)
        recorder = Recorder(client)
        isolate_metrics(client)
        self._attach(recorder, client)
        optimizers = tuple(self.side.local_optimizer(recipe, client) for recipe in self.recipes)
        train = self.local_trainer(client, [local.optimizer for local in optimizers], self.settings)
        return SubModel(client, optimizers, recorder, train, KeptAttributes(client))


class _Failed(Exception):
    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@contextmanager
def _during(stage: str, is_smaller: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Raise any failure within the block as a `_Failed` that names the stage.

    Args:
        stage: The stage.
        is_smaller: Returns whether the sub-model's parameters have other names or shapes than the module's.
    """
    try:
        yield
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        if remedy := _remedy(error, is_smaller()):
            message = f"{message.rstrip(' .')}. {remedy}"
        raise _Failed(Failure(stage, message, error)) from error


def _remedy(error: Exception, is_smaller: bool) -> str:
    """Advice for an error from torch that does not mention the user's code; empty for other errors."""
    remedies = REMEDIES | dict.fromkeys(OTHER_SHAPES if is_smaller else (), SMALLER)
    return next((remedy for words, remedy in remedies.items() if words in str(error)), "")


def _is_smaller(client: nn.Module, module: nn.Module) -> bool:
    """Whether the parameters of a sub-model have other names or shapes than those of the user's module."""
    own, whole = ([(name, p.shape) for name, p in part.named_parameters()] for part in (client, module))
    return own != whole
