"""The one-screen contract of a sharding strategy: how likely each term is, and how it is scaled."""

from abc import ABC, abstractmethod

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

    def own_design(self, singular_values: Tensor, num_terms: int) -> Design:
        """The sampling design to use when the user names none.

        Args:
            singular_values: As for the call, shape ``(N,)``.
            num_terms: As for the call.

        Returns:
            Conditional Poisson sampling, unless the strategy prescribes another design.
        """
        return ConditionalPoisson()
