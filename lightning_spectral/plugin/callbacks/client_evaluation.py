"""Evaluates the server's model on each client's own held-out examples: a table, and how evenly clients are served."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import lightning.pytorch as pl
import torch

from lightning_spectral.arguments import Whole
from lightning_spectral.errors import ClientError, SpectralWarning
from lightning_spectral.functional.figures import decile_means, gini_coefficient, jain_index
from lightning_spectral.plugin.callbacks.round_callback import RoundCallback
from lightning_spectral.plugin.callbacks.validated_beside import ValidatedBeside
from lightning_spectral.plugin.host import Host, Trained, as_host
from lightning_spectral.plugin.logs import log_values
from lightning_spectral.plugin.processes import processes_of
from lightning_spectral.plugin.trainer import num_rounds
from lightning_spectral.plugin.user_hooks import adopt_batch_hooks, as_in_a_step, is_overridden
from lightning_spectral.protocol.records import RoundSummary, WorkUnit
from lightning_spectral.protocol.rng import derived_generator, derived_seed, isolated_rng
from lightning_spectral.server.processes import deal
from lightning_spectral.server.round import client_error
from lightning_spectral.tables import Block, as_html, as_text


@dataclass(frozen=True)
class ClientRow:
    """One client's part of an evaluation.

    Attributes:
        client_id: The client, from 0.
        num_examples: Number of its held-out examples.
        metrics: The values that ``validation_step`` logged on them, by name.
    """

    client_id: int
    num_examples: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class ClientTable:
    """The server's model after a round, evaluated on the held-out examples of some clients.

    Attributes:
        round_idx: The round, from 0.
        rows: One for each client, by its id.
        model: The model's name; empty if there is only one.

    Example:
        >>> table = ClientTable(9, (ClientRow(0, 3, {"acc": 1.0}), ClientRow(4, 1, {"acc": 0.5})))
        >>> print(table)
        client  examples  acc
        0       3         1
        4       1         0.5
        >>> table.figures()["acc/mean"], table.figures()["acc/weighted_mean"]
        (0.75, 0.875)
    """

    round_idx: int
    rows: tuple[ClientRow, ...]
    model: str = ""

    @property
    def metrics(self) -> list[str]:
        """Names of all metrics, in the order in which they were logged."""
        return list(dict.fromkeys(name for row in self.rows for name in row.metrics))

    def column(self, metric: str) -> dict[int, float]:
        """One metric of the clients that have it, by their ids."""
        return {row.client_id: row.metrics[metric] for row in self.rows if metric in row.metrics}

    def figures(self) -> dict[str, float]:
        """The spread of each metric over the clients, as ``<metric>/<figure>``.

        - ``mean``, ``weighted_mean``: clients have equal weights; weights are their numbers of held-out examples.
        - ``std``: unweighted standard deviation over the clients. Its square is the variance of q-FFL.
        - ``lowest_decile``, ``highest_decile``: `decile_means`.
        - ``jain``, ``gini``: `jain_index`, `gini_coefficient`; missing if a value is negative.
        """
        return {f"{name}/{figure}": value for name in self.metrics for figure, value in self._figures(name).items()}

    def _figures(self, metric: str) -> dict[str, float]:
        column = self.column(metric)
        values = torch.tensor(list(column.values()), dtype=torch.float64)
        sizes = torch.tensor([row.num_examples for row in self.rows if row.client_id in column], dtype=torch.float64)
        lowest, highest = decile_means(values)
        figures = {
            "mean": float(values.mean()),
            "weighted_mean": float(values @ sizes / sizes.sum()),
            "std": float(values.std(correction=0)),
            "lowest_decile": lowest,
            "highest_decile": highest,
        }
        if not (values < 0).any():
            figures |= {"jain": jain_index(values), "gini": gini_coefficient(values)}
        return figures

    def __str__(self) -> str:
        return as_text(self._blocks())

    def _repr_html_(self) -> str:
        return as_html(self._blocks())

    def _blocks(self) -> list[Block]:
        head = ("client", "examples", *self.metrics)
        return [[head, *((str(row.client_id), str(row.num_examples), *self._cells(row)) for row in self.rows)]]

    def _cells(self, row: ClientRow) -> list[str]:
        return [f"{row.metrics[name]:.4g}" if name in row.metrics else "" for name in self.metrics]

    def state_dict(self) -> dict[str, Any]:
        rows = [(row.client_id, row.num_examples, dict(row.metrics)) for row in self.rows]
        return {"round_idx": self.round_idx, "rows": rows, "model": self.model}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> ClientTable:
        return cls(state["round_idx"], tuple(ClientRow(*row) for row in state["rows"]), state["model"])


class ClientEvaluation(RoundCallback):
    """Evaluates the server's model on each client's held-out examples, and logs how evenly it serves the clients.

    The examples are those held out by ``FederatedDataModule(..., client_val_fraction=0.1)``, on which no client trains.
    For one client after another, it runs your ``validation_step`` in eval mode on a copy of your module with its
    metrics reset. No other hooks run, except those that move batches. For each metric M that the step logs, and that
    Lightning averages over examples or computes, it logs ``fl/clients/M/mean`` and the other figures of
    `ClientTable.figures`.

    The global random generators and the run itself are not affected. Several processes share the clients.

    Args:
        every_n_rounds: Evaluate after rounds 0, n, 2n, ... and after the last.
        clients: Clients to evaluate: ``"all"``, ``"participants"`` (those in the round's average), or a number of
            clients, drawn anew each time.

    Attributes:
        tables: The last `ClientTable` of each model, by name; that of a single model is ``tables[""]``, or `table`.
            They are part of the checkpoint.

    Example:
        >>> evaluation = ClientEvaluation(every_n_rounds=10, clients=100)  # Trainer(callbacks=[evaluation])
    """

    def __init__(self, every_n_rounds: int = 1, clients: Literal["all", "participants"] | int = "all") -> None:
        self.every_n_rounds: int = Whole(at_least=1)("every_n_rounds", every_n_rounds)
        if not (isinstance(clients, str) and clients in ("all", "participants")):
            hint = 'it is "all", "participants" or a number of clients'
            clients = Whole(at_least=1, hint=hint)("clients", clients)
        self.clients = clients
        self.tables: dict[str, ClientTable] = {}

    @property
    def table(self) -> ClientTable | None:
        """The last table of the only model; ``None`` before there is one."""
        return self.tables.get("")

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        check_evaluated(as_host(pl_module, "ClientEvaluation needs federated clients"))

    def on_round_end(self, trainer: pl.Trainer, pl_module: Trained, summary: RoundSummary) -> None:  # type: ignore[override]
        round_idx = summary.round_idx
        if round_idx % self.every_n_rounds and round_idx + 1 != num_rounds(trainer):
            return
        if not (client_ids := self._chosen(pl_module, summary)):
            return
        table = ClientTable(round_idx, evaluate_clients(trainer, pl_module, round_idx, client_ids), summary.model)
        self.tables[summary.model] = table
        if not table.metrics and trainer.is_global_zero:
            warnings.warn(
                f"`{type(pl_module.module).__name__}.validation_step` logs no mean and no metric with `self.log`, so "
                "ClientEvaluation has nothing to report; log there, and not in `on_validation_epoch_end`.",
                SpectralWarning,
                stacklevel=2,
            )
        figures = {summary.metric(f"fl/clients/{name}"): value for name, value in table.figures().items()}
        log_values(trainer, round_idx, {"fl/round": float(round_idx), **figures})

    def client_columns(self, summary: RoundSummary) -> Mapping[str, Mapping[int, float]]:
        table = self.tables.get(summary.model)
        if table is None or table.round_idx != summary.round_idx:
            return {}
        return {name: table.column(name) for name in table.metrics}

    def _chosen(self, pl_module: Trained, summary: RoundSummary) -> list[int]:
        """Ids of the clients to evaluate, ascending; those without held-out examples cannot be evaluated."""
        held_out = pl_module.data.held_out.sizes > 0
        if self.clients == "participants":
            return sorted(client.client_id for client in summary.averaged if held_out[client.client_id])
        able: list[int] = held_out.nonzero().flatten().tolist()
        if self.clients == "all":
            return able
        generator = derived_generator(pl_module.seed, "client evaluation", summary.round_idx)
        drawn = torch.randperm(len(able), generator=generator)[: self.clients]
        return sorted(able[i] for i in drawn.tolist())

    def state_dict(self) -> dict[str, Any]:
        return {"tables": [table.state_dict() for table in self.tables.values()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        tables = map(ClientTable.from_state_dict, state_dict["tables"])
        self.tables = {table.model: table for table in tables}


def check_evaluated(federation: Host) -> None:
    """Check that some clients have held-out examples, and that their models can be validated."""
    members = federation.members
    evaluated = [name for name in members if federation.data_of(name).held_out.num_assigned]
    if not evaluated:
        raise ValueError(
            "ClientEvaluation finds no held-out examples; give the data a share to hold out: "
            "FederatedDataModule(..., client_val_fraction=0.1)."
        )
    for name in evaluated:
        if not is_overridden(members[name].module, "validation_step"):
            raise ValueError(
                f"ClientEvaluation needs `{type(members[name].module).__name__}.validation_step`; define it."
            )


def evaluate_clients(
    trainer: pl.Trainer, model: Trained, round_idx: int, client_ids: Sequence[int]
) -> tuple[ClientRow, ...]:
    """Evaluate the server's model on the held-out examples of some clients; several processes share them.

    Returns:
        One row for each client, in the order of ``client_ids``; the same rows in all processes.
    """
    sizes = model.data.held_out.sizes_of(client_ids)
    if (elsewhere := model.data.evaluate_elsewhere(model, round_idx, client_ids)) is not None:
        sized = zip(client_ids, sizes, strict=True)
        return tuple(
            ClientRow(client_id, size, elsewhere[client_id]) for client_id, size in sized if client_id in elsewhere
        )
    processes = processes_of(trainer)
    mine = deal(sizes, processes.size)[processes.rank]

    def evaluate() -> list[ClientRow]:
        beside = ValidatedBeside(model.module, {}, trainer)
        with beside.entered():
            model.module.eval()
            adopt_batch_hooks(model.module, model.data)
            return [_evaluated(trainer, model, beside, round_idx, client_ids[i]) for i in mine]

    with validating(trainer), torch.no_grad():
        gathered = processes.gather_results(evaluate, ClientError)
    rows = {row.client_id: row for part in gathered for row in part}
    return tuple(rows[client_id] for client_id in client_ids)


@contextmanager
def validating(trainer: pl.Trainer) -> Iterator[None]:
    """Within the block, ``trainer.validating`` is true, as it is in a validation within a fit."""
    trainer.validating = True
    try:
        yield
    finally:
        trainer.training = True


def _evaluated(
    trainer: pl.Trainer, model: Trained, beside: ValidatedBeside, round_idx: int, client_id: int
) -> ClientRow:
    device = trainer.strategy.root_device
    seed = derived_seed(model.seed, "client evaluation", round_idx, client_id)
    beside.start()
    try:
        with isolated_rng(seed, [device]):  # a step may draw random numbers
            for batch_idx, batch in enumerate(model.data.client_val_batches(client_id)):
                beside.step(as_in_a_step(batch, model.module, trainer), batch_idx)
    except Exception as error:
        raise client_error(round_idx, WorkUnit(client_id, model.name), "evaluation", error) from error
    (num_examples,) = model.data.held_out.sizes_of([client_id])
    return ClientRow(client_id, num_examples, beside.logged())
