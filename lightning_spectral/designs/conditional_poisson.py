"""Conditional Poisson sampling, the most random of the fixed-size designs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_spectral.designs.base import Design, FittedDesign
from lightning_spectral.functional.checks import as_inclusion_probs
from lightning_spectral.functional.conditional_poisson import (
    draw_conditional_poisson,
    fit_conditional_poisson,
)


@dataclass(frozen=True)
class ConditionalPoisson(Design):
    """The design of maximum entropy among those with the given inclusion probabilities; the default.

    The fit takes a few milliseconds, about 20 for 4096 terms; ten draws of those take as long.

    Reference:
        Hájek (1964); Korzhenkov & Louizos (2024) use it for their strategies.

    Example:
        >>> design = ConditionalPoisson()
        >>> design.sample(torch.tensor([1.0, 0.0, 1.0]), num_samples=2, generator=torch.Generator())
        tensor([[0, 2],
                [0, 2]])
    """

    def fit(self, inclusion_probs: Tensor) -> "FittedConditionalPoisson":
        """Fit the working probabilities; see :func:`~lightning_spectral.functional.fit_conditional_poisson`.

        Args:
            inclusion_probs: Shape ``(N,)``, in ``[0, 1]``, with a whole sum n within 1e-6 n. Entries closer
                than 1e-13 to 0 or 1 count as 0 or 1.

        Returns:
            The fitted design.

        Raises:
            ValueError: If ``inclusion_probs`` breaks a rule.
        """
        _, num_terms = as_inclusion_probs(inclusion_probs)
        return FittedConditionalPoisson(fit_conditional_poisson(inclusion_probs), num_terms)


@dataclass(frozen=True, eq=False)
class FittedConditionalPoisson(FittedDesign):
    """Working probabilities, ready to draw from.

    Attributes:
        working_probs: Probability of each term before conditioning on the number, shape ``(N,)``, float64.
        num_terms: Sample size n.
    """

    working_probs: Tensor
    num_terms: int

    def draw(self, num_samples: int, generator: torch.Generator) -> Tensor:
        """Draw independent samples; see :meth:`FittedDesign.draw`."""
        return draw_conditional_poisson(self.working_probs, self.num_terms, num_samples, generator)
