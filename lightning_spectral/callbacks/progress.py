"""A progress bar that counts rounds and clients."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm


class RoundProgressBar(TQDMProgressBar):
    """Lightning's bar in the words of federated learning: ``Round 3/20:  40%|... 4/10 clients``.

    Metrics that were logged with ``prog_bar=True`` stand beside it, as always.

    Example:
        >>> bar = RoundProgressBar(refresh_rate=10)  # Trainer(callbacks=[bar])
    """

    def init_train_tqdm(self) -> Tqdm:
        """The bar of one round; its items are clients."""
        bar = super().init_train_tqdm()
        bar.unit = " clients"
        return bar

    def on_train_epoch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Begin a round."""
        super().on_train_epoch_start(trainer, *args)
        total = "" if trainer.max_epochs in (None, -1) else f"/{trainer.max_epochs}"
        self.train_progress_bar.set_description(f"Round {trainer.current_epoch + 1}{total}")

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """The metrics without the logger's version number, which says nothing about the run."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return dict(metrics)
