"""Makes Lightning count rounds instead of clients."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import LearningRateMonitor

from lightning_spectral.plugin.host import Host


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
