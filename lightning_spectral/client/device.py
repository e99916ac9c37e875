"""The device half of an algorithm, and the device that runs it, one download after another."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_spectral.client.batches import ClientData
from lightning_spectral.client.forms import Form, Forms
from lightning_spectral.client.kept_state import KeptState, changed_attributes, trying
from lightning_spectral.client.local_loop import (
    LocalLoop,
    LocalResult,
    LocalSettings,
    LocalTask,
    LocalTrainer,
    LossLoop,
    Recorder,
    Train,
    isolate_metrics,
    log_to,
)
from lightning_spectral.client.masking import Parties
from lightning_spectral.client.user_optimizer import LocalOptimizer, StandIn, check_still_own, trainable_parameters
from lightning_spectral.errors import DeviceError, RecordError
from lightning_spectral.functional.checks import shapes_of
from lightning_spectral.protocol.exchange import KeptTensors, check_same_buffers, named_state
from lightning_spectral.protocol.records import Download, Failure, Profile, StageClock, Tensors, Upload
from lightning_spectral.protocol.rng import GlobalGenerators, derived_seed
from lightning_spectral.sums.exact_mean import largest_magnitudes

TOO_LARGE = " (not put back: too large)"  # follows the name of an attribute that a client has changed
WATCHED_ROUNDS = 10  # a single client may not use every layer, e.g. an expert or one that is dropped at random

LABELS = (
    "Classes are numbered from 0, and the last layer needs an output for each: relabel the examples in the data set, "
    "add outputs, or give the loss an `ignore_index` for examples without a class."
)
INTEGERS = "Cross-entropy takes int64 classes, `y.long()`, one per example, or floats of shape (batch, classes)."
# Advice to the user, by a phrase of the error message from torch
REMEDIES = {
    "Expected more than 1 value per channel": "BatchNorm cannot train on a batch of one example: leave such last "
    "batches out with FederatedDataModule(..., drop_last=True), and give all clients and batches two examples or more.",
    "grad can be implicitly created only for scalar outputs": "`training_step` must return one number; return the mean "
    "of the losses.",
    "element 0 of tensors does not require grad": "The loss of `training_step` depends on nothing that is trained; "
    "compute it from the module's output, without `detach` or `no_grad`, or return None to skip the step.",
}
# Likewise, and the message says what the batch was
OF_BATCHES = {
    "Target size": "This loss takes targets of the shape and type of the outputs: `y.view_as(outputs).float()`, or "
    "one-hot ones.",
    "Target ": LABELS,
    "device-side assert": LABELS + " Train with accelerator='cpu' to see which.",
    "expected target dtype": INTEGERS,
    "expected scalar type Long": INTEGERS,
    "multi-target not supported": "Cross-entropy takes one class per example, shape (batch,): `y.squeeze(1)`, or "
    "`y.argmax(1)` of one-hot labels.",
    "must have the same dtype": "Inputs need the type of the weights: convert them in the data set, e.g. `x.float()`.",
    "shapes cannot be multiplied": "The first layer that fails takes another number of features: compare the batch "
    "with what `forward` expects; images may have to be flattened.",
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


@dataclass(frozen=True)
class StepActions:
    """The actions of the device half of an algorithm in every local step of a turn, or of one of its phases.

    Attributes:
        before_forward: Called before each ``training_step``; ``None`` for nothing.
        before_step: Called with the optimizer before it steps, once all gradients are computed; ``None`` for nothing.
        after_forward: Called after each ``training_step``, before the backward pass of its loss; ``None`` for nothing.
        prepare: Called before the phase; ``None`` for nothing.
        epochs: Passes over the client's data in this phase; ``None`` for as long as the turn.
    """

    before_forward: Callable[[], None] | None = None
    before_step: Callable[[Optimizer], None] | None = None
    after_forward: Callable[[], None] | None = None
    prepare: Callable[[], None] | None = None
    epochs: int | None = None


class ClientSide(ABC):
    """The device half of an algorithm: a frozen, picklable object without access to the server or the round.

    It is sent to a device once. From then on it gets only a `Download` for each client, and returns only an `Upload`.

    Attributes:
        reads_loss: Whether uploads say the client's loss at the downloaded weights, ``Upload.loss_before``; it costs a
            third of a local epoch.
    """

    reads_loss: ClassVar[bool] = False

    def take_form(self, module: nn.Module, capacity: float) -> None:
        """Turn the user's module into a client of a capacity, in place; `load` sets its values later.

        The device undoes all of it when the client is done. Tensors that a client also has stay the same objects,
        with memory of their own. By default a client has the whole module.

        Args:
            module: The user's module.
            capacity: The keep ratio.
        """
        return None

    @abstractmethod
    def load(self, client: nn.Module, download: Download) -> None:
        """Overwrite a client's values with the downloaded ones."""

    def stand_ins(self, client: nn.Module) -> Mapping[str, StandIn]:
        """What those of a client's parameters stand for, by name, that are not the server's; by default all are."""
        return {}

    def start(self, client: nn.Module, download: Download) -> StepActions | Sequence[StepActions] | None:
        """Return what to do in each local step of a client; called before the first. By default nothing.

        Several are phases, one after another, each with new optimizers. The upload's loss is that of the last one.
        """
        return None

    @abstractmethod
    def collect(self, client: nn.Module, download: Download) -> Upload:
        """Return the unit and the tensors that a trained client sends back."""

    def keep(self, client: nn.Module, download: Download, upload: Upload) -> Tensors:
        """Return what the device keeps for the client's next turn, ``Download.client_state``; by default nothing.

        It stays on the device: in a simulation, in memory and checkpoints of the process; elsewhere, with the client's
        own data. It counts once the server has received the upload of the turn.

        Args:
            client: The trained client.
            download: What it was sent, with the state of its last turn.
            upload: What it sends back, as the server's round adds it.
        """
        return {}

    def own_model(self, client_state: Tensors) -> Tensors:
        """The values of the client's own model that differ from the server's, given its state; by default none."""
        return {}


@dataclass(frozen=True, eq=False)
class DeviceTurn:
    """A client's turn, as the device ends of filters see it.

    Attributes:
        client: The user's module in the client's form.
        download: What the client was sent.
        kept: What this filter kept for the client in its last turn; empty before there is one.
        parties: The secrets with which clients mask their updates.
    """

    client: nn.Module
    download: Download
    kept: Tensors
    parties: Parties


class DeviceEnd:
    """The end of a filter that acts on a device: a frozen, picklable object without access to the server.

    By default nothing happens to what comes and goes.

    Attributes:
        keeps: Whether `leave` returns something to keep for the client's next turn.
        hides_values: Whether the server cannot see the values of what `leave` returns, only sums of them.
        says_nothing: Whether uploads say nothing besides their tensors: no loss, no metrics, no seconds.
    """

    keeps: ClassVar[bool] = False
    hides_values: ClassVar[bool] = False
    says_nothing: ClassVar[bool] = False

    def enter(self, turn: DeviceTurn) -> None:
        """A client has been loaded, and may get values of its own before it trains."""

    def phases(self, client: nn.Module, phases: Sequence[StepActions]) -> Sequence[StepActions]:
        """The phases of a client's training, given those of the algorithm."""
        return phases

    def trainer(self, trainer: LocalTrainer, settings: LocalSettings) -> LocalTrainer:
        """What runs clients' local epochs, given what would without this filter; errors end the run."""
        return trainer

    def leave(self, turn: DeviceTurn, upload: Upload) -> tuple[Upload, Tensors]:
        """What leaves the device in place of an upload, and what is kept for the client's next turn.

        An upload that is left out passes, too, with `Upload.left_out` and without tensors; nothing is kept then.

        Raises:
            DeviceError: If it must not leave.
        """
        return upload, {}

    def unpack(self, download: Download, upload: Upload) -> Upload:
        """The new values that the tensors of an upload stand for; called at the server, and for what devices keep.

        Raises:
            ValueError: If tensors have the names, types and shapes that `leave` gives them, but impossible values.
        """
        return upload

    def sized(self, turn: DeviceTurn, upload: Upload) -> Upload:
        """An upload whose tensors have the names, types and shapes of those that `leave` returns.

        Costs and checks of uploads need no more; by default the upload of the client as it is.
        """
        return self.leave(turn, upload)[0]

    def own_model(self, kept: Tensors) -> Tensors:
        """The values of the client's own model that differ from the server's, given what is kept; by default none."""
        return {}


@dataclass(frozen=True)
class Instructions:
    """What a device is told once in a run: the algorithm's half, and the filters that act on what comes and goes.

    Attributes:
        side: The device half of the algorithm.
        ends: The device ends of the filters by name, the one next to the algorithm first.
    """

    side: ClientSide
    ends: Mapping[str, DeviceEnd] = field(default_factory=dict)

    @property
    def side_keeps_state(self) -> bool:
        """Whether the algorithm's half keeps something from turn to turn: whether it defines `ClientSide.keep`."""
        return getattr(self.side.keep, "__func__", None) is not ClientSide.keep

    @property
    def keeps_state(self) -> bool:
        """Whether devices keep something from turn to turn."""
        return self.side_keeps_state or any(end.keeps for end in self.ends.values())

    @property
    def says_nothing(self) -> bool:
        """Whether uploads say nothing besides their tensors."""
        return any(end.says_nothing for end in self.ends.values())

    def load(self, client: nn.Module, download: Download) -> None:
        """Give a client the downloaded values, and then its own."""
        self.side.load(client, self._of_algorithm(download))
        for name, end in reversed(list(self.ends.items())):
            end.enter(self._turn(name, client, download))

    def phases(self, client: nn.Module, download: Download) -> Sequence[StepActions]:
        """What to do in each local step, phase by phase; at least one."""
        started = self.side.start(client, self._of_algorithm(download))
        phases: Sequence[StepActions] = started if isinstance(started, Sequence) else [started or StepActions()]
        for end in self.ends.values():
            phases = end.phases(client, phases)
        return phases

    def sized(self, client: nn.Module, download: Download) -> Upload:
        """An upload of the client as it is, with the names, types and shapes of tensors that a device sends."""
        upload = self.side.collect(client, self._of_algorithm(download))
        for name, end in self.ends.items():
            upload = end.sized(self._turn(name, client, download), upload)
        return upload

    def leave(
        self, client: nn.Module, download: Download, upload: Upload, parties: Parties | None = None
    ) -> tuple[Upload, dict[str, Tensor]]:
        """What leaves the device in place of an upload, and what it keeps for the client's next turn."""
        if upload.left_out is not None:
            upload = replace(upload, tensors={})
        kept, seen, is_hidden = dict[str, Tensor](), upload, False  # seen by the server's round
        for name, end in self.ends.items():
            upload, own = end.leave(self._turn(name, client, download, parties), upload)
            if own and not end.keeps:
                raise TypeError(f"{type(end).__name__} keeps {', '.join(own)} for the next turn; set `keeps = True`.")
            kept |= {f"{name}/{key}": tensor for key, tensor in own.items()}
            is_hidden |= end.hides_values
            seen = seen if is_hidden else upload
        if upload.left_out is not None:
            return upload, {}
        if self.side_keeps_state:
            kept |= self.side.keep(client, self._of_algorithm(download), self.unpack(download, seen))
        return upload, kept

    def unpack(self, download: Download, upload: Upload) -> Upload:
        """The upload as the algorithm's round adds it, as far as the server can see it; errors as for `DeviceEnd`."""
        for end in reversed(list(self.ends.values())):
            if end.hides_values:
                return upload
            upload = end.unpack(download, upload)
        return upload

    def own_model(self, client_state: Tensors) -> dict[str, Tensor]:
        """The values of a client's own model that differ from the server's, given its state."""
        kept = self._kept_by(client_state)
        own = dict(self.side.own_model(kept[""]))
        for name, end in self.ends.items():
            own |= end.own_model(kept[name])
        return own

    def _kept_by(self, client_state: Tensors) -> dict[str, dict[str, Tensor]]:
        """What each filter has kept of a client, by its own names, and the algorithm, whose name is empty."""
        kept: dict[str, dict[str, Tensor]] = {name: {} for name in ("", *self.ends)}
        for name, tensor in client_state.items():
            keeper = max((end for end in self.ends if name.startswith(f"{end}/")), key=len, default="")
            kept[keeper][name.removeprefix(f"{keeper}/") if keeper else name] = tensor
        return kept

    def _of_algorithm(self, download: Download) -> Download:
        if not download.client_state:  # spares most clients several copies of it
            return download
        return replace(download, client_state=self._kept_by(download.client_state)[""])

    def _turn(self, name: str, client: nn.Module, download: Download, parties: Parties | None = None) -> DeviceTurn:
        return DeviceTurn(client, download, self._kept_by(download.client_state)[name], parties or Parties())


@dataclass(eq=False, repr=False)
class Device:
    """Turns a `Download` into an `Upload`, without access to the server or the round.

    The user's module is a client while `run` trains, and the server at any other time. A user's dropout and
    augmentations draw from the process's global generators, which are seeded for each client. Where other code shares
    the process, `generators` must be saved before a round and restored after it.

    Args:
        module: The user's module.
        instructions: The device half of the algorithm, and what acts on what comes and goes.
        optimizers: The user's optimizers of its parameters; exactly one unless the module uses manual optimisation.
        data: Maps a download to the data of its client.
        settings: Settings shared by the local training of all clients.
        local_trainer: Runs a client's local epochs.
        attach: Called with the recorder and the module in each turn, to let it log there, and e.g. to attach the
            Trainer; what it sets is put back.
        profile: Maps the name of a stage to a context manager that is entered around it.
        owned: Whether the module is this device's alone, and not the server's.
    """

    module: nn.Module
    instructions: Instructions
    optimizers: Sequence[Optimizer]
    data: Callable[[Download], ClientData]
    settings: LocalSettings
    local_trainer: LocalTrainer = LocalLoop
    attach: Callable[[Recorder, Any], None] = log_to
    profile: Profile = nullcontext
    owned: bool = False

    def __post_init__(self) -> None:
        self.optimizers = tuple(self.optimizers)
        self.generators = GlobalGenerators([self.settings.placement.device])
        self.forms = Forms(self.module, self.instructions.side.take_form, self.optimizers, self.owned)
        self.kept, self.parties, self._recorder = KeptTensors(), Parties(), Recorder(self.module)
        for end in self.instructions.ends.values():
            self.local_trainer = end.trainer(self.local_trainer, self.settings)
        self._train: Train | None = None
        self._measure: Train | None = None
        self._local_optimizers: dict[float, tuple[Form, Mapping[str, StandIn], tuple[LocalOptimizer, ...]]] = {}
        self._num_compared = 0

    def run(self, download: Download) -> Upload:
        """Train for one client; a failure, or the loss of a frozen tensor, is reported in the upload.

        Its tensors are in the memory of the client, in which the next one trains.

        Raises:
            ValueError: If gradients reach weights that are the server's and not the client's.
        """
        if download.frozen and (missing := self.kept.missing(download)):
            return Upload(download.unit, {}, missing=missing)
        clock = StageClock(self.profile)
        try:
            try:
                with self.settings.alone():
                    upload, state = self._answer(download, clock)
            finally:
                self.forms.give_back()
        finally:
            self.forms.give_back()  # Ctrl-C may have kept the first from beginning
        upload = replace(upload, client_state=state, seconds={key: clock.seconds[key] for key in ("load", "train")})
        return upload.without_figures() if self.instructions.says_nothing else upload

    def _answer(self, download: Download, clock: StageClock) -> tuple[Upload, Tensors]:
        """What leaves the device once the client has trained, or failed, and what the device keeps."""
        try:
            download, upload = self._turn(download, clock)
        except _Failed as failed:
            upload = Upload(download.unit, {}, left_out="error", failure=failed.failure)
        measuring = clock.measure("train") if self.instructions.ends else nullcontext()
        try:
            with measuring, _during("collecting", passing=(DeviceError, RecordError)):
                left, state = self.instructions.leave(self.module, download, upload, self.parties)
        except _Failed as failed:
            return Upload(download.unit, {}, left_out="error", failure=failed.failure), {}
        if state and not all(map(math.isfinite, largest_magnitudes(state).values())):
            return Upload(download.unit, {}, loss=left.loss, left_out="not_finite"), {}  # the last state is kept
        return left, state

    def _turn(self, download: Download, clock: StageClock) -> tuple[Download, Upload]:
        """What the client was sent, with what the device has of it, and what it sends back before filters act."""
        with clock.measure("load"), _during("loading"):
            download = self.kept.complete(download) if download.frozen else download
            form = self.forms.take(download.capacity, download.tensors.keys())
            self.attach(self._recorder, self.module)
            isolate_metrics(self._recorder.metrics)
            self.instructions.load(self.module, download)
        module, hooks, kept = self.module, self.settings.local_hooks, self.forms.kept
        side = self.instructions.side
        assert kept is not None, "the module is a client"
        is_watched = download.round_idx < WATCHED_ROUNDS
        stage = _during("local training", lambda: bool(form.replaced), lambda: shapes_of(self._recorder.batch))
        with clock.measure("train"), stage:
            self._seed(download, kept)
            trains, data = download.local_epochs > 0, self.data(download)
            loss_before = self._loss(download, data) if side.reads_loss and trains else math.nan
            phases = self._phases(form, download, data)
            task = next(phases)
            changed = self._comparison(form, kept) if is_watched and trains else tuple
            if self._train is None:  # only now the module has the hooks of a client
                self._train = self.local_trainer(module, self.optimizers, self.settings)
            stand_ins = self._local_optimizers[download.capacity][1]
            watched: dict[str, nn.Parameter] = {}
            for name, stand_in in stand_ins.items() if is_watched else ():
                if stand_in.layer and (parameter := module.get_parameter(name)).requires_grad:
                    watched.setdefault(stand_in.layer, parameter)
            result, unreached, num_steps = LocalResult(0, math.nan), list(watched), 0
            for phase in chain([task], phases if trains else ()):
                with ExitStack() as blocks:
                    left = watching({name: watched[name] for name in unreached}, blocks)
                    for hook in hooks if trains else ():
                        blocks.enter_context(hook.while_training(module, data))
                    result = self._train(phase)
                unreached, num_steps = [*left], num_steps + result.num_steps
        check_not_reached(form.replaced)
        with _during("local training"):
            if is_watched:
                check_same_buffers(module, form.buffers)
            for optimizer in self.optimizers:
                check_still_own(optimizer, module)
        if num_steps == 0 and trains:
            own = module.named_parameters()
            if not any(bool((p != download.tensors[name]).any()) for name, p in own if name in download.tensors):
                return download, Upload(download.unit, {}, loss=result.loss, left_out="no_update")
            num_steps = download.steps_in(data.num_batches)  # optimizers that step by other methods, as SAM does
        put_back = changed()  # before the algorithm clears away what it has set
        with _during("collecting"):
            upload = side.collect(module, download)
            logged = {**upload.logged, **self._recorder.finish_client()}
            rows = {name: own for hook in hooks for name, own in hook.untrained_rows(module, data).items()}
        sent, returned = download.tensors, upload.tensors
        return download, replace(
            upload,
            num_steps=num_steps,
            loss=result.loss,
            loss_before=loss_before,
            logged=logged,
            untrained_rows=rows,
            unreached=tuple(unreached) if is_watched and num_steps > 0 else None,
            discarded=discarded_changes(module, self.optimizers, sent, returned) if is_watched else (),
            put_back=put_back,
        )

    def _seed(self, download: Download, kept: KeptState) -> None:
        """Seed all generators, as a turn begins."""
        self.generators.seed(derived_seed(download.seed, "local training", *download.ids))
        kept.seed(download.seed, download.ids)

    def _comparison(self, form: Form, kept: KeptState) -> Callable[[], tuple[str, ...]]:
        """What names the attributes that this client changes, in the first turns."""
        if self._num_compared >= COMPARED_TURNS:
            return tuple
        self._num_compared += 1
        changed = changed_attributes(self.module, form.replaced.keys())
        large = kept.not_kept()

        def noted(name: str) -> str:
            is_large = any(path == name or path.startswith((f"{name}.", f"{name}[")) for path in large)
            return name + TOO_LARGE if is_large else name

        return lambda: tuple(map(noted, changed()))

    def _loss(self, download: Download, data: ClientData) -> float:
        """The client's mean loss at the downloaded weights; what the pass changes in the module is put back."""
        if self._measure is None:
            self._measure = LossLoop(self.module, self.optimizers, self.settings)
        self._recorder.start_client()
        with trying(self.module):
            return self._measure(LocalTask(download, data, self._recorder)).loss

    def _phases(self, form: Form, download: Download, data: ClientData) -> Iterator[LocalTask]:
        """Prepare the client's tasks, most often one; each begins with the state that the server has."""
        known, _, local_optimizers = self._local_optimizers.get(download.capacity, (None, {}, ()))
        if known is not form:
            names = {id(tensor): name for name, tensor in form.server.items()}
            stand_ins = self.instructions.side.stand_ins(self.module)
            local_optimizers = tuple(LocalOptimizer(one, names, self.module, stand_ins) for one in self.optimizers)
            self._local_optimizers[download.capacity] = form, stand_ins, local_optimizers
        for local, options in zip(local_optimizers, download.options, strict=True):
            local.start_client(options)
        self._recorder.start_client()
        phases = self.instructions.phases(self.module, download)
        rewind: list[Callable[[], object]] = []
        if len(phases) > 1:
            kept = KeptState(self.module)
            rewind = [kept.restore, partial(self._seed, download, kept), *(one.as_now() for one in local_optimizers)]
        needed = [p for p in self.module.parameters() if p.requires_grad] if rewind else []
        first_epoch = 0
        for number, actions in enumerate(phases):
            for act in rewind if number > 0 else ():
                act()
            if actions.prepare is not None:
                actions.prepare()
            before_step = []
            for optimizer in self.optimizers:  # the user's local hooks in order, then the algorithm's
                acts = [hook.start_client(self.module, optimizer) for hook in self.settings.local_hooks]
                acts.append(None if actions.before_step is None else partial(actions.before_step, optimizer))
                before_step.append([act for act in acts if act is not None])
            around = actions.before_forward, actions.after_forward
            own, length = actions.epochs, data.num_batches
            steps = download.steps_in(length) if own is None else own * length
            end = first_epoch + math.ceil(steps / max(length, 1))
            yield LocalTask(download, data, self._recorder, *around, before_step, range(first_epoch, end), steps)
            first_epoch = end
        for parameter in needed:  # a phase may train only some of them
            parameter.requires_grad_()


class _Failed(Exception):
    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@contextmanager
def _during(
    stage: str,
    has_other_shapes: Callable[[], bool] = lambda: False,
    shapes: Callable[[], str] = str,
    passing: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
    """Raise any failure within the block as a `_Failed` that names the stage; those of types ``passing`` as they are.

    For the remedy, ``has_other_shapes`` says whether the client's parameters have other names or shapes than the
    server's, and ``shapes`` names those of the current batch.
    """
    try:
        yield
    except passing:
        raise
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        remedies = REMEDIES | OF_BATCHES | dict.fromkeys(OTHER_SHAPES if has_other_shapes() else (), SMALLER)
        if remedy := next((remedy for words, remedy in remedies.items() if words in str(error)), ""):
            batch = f" in a batch of {shapes()}" if remedy in OF_BATCHES.values() and shapes() else ""
            message = f"{message.rstrip(' .')}{batch}. {remedy}"
        raise _Failed(Failure(stage, message, error, remedy)) from error


def watching(parameters: Mapping[str, nn.Parameter], blocks: ExitStack) -> Collection[str]:
    """Watch which parameters, each by its layer's name, get a gradient until the blocks end; the names without."""
    unreached = dict.fromkeys(parameters)
    for name, parameter in parameters.items():
        handle = parameter.register_post_accumulate_grad_hook(lambda _, name=name: unreached.pop(name, None))  # type: ignore[no-untyped-call]
        blocks.enter_context(handle)
    return unreached.keys()


def check_not_reached(replaced: Mapping[str, Tensor]) -> None:
    """Check that no gradient reached server parameters that the client holds in another form."""
    if reached := [name for name, parameter in replaced.items() if parameter.grad is not None]:
        raise ValueError(
            f"A client's `training_step` uses parameters that it does not hold ({', '.join(reached)}), by a variable "
            "or a list that refers to the parameters themselves, so they would not be trained; refer to their layers, "
            "and read `layer.weight`, or keep these layers whole with `exclude`."
        )


@torch.no_grad()
def discarded_changes(
    client: nn.Module, optimizers: Sequence[Optimizer], sent: Tensors, returned: Tensors
) -> tuple[str, ...]:
    """Names of the parameters, flags and counters that changed without an optimizer, and that are not sent back.

    Counts of BatchNorm's batches are left out: nobody reads them.

    Args:
        client: The sub-model after training.
        optimizers: Its optimizers.
        sent: What it was loaded with.
        returned: What it sends back.

    Example:
        >>> teacher = nn.Linear(2, 1).requires_grad_(False)
        >>> sent = {name: p.clone() for name, p in teacher.named_parameters()}
        >>> _ = teacher.bias.add_(1.0)
        >>> discarded_changes(teacher, [], sent, {})
        ('bias',)
    """
    stepped = {id(p) for p in trainable_parameters(optimizers)}
    kept = {
        name: tensor
        for name, tensor in named_state(client).items()
        if id(tensor) not in stepped and name in sent and (tensor.requires_grad or name not in returned)
        if isinstance(tensor, nn.Parameter) or not (tensor.is_floating_point() or name.endswith("num_batches_tracked"))
    }
    if not kept:
        return ()
    changed = torch.stack([(t != sent[name].to(t)).any() for name, t in kept.items()]).tolist()  # read at once
    return tuple(name for name, is_changed in zip(kept, changed, strict=True) if is_changed)
