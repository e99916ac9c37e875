"""What the server knows of clients elsewhere: what they said of themselves, as it is now."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from lightning_spectral.network.server.roster import Roster
from lightning_spectral.protocol.per_client import Assigned
from lightning_spectral.server.client_directory import ClientDirectory


class RemoteDirectory(ClientDirectory):
    """A directory that grows as clients join.

    Args:
        roster: Who is there.
        model: The model's name; empty if there is only one.
        capacities: Keep ratios as the algorithm assigns them to the clients of the start.
        available: Whether each client can train this model; ``None`` if all can.
        begin_round: Called when a round begins, before its cohort is drawn; perhaps several times.

    Raises:
        ValueError: If a client says a keep ratio that the algorithm does not have.
    """

    def __init__(
        self,
        roster: Roster,
        model: str,
        capacities: Assigned[float],
        available: Tensor | None,
        begin_round: Callable[[int], None],
    ) -> None:
        vars(self).update(roster=roster, model=model, capacities=capacities, available=available)
        vars(self).update(begin_round=begin_round)
        for client_id in range(len(roster.names)):
            self.capacity_of(client_id)

    roster: Roster
    model: str

    @property
    def sizes(self) -> Tensor:
        """Number of training examples of each client, int64, shape ``(num_clients,)``."""
        return torch.tensor([self.roster.holding(i, self.model).num_examples for i in range(len(self.roster.names))])

    @cached_property
    def num_examples(self) -> int:
        """Number of training examples of the clients of the start, from which fixed shares are computed."""
        return int((self.sizes if self.available is None else self.sizes[self.available]).sum())

    def capacity_of(self, client_id: int) -> float:
        """Keep ratio of a client: what it said, or else what the algorithm assigned."""
        said = self.roster.holding(client_id, self.model).keep_ratio
        values = self.capacities.values
        if said is None and client_id < len(self.capacities):
            return float(self.capacities.of(client_id))
        if said is None and len(values) == 1:
            return float(values[0])
        if said not in values:
            name, given = self.roster.names[client_id], "no keep ratio" if said is None else f"a keep ratio of {said}"
            raise ValueError(
                f"Client {name!r} says {given}, and the algorithm has {', '.join(map(str, values))}; write one of "
                "them on the device, ClientData(keep_ratio=...), or give the algorithm its own."
            )
        return float(said)

    def epoch_of(self, client_id: int) -> int:
        """Number of examples that a client trains on in a local epoch."""
        return self.roster.holding(client_id, self.model).examples_per_epoch
