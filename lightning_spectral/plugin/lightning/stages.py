"""The stages of a round, by name, in Lightning's profiler."""

from __future__ import annotations

import lightning.pytorch as pl


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
