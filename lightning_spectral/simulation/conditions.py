"""The conditions under which clients are simulated to work."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_spectral.errors import check_is
from lightning_spectral.protocol.exclusion import ExclusionReason
from lightning_spectral.simulation.clock import VirtualClock
from lightning_spectral.simulation.dropout import ClientDropout
from lightning_spectral.simulation.outcomes import Simulation

__all__ = ["Conditions"]


@dataclass(frozen=True)
class Conditions:
    """The user's choice of simulated dropout and device speed.

    Attributes:
        dropout: Which clients drop out; ``None`` if none do.
        clock: How long clients take; ``None`` if time plays no part.
    """

    dropout: ClientDropout | None = None
    clock: VirtualClock | None = None

    def __post_init__(self) -> None:
        for name, kind in {"dropout": ClientDropout, "clock": VirtualClock}.items():
            if getattr(self, name) is not None:
                check_is(name, getattr(self, name), kind)

    def check(self, num_clients: int, clients_per_round: int) -> None:
        """Raise ``ValueError`` if the conditions do not fit the federation."""
        if self.dropout is not None:
            self.dropout.check(num_clients)
        if self.clock is not None:
            self.clock.check(num_clients, clients_per_round)

    @property
    def exclusion_reasons(self) -> tuple[ExclusionReason, ...]:
        """The reasons for which clients may be left out under these conditions."""
        possible: dict[ExclusionReason, bool] = {
            "dropped_out": self.dropout is not None,
            "late": self.clock is not None and self.clock.deadline < math.inf,
            "surplus": self.clock is not None and self.clock.keep_first is not None,
        }
        return tuple(reason for reason, is_possible in possible.items() if is_possible)

    def prepare(self, num_clients: int, seed: int) -> Simulation:
        """Assign probabilities and devices to clients, once for all rounds.

        Args:
            num_clients: Number of clients of the federation.
            seed: The run's seed.
        """
        probabilities = None if self.dropout is None else self.dropout.assign(num_clients, seed)
        if self.clock is None:
            return Simulation(seed, probabilities)
        return Simulation(seed, probabilities, self.clock, self.clock.assign(num_clients, seed))
