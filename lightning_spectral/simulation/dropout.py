"""Clients that drop out of a round at random."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from lightning_spectral.arguments import Number, check_fields
from lightning_spectral.protocol.per_client import Assigned, PerClient, assign, check_num_entries, check_per_client
from lightning_spectral.protocol.rng import derived_seed
from lightning_spectral.protocol.work_unit import WorkUnit

__all__ = ["ClientDropout", "drops_out"]


@dataclass(frozen=True)
class ClientDropout:
    """Makes clients drop out of rounds: such a client is sent its sub-model, trains nothing and returns nothing.

    Whether a client drops out depends only on the run's seed, the round and the client, not on who else takes part or
    where a run was resumed.

    Args:
        probability: Probability p of dropping out of a round, in [0, 1]: one for all clients; ``{probability: share of
            clients}``; or one per client.

    Example:
        >>> dropout = ClientDropout({0.0: 0.5, 0.5: 0.5})  # half of the clients are on mains power
        >>> [dropout.assign(num_clients=6, seed=0).of(client_id) for client_id in range(6)]
        [0.5, 0.5, 0.5, 0.0, 0.0, 0.0]
    """

    probability: PerClient[float]

    def __post_init__(self) -> None:
        check_fields(self, probability=partial(check_per_client, rule=Number(at_least=0, at_most=1)))

    def check(self, num_clients: int) -> None:
        """Raise ``ValueError`` if probabilities are listed for another number of clients."""
        check_num_entries("probability", self.probability, num_clients)

    def assign(self, num_clients: int, seed: int) -> Assigned[float]:
        """Each client's probability, the same in every round."""
        return assign(self.probability, num_clients, seed, "dropout probability")


def drops_out(probability: float, seed: int, round_idx: int, unit: WorkUnit) -> bool:
    """Whether a unit drops out of a round: an independent draw for each unit and round.

    Example:
        >>> sum(drops_out(0.25, 0, 0, WorkUnit(client_id)) for client_id in range(1000))
        250
    """
    # a derived seed is a uniform integer below 2**63: no generator is needed for a single draw
    return derived_seed(seed, "client dropout", round_idx, *unit.ids) < probability * 2**63
