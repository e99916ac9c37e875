"""Clients that drop out of a round by chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_spectral.protocol.rng import derived_seed

__all__ = ["ClientDropout"]


@dataclass(frozen=True)
class ClientDropout:
    """Lets a client that was sent its sub-model vanish: it trains nothing and returns nothing.

    Whether it does depends on the run's seed, the round and the client alone: not on who else takes part, nor on
    where a run was resumed.

    Args:
        probability: Probability p of dropping out of a round, in [0, 1]: one for all clients, or one for each.

    Raises:
        ValueError: If a probability is outside [0, 1].

    Example:
        >>> dropout = ClientDropout(probability=0.25)
        >>> sum(dropout.drops(0, 0, client_id) for client_id in range(1000))
        250
    """

    probability: float | Sequence[float]

    def __post_init__(self) -> None:
        for p in [self.probability] if isinstance(self.probability, float | int) else self.probability:
            if not 0.0 <= p <= 1.0:
                raise ValueError(f"`probability` must be in [0, 1], got {p!r}.")

    def check(self, num_clients: int) -> None:
        """Raise ``ValueError`` if probabilities are listed for another number of clients."""
        if isinstance(self.probability, Sequence) and len(self.probability) != num_clients:
            raise ValueError(
                f"`probability` lists {len(self.probability)} numbers for {num_clients} clients; give one per client, "
                "or one for all."
            )

    def drops(self, seed: int, round_idx: int, client_id: int) -> bool:
        """Whether a client drops out of a round."""
        p = self.probability[client_id] if isinstance(self.probability, Sequence) else self.probability
        # a derived seed is a uniform integer below 2**63: no generator is needed for a single coin
        return derived_seed(seed, "client dropout", round_idx, client_id) < p * 2**63
