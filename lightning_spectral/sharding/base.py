"""The contract of a sharding strategy: how likely each term is to be drawn, and how it is scaled."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor

from lightning_spectral.designs import ConditionalPoisson, Design

OWN_DESIGN = ConditionalPoisson()  # one for all layers, which are then fitted together


class ShardingStrategy(ABC):
    """Turns the singular values of a layer into inclusion probabilities and multipliers.

    ``lightning_spectral.testing.check_strategy(MyStrategy())`` checks the contract of a subclass.
    """

    @abstractmethod
    def __call__(self, singular_values: Tensor, num_terms: int, cohort_size: float) -> tuple[Tensor, Tensor]:
        """Choose inclusion probabilities and multipliers for one layer and one sub-model size.

        Args:
            singular_values: Singular values of the layer's weight, shape ``(N,)``, float64, in any order and unit (only
                ratios matter).
            num_terms: Number n of terms that a client holds, ``1 <= n <= N``.
            cohort_size: Number of clients whose terms are averaged, any real number >= 1.

        Returns:
            Inclusion probabilities in ``[0, 1]`` with sum n, and auxiliary multipliers, dimensionless, finite
            and positive: both of shape ``(N,)``, float64. With n = N all are one.
        """

    def for_groups(
        self, singular_values: Tensor, num_terms: Sequence[int], weights: Sequence[Sequence[float]]
    ) -> list[tuple[Tensor, Tensor]]:
        """What :meth:`__call__` returns, for each group of a cohort; by default for each group's number of clients.

        Args:
            singular_values: As for :meth:`__call__`.
            num_terms: Number of terms of each group's clients.
            weights: Weights of each group's clients in the average over the cohort, in any unit.
        """
        return [self(singular_values, n, float(len(own))) for n, own in zip(num_terms, weights, strict=True)]

    def drawn_multipliers(self, singular_values: Tensor, multipliers: Tensor, terms: Tensor) -> Tensor:
        """The multipliers of one client, shape ``(n,)``, float64; by default those of the terms that it drew."""
        return multipliers[terms]

    def figures(self, singular_values: Tensor, num_terms: int, cohort_size: float) -> Mapping[str, float]:
        """What the strategy chose for one layer, by name, for `SpectralDiagnostics` to log; by default nothing."""
        return {}

    def own_design(self, singular_values: Tensor, num_terms: int) -> Design:
        """The design to use when the user names none: conditional Poisson sampling, unless the strategy has its own."""
        return OWN_DESIGN
