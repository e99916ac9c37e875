"""The contract of a participation scheme."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

__all__ = ["Participation"]


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
            Distinct client ids in ``[0, num_clients)``, int64, shape ``(k,)``, in the order in which they are
            served.
        """

    def check(self, num_clients: int) -> None:  # noqa: B027 - a scheme without limits has nothing to check
        """Refuse a federation that this scheme cannot serve; called at set-up, before any round.

        Args:
            num_clients: Number of clients in the federation.

        Raises:
            ValueError: If no cohort can be drawn from this number of clients.
        """
