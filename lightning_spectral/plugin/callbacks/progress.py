"""The progress of a run: a bar that counts rounds and clients, or lines where no bar is drawn."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.utilities import rank_zero_only

from lightning_spectral.arguments import Number, Whole
from lightning_spectral.plugin.callbacks.round_callback import RoundCallback
from lightning_spectral.plugin.logs import NewlyLogged
from lightning_spectral.plugin.trainer import num_rounds
from lightning_spectral.protocol.records import RoundSummary
from lightning_spectral.server.metrics import mean_loss
from lightning_spectral.server.round import Turn


class RoundProgressBar(TQDMProgressBar, RoundCallback):
    """One bar for all rounds of a run; the remaining time is that of the whole run.

    ``Round 3/20:  12%|#2        | [00:31<03:47, clients=4/10, loss=0.52, down=1.2 MB, up=1.1 MB, s/round=12.8]``

    ``loss`` is that of the clients so far, then the round's. Bytes and seconds are those of the last finished round.
    Metrics logged with ``prog_bar=True`` are shown as usual. Without a terminal or a notebook there is no bar.

    Args:
        refresh_rate: Clients between two updates of the bar.
        process_position: Lines to leave above the bar.

    Example:
        >>> bar = RoundProgressBar(refresh_rate=10)  # Trainer(callbacks=[bar])
    """

    BAR_FORMAT = "{l_bar}{bar}| [{elapsed}<{remaining}{postfix}]"

    def __init__(self, refresh_rate: int = 1, process_position: int = 0) -> None:
        count = Whole(at_least=0)
        super().__init__(count("refresh_rate", refresh_rate), count("process_position", process_position))
        self._progress: dict[str, Any] = {}
        self._losses: dict[str, tuple[float, int]] = {}
        self._bytes, self._start = [0, 0], 0.0
        self._done = self._cohort = 0

    @property
    def is_enabled(self) -> bool:
        return bool(super().is_enabled) and (sys.stdout.isatty() or "ipykernel" in sys.modules)

    def init_train_tqdm(self) -> Tqdm:
        return Tqdm(
            desc="Rounds",
            total=num_rounds(self.trainer),
            initial=self.trainer.current_epoch,
            position=2 * self.process_position,
            disable=self.is_disabled,
            dynamic_ncols=True,
            file=sys.stdout,
            smoothing=0,
            bar_format=self.BAR_FORMAT,
        )

    def init_validation_tqdm(self) -> Tqdm:
        """No bar within a fit, whose own bar shows that validation is running."""
        if self.trainer.state.fn != "fit":
            return super().init_validation_tqdm()
        self.train_progress_bar.set_description(f"{round_title(self.trainer)}, validating")
        return Tqdm(disable=True)

    def on_train_epoch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self._losses, self._bytes, self._start = {}, [0, 0], time.perf_counter()
        self.train_progress_bar.set_description(round_title(trainer))

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._done, self._cohort = 0, len(batch.units)

    def on_client_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, turn: Turn) -> None:
        if turn.upload is not None and turn.upload.num_steps > 0 and not turn.is_masked:
            name = f"{turn.unit.model} loss".lstrip()  # the name of an only model is empty
            total, size = self._losses.get(name, (0.0, 0))
            total, size = total + turn.upload.loss * turn.num_examples, size + turn.num_examples
            self._losses[name], self._progress[name] = (total, size), total / size
        self._done += 1
        if self.is_enabled and self._done < self._cohort and self._done % self.refresh_rate == 0:
            self._show(trainer, pl_module, self._done / self._cohort)

    def on_round_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, summary: RoundSummary) -> None:
        self._bytes = [so_far + new for so_far, new in zip(self._bytes, round_bytes(summary), strict=True)]
        name = f"{summary.model} loss".lstrip()
        if summary.has_losses:
            self._progress[name] = mean_loss(summary)
        elif summary.clients:
            self._progress.pop(name, None)  # the clients that trained were left out afterwards
        if not summary.is_private:
            self._progress |= {way: f"{n / 1e6:.3g} MB" for way, n in zip(("down", "up"), self._bytes, strict=True)}
        self._progress["s/round"] = time.perf_counter() - self._start

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if self.is_enabled:
            self._show(trainer, pl_module, 1.0)

    def _show(self, trainer: pl.Trainer, pl_module: pl.LightningModule, share: float) -> None:
        self.train_progress_bar.n = trainer.current_epoch + share
        counted = {"clients" if trainer.world_size == 1 else "turns": f"{self._done}/{self._cohort}"}
        self._progress = {**counted, **self._progress, **counted}  # first, and up to date
        self.train_progress_bar.set_postfix(self.get_metrics(trainer, pl_module))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.train_progress_bar.set_description(round_title(trainer))
        super().on_validation_end(trainer, pl_module)

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """The round's figures and the metrics for the bar, without the logger's version number."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return {**self._progress, **metrics} if trainer.state.fn == "fit" else metrics


class RoundLines(RoundCallback):
    """Where no progress bar is drawn, logs a line about the finished round every now and then.

    ``Round 31/60: loss 0.348, accuracy 0.9, 61.2 MB so far, 1.3 s a round, 37.7 s left``

    Every federation has this callback by default: a run of under ten seconds logs nothing, a longer one logs a line
    every ten seconds and one for its last round. Validation metrics are those of the last validation since the previous
    line. Only the first process logs lines. They go where Lightning's messages go, at level INFO, through the logger
    ``"lightning.pytorch.rounds"``. An instance of your own replaces the default one.

    Args:
        every_n_seconds: Least number of seconds between two lines; 0 for a line in every round, ``math.inf`` for none.

    Example:
        >>> lines = RoundLines(every_n_seconds=60)  # Trainer(callbacks=[lines], enable_progress_bar=False)
    """

    def __init__(self, every_n_seconds: float = 10.0) -> None:
        self.every_n_seconds: float = Number(at_least=0, finite=False)("every_n_seconds", every_n_seconds)
        self._bytes = self._first_round = 0
        self._start, self._last, self._has_logged = 0.0, 0.0, False
        self._losses: dict[str, float] = {}
        self._new = NewlyLogged()
        self._validated: dict[str, float] = {}

    def setup(self, trainer: Any, pl_module: pl.LightningModule, stage: str) -> None:
        """Let Lightning's summary show the layers of the user's module, which is a single row of the federation."""
        own = getattr(pl_module, "module", None)
        inner = own if isinstance(own, pl.LightningModule) else pl_module
        for one in trainer.callbacks:
            if isinstance(one, ModelSummary):
                vars(one)["on_fit_start"] = lambda trainer, _, one=one: type(one).on_fit_start(one, trainer, inner)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._first_round, self._has_logged, self._losses = trainer.current_epoch, False, {}
        self._start = self._last = time.perf_counter()

    def on_round_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, summary: RoundSummary) -> None:
        self._bytes += sum(round_bytes(summary))
        if summary.has_losses:
            self._losses[f"{summary.model} loss".lstrip()] = mean_loss(summary)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._new.mark(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validated = {name: value for name, value in self._new.take(trainer).items() if name != "fl/round"}

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        losses, self._losses = self._losses, {}
        now, done, total = time.perf_counter(), trainer.current_epoch + 1, num_rounds(trainer)
        is_due = now - self._last >= self.every_n_seconds or (done == total and self._has_logged)
        bar = trainer.progress_bar_callback  # a `RoundProgressBar` needs a terminal or a notebook
        is_drawn = bar is not None and not getattr(bar, "is_disabled", False)
        if not is_due or is_drawn:
            return
        values = [f"{name} {value:.3g}" for name, value in {**losses, **self._validated}.items()]
        parts = [": ".join([round_title(trainer), *values[:1]]), *values[1:]]
        if self._bytes:
            parts.append(f"{self._bytes / 1e6:.3g} MB so far")
        seconds = (now - self._start) / (done - self._first_round)
        parts.append(f"{seconds:.3g} s a round")
        if total is not None:
            left = seconds * (total - done)
            hours, rest = divmod(round(left), 3600)
            parts.append(f"{left:.1f} s left" if left < 60 else f"{hours}:{rest // 60:02d}:{rest % 60:02d} left")
        rank_zero_only(logging.getLogger("lightning.pytorch.rounds").info)(", ".join(parts))
        self._last, self._has_logged, self._validated = now, True, {}

    def state_dict(self) -> dict[str, Any]:
        return {"bytes": self._bytes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._bytes = state_dict["bytes"]


def round_title(trainer: pl.Trainer) -> str:
    """The number of the current round, from 1, and that of all if it is known."""
    total = num_rounds(trainer)
    return f"Round {trainer.current_epoch + 1}" + ("" if total is None else f"/{total}")


def round_bytes(summary: RoundSummary) -> tuple[int, int]:
    """Bytes sent in a model's round, down and up, including those of measuring before it."""
    clients = (*summary.clients, *summary.measured)
    return sum(client.downlink_bytes for client in clients), sum(client.uplink_bytes for client in clients)
