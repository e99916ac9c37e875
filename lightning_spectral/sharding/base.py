"""The one-screen contract of a sharding strategy: how likely each term is, and how it is scaled."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from lightning_spectral.designs import ConditionalPoisson, Design


class ShardingStrategy(ABC):
    """Turns the singular values of a layer into inclusion probabilities and multipliers.

    Subclasses write :meth:`__call__`. Then ``lightning_spectral.testing.check_strategy(MyStrategy())`` says
    whether the answers keep the contract.
    """

    @abstractmethod
    def __call__(self, singular_values: Tensor, num_terms: int, cohort_size: float) -> tuple[Tensor, Tensor]:
        """Decide for one layer and one size of sub-model.

        Args:
            singular_values: Of the layer's weight, shape ``(N,)``, float64, any order, any unit (only ratios
                matter).
            num_terms: Number n of terms that a client holds, ``1 <= n <= N``.
            cohort_size: Number of clients whose terms are averaged, any real number >= 1.

        Returns:
            Inclusion probabilities in ``[0, 1]`` with sum n, and auxiliary multipliers, dimensionless, finite
            and positive: both of shape ``(N,)``, float64. With n = N all are one.

        Raises:
            ValueError: If an argument is out of range or a singular value is negative, infinite or NaN.
        """

    def for_groups(
        self, singular_values: Tensor, num_terms: Sequence[int], sizes: Sequence[float]
    ) -> list[tuple[Tensor, Tensor]]:
        """Decide for a cohort of clients with several sizes of sub-model; here each group by itself.

        Args:
            singular_values: As for the call, shape ``(N,)``.
            num_terms: Number of terms held by the clients of each group.
            sizes: Number of clients of each group.

        Returns:
            For each group what the call returns.
        """
        return [self(singular_values, n, size) for n, size in zip(num_terms, sizes, strict=True)]

    def drawn_multipliers(self, singular_values: Tensor, multipliers: Tensor, terms: Tensor) -> Tensor:
        """Multipliers of the terms that one client drew; only these are ever used.

        Args:
            singular_values: As for the call, shape ``(N,)``.
            multipliers: What the call returned, shape ``(N,)``.
            terms: Drawn term indices, shape ``(n,)``.

        Returns:
            Shape ``(n,)``, float64; here simply those of the drawn terms.
        """
        return multipliers[terms]

    def own_design(self, singular_values: Tensor, num_terms: int) -> Design:
        """The sampling design to use when the user names none.

        Args:
            singular_values: As for the call, shape ``(N,)``.
            num_terms: As for the call.

        Returns:
            Conditional Poisson sampling, unless the strategy prescribes another design.
        """
        return ConditionalPoisson()
