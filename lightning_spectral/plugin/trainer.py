"""What a federated fit asks of a Trainer: rounds to count, stages to profile, a precision for clients, and silence."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property
from typing import Any, ClassVar, NoReturn

import lightning.pytorch as pl
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_spectral.client.local_loop import Placement, Recorder
from lightning_spectral.plugin.user_hooks import is_overridden, replaced


def num_rounds(trainer: pl.Trainer) -> int | None:
    """Number of rounds of a fit, from the first to the last; ``None`` if it continues until it is stopped."""
    epochs, steps = trainer.max_epochs, trainer.max_steps
    if epochs is None:
        epochs = 1000 if steps == -1 else -1  # as Lightning decides when it fits
    limits = [limit for limit in (epochs, steps) if limit != -1]
    return min(limits) if limits else None


STAGE = "[Federated]{}".format  # the name of a stage of a round in Lightning's profiler


class RoundsAsSteps(pl.Callback):
    """Gives a Trainer the settings of a federated fit, and restores its own settings however the fit ends.

    - ``limit_train_batches`` limits the cohort; a round is a single batch, with all clients of a process.
    - Metrics come once per round, which Lightning should not mistake for logging too rarely.
    - Without validation data there is neither validation nor a warning that it is missing.
    - A `LearningRateMonitor` logs once per round, not twice.
    - A `ModelCheckpoint` with ``train_time_interval`` or ``every_n_train_steps`` looks after each round as in plain
      Lightning, which ignores the first and warns of the second under manual optimisation, as a federation's is.
    - The profiler also records the one stage of a round that Lightning runs itself: validation.
    """

    def __init__(self) -> None:
        self._replaced, self._validation = ExitStack(), ExitStack()

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        pl_module.federation.cohorts.begin(trainer.limit_train_batches)
        settings: dict[str, Any] = {"log_every_n_steps": 1}
        if trainer.limit_train_batches != 0:  # with 0 Lightning trains nothing, and reports it
            settings["limit_train_batches"] = 1.0
        if not getattr(trainer.datamodule, "has_val", True):  # type: ignore[attr-defined]
            settings["limit_val_batches"] = 0
        self._replaced.enter_context(replaced(trainer, **settings))
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, LearningRateMonitor):
                self._replaced.enter_context(replaced(callback, logging_interval="epoch"))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        as_automatic: Any = Lookalike(pl_module, automatic_optimization=True)
        for callback in trainer.checkpoint_callbacks:
            if (own := vars(callback)).get("_train_time_interval") is not None or own.get("_every_n_train_steps"):
                callback.on_train_batch_end(trainer, as_automatic, outputs, batch, batch_idx)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._validation.enter_context(trainer.profiler.profile(STAGE("validate")))  # type: ignore[attr-defined]

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validation.close()

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        self.on_validation_end(trainer, pl_module)  # a profiler cannot restart what it has not stopped
        pl_module.federation.abandon_round()
        self.teardown(trainer, pl_module, "fit")  # after an error Lightning does not call it

    def teardown(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        self._replaced.close()


class Lookalike:
    """An object to look at, which seems to be another one with some attributes replaced."""

    def __init__(self, of: Any, **attributes: Any) -> None:
        vars(self).update(attributes, of=of)

    __class__ = property(lambda self: type(self.of))

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["of"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.of, name, value)


class NoLogger:
    """What a client of a private run sees in place of a logger: what it writes there would not be hidden."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"A client of a private run cannot use `logger.{name}`: what it logs would tell of its examples, without "
            "noise. Log at the server, in `validation_step` or a callback."
        )


class ClientTrainer(Lookalike):
    """The Trainer as a module sees it while it is a client: as in a plain fit on this client's data alone.

    An epoch is a round, which has ``local_epochs`` passes over the data, or ``local_steps`` batches. What is not the
    client's is the run's: loggers, callbacks, metrics of the rounds before.

    Args:
        of: The run's Trainer.
        module: The user's module.
        optimizers: The user's optimizers.
        recorder: Knows where the client's training is.
        is_private: Whether nothing that a client says may leave it, apart from its update.
    """

    OF_THE_CLIENT: ClassVar[Mapping[str, Callable[[Any], Any]]] = {
        "task": lambda own: own.recorder.task,
        "num_training_batches": lambda own: own.task.data.num_batches,
        "is_last_batch": lambda own: own.recorder.batch_idx + 1 == own.num_training_batches,
        "train_dataloader": lambda own: own.task.data.loader(),
        "datamodule": lambda own: Lookalike(own.of.datamodule, train_dataloader=own.task.data.loader),
        "steps_per_round": lambda own: own.task.download.steps_in(own.num_training_batches),
        "global_step": lambda own: own.current_epoch * own.steps_per_round + own.recorder.num_steps,
        "max_steps": lambda own: own.of.max_steps if own.of.max_steps < 0 else own.of.max_steps * own.steps_per_round,
        "estimated_stepping_batches": lambda own: own.of.estimated_stepping_batches * own.steps_per_round,
        "fit_loop": lambda own: Lookalike(
            own.of.fit_loop,
            batch_idx=own.recorder.batch_idx,
            max_batches=own.num_training_batches,
            epoch_loop=Lookalike(own.of.fit_loop.epoch_loop, batch_idx=own.recorder.batch_idx),
        ),
        "loggers": lambda own: [NoLogger()] * len(own.of.loggers) if own.is_private else own.of.loggers,
        "logger": lambda own: next(iter(own.loggers), None),
    }

    def __init__(
        self, of: Any, module: Any, optimizers: Sequence[Any], recorder: Recorder, is_private: bool = False
    ) -> None:
        single = {"world_size": 1, "num_devices": 1, "num_nodes": 1, "global_rank": 0, "local_rank": 0, "node_rank": 0}
        super().__init__(of, model=module, lightning_module=module, is_global_zero=True, **single)
        vars(self).update(optimizers=list(optimizers), recorder=recorder, is_private=is_private)

    @cached_property
    def strategy(self) -> SingleDeviceStrategy:
        """One process on one device; made on first use: few modules ask for it, and each turn has its own."""
        strategy = SingleDeviceStrategy(self.of.strategy.root_device, precision_plugin=self.of.precision_plugin)
        strategy.connect(self.lightning_module)
        strategy.optimizers = self.optimizers
        return strategy

    def __getattr__(self, name: str) -> Any:
        return self.OF_THE_CLIENT[name](self) if name in self.OF_THE_CLIENT else super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "should_stop" and self.is_private:
            raise ValueError(
                "A client of a private run cannot end it by `trainer.should_stop`, which would tell of its examples; "
                "use EarlyStopping with a metric of the server."
            )
        super().__setattr__(name, value)

    def save_checkpoint(self, *args: Any, **options: Any) -> NoReturn:
        """Raise ``RuntimeError``: within a client's turn the module has the client's weights, in the client's form."""
        raise RuntimeError(
            "`trainer.save_checkpoint` within a client's turn would save the client's weights in place of the "
            "server's; use ModelCheckpoint, or call it in a RoundCallback."
        )


def convert_now(module: pl.LightningModule, precision_plugin: Any) -> None:
    """Convert a module as Lightning will, before weights are restored, so that these are not rounded to its old type.

    Only for plugins that change nothing but the type: others may replace layers, which must not happen twice.
    """
    if isinstance(precision_plugin, DoublePrecision | HalfPrecision):
        precision_plugin.convert_module(module)


@contextmanager
def full_precision(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Undo, within the block, the precision context that Lightning enters around a whole training step.

    A client enters it again only for its forward passes, as the batches of a plain Trainer would. Autocast's cache of
    converted weights, which Lightning 2.4 leaves on, would outlive these passes within a context: it stays off.
    True-half and true-double precision change the default type of floating-point tensors: ``dtype`` is restored.
    """
    inside = torch.get_default_dtype()
    if inside == dtype and not torch.is_autocast_enabled(device.type):
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        with torch.autocast(device.type, enabled=False, cache_enabled=False):
            yield
    finally:
        torch.set_default_dtype(inside)


def placement_of(trainer: pl.Trainer, device: torch.device, *hooked: Any) -> Placement:
    """The placement of clients in a Trainer's precision; ``hooked`` are the module, and data, whose batch hooks act."""
    precision: Any = trainer.precision_plugin
    own = any(is_overridden(module, "transfer_batch_to_device") for module in hooked)
    names = ("train_step_context", "forward_context")
    is_plain = all(getattr(type(precision), name) is getattr(Precision, name) for name in names)
    context = nullcontext if is_plain else precision.train_step_context  # entering one takes time in every step
    scaler = getattr(precision, "scaler", None)
    return Placement(device, precision.convert_input, context, own or device.type != "cpu", scaler)


def silent_trainer(kind: type[Trainer] = Trainer, **settings: Any) -> Trainer:
    """Make a Trainer without loggers, checkpoints, bars, summaries and remarks, unless the settings say otherwise."""
    silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    with silence(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind(**{**silent, **settings})


@contextmanager
def silence() -> Iterator[None]:
    """Make Lightning log only errors within the block, and restore the levels of its loggers afterwards."""
    with ExitStack() as restored:
        for logger in map(logging.getLogger, ("lightning.pytorch", "lightning.fabric")):
            restored.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        yield
