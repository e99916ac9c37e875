"""Results of an evaluation on clients: one row for each client, and how evenly the clients are served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lightning_spectral.functional.figures.fairness import decile_means, gini_coefficient, jain_index
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
