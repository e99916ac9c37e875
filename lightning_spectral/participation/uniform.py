"""The contract of a participation scheme, and the uniform one."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_spectral.arguments import Whole, check_fields
from lightning_spectral.sums.exact_mean import MOST_TERMS

__all__ = ["CLIENTS_PER_ROUND", "Participation", "UniformParticipation"]

CLIENTS_PER_ROUND = Whole(at_least=1, at_most=MOST_TERMS)


class Participation(ABC):
    """A way to choose the cohort of a round: a frozen dataclass with one method that draws.

    Example:
        >>> class Everyone(Participation):
        ...     def cohort(self, num_clients, generator):
        ...         return torch.arange(num_clients)
        >>> Everyone().cohort(3, torch.Generator())
        tensor([0, 1, 2])
    """

    @abstractmethod
    def cohort(self, num_clients: int, generator: torch.Generator) -> Tensor:
        """Choose the cohort: a pure function of its arguments, cheap even for millions of clients.

        Args:
            num_clients: Number of clients in the federation.
            generator: CPU generator of this round, the only source of randomness.

        Returns:
            Distinct client ids in ``[0, num_clients)``, int64, shape ``(k,)``, in the order in which they are served.
        """

    def check(self, num_clients: int) -> None:  # noqa: B027 - a scheme without limits has nothing to check
        """Refuse a federation that this scheme cannot serve; called at set-up, before any round.

        Args:
            num_clients: Number of clients in the federation.

        Raises:
            ValueError: If no cohort can be drawn from this number of clients.
        """


@dataclass(frozen=True)
class UniformParticipation(Participation):
    """A fixed number k of clients, drawn uniformly without replacement, in random order, at a cost proportional to k.

    Args:
        clients_per_round: Size of the cohort, at least 1, and at most as many as can be summed exactly.

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
        if self.clients_per_round > num_clients:
            raise ValueError(
                f"`clients_per_round` must be at most num_clients={num_clients}, "
                f"got {self.clients_per_round}; lower it or add clients."
            )

    def cohort(self, num_clients: int, generator: torch.Generator) -> Tensor:
        self.check(num_clients)
        size = self.clients_per_round
        if 4 * size >= num_clients:
            return torch.randperm(num_clients, generator=generator)[:size].clone()
        # the first k distinct values of an i.i.d. stream are a uniform ordered sample without replacement
        seen: dict[int, None] = {}
        while len(seen) < size:
            seen.update(dict.fromkeys(torch.randint(num_clients, (size,), generator=generator).tolist()))
        return torch.tensor(list(seen)[:size])
