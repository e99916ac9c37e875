"""A device runs the client half of an algorithm, one download after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_spectral.client.batches import ClientData
from lightning_spectral.client.forms import Form, Forms
from lightning_spectral.client.local_hooks import BeforeStep
from lightning_spectral.client.local_loop import LocalLoop
from lightning_spectral.client.local_optimizer import LocalOptimizer
from lightning_spectral.client.local_task import LocalSettings, LocalTask, LocalTrainer, Train
from lightning_spectral.client.metrics import isolate_metrics
from lightning_spectral.client.side import ClientSide, StepActions
from lightning_spectral.client.training_checks import (
    WATCHED_ROUNDS,
    GradientWatch,
    check_not_reached,
    check_still_own,
    discarded_changes,
)
from lightning_spectral.client.user_step import Recorder, log_to
from lightning_spectral.protocol.exchange import check_same_buffers
from lightning_spectral.protocol.frozen_base import KeptTensors
from lightning_spectral.protocol.kept_state import changed_attributes
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
# Likewise, if the client's parameters have other names or shapes than the server's
OTHER_SHAPES = (
    "must match the size of tensor",
    "in loading state_dict for",
    "doesn't match the broadcast shape",
    "Tensor lists must have the same number of tensors",
)
SMALLER = (
    "Clients of this algorithm hold some layers in a smaller form, whose parameters have other names or shapes. Where "
    "one part is updated from another, as a teacher, a target network or an average of weights is, leave the layers "
    "that it is updated from whole with `exclude`; sharded layers can be read as `layer.weight` instead. Or update it "
    "at the server, in `RoundCallback.on_round_end`."
)
COMPARED_TURNS = 3  # of a device, in which what clients change is looked for


class Device:
    """Turns a `Download` into an `Upload`, without access to the server or the round.

    The user's module is a client while `run` trains, and the server at any other time. A user's dropout and
    augmentations draw from the process's global generators, which are seeded for each client. Where other code shares
    the process, `generators` must be saved before a round and restored after it.

    Args:
        module: The user's module.
        side: The device half of the algorithm.
        optimizers: The user's optimizers of its parameters; exactly one unless the module uses manual optimisation.
        data: Maps a download to the data of its client.
        settings: Settings shared by the local training of all clients.
        local_trainer: Runs a client's local epochs.
        attach: Called with the recorder and the module in each turn, to let it log there, and e.g. to attach the
            Trainer; what it sets is put back.
        profile: Maps the name of a stage to a context manager that is entered around it.
        owned: Whether the module is this device's alone, and not the server's.
    """

    def __init__(
        self,
        module: nn.Module,
        side: ClientSide,
        optimizers: Sequence[Optimizer],
        data: Callable[[Download], ClientData],
        settings: LocalSettings,
        local_trainer: LocalTrainer = LocalLoop,
        attach: Callable[[Recorder, Any], None] = log_to,
        profile: Profile = nullcontext,
        owned: bool = False,
    ) -> None:
        self.module = module
        self.side = side
        self.optimizers = tuple(optimizers)
        self.data = data
        self.settings = settings
        self.generators = GlobalGenerators([settings.placement.device])
        self.forms = Forms(module, side.take_form, self.optimizers, owned)
        self.kept = KeptTensors()
        self._recorder = Recorder(module)
        self._local_trainer = local_trainer
        self._attach = attach
        self._profile = profile
        self._train: Train | None = None
        self._local_optimizers: dict[float, tuple[Form, tuple[LocalOptimizer, ...]]] = {}
        self._num_compared = 0

    def run(self, download: Download) -> Upload:
        """Train for one client; a failure, or the loss of a frozen tensor, is reported in the upload.

        Its tensors are in the memory of the client, in which the next one trains.

        Raises:
            ValueError: If gradients reach weights that are the server's and not the client's.
        """
        if download.frozen and (missing := self.kept.missing(download)):
            return Upload(download.unit, {}, missing=missing)
        clock = StageClock(self._profile)
        try:
            try:
                upload = self._turn(download, clock)
            except _Failed as failed:
                upload = Upload(download.unit, {}, left_out="error", failure=failed.failure)
            finally:
                self.forms.give_back()
        finally:
            self.forms.give_back()  # Ctrl-C may have kept the first from beginning
        return replace(upload, seconds={stage: clock.seconds[stage] for stage in ("load", "train")})

    def _turn(self, download: Download, clock: StageClock) -> Upload:
        with clock.measure("load"), _during("loading"):
            download = self.kept.complete(download) if download.frozen else download
            form = self.forms.take(download.capacity, download.tensors.keys())
            self._attach(self._recorder, self.module)
            isolate_metrics(self._recorder.metrics)
            self.side.load(self.module, download)
        return self._trained(form, download, clock)

    def _trained(self, form: Form, download: Download, clock: StageClock) -> Upload:
        module, hooks = self.module, self.settings.local_hooks
        is_watched = download.round_idx < WATCHED_ROUNDS
        watched = self.side.watched(module) if is_watched else {}
        stage = _during("local training", lambda: bool(form.replaced))
        with GradientWatch(watched) as watch, clock.measure("train"), stage:
            self.generators.seed(derived_seed(download.seed, "local training", *download.ids))
            assert self.forms.kept is not None, "the module is a client"
            self.forms.kept.seed(download.seed, download.ids)
            task = self._start(form, download)
            changed = self._comparison(form) if is_watched and download.local_epochs > 0 else tuple
            with ExitStack() as blocks:
                for hook in hooks if download.local_epochs > 0 else ():
                    blocks.enter_context(hook.while_training(module, task.data))
                result = self._loop(task)
        check_not_reached(form.replaced)
        with _during("local training"):
            if is_watched:
                check_same_buffers(module, form.buffers)
            for optimizer in self.optimizers:
                check_still_own(optimizer, module)
        if result.num_steps == 0 and download.local_epochs > 0:
            return Upload(download.unit, {}, loss=result.loss, left_out="no_update")
        put_back = changed()  # before the algorithm clears away what it has set
        with _during("collecting"):
            upload = self.side.collect(module, download)
            logged = {**upload.logged, **self._recorder.finish_client()}
            rows = {name: own for hook in hooks for name, own in hook.untrained_rows(module, task.data).items()}
        sent, returned = download.tensors, upload.tensors
        return replace(
            upload,
            num_steps=result.num_steps,
            loss=result.loss,
            logged=logged,
            untrained_rows=rows,
            unreached=watch.unreached if is_watched and result.num_steps > 0 else None,
            discarded=discarded_changes(module, self.optimizers, sent, returned) if is_watched else (),
            put_back=put_back,
        )

    def _comparison(self, form: Form) -> Callable[[], tuple[str, ...]]:
        """What names the attributes that this client changes, in the first turns."""
        if self._num_compared >= COMPARED_TURNS:
            return tuple
        self._num_compared += 1
        changed = changed_attributes(self.module, form.replaced.keys())
        assert self.forms.kept is not None, "the module is a client"
        large = self.forms.kept.not_kept()

        def is_large(name: str) -> bool:
            return any(path == name or path.startswith((f"{name}.", f"{name}[")) for path in large)

        return lambda: tuple(f"{n} (not put back: too large)" if is_large(n) else n for n in changed())

    def _start(self, form: Form, download: Download) -> LocalTask:
        """Prepare the client's task; it begins with the state that the server has."""
        for local, options in zip(self._optimizers_of(form, download.capacity), download.options, strict=True):
            local.start_client(options)
        self._recorder.start_client()
        actions = self.side.start(self.module, download) or StepActions()
        before_step = [self._before_step(optimizer, actions) for optimizer in self.optimizers]
        around = actions.before_forward, actions.after_forward
        return LocalTask(download, self.data(download), self._recorder, *around, before_step)

    def _before_step(self, optimizer: Optimizer, actions: StepActions) -> list[BeforeStep]:
        """Actions before each step: the user's local hooks in order, then the algorithm's."""
        started = [hook.start_client(self.module, optimizer) for hook in self.settings.local_hooks]
        own = None if actions.before_step is None else partial(actions.before_step, optimizer)
        return [act for act in (*started, own) if act is not None]

    def _optimizers_of(self, form: Form, capacity: float) -> tuple[LocalOptimizer, ...]:
        """The user's optimizers as they step clients of a capacity; made while the module is one."""
        known, made = self._local_optimizers.get(capacity, (None, ()))
        if known is not form:
            names = {id(tensor): name for name, tensor in form.server.items()}
            follow = self.side.origin, self.side.overrides
            made = tuple(LocalOptimizer(one, names, self.module, *follow) for one in self.optimizers)
            self._local_optimizers[capacity] = form, made
        return made

    @property
    def _loop(self) -> Train:
        """What runs local epochs; made in the first turn, in which the module has the hooks of a client."""
        if self._train is None:
            self._train = self._local_trainer(self.module, self.optimizers, self.settings)
        return self._train


class _Failed(Exception):
    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@contextmanager
def _during(stage: str, has_other_shapes: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Raise any failure within the block as a `_Failed` that names the stage.

    Args:
        stage: The stage.
        has_other_shapes: Returns whether the client's parameters have other names or shapes than the server's.
    """
    try:
        yield
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        if remedy := _remedy(error, has_other_shapes()):
            message = f"{message.rstrip(' .')}. {remedy}"
        raise _Failed(Failure(stage, message, error)) from error


def _remedy(error: Exception, has_other_shapes: bool) -> str:
    """Advice for an error from torch that does not mention the user's code; empty for other errors."""
    remedies = REMEDIES | dict.fromkeys(OTHER_SHAPES if has_other_shapes else (), SMALLER)
    return next((remedy for words, remedy in remedies.items() if words in str(error)), "")
