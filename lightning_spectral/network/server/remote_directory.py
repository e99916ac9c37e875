"""What the server knows of clients elsewhere: what they said of themselves, as it is now."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from lightning_spectral.network.messages import Holding
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
        bytes_of: Maps keep ratios to the bytes that a client gets and sends in a round.

    Raises:
        ValueError: If a client says a keep ratio that the algorithm does not have, or a budget that no sub-model fits.
    """

    def __init__(
        self,
        roster: Roster,
        model: str,
        capacities: Assigned[float],
        available: Tensor | None,
        begin_round: Callable[[int], None],
        bytes_of: Callable[[Sequence[float]], Mapping[float, int]],
    ) -> None:
        vars(self).update(roster=roster, model=model, capacities=capacities, available=available)
        vars(self).update(begin_round=begin_round, bytes_of=bytes_of)
        for client_id in range(len(roster.names)):
            self.capacity_of(client_id)
        roster.admits[model] = self._capacity

    roster: Roster
    model: str
    bytes_of: Callable[[Sequence[float]], Mapping[float, int]]

    @property
    def sizes(self) -> Tensor:
        """Number of training examples of each client, int64, shape ``(num_clients,)``."""
        return torch.tensor([self.roster.holding(i, self.model).num_examples for i in range(len(self.roster.names))])

    @cached_property
    def num_examples(self) -> int:
        """Number of training examples of the clients of the start, from which fixed shares are computed."""
        return int((self.sizes if self.available is None else self.sizes[self.available]).sum())

    def capacity_of(self, client_id: int) -> float:
        """Keep ratio of a client: what it said, or what its budget allows, or else what the algorithm assigned."""
        return self._capacity(self.roster.names[client_id], self.roster.holding(client_id, self.model))

    def _capacity(self, name: str, holding: Holding) -> float:
        said, values = holding.keep_ratio, self.capacities.values
        if holding.budget_bytes is not None:
            return self._largest(holding.budget_bytes, name)
        if said is None and name in self._assigned:
            return float(self._assigned[name])
        if said is None and len(values) == 1:
            return float(values[0])
        if said not in values:
            given = "no keep ratio" if said is None else f"a keep ratio of {said}"
            raise ValueError(
                f"Client {name!r} says {given}, and the algorithm has {', '.join(map(str, values))}; write one of "
                "them on the device, ClientData(keep_ratio=...), or give the algorithm its own."
            )
        return float(said)

    def _largest(self, budget: float, name: str) -> float:
        """The largest of the algorithm's keep ratios with which a client gets and sends no more than its budget."""
        if fitting := [keep_ratio for keep_ratio, needed in self._needed.items() if needed <= budget]:
            return max(fitting)
        raise ValueError(
            f"Client {name!r} says `budget_bytes={budget:,.0f}`, and the smallest sub-model takes "
            f"{min(self._needed.values()):,} bytes a round; raise its budget, or let the algorithm cut more."
        )

    @cached_property
    def _needed(self) -> Mapping[float, int]:
        return self.bytes_of(self.capacities.values)

    @cached_property
    def _assigned(self) -> Mapping[str, float]:
        """Keep ratios of the clients of the start, by name; a client keeps its number, and others come later."""
        return {name: self.capacities.of(i) for i, name in enumerate(self.roster.names[: len(self.capacities)])}

    def epoch_of(self, client_id: int) -> int:
        """Number of examples that a client trains on in a local epoch."""
        return self.roster.holding(client_id, self.model).examples_per_epoch
