"""The metrics of every round, kept for a table or a plot at the end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

from lightning_spectral.errors import check_is
from lightning_spectral.extras import from_extra
from lightning_spectral.plugin.callbacks.newly_logged import NewlyLogged
from lightning_spectral.plugin.callbacks.round_callback import RoundCallback
from lightning_spectral.protocol.records import RoundSummary
from lightning_spectral.server.metrics import logged_by_clients, round_metrics
from lightning_spectral.tables import as_html

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 10  # rounds of a notebook's table


class RoundHistory(RoundCallback):
    """Keeps one row of metrics per round: its own (``fl/...``), those of clients and callbacks, and validation's.

    It is part of the checkpoint, so a resumed run includes the earlier rounds. A new fit needs a new history.

    Attributes:
        rows: One dictionary per round, in order.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self._from_clients: set[str] = set()
        self._new = NewlyLogged()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and self.rows and trainer.current_epoch == 0 and trainer.ckpt_path is None:
            raise ValueError(
                f"This RoundHistory already holds {len(self.rows)} rounds of another fit; "
                "give each fit its own: Trainer(callbacks=[RoundHistory()])."
            )

    def on_round_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, summary: RoundSummary) -> None:
        own = round_metrics(summary)
        own.update({name: entry.value for name, entry in logged_by_clients(summary).items()})
        if not self._belongs_to_last_row(own):
            self.rows.append({})
        self.rows[-1].update(own)
        self._from_clients |= own.keys()

    def _belongs_to_last_row(self, own: dict[str, float]) -> bool:
        """Whether another model has begun the row of this round."""
        last = self.rows[-1] if self.rows else {}
        return last.get("fl/round") == own["fl/round"] and not (own.keys() & last.keys()) - {"fl/round"}

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._new.mark(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn != "fit":  # no round precedes
            self._new.mark(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._add_new(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._add_new(trainer)

    def _add_new(self, trainer: pl.Trainer) -> None:
        new = self._new.take(trainer)
        if self.rows:
            self.rows[-1].update({name: value for name, value in new.items() if name not in self._from_clients})

    def column(self, name: str) -> list[float]:
        """One metric over the rounds that have it."""
        return [row[name] for row in self.rows if name in row]

    def plot(self, name: str | None = None, path: str | Path | None = None) -> Figure:
        """Plot a metric over the rounds; needs matplotlib (the ``examples`` extra).

        Args:
            name: The metric; ``None`` for the loss and what validation logged, side by side.
            path: An image file to write; ``None`` to return the figure alone, which a notebook shows.
        """
        names = self._plotted() if name is None else [name]
        curves = {name: [(row["fl/round"] + 1, row[name]) for row in self.rows if name in row] for name in names}
        if not all(curves.values()) or not curves:
            known = ", ".join(sorted({name for row in self.rows for name in row})) or "none"
            raise ValueError(f"no round has a metric {name or 'to plot'!r}; known metrics: {known}.")
        with from_extra("examples"):
            from lightning_spectral.report.printed import draw_line, printed, round_axis
            from lightning_spectral.report.style import look
            from lightning_spectral.report.texts import as_label

        size = (6.0 if len(curves) == 1 else 3.5 * len(curves), 3.5)
        with _picture(*size) if path is None else printed(Path(path), *size) as figure:
            for position, (name, points) in enumerate(curves.items(), start=1):
                axes = figure.add_subplot(1, len(curves), position, ylabel=as_label(name))
                rounds, values = zip(*points, strict=True)
                draw_line(axes, rounds, values, look(0), name)
                round_axis(axes)
        return figure

    def _plotted(self) -> list[str]:
        """The loss, and the metrics that are neither a federation's own nor a client's."""
        own = [name for row in self.rows for name in row if "fl/" not in name and name not in self._from_clients]
        return [*dict.fromkeys([*(["fl/loss"] if self.column("fl/loss") else []), *own])]

    def _repr_html_(self) -> str:
        """The last rounds as a table, for a notebook."""
        shown = self.rows[-SHOWN:]
        names = list(dict.fromkeys(name for row in shown for name in row if "fl/seconds" not in name))
        table = [names, *([f"{row[name]:.4g}" if name in row else "" for name in names] for row in shown)]
        return as_html([f"{len(self.rows)} rounds", *([table] if shown else [])])

    def save(self, path: str | Path, config: Mapping[str, Any] | None = None) -> None:
        """Write the rows to a JSON file, for `load` and for ``python -m lightning_spectral report``.

        Args:
            path: The file; missing folders are created.
            config: Settings that distinguish this run from others, such as ``{"keep_ratio": 0.2, "seed": 1}``. Values
                that are not JSON are written as their ``repr``.
        """
        if config is not None:
            check_is("config", config, Mapping)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps({**self.state_dict(), "config": dict(config or {})}, default=repr))

    @classmethod
    def load(cls, path: str | Path) -> RoundHistory:
        """Read what `save` wrote."""
        history = cls()
        try:
            history.load_state_dict(json.loads(Path(path).read_text()))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} was not written by `RoundHistory.save`.") from error
        return history

    def state_dict(self) -> dict[str, Any]:
        return {"rows": [dict(row) for row in self.rows], "from_clients": sorted(self._from_clients)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = [dict(row) for row in state_dict["rows"]]
        self._from_clients = set(state_dict["from_clients"])


@contextmanager
def _picture(width: float, height: float) -> Iterator[Figure]:
    """A figure to draw on, in the style of those in files."""
    with from_extra("examples"):
        import matplotlib

        from lightning_spectral.pictures import Picture
    from lightning_spectral.report.style import PRINTED, settings

    with matplotlib.rc_context(settings(PRINTED)):
        yield Picture(figsize=(width, height), layout="constrained")
