"""Designs that draw one term after the other."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_spectral.designs.base import Design, FittedDesign, JointDesign, Prepared
from lightning_spectral.errors import check_is
from lightning_spectral.functional.checks import as_inclusion_probs
from lightning_spectral.functional.sampling.brewer import draw_one_by_one
from lightning_spectral.functional.sampling.joint import successive_joint_probs
from lightning_spectral.functional.sampling.open_terms import open_terms
from lightning_spectral.functional.sampling.successive_sampling import draw_successive, fit_log_sizes


@dataclass(frozen=True)
class Brewer(Design):
    """Brewer's draw-by-draw method: exact inclusion probabilities without a fit, in O(N n) for each sample.

    Its law is close to that of :class:`ConditionalPoisson`, which is faster here. It is meant for reproducing the
    comparison of Korzhenkov & Louizos (2024), Table 4. Joint probabilities have no closed form.

    Reference:
        Brewer (1975), Australian Journal of Statistics 17, 166-172.

    Example:
        >>> Brewer().sample(torch.tensor([1.0, 0.0, 1.0]), num_samples=2, generator=torch.Generator())
        tensor([[0, 2],
                [0, 2]])
    """

    def fit(self, inclusion_probs: Tensor) -> FittedDesign:
        """Set aside the certain and the impossible terms; there is nothing to fit."""
        return Prepared(draw_one_by_one, open_terms(inclusion_probs))


@dataclass(frozen=True, eq=False)
class SuccessiveSampling(JointDesign):
    """Draw terms one by one from those left, in proportion to their sizes.

    Args:
        log_sizes: Logarithms of the sizes, shape ``(N,)``, if they are known, as PriSM's are. Then ``fit`` only reads
            the sample size n from its argument, which must be this design's own
            :func:`~lightning_spectral.functional.successive_inclusion_probs`. If ``None``, ``fit`` finds the sizes that
            give the inclusion probabilities, in a few tenths of a second.

    Example:
        >>> design = SuccessiveSampling()
        >>> design.sample(torch.tensor([0.5, 0.25, 0.25]), num_samples=3, generator=torch.Generator()).shape
        torch.Size([3, 1])
    """

    log_sizes: Tensor | None = None

    def __post_init__(self) -> None:
        if self.log_sizes is not None:
            check_is("log_sizes", self.log_sizes, Tensor)

    def fit(self, inclusion_probs: Tensor) -> "FittedSuccessiveSampling":
        """Find the sizes, or use the known ones."""
        _, num_terms = as_inclusion_probs(inclusion_probs)
        if self.log_sizes is None:
            return FittedSuccessiveSampling(fit_log_sizes(inclusion_probs), num_terms)
        if self.log_sizes.shape != inclusion_probs.shape:
            raise ValueError(
                f"`inclusion_probs` must be those of this design's {len(self.log_sizes)} sizes, got "
                f"{len(inclusion_probs)} entries; use SuccessiveSampling() to fit sizes to any probabilities."
            )
        return FittedSuccessiveSampling(self.log_sizes, num_terms)

    def joint_inclusion_probs(self, inclusion_probs: Tensor) -> Tensor:
        """Joint probabilities by quadrature; see :meth:`JointDesign.joint_inclusion_probs`.

        Absolute error about 1e-10; half a second for 512 terms, and nearly a minute for 4096.
        """
        fitted = self.fit(inclusion_probs)
        return successive_joint_probs(fitted.log_sizes, fitted.num_terms)


@dataclass(frozen=True, eq=False)
class FittedSuccessiveSampling(FittedDesign):
    """Sizes, ready to draw from.

    Attributes:
        log_sizes: Logarithms of the sizes, shape ``(N,)``; ``+inf`` is always drawn, ``-inf`` only to reach n.
        num_terms: Sample size n.
    """

    log_sizes: Tensor
    num_terms: int

    def draw(self, num_samples: int, generator: torch.Generator) -> Tensor:
        """Draw independent samples; see :meth:`FittedDesign.draw`."""
        return draw_successive(self.log_sizes, self.num_terms, num_samples, generator)
