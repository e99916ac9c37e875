"""The minimum support design: at most N different samples."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_spectral.designs.base import FittedDesign, JointDesign
from lightning_spectral.functional.sampling.support import (
    Support,
    draw_from_support,
    minimum_support,
    support_joint_probs,
)


@dataclass(frozen=True)
class MinimumSupport(JointDesign):
    """The design with the fewest samples: nearly the opposite of :class:`ConditionalPoisson`.

    The list of samples, at most N, depends only on the inclusion probabilities and is made once, by ``fit``. Clients
    draw from it independently, so several clients of a round may hold exactly the same terms, and most pairs of terms
    never occur together.

    Note:
        R's ``UPminimalsupport`` splits at random for each sample: it has the same inclusion probabilities, but any set
        of terms can occur. This class is the design as published.

    Reference:
        Deville & Tillé (1998), Biometrika 85, 89-101. Korzhenkov & Louizos (2024), Table 4, compare designs.

    Example:
        >>> MinimumSupport().sample(torch.tensor([1.0, 0.0, 1.0]), num_samples=2, generator=torch.Generator())
        tensor([[0, 2],
                [0, 2]])
    """

    def fit(self, inclusion_probs: Tensor) -> "FittedMinimumSupport":
        """List the samples; see :func:`~lightning_spectral.functional.minimum_support`.

        Args:
            inclusion_probs: Shape ``(N,)``, in ``[0, 1]``, summing to an integer n within 1e-6 n. Entries closer
                than 1e-13 to 0 or 1 count as 0 or 1.

        Returns:
            The fitted design.

        Raises:
            ValueError: If ``inclusion_probs`` is invalid, or more than 8191 open terms are to be drawn.
        """
        return FittedMinimumSupport(minimum_support(inclusion_probs))

    def joint_inclusion_probs(self, inclusion_probs: Tensor) -> Tensor:
        """Exact joint probabilities: a sum over the samples; see :meth:`JointDesign.joint_inclusion_probs`."""
        return support_joint_probs(minimum_support(inclusion_probs), len(inclusion_probs))


@dataclass(frozen=True, eq=False)
class FittedMinimumSupport(FittedDesign):
    """A list of samples, ready to draw from.

    Attributes:
        support: The samples and their probabilities.
    """

    support: Support

    def draw(self, num_samples: int, generator: torch.Generator) -> Tensor:
        """Draw independent samples; see :meth:`FittedDesign.draw`."""
        return draw_from_support(self.support, num_samples, generator)
