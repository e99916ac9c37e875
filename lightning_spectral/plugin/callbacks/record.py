"""The record of a run: the metrics of every round and the bytes of every client, in memory and in a file.

In the checkpoint they are flat arrays, so that it is small and quickly written however long the run is.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor

from lightning_spectral.errors import check_is, from_extra
from lightning_spectral.plugin.callbacks.round_callback import RoundCallback
from lightning_spectral.plugin.logs import NewlyLogged
from lightning_spectral.plugin.settings import as_config
from lightning_spectral.plugin.user_hooks import Host
from lightning_spectral.protocol.records import ClientOutcome, ExclusionReason, RoundSummary
from lightning_spectral.report.measures import BYTES
from lightning_spectral.report.runs import NAME, Line, append_line, read_record, write_record
from lightning_spectral.server.metrics import logged_by_clients, round_metrics
from lightning_spectral.tables import as_html

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EMPTY = torch.empty(0)  # a column without entries


class LedgerRow(NamedTuple):
    """The cost of one client's turn, and the reason if its update was not used.

    Attributes:
        round_idx: Communication round, from 0.
        client_id: The client, from 0.
        keep_ratio: Share of singular terms it held.
        downlink_bytes: Bytes sent to it.
        uplink_bytes: Bytes it sent back.
        left_out: Why it is not in the average; ``None`` if it is.
        virtual_seconds: When it finished, by the virtual clock; ``None`` without a clock, or if it never finished.
        model: Which model it trained; ``""`` if there is only one.
        measured: Whether it only measured something for a sampler before the round and sent back one number.
        frozen_bytes: Those of the bytes sent to it that are frozen parameters, which it did not have yet.
        example_epsilon: The epsilon of all its turns so far, with `ExamplePrivacy`; ``None`` without, or if left out.
        name: The client's name; ``""`` if clients have only numbers.
    """

    round_idx: int
    client_id: int
    keep_ratio: float
    downlink_bytes: int
    uplink_bytes: int
    left_out: ExclusionReason | None = None
    virtual_seconds: float | None = None
    model: str = ""
    measured: bool = False
    frozen_bytes: int = 0
    example_epsilon: float | None = None
    name: str = ""

    @classmethod
    def of(cls, client: ClientOutcome, measured: bool, names: Sequence[str] = ()) -> LedgerRow:
        seconds = None if math.isnan(client.virtual_seconds) else client.virtual_seconds
        turn = client.round_idx, client.client_id, client.keep_ratio, client.downlink_bytes, client.uplink_bytes
        also = client.unit.model, measured, client.frozen_bytes, client.example_epsilon
        return cls(*turn, client.left_out, seconds, *also, *names[client.client_id : client.client_id + 1])


class PackedTurns(Mapping[int, list[LedgerRow]]):
    """The turns of each round, in 8 bytes each, and 8 more with a virtual clock, or with privacy of examples.

    Turns differ in their clients, times and epsilons. All else takes few values together, which are kept once.
    """

    COLUMNS = ("rounds", "counts", "clients", "kind_of", "seconds", "epsilons")

    def __init__(
        self, kinds: Iterable[Sequence[Any]] = (), names: Iterable[Sequence[Any]] = (), **columns: Tensor
    ) -> None:
        rounds, counts, clients, kind_of, *own = (columns.get(name, EMPTY).tolist() for name in self.COLUMNS)
        spans = zip(rounds, counts, accumulate(counts), strict=True)
        self._spans = {round_idx: (end - count, end) for round_idx, count, end in spans}  # of each round's turns
        self._clients, self._kind_of = array("i", clients), array("i", kind_of)
        self._own = [array("d", column) for column in own]  # NaN, or beyond the end, for none
        self._kinds = {tuple(kind): index for index, kind in enumerate(kinds)}
        self._names = {(model, client): name for model, client, name in names}

    def __getitem__(self, round_idx: int) -> list[LedgerRow]:
        rows, kinds = [], [*self._kinds]
        for turn in range(*self._spans[round_idx]):
            kind = kinds[self._kind_of[turn]]
            at, epsilon = (next((n for n in own[turn : turn + 1] if not math.isnan(n)), None) for own in self._own)
            client, name = self._clients[turn], self._names.get((kind[4], self._clients[turn]), "")
            rows.append(LedgerRow._make((round_idx, client, *kind[:4], at, *kind[4:], epsilon, name)))
        return rows

    def __iter__(self) -> Iterator[int]:
        return iter(self._spans)

    def __len__(self) -> int:
        return len(self._spans)

    def add(self, rows: Iterable[LedgerRow]) -> None:
        """Add turns of a round, which may have some already; no later one has."""
        for row in rows:
            turn = len(self._clients)
            first, end = self._spans.get(row.round_idx, (turn, turn))
            assert end == turn, "turns are added round by round"
            self._spans[row.round_idx] = first, end + 1
            self._clients.append(row.client_id)
            if row.name:
                self._names[row.model, row.client_id] = row.name
            self._kind_of.append(self._kinds.setdefault((*row[2:6], *row[7:10]), len(self._kinds)))
            for column, number in zip(self._own, (row.virtual_seconds, row.example_epsilon), strict=True):
                if number is not None:
                    column.extend([math.nan] * (turn - len(column)))
                    column.append(number)

    def state_dict(self) -> dict[str, Any]:
        """The arguments of an equal one: a few tensors, and the list of what turns have in common."""
        counts = array("i", (end - first for first, end in self._spans.values()))
        columns = array("q", self._spans), counts, self._clients, self._kind_of, *self._own
        own = {"kinds": [*self._kinds], "names": [(*of, name) for of, name in self._names.items()]}
        return {**own, **dict(zip(self.COLUMNS, map(_tensor, columns), strict=True))}


class PackedRows:
    """Rows of named numbers, which are final; those with the same names share a list of them.

    Example:
        >>> rows = PackedRows()
        >>> rows.add([{"loss": 0.5}, {"loss": 0.25, "acc": 1.0}])
        >>> len(rows), rows.state_dict()["values"].tolist(), list(rows)[1]
        (2, [0.5, 0.25, 1.0], {'loss': 0.25, 'acc': 1.0})
    """

    def __init__(self, names: Iterable[Sequence[str]] = (), names_of: Tensor = EMPTY, values: Tensor = EMPTY) -> None:
        self._names = {tuple(own): index for index, own in enumerate(names)}
        self._names_of, self._values = array("i", names_of.tolist()), array("d", values.tolist())

    def __len__(self) -> int:
        return len(self._names_of)

    def __iter__(self) -> Iterator[dict[str, float]]:
        known, values = [*self._names], iter(self._values)
        for names in (known[index] for index in self._names_of):
            yield dict(zip(names, islice(values, len(names)), strict=True))

    def add(self, rows: Iterable[Mapping[str, float]]) -> None:
        for row in rows:
            self._names_of.append(self._names.setdefault(tuple(row), len(self._names)))
            self._values.extend(row.values())

    def state_dict(self) -> dict[str, Any]:
        """The arguments of an equal one: two tensors, and the lists of names."""
        return {"names": list(self._names), "names_of": _tensor(self._names_of), "values": _tensor(self._values)}


def _tensor(column: array[Any]) -> Tensor:
    return torch.from_numpy(np.array(column))


class RoundHistory(RoundCallback):
    """Keeps one row of metrics per round: its own (``fl/...``), those of clients and callbacks, and validation's.

    The rows are part of the checkpoint, so a resumed run includes the earlier rounds. A new fit needs a new history.

    If the Trainer has a logger, each round is also a line of the file ``rounds.jsonl`` beside the logger's, which
    ``python -m lightning_spectral report`` reads. A resumed run continues the file: it keeps the rounds of the
    checkpoint and cuts what follows them. With a folder of its own, it begins with a copy of these rounds.

    Args:
        path: The file; by default that of the first logger, in the folder of this run.
        config: Settings that distinguish this run from others, besides those of the federation.

    Attributes:
        rows: One dictionary per round, in order; only the last may still change.
        turns: The clients' turns by round, if a `CommunicationLedger` reads them.

    Example:
        >>> history = RoundHistory(config={"hospital": "north"})
        >>> trainer = pl.Trainer(max_epochs=3, callbacks=[history], logger=False, enable_checkpointing=False)
        >>> history.rows  # after `trainer.fit(model, data)`, one for each round
        []
    """

    def __init__(self, path: str | Path | None = None, config: Mapping[str, Any] | None = None) -> None:
        self.path = None if path is None else Path(check_is("path", path, str | Path))
        self.config: dict[str, Any] = dict(check_is("config", {} if config is None else config, Mapping))
        self.rows: list[dict[str, float]] = []
        self.turns, self.keeps_turns = PackedTurns(), False
        self._from_clients: set[str] = set()
        self._final, self._new = PackedRows(), NewlyLogged()  # all rows but the last, in the checkpoint
        self._file: Path | None = None
        self._run = ""  # its id, once it has a file

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and self.rows and trainer.current_epoch == 0 and trainer.ckpt_path is None:
            raise ValueError(
                f"This RoundHistory already holds {len(self.rows)} rounds of another fit; "
                "give each fit its own: Trainer(callbacks=[RoundHistory()])."
            )

    # -- the rows

    def on_round_end(self, trainer: pl.Trainer, pl_module: Any, summary: RoundSummary) -> None:
        own = round_metrics(summary) | {name: entry.value for name, entry in logged_by_clients(summary).items()}
        last = self.rows[-1] if self.rows else {}
        if last.get("fl/round") != own["fl/round"] or own.keys() & last.keys() != {"fl/round"}:
            self.rows.append({})  # the last row is not that of another model
        self.rows[-1].update(own)
        self._from_clients |= own.keys()
        if self.keeps_turns:
            names = pl_module.data.held_out.names
            self.turns.add(LedgerRow.of(client, True, names) for client in summary.measured)
            self.turns.add(LedgerRow.of(client, False, names) for client in summary.clients)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._new.mark(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn != "fit":  # no round precedes
            self._new.mark(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add what was evaluated to the row of the last round, and after a fit also to the file."""
        new = {} if trainer.sanity_checking else self.take_logged(trainer)
        if trainer.state.fn != "fit" and self.rows and new:
            self.append({"round": int(self.rows[-1]["fl/round"]), "evaluated": new})

    on_test_start, on_test_end = on_validation_start, on_validation_end

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.take_logged(trainer)
        if self.rows and self.rows[-1]["fl/round"] == trainer.current_epoch:
            self.append(self._line(self.rows[-1]))

    def take_logged(self, trainer: pl.Trainer) -> dict[str, float]:
        """Add what was logged since it was last taken to the row of the last round."""
        new = {name: value for name, value in self._new.take(trainer).items() if name not in self._from_clients}
        if self.rows:
            self.rows[-1].update(new)
        return new

    def column(self, name: str) -> list[float]:
        """One metric over the rounds that have it."""
        return [row[name] for row in self.rows if name in row]

    def bytes_sent(self, model: str = "") -> int:
        """Bytes of all rounds so far, in both directions and for measuring, of one model or by default of all."""
        names = [name for name in self._from_clients if name.startswith(model and f"{model}/") and name.endswith(BYTES)]
        return int(sum(row.get(name, 0.0) for row in self.rows for name in names))

    def outcomes(self, rows: Sequence[Mapping[str, float]] | None = None) -> list[str]:
        """Names of the losses, and of the metrics that are neither a federation's own nor a client's, in some rows."""
        found = dict.fromkeys(name for row in (self.rows if rows is None else rows) for name in row)
        losses = [name for name in found if f"/{name}".endswith("/fl/loss")]
        return [*losses, *(name for name in found if "fl/" not in name and name not in self._from_clients)]

    def state_dict(self) -> dict[str, Any]:
        self._final.add(self.rows[len(self._final) : -1])
        rows = {"final": self._final.state_dict(), "last": [dict(row) for row in self.rows[-1:]]}
        file = {"from_clients": sorted(self._from_clients), "run": self._run, "file": str(self._file or "")}
        return {"rows": rows, "turns": self.turns.state_dict(), **file}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._final = PackedRows(**state_dict["rows"]["final"])
        self.rows = [*self._final, *map(dict, state_dict["rows"]["last"])]
        self.turns = PackedTurns(**state_dict["turns"])
        self._from_clients = set(state_dict["from_clients"])
        self._run, self._file = state_dict["run"], Path(state_dict["file"]) if state_dict["file"] else None

    # -- the file

    def on_train_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """Begin the file with the finished rounds of the checkpoint, or of an earlier fit of this Trainer."""
        earlier, self._file = self._file, None
        path, logger = self.path, trainer.logger
        if path is None and logger is not None and not trainer.fast_dev_run:
            folder = str(logger.save_dir or trainer.default_root_dir)  # where Lightning also puts its checkpoints
            version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
            path = None if "://" in folder else Path(folder) / str(logger.name or "") / version / NAME
        if path is None or not trainer.is_global_zero or not isinstance(pl_module, Host):
            return
        self._file = path.absolute()
        written: list[Line] = []  # by this run, with tables that no checkpoint has
        for file in filter(None, (self._file, earlier)):
            with suppress(OSError, ValueError):  # there is none, or it is something else
                found = read_record(file)
                if found.head["run"] == self._run:
                    written = [*found.lines]
                    break
        there = {line["round"] for line in written if "trained" in line}
        lines = [*written, *(line for line in map(self._line, self.rows) if line["round"] not in there)]
        config = {**pl_module.hparams_initial, **self.config}
        self._write(self._file, config, [line for line in lines if line["round"] < trainer.current_epoch])

    def append(self, line: Line) -> None:
        """Add a line to the file, if there is one."""
        if self._file is not None:
            append_line(self._file, line)

    def _line(self, row: Mapping[str, float]) -> Line:
        round_idx = int(row["fl/round"])
        trained = {name: value for name, value in row.items() if name in self._from_clients}
        evaluated = {name: value for name, value in row.items() if name not in self._from_clients}
        turns = {"turns": self.turns[round_idx]} if round_idx in self.turns else {}
        return {"round": round_idx, "trained": trained, "evaluated": evaluated, **turns}

    def _write(self, path: Path, config: Mapping[str, Any], lines: Sequence[Line]) -> None:
        self._run = self._run or uuid4().hex
        write_record(path, self._run, as_config(config), sorted(lines, key=lambda line: line["round"]))

    def save(self, path: str | Path, config: Mapping[str, Any] | None = None) -> None:
        """Write the rows to a file of a fit without a logger, for `load` and ``python -m lightning_spectral report``.

        Missing folders are created. Further settings, such as ``{"keep_ratio": 0.2}``, may distinguish this run.
        """
        own = check_is("config", {} if config is None else config, Mapping)
        self._write(Path(path), {**self.config, **own}, [*map(self._line, self.rows)])

    @classmethod
    def load(cls, path: str | Path) -> RoundHistory:
        """Read a file that a fit or `save` wrote."""
        try:
            found = read_record(Path(path))
        except ValueError as error:
            raise ValueError(f"{path} was not written by a RoundHistory: {error}.") from error
        history, rows = cls(), defaultdict[int, dict[str, float]](dict)
        for line in sorted(found.lines, key=lambda line: line["round"]):
            trained: dict[str, float] = line.get("trained", {})
            rows[line["round"]].update({**trained, **line.get("evaluated", {})})
            history._from_clients |= trained.keys()
            history.turns.add(LedgerRow(*turn) for turn in line.get("turns", ()))
        history.rows = [*rows.values()]
        return history

    # -- pictures and notebooks

    def plot(self, name: str | None = None, path: str | Path | None = None) -> Figure:
        """Plot a metric over the rounds; needs matplotlib (the ``examples`` extra).

        Args:
            name: The metric; ``None`` for the loss and what validation logged, side by side.
            path: An image file to write; ``None`` to return the figure alone, which a notebook shows.
        """
        names = self.outcomes() if name is None else [name]
        curves = {name: [(row["fl/round"] + 1, row[name]) for row in self.rows if name in row] for name in names}
        if not all(curves.values()) or not curves:
            known = ", ".join(sorted({name for row in self.rows for name in row})) or "none"
            raise ValueError(f"no round has a metric {name or 'to plot'!r}; known metrics: {known}.")
        with from_extra("examples"):
            from lightning_spectral.report.printed import as_label, draw_line, look, printed, round_axis

        with printed(path, max(6.0, 3.5 * len(curves)), 3.5) as figure:
            for position, (name, points) in enumerate(curves.items(), start=1):
                axes = figure.add_subplot(1, len(curves), position, ylabel=as_label(name))
                rounds, values = zip(*points, strict=True)
                draw_line(axes, rounds, values, look(0), name)
                round_axis(axes)
        return figure

    def _repr_html_(self) -> str:
        """The last ten rounds as a table, for a notebook."""
        shown = self.rows[-10:]
        names = list(dict.fromkeys(name for row in shown for name in row if "fl/seconds" not in name))
        table = [names, *([f"{row[name]:.4g}" if name in row else "" for name in names] for row in shown)]
        return as_html([f"{len(self.rows)} rounds", *([table] if shown else [])])


class CommunicationLedger(RoundCallback):
    """Counts the bytes of the tensors that are sent: their values, without the framing of any network protocol.

    It reads them from the run's `RoundHistory`, which keeps one row per client and round for it, in the checkpoint and
    in the file as well; without a history, the Trainer gets one. A long run makes many rows, so this callback is not
    installed by default; the round's totals (``fl/bytes_down``, ``fl/bytes_up``) are always logged.

    Example:
        >>> ledger = CommunicationLedger()  # pl.Trainer(callbacks=[ledger], ...)
        >>> ledger.bytes_per_client()  # of each keep ratio, sent down and up in a turn, after a fit
        {}
    """

    def __init__(self) -> None:
        self._history = RoundHistory()  # until there is a fit

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._history = history_of(trainer) or self._history
        self._history.keeps_turns = True

    @property
    def rows(self) -> list[LedgerRow]:
        """One `LedgerRow` per client and round, in order."""
        return [row for of_round in self._history.turns.values() for row in of_round]

    @property
    def total_bytes(self) -> int:
        """All bytes of the run so far, in both directions."""
        return sum(row.downlink_bytes + row.uplink_bytes for row in self.rows)

    def bytes_per_client(self) -> dict[float, tuple[float, float]]:
        """For each keep ratio, the mean bytes (down, up) of a client's turn, without frozen parameters."""
        sent: dict[float, list[tuple[int, int]]] = defaultdict(list)
        for row in self.rows:
            if not row.measured:
                sent[row.keep_ratio].append((row.downlink_bytes - row.frozen_bytes, row.uplink_bytes))
        return {ratio: (fmean(d for d, _ in own), fmean(u for _, u in own)) for ratio, own in sorted(sent.items())}


def history_of(trainer: Any) -> RoundHistory | None:
    """The history of a Trainer's run, if it has one."""
    return next((one for one in trainer.callbacks if isinstance(one, RoundHistory)), None)
