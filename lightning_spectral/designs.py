"""Designs: exact fixed-size draws with given inclusion probabilities; the contract, and the designs of the papers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_spectral.errors import check_is
from lightning_spectral.functional.checks import as_inclusion_probs
from lightning_spectral.functional.sampling.cohorts import coordinated_multipliers, draw_coordinated
from lightning_spectral.functional.sampling.conditional_poisson import (
    conditional_poisson_joint_probs,
    draw_conditional_poisson,
    fit_conditional_poisson,
    fit_conditional_poissons,
    working_open_terms,
)
from lightning_spectral.functional.sampling.open_terms import open_terms
from lightning_spectral.functional.sampling.successive_sampling import (
    draw_successive,
    fit_log_sizes,
    successive_joint_probs,
)
from lightning_spectral.functional.sampling.without_fit import (
    draw_brewer,
    draw_from_support,
    draw_systematic,
    minimum_support,
    support_joint_probs,
    systematic_support,
    whole_units,
)

__all__ = [
    "Brewer",
    "ConditionalPoisson",
    "Coordinated",
    "Design",
    "FittedDesign",
    "JointDesign",
    "MinimumSupport",
    "RandomSystematic",
    "SuccessiveSampling",
    "Systematic",
]


class FittedDesign:
    """A design prepared for one vector of inclusion probabilities; draws are cheap and can be repeated.

    Args:
        function: Draws samples, as ``function(*prepared, num_samples, generator, **options)``.
        prepared: What was prepared for it.
        options: Its other arguments.
    """

    def __init__(self, function: Callable[..., Tensor], *prepared: Any, **options: Any) -> None:
        self._draw = partial(function, *prepared, **options)

    def draw(self, num_samples: int, generator: torch.Generator) -> Tensor:
        """Draw independent samples of terms, e.g. one for each client; ``generator`` is the only source of randomness.

        Returns:
            Term indices, sorted and distinct in each row, int64, shape ``(num_samples, n)``, on the generator's device.
        """
        return self._draw(num_samples, generator)


class Design(ABC):
    """A way to draw exactly n of N terms so that term i is drawn with probability ``inclusion_probs[i]``.

    Subclasses implement :meth:`fit`. ``lightning_spectral.testing.check_design(MyDesign())`` then checks the contract:
    size exactly n, terms of probability one always drawn and those of zero never, the given frequencies, independent
    rows.

    Attributes:
        draws_cohort: Whether the rows of one draw belong together, one for each client of a group. Such a design draws
            once per group and round; all others draw once per client.
    """

    draws_cohort: ClassVar[bool] = False

    @abstractmethod
    def fit(self, inclusion_probs: Tensor) -> FittedDesign:
        """Do the work that is common to all draws; in a federation it serves every client with these probabilities.

        Args:
            inclusion_probs: Shape ``(N,)``, in ``[0, 1]``, summing to an integer n within 1e-6 n. Our designs treat
                entries within 1e-13 of 0 or 1 as 0 or 1; `SuccessiveSampling` treats those within 1e-11 of 1 as 1.

        Raises:
            ValueError: If ``inclusion_probs`` is invalid; ``functional.checks.as_inclusion_probs`` makes that check.
        """

    def fit_all(self, inclusion_probs: Sequence[Tensor]) -> list[FittedDesign]:
        """Fit several vectors, such as those of all layers; by default one after another."""
        return [self.fit(probs) for probs in inclusion_probs]

    def multipliers(self, inclusion_probs: Tensor, multipliers: Tensor, cohort_size: int) -> Tensor:
        """Return the multipliers, shape ``(N,)``, for draws of this design; by default the strategy's.

        Those suit independent draws. ``cohort_size`` is the number of clients of the group.
        """
        return multipliers

    def sample(self, inclusion_probs: Tensor, num_samples: int, generator: torch.Generator) -> Tensor:
        """Fit and draw in one call."""
        return self.fit(inclusion_probs).draw(num_samples, generator)


class JointDesign(Design):
    """A design that also knows how likely two terms are to be drawn together."""

    @abstractmethod
    def joint_inclusion_probs(self, inclusion_probs: Tensor) -> Tensor:
        """Probabilities that terms i and j are in the same sample, shape ``(N, N)``, float64, symmetric.

        The inclusion probabilities, as for :meth:`fit`, are the diagonal; each row sums to n times its entry there.
        """


@dataclass(frozen=True)
class ConditionalPoisson(JointDesign):
    """The design of maximum entropy among those with the given inclusion probabilities; the default.

    The fit takes about two milliseconds, ten for 4096 terms. A draw discards Poisson samples until one has n terms:
    0.05 ms for 64 terms, two for 4096. Joint probabilities have an absolute error of about 1e-12, that of the fit, and
    take one second for 4096 terms.

    Reference:
        Hájek (1964); Korzhenkov & Louizos (2024) use it for their strategies.

    Example:
        >>> design = ConditionalPoisson()
        >>> design.sample(torch.tensor([1.0, 0.0, 1.0]), num_samples=2, generator=torch.Generator())
        tensor([[0, 2],
                [0, 2]])
    """

    def fit(self, inclusion_probs: Tensor) -> FittedDesign:
        return self.fit_all([inclusion_probs])[0]

    def fit_all(self, inclusion_probs: Sequence[Tensor]) -> list[FittedDesign]:
        """Fit vectors of one length and sample size together, which is several times faster for short ones."""
        fitted = fit_conditional_poissons(inclusion_probs)
        num_terms = [as_inclusion_probs(probs)[1] for probs in inclusion_probs]
        # checked and centred once: in a federation every client draws separately
        parts = map(working_open_terms, fitted, num_terms)
        return [FittedDesign(draw_conditional_poisson, own) for own in parts]

    def joint_inclusion_probs(self, inclusion_probs: Tensor) -> Tensor:
        _, num_terms = as_inclusion_probs(inclusion_probs)
        return conditional_poisson_joint_probs(fit_conditional_poisson(inclusion_probs), num_terms)


@dataclass(frozen=True)
class Brewer(Design):
    """Brewer's draw-by-draw method: exact inclusion probabilities without a fit, in O(N n) for each sample.

    Its law is close to that of :class:`ConditionalPoisson`, which is faster here. It is meant for reproducing the
    comparison of Korzhenkov & Louizos (2024), Table 4. Joint probabilities have no closed form.

    Reference:
        Brewer (1975), Australian Journal of Statistics 17, 166-172.

    Example:
        >>> Brewer().sample(torch.tensor([1.0, 0.0, 1.0]), num_samples=1, generator=torch.Generator())
        tensor([[0, 2]])
    """

    def fit(self, inclusion_probs: Tensor) -> FittedDesign:
        return FittedDesign(draw_brewer, open_terms(inclusion_probs))


@dataclass(frozen=True, eq=False)
class SuccessiveSampling(JointDesign):
    """Draw terms one by one from those left, in proportion to their sizes.

    Joint probabilities come from a quadrature, with an absolute error of about 1e-10: half a second for 512 terms, and
    nearly a minute for 4096.

    Args:
        log_sizes: Logarithms of the sizes, shape ``(N,)``, if they are known, as PriSM's are. Then ``fit`` only reads
            the sample size n from its argument, which must be this design's own
            `successive_inclusion_probs`. If ``None``, ``fit`` finds the sizes that
            give the inclusion probabilities, in a few tenths of a second.

    Example:
        >>> design = SuccessiveSampling()
        >>> design.sample(torch.tensor([0.5, 0.25, 0.25]), num_samples=3, generator=torch.Generator()).shape
        torch.Size([3, 1])
    """

    log_sizes: Tensor | None = None

    def __post_init__(self) -> None:
        check_is("log_sizes", self.log_sizes, Tensor | None)

    def fit(self, inclusion_probs: Tensor) -> FittedDesign:
        return FittedDesign(draw_successive, *self._sizes(inclusion_probs))

    def joint_inclusion_probs(self, inclusion_probs: Tensor) -> Tensor:
        return successive_joint_probs(*self._sizes(inclusion_probs))

    def _sizes(self, inclusion_probs: Tensor) -> tuple[Tensor, int]:
        """Logarithms of the sizes, and the sample size n."""
        _, num_terms = as_inclusion_probs(inclusion_probs)
        if self.log_sizes is None:
            return fit_log_sizes(inclusion_probs), num_terms
        if self.log_sizes.shape != inclusion_probs.shape:
            raise ValueError(
                f"`inclusion_probs` must be those of this design's {len(self.log_sizes)} sizes, got "
                f"{len(inclusion_probs)} entries; use SuccessiveSampling() to fit sizes to any probabilities."
            )
        return self.log_sizes, num_terms


@dataclass(frozen=True)
class Systematic(JointDesign):
    """Systematic sampling in the order of the terms: the cheapest design, with one random number per sample.

    Singular values come sorted, so each sample spreads evenly over the spectrum: of any run of consecutive terms with
    probabilities summing to m it holds m, give or take one. Neighbours are hardly ever drawn together, and there are at
    most N different samples. :class:`RandomSystematic` has neither property.

    Reference:
        Madow (1949), Annals of Mathematical Statistics 20, 333-354.

    Example:
        >>> Systematic().joint_inclusion_probs(torch.tensor([0.5, 0.5, 0.5, 0.5]))[0]
        tensor([0.5000, 0.0000, 0.5000, 0.0000], dtype=torch.float64)
    """

    def fit(self, inclusion_probs: Tensor) -> FittedDesign:
        parts = open_terms(inclusion_probs)
        return FittedDesign(draw_systematic, parts, whole_units(parts), shuffled=False)

    def joint_inclusion_probs(self, inclusion_probs: Tensor) -> Tensor:
        return support_joint_probs(systematic_support(inclusion_probs), len(inclusion_probs))


@dataclass(frozen=True)
class RandomSystematic(Design):
    """Systematic sampling after a random permutation, drawn anew for each sample.

    Nearly as cheap as :class:`Systematic`, and close to :class:`ConditionalPoisson` in which terms are drawn together.
    The joint probabilities are averages over all orders and have no closed form.

    Reference:
        Hartley & Rao (1962), Annals of Mathematical Statistics 33, 350-374.

    Example:
        >>> RandomSystematic().sample(torch.tensor([1.0, 0.0, 1.0]), num_samples=1, generator=torch.Generator())
        tensor([[0, 2]])
    """

    def fit(self, inclusion_probs: Tensor) -> FittedDesign:
        parts = open_terms(inclusion_probs)
        return FittedDesign(draw_systematic, parts, whole_units(parts), shuffled=True)


@dataclass(frozen=True)
class MinimumSupport(JointDesign):
    """The design with the fewest samples: nearly the opposite of :class:`ConditionalPoisson`.

    The list of samples, at most N, depends only on the inclusion probabilities and is made once, by ``fit``. Clients
    draw from it independently, so several of a round may hold exactly the same terms, and most pairs never occur.

    Note:
        R's ``UPminimalsupport`` splits at random for each sample: it has the same inclusion probabilities, but any set
        of terms can occur. This class is the design as published.

    Reference:
        Deville & Tillé (1998), Biometrika 85, 89-101. Korzhenkov & Louizos (2024), Table 4, compare designs.

    Example:
        >>> MinimumSupport().sample(torch.tensor([1.0, 0.0, 1.0]), num_samples=1, generator=torch.Generator())
        tensor([[0, 2]])
    """

    def fit(self, inclusion_probs: Tensor) -> FittedDesign:
        return FittedDesign(draw_from_support, minimum_support(inclusion_probs))

    def joint_inclusion_probs(self, inclusion_probs: Tensor) -> Tensor:
        return support_joint_probs(minimum_support(inclusion_probs), len(inclusion_probs))


@dataclass(frozen=True)
class Coordinated(Design):
    r"""Exact size and inclusion probabilities for each client, and term counts of :math:`C\pi_i` rounded down or up.

    The rows of one draw are the clients of one group and depend on each other: what one client lacks, another holds.
    Their average is closer to the weight than that of independent clients with the same probabilities. The multipliers
    are the best for these counts and replace the strategy's.

    Example:
        >>> rows = Coordinated().sample(torch.tensor([0.5, 0.25, 0.25]), num_samples=4, generator=torch.Generator())
        >>> rows.flatten().bincount()
        tensor([2, 1, 1])
    """

    draws_cohort = True

    def fit(self, inclusion_probs: Tensor) -> FittedDesign:
        return FittedDesign(draw_coordinated, as_inclusion_probs(inclusion_probs)[0])

    def multipliers(self, inclusion_probs: Tensor, multipliers: Tensor, cohort_size: int) -> Tensor:
        return coordinated_multipliers(inclusion_probs, cohort_size)
