"""What the server knows of its clients: who they are, how many examples they have, and what they can hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_spectral.protocol.per_client import Assigned


def _all(num_examples: int) -> int:
    return num_examples


@dataclass(frozen=True, eq=False)
class ClientDirectory:
    """The clients of one model, numbered from 0. The server reads it and never sees their data.

    A simulation fills it from its data set: `FederatedDataModule.client_directory`. Clients elsewhere are asked.

    Attributes:
        sizes: Number of training examples of each client, int64, shape ``(num_clients,)``.
        capacities: Keep ratio of each client.
        available: Whether each client can train this model, if it has examples, bool, shape ``(num_clients,)``;
            ``None`` if all can.
        examples_per_epoch: Maps a client's number of examples to how many of them it trains on in a local epoch.

    Example:
        >>> from lightning_spectral.protocol.per_client import assign
        >>> sizes = torch.tensor([30, 0, 12])
        >>> clients = ClientDirectory(sizes, assign([0.5, 0.5, 1.0], 3, 0, "keep ratios"))
        >>> clients.sizes_of([2, 0]), clients.capacity_of(2), clients.num_examples
        ([12, 30], 1.0, 42)
    """

    sizes: Tensor
    capacities: Assigned[float]
    available: Tensor | None = None
    examples_per_epoch: Callable[[int], int] = _all

    def begin_round(self, round_idx: int) -> None:
        """Look who is there, before a round's cohort is drawn; in a simulation, always everybody."""
        return None

    @property
    def num_clients(self) -> int:
        """Number of clients, including those without examples."""
        return len(self.sizes)

    @cached_property
    def num_examples(self) -> int:
        """Number of training examples of all clients that can train this model."""
        return int((self.sizes if self.available is None else self.sizes[self.available]).sum())

    def sizes_of(self, client_ids: Sequence[int]) -> list[int]:
        """Number of training examples of each given client."""
        sizes: list[int] = self.sizes[torch.tensor(client_ids, dtype=torch.int64)].tolist()
        return sizes

    def epoch_of(self, client_id: int) -> int:
        """Number of examples that a client trains on in a local epoch."""
        return self.examples_per_epoch(int(self.sizes[client_id]))

    def capacity_of(self, client_id: int) -> float:
        """Keep ratio of a client."""
        return float(self.capacities.of(client_id))
