"""What a federated fit asks of a Trainer: rounds to count, stages to profile, a precision for clients, and silence."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.amp.grad_scaler import GradScaler

from lightning_spectral.client.local_loop import Placement
from lightning_spectral.plugin.host import Host
from lightning_spectral.plugin.user_hooks import is_overridden


def num_rounds(trainer: pl.Trainer) -> int | None:
    """Number of rounds of a fit, from the first to the last; ``None`` if it continues until it is stopped.

    Example:
        >>> num_rounds(pl.Trainer(max_epochs=20, max_steps=15, accelerator="cpu", logger=False))
        15
    """
    epochs, steps = trainer.max_epochs, trainer.max_steps
    if epochs is None:
        epochs = 1000 if steps == -1 else -1  # as Lightning decides when it fits
    limits = [limit for limit in (epochs, steps) if limit != -1]
    return min(limits) if limits else None


class RoundsAsSteps(pl.Callback):
    """Gives a Trainer the settings of a federated fit, and restores its own settings however the fit ends.

    - ``limit_train_batches`` limits the cohort; a round is a single batch, with all clients of a process.
    - Metrics come once per round, which Lightning should not mistake for logging too rarely.
    - Without validation data there is neither validation nor a warning that it is missing.
    - A `LearningRateMonitor` logs once per round, not twice.
    - A `ModelCheckpoint` with a ``train_time_interval`` looks at the clock after each round. Lightning ignores the
      interval under manual optimisation, which is what a federation is to it.
    """

    def __init__(self) -> None:
        self._own: list[tuple[object, dict[str, Any]]] = []

    def setup(self, trainer: pl.Trainer, pl_module: Host, stage: str) -> None:  # type: ignore[override]
        if stage != "fit":
            return
        pl_module.cut_cohort(trainer.limit_train_batches)
        settings: dict[str, Any] = {"log_every_n_steps": 1}
        if trainer.limit_train_batches != 0:  # with 0 Lightning trains nothing, and reports it
            settings["limit_train_batches"] = 1.0
        if not getattr(trainer.datamodule, "has_val", True):  # type: ignore[attr-defined]
            settings["limit_val_batches"] = 0
        self._apply(trainer, settings)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, LearningRateMonitor):
                self._apply(callback, {"logging_interval": "epoch"})

    def _apply(self, to: object, settings: dict[str, Any]) -> None:
        self._own.append((to, {name: getattr(to, name) for name in settings}))
        _set(to, settings)

    def on_train_batch_end(  # type: ignore[override]
        self, trainer: pl.Trainer, pl_module: Host, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        as_automatic: Any = _Automatic(pl_module)
        for callback in trainer.checkpoint_callbacks:
            if getattr(callback, "_train_time_interval", None) is not None:
                callback.on_train_batch_end(trainer, as_automatic, outputs, batch, batch_idx)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._restore()

    def on_exception(self, trainer: pl.Trainer, pl_module: Host, exception: BaseException) -> None:  # type: ignore[override]
        pl_module.abandon_round()
        self._restore()  # after an error Lightning does not call `teardown`

    def _restore(self) -> None:
        for owner, settings in self._own:
            _set(owner, settings)
        self._own = []


class _Automatic:
    """A module for a callback to look at, as if its optimisation were automatic."""

    automatic_optimization = True

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _set(owner: object, settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        setattr(owner, name, value)


def action_name(stage: str) -> str:
    """The name of a stage in the profiler.

    Example:
        >>> action_name("train")
        '[Federated]train'
    """
    return f"[Federated]{stage}"


class RoundStages(pl.Callback):
    """Records the one stage that Lightning runs itself in the profiler: validation within a fit."""

    def __init__(self) -> None:
        self._is_open = False

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            trainer.profiler.start(action_name("validate"))  # type: ignore[attr-defined]
            self._is_open = True

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._is_open:
            trainer.profiler.stop(action_name("validate"))  # type: ignore[attr-defined]
            self._is_open = False

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.on_validation_end(trainer, pl_module)  # a profiler cannot restart what it has not stopped


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


@contextmanager
def scaled_by(scaler: GradScaler | None, precision_plugin: Any) -> Iterator[None]:
    """Give Lightning's precision plugin another gradient scaler within the block, if it scales gradients at all.

    Clients scale their gradients with scalers of their own. The server's pseudo-gradient is not scaled, so Lightning
    must not divide it by a scale when the server steps; the scaler is then ``None``.
    """
    own = getattr(precision_plugin, "scaler", None)
    if own is None:
        yield
        return
    precision_plugin.scaler = scaler
    try:
        yield
    finally:
        precision_plugin.scaler = own


def placement_of(trainer: pl.Trainer, device: torch.device, *hooked: Any) -> Placement:
    """The placement of clients in a Trainer's precision.

    Args:
        trainer: The Trainer.
        device: Device of the sub-models.
        *hooked: The module, and perhaps the data module, whose batch hooks act.
    """
    precision: Any = trainer.precision_plugin
    own = any(is_overridden(module, "transfer_batch_to_device") for module in hooked)
    scaler = getattr(precision, "scaler", None)
    return Placement(device, precision.convert_input, _forward_context(precision), own or device.type != "cpu", scaler)


def _forward_context(precision: Precision) -> Callable[[], AbstractContextManager[Any]]:
    """The context of a client's forward pass; none in full precision, since entering one takes time in every step."""
    names = ("train_step_context", "forward_context")
    is_plain = all(getattr(type(precision), name) is getattr(Precision, name) for name in names)
    return nullcontext if is_plain else precision.train_step_context


def quiet_trainer(like: Trainer, **settings: Any) -> Trainer:
    """Make a silent Trainer, with some settings, that has the device and precision of another."""
    own = {
        "strategy": _StaysOnDevice(like.strategy.root_device, like.accelerator, precision_plugin=like.precision_plugin),
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        "detect_anomaly": torch.is_anomaly_enabled(),
        "default_root_dir": like.default_root_dir,
    }
    return silent_trainer(**{**own, **settings})


def silent_trainer(kind: type[Trainer] = Trainer, **settings: Any) -> Trainer:
    """Make a Trainer without loggers, checkpoints, bars, summaries and remarks, unless the settings say otherwise."""
    silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    with silence(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind(**{**silent, **settings})


@contextmanager
def silence() -> Iterator[None]:
    """Make Lightning log only errors within the block, and restore the levels of its loggers afterwards.

    Example:
        >>> with silence():
        ...     logging.getLogger("lightning.pytorch").level == logging.ERROR
        True
    """
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class _StaysOnDevice(SingleDeviceStrategy):
    """Leaves module and optimizers where they are when a fit ends, since the device is the other Trainer's."""

    def teardown(self) -> None: ...  # Lightning's own would move the module to the CPU and empty the device's cache
