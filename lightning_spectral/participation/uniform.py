"""Every cohort of a given size is equally likely."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_spectral.arguments import Whole, check_fields
from lightning_spectral.participation.base import Participation
from lightning_spectral.sums.exact_sum import MOST_TERMS

__all__ = ["CLIENTS_PER_ROUND", "UniformParticipation"]

CLIENTS_PER_ROUND = Whole(at_least=1, at_most=MOST_TERMS)


@dataclass(frozen=True)
class UniformParticipation(Participation):
    """A fixed number of clients, drawn uniformly without replacement, in random order.

    Args:
        clients_per_round: Size k of the cohort, at least 1, and at most as many as can be summed exactly.

    Example:
        >>> participation = UniformParticipation(clients_per_round=3)
        >>> cohort = participation.cohort(10**12, torch.Generator().manual_seed(0))
        >>> cohort.shape, len(cohort.unique())
        (torch.Size([3]), 3)
    """

    clients_per_round: int

    def __post_init__(self) -> None:
        check_fields(self, clients_per_round=CLIENTS_PER_ROUND)

    def check(self, num_clients: int) -> None:
        """Refuse a cohort larger than the federation.

        Example:
            >>> UniformParticipation(clients_per_round=3).check(num_clients=2)
            Traceback (most recent call last):
            ValueError: `clients_per_round` must be at most num_clients=2, got 3; lower it or add clients.
        """
        if self.clients_per_round > num_clients:
            raise ValueError(
                f"`clients_per_round` must be at most num_clients={num_clients}, "
                f"got {self.clients_per_round}; lower it or add clients."
            )

    def cohort(self, num_clients: int, generator: torch.Generator) -> Tensor:
        """Draw the cohort, at a cost proportional to k for any number of clients."""
        self.check(num_clients)
        size = self.clients_per_round
        if 4 * size >= num_clients:
            return torch.randperm(num_clients, generator=generator)[:size].clone()
        # the first k distinct values of an i.i.d. stream are a uniform ordered sample without replacement
        seen: dict[int, None] = {}
        while len(seen) < size:
            seen.update(dict.fromkeys(torch.randint(num_clients, (size,), generator=generator).tolist()))
        return torch.tensor(list(seen)[:size])
