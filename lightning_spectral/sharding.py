"""Sharding strategies: how likely each singular term is to be in a client's shard; and choices of channels."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_spectral.arguments import Number, OneOf, Whole, check_fields
from lightning_spectral.designs import ConditionalPoisson, Design, SuccessiveSampling
from lightning_spectral.errors import check_is
from lightning_spectral.functional.checks import as_magnitudes, check_num_terms
from lightning_spectral.functional.figures import cohort_discrepancy
from lightning_spectral.functional.sampling.cohorts import SLACK, effective_cohort_size, joint_multipliers, kish_size
from lightning_spectral.functional.sampling.inclusion import (
    ORDER,
    collective_inclusion_probs,
    collective_multipliers,
    proportional_inclusion_probs,
    schatten_inclusion_probs,
    top_inclusion_probs,
)
from lightning_spectral.functional.sampling.successive_sampling import manly_inclusion_probs, successive_inclusion_probs

__all__ = [
    "ChannelChoice",
    "Collective",
    "EffectiveCohort",
    "Number",
    "PrefixChannels",
    "PriSM",
    "RandomChannels",
    "RollingChannels",
    "Scaled",
    "Schatten",
    "ShardingStrategy",
    "TopN",
    "Unbiased",
    "as_magnitudes",
    "check_fields",
    "check_num_terms",
    "inverse_probs",
    "proportional_inclusion_probs",
    "top_inclusion_probs",
]

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
                ratios matter). Terms that get probability 0 even if they are larger may be given equal values, whose
                squares have the sum that they should have.
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


@dataclass(frozen=True)
class TopN(ShardingStrategy):
    """All clients hold the n terms with the largest singular values (ties by position), unscaled, as in FedHM.

    The sub-model is the best approximation of rank n, but the other terms are never trained.

    Example:
        >>> TopN()(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64), num_terms=2, cohort_size=10)[0]
        tensor([1., 1., 0.], dtype=torch.float64)
    """

    def __call__(self, singular_values: Tensor, num_terms: int, cohort_size: float) -> tuple[Tensor, Tensor]:
        probs = top_inclusion_probs(singular_values.double(), num_terms)
        return probs, torch.ones_like(probs)


@dataclass(frozen=True)
class Unbiased(ShardingStrategy):
    r"""Horvitz-Thompson: :math:`\pi_i = \min(1, c\,s_i)` and multipliers :math:`1 / \pi_i`.

    Each client's sub-model equals the full weight on average, with the least Frobenius error that this
    allows. Multipliers of small terms can be large; clip the learning rate (``EffectiveLRClip``).

    Note:
        Terms that are never drawn, those of singular value zero, get multiplier 1, so that all multipliers are finite.

    Reference:
        Korzhenkov & Louizos (2024), Theorem 3.1 and Algorithm 1.

    Example:
        >>> s = torch.tensor([6.0, 2.0, 1.0, 1.0], dtype=torch.float64)
        >>> Unbiased()(s, num_terms=2, cohort_size=10)[1]
        tensor([1., 2., 4., 4.], dtype=torch.float64)
    """

    def __call__(self, singular_values: Tensor, num_terms: int, cohort_size: float) -> tuple[Tensor, Tensor]:
        probs = proportional_inclusion_probs(singular_values.double(), num_terms)
        return probs, inverse_probs(probs)


def inverse_probs(inclusion_probs: Tensor) -> Tensor:
    """Horvitz-Thompson multipliers 1 / pi; 1 for terms that are never drawn, and finite for any pi."""
    smallest = torch.finfo(inclusion_probs.dtype).tiny
    return torch.where(inclusion_probs > 0, inclusion_probs.clamp_min(smallest), 1.0).reciprocal()


@dataclass(frozen=True)
class Schatten(ShardingStrategy):
    r"""Multipliers :math:`1/\pi_i`, and the :math:`\pi` with the least bound on the expected Schatten p-norm error.

    For p = 2 this is `Unbiased`. Small terms keep nearly the same proportions for any p; a larger p takes probability
    from large terms that are not yet certain and gives it to small ones, whose omission costs more.

    Args:
        p: Order of the norm, at least 2; the paper reports 4.

    Note:
        The paper optimises numerically and finds larger p unstable. The problem is convex and separable, so it is
        solved exactly here; nothing can fail to converge, and there is no fallback.

    Reference:
        Korzhenkov & Louizos (2024), appendix A, Eq. (10) and Table 5.

    Example:
        >>> s = torch.tensor([6.0, 2.0, 1.0, 1.0], dtype=torch.float64)
        >>> Schatten(p=4)(s, num_terms=2, cohort_size=10)[0]
        tensor([1.0000, 0.4541, 0.2730, 0.2730], dtype=torch.float64)
    """

    p: float = 4.0

    def __post_init__(self) -> None:
        check_fields(self, p=ORDER)

    def __call__(self, singular_values: Tensor, num_terms: int, cohort_size: float) -> tuple[Tensor, Tensor]:
        probs = schatten_inclusion_probs(singular_values.double(), num_terms, self.p)
        return probs, inverse_probs(probs)


@dataclass(frozen=True)
class Scaled(ShardingStrategy):
    r"""Another strategy's draws, with one multiplier for all drawn terms that preserves the Frobenius norm.

    :math:`\omega = \sqrt{\sum_k s_k^2 / \sum_{k \in I} s_k^2}`: it depends on the drawn terms I and is known only after
    the draw (`drawn_multipliers`); before, the multiplier is that of the expected draw.

    Args:
        strategy: The strategy that sets the inclusion probabilities.

    Reference:
        Korzhenkov & Louizos (2024), section 4.1, "+Scaled".

    Example:
        >>> s = torch.tensor([3.0, 4.0, 12.0], dtype=torch.float64)
        >>> Scaled(TopN()).drawn_multipliers(s, torch.ones(3), torch.tensor([0, 1]))
        tensor([2.6000, 2.6000], dtype=torch.float64)
    """

    strategy: ShardingStrategy

    def __post_init__(self) -> None:
        check_is("strategy", self.strategy, ShardingStrategy)

    def __call__(self, singular_values: Tensor, num_terms: int, cohort_size: float) -> tuple[Tensor, Tensor]:
        probs, _ = self.strategy(singular_values, num_terms, cohort_size)
        squares = as_magnitudes(singular_values, "singular_values") ** 2
        return probs, torch.full_like(probs, _norm_ratio(squares.sum(), (probs * squares).sum()))

    def drawn_multipliers(self, singular_values: Tensor, multipliers: Tensor, terms: Tensor) -> Tensor:
        squares = as_magnitudes(singular_values, "singular_values") ** 2
        return torch.full((len(terms),), _norm_ratio(squares.sum(), squares[terms].sum()), dtype=torch.float64)

    def figures(self, singular_values: Tensor, num_terms: int, cohort_size: float) -> Mapping[str, float]:
        return self.strategy.figures(singular_values, num_terms, cohort_size)

    def own_design(self, singular_values: Tensor, num_terms: int) -> Design:
        return self.strategy.own_design(singular_values, num_terms)


def _norm_ratio(whole: Tensor, part: Tensor) -> float:
    return float((whole / part).sqrt()) if part > 0 else 1.0  # all drawn terms are zero: nothing to scale


@dataclass(frozen=True)
class PriSM(ShardingStrategy):
    """Successive sampling with sizes :math:`s_i^k`, as in ``numpy.random.choice(replace=False)``, unscaled.

    Args:
        exponent: The power k > 0. ``None`` follows Korzhenkov & Louizos (2024): 4 for keep ratios up to 0.2, 2.5 above.
            PriSM's own experiments use one exponent for all clients.
        compensation: ``None`` for multipliers of one, as in PriSM; ``"wallenius"`` for 1/pi, which makes each client's
            estimator unbiased: "PriSM + Wallenius" of the 2024 paper.
        marginals: ``"exact"`` inclusion probabilities, or ``"manly"`` for Manly's approximation, which that paper used.

    Note:
        The exact inclusion probabilities are the marginals of this draw, so they belong to the strategy's
        :meth:`own_design`; another design keeps the marginals and only changes which terms are drawn together.

    Reference:
        Niu et al. (2022).

    Example:
        >>> s = torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64)
        >>> PriSM(exponent=1)(s, num_terms=2, cohort_size=10)[0]
        tensor([0.8333, 0.5833, 0.5833], dtype=torch.float64)
    """

    exponent: float | None = None
    compensation: Literal["wallenius"] | None = None
    marginals: Literal["exact", "manly"] = "exact"

    def __post_init__(self) -> None:
        check_fields(
            self,
            exponent=Number(above=0, optional=True),
            compensation=OneOf((None, "wallenius")),
            marginals=OneOf(("exact", "manly")),
        )

    def __call__(self, singular_values: Tensor, num_terms: int, cohort_size: float) -> tuple[Tensor, Tensor]:
        marginals = successive_inclusion_probs if self.marginals == "exact" else manly_inclusion_probs
        probs = marginals(self._log_sizes(singular_values, num_terms), num_terms)
        return probs, torch.ones_like(probs) if self.compensation is None else inverse_probs(probs)

    def own_design(self, singular_values: Tensor, num_terms: int) -> SuccessiveSampling:
        return SuccessiveSampling(self._log_sizes(singular_values, num_terms))

    def _log_sizes(self, singular_values: Tensor, num_terms: int) -> Tensor:
        values = as_magnitudes(singular_values, "singular_values")
        exponent = self.exponent
        if exponent is None:
            # r <= 0.2 is the same as n = ceil(r N) <= ceil(0.2 N), in integers; n / N may exceed 0.2: 13 / 64.
            exponent = 4.0 if num_terms <= -(-len(values) // 5) else 2.5
        return exponent * values.log()


CohortPlan = Literal["group", "joint", "best"]


@dataclass(frozen=True)
class Collective(ShardingStrategy):
    r"""Probabilities and multipliers that minimise the error of the average of C independent clients.

    :math:`\pi_i = \operatorname{clip}((s_i/L - 1)/(C - 1), 0, 1)` and
    :math:`\omega_i = C / (1 + (C - 1)\pi_i)`, between top-n (C = 1) and :class:`Unbiased` (C to infinity).
    Small terms may never be drawn; multipliers stay below C.

    Args:
        cohort: How to treat a cohort of clients with different keep ratios or different weights in the average.

            - ``"group"``: each group of equal keep ratios separately, with its own number of clients, whatever their
              weights. The paper's recipe.
            - ``"joint"``: each group with the total number of clients, then the multipliers that are best for the
              average over all of them. Clients of different weights count as Kish's number of equal ones,
              :math:`1 / \sum_c a_c^2` in each group. Multipliers may exceed the number of clients, or be zero where
              other clients hold the term for certain.
            - ``"best"``: layer by layer, whichever has the least discrepancy: either of these two, or the paper's
              probabilities with the best multipliers.

    Note:
        A lower discrepancy does not imply a better model: it measures the sub-models before any client trains. This is
        why the paper's recipe is the default.

    Reference:
        Korzhenkov & Louizos (2024), Theorem 3.2 and Algorithm 2 with the sign of line 30 corrected.

    Example:
        >>> Collective()(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64), num_terms=2, cohort_size=3)
        (tensor([1.0000, 0.8333, 0.1667], dtype=torch.float64), tensor([1.0000, 1.1250, 2.2500],
        dtype=torch.float64))
    """

    cohort: CohortPlan = "group"

    def __post_init__(self) -> None:
        check_fields(self, cohort=OneOf(get_args(CohortPlan)))

    def __call__(self, singular_values: Tensor, num_terms: int, cohort_size: float) -> tuple[Tensor, Tensor]:
        probs = collective_inclusion_probs(singular_values.double(), num_terms, cohort_size)
        return probs, collective_multipliers(probs, cohort_size)

    def for_groups(
        self, singular_values: Tensor, num_terms: Sequence[int], weights: Sequence[Sequence[float]]
    ) -> list[tuple[Tensor, Tensor]]:
        apart = super().for_groups(singular_values, num_terms, weights)
        if self.cohort == "group":
            return apart
        if not any(map(any, weights)):  # no client has data: all count equally
            weights = [[1.0] * len(own) for own in weights]
        total = sum(kish_size(own) for own in weights if any(own))
        joint = _with_joint_multipliers([self(singular_values, n, total) for n in num_terms], weights)
        if self.cohort == "joint":
            return joint
        flat = torch.tensor([weight for own in weights for weight in own], dtype=torch.float64)

        def discrepancy(groups: Sequence[tuple[Tensor, Tensor]]) -> float:
            rows = [group for group, own in zip(groups, weights, strict=True) for _ in own]
            probs, multipliers = (torch.stack(column) for column in zip(*rows, strict=True))
            return float(cohort_discrepancy(singular_values, probs, multipliers, flat / flat.sum()))

        return min([apart, joint, _with_joint_multipliers(apart, weights)], key=discrepancy)


def _with_joint_multipliers(
    groups: Sequence[tuple[Tensor, Tensor]], weights: Sequence[Sequence[float]]
) -> list[tuple[Tensor, Tensor]]:
    probs = torch.stack([group for group, _ in groups])
    sizes, shares = torch.tensor([[kish_size(own), sum(own)] for own in weights], dtype=torch.float64).T
    return list(zip(probs, joint_multipliers(probs, sizes, shares), strict=True))


@dataclass(frozen=True)
class EffectiveCohort(ShardingStrategy):
    r"""`Collective` for the largest number of clients that keeps each sub-model close to the weight.

    `Collective` minimises the error of an average, in which clients' errors cancel. But each client trains its own
    sub-model, which may be far from the weight. Layer by layer, this strategy uses the largest effective number of
    clients for which the expected squared error of a single sub-model is at most :math:`1 + slack` times that of the n
    largest terms. With slack 0 it is :class:`TopN`, with infinite slack :class:`Collective`.

    Args:
        slack: By how much the squared error of a client's sub-model may exceed that of the best sub-model of n terms,
            as a share of the latter.

    Note:
        Any mixture of the client's and the cohort's error is the cohort's error for another number of clients, so no
        strategy can improve on one of the two without making the other worse: see
        `functional.sampling.cohorts.effective_cohort_size`.

    Example:
        >>> s = torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)
        >>> EffectiveCohort(slack=0.5)(s, num_terms=2, cohort_size=10)[0]
        tensor([1.0000, 0.8882, 0.1118], dtype=torch.float64)
    """

    slack: float = 0.05

    def __post_init__(self) -> None:
        check_fields(self, slack=SLACK)

    def __call__(self, singular_values: Tensor, num_terms: int, cohort_size: float) -> tuple[Tensor, Tensor]:
        size = effective_cohort_size(singular_values, num_terms, cohort_size, self.slack)
        return Collective()(singular_values, num_terms, size)

    def figures(self, singular_values: Tensor, num_terms: int, cohort_size: float) -> Mapping[str, float]:
        return {"effective_cohort": effective_cohort_size(singular_values, num_terms, cohort_size, self.slack)}


class ChannelChoice(ABC):
    """Chooses the channels that a client holds, for each group of channels that belong together.

    ``lightning_spectral.testing.check_channel_choice(MyChoice())`` checks the contract.
    """

    @abstractmethod
    def __call__(self, num_channels: int, num_kept: int, round_idx: int, generator: torch.Generator) -> Tensor:
        """Choose ``num_kept`` of a group's ``num_channels`` channels for one client.

        Args:
            num_channels: Number N of the group's channels.
            num_kept: Number n of those that the client holds, ``1 <= n <= N``.
            round_idx: Communication round, from 0.
            generator: The client's generator for this group and round, the only source of randomness.

        Returns:
            Distinct indices, shape ``(n,)``, int64, on the CPU, in any order.
        """


@dataclass(frozen=True)
class PrefixChannels(ChannelChoice):
    """The first channels: sub-models are nested, and the last channels are trained only by large clients.

    Reference:
        Diao et al. (2021), HeteroFL.

    Example:
        >>> PrefixChannels()(8, 3, round_idx=7, generator=torch.Generator())
        tensor([0, 1, 2])
    """

    def __call__(self, num_channels: int, num_kept: int, round_idx: int, generator: torch.Generator) -> Tensor:
        return torch.arange(num_kept)


@dataclass(frozen=True)
class RollingChannels(ChannelChoice):
    """A window that moves on in every round and wraps around at the end: all channels are trained equally often.

    Args:
        step: Number of channels by which it moves in each round.

    Note:
        As in the paper, the window starts at the channel with the round's number. The authors' code moves it backwards.

    Reference:
        Alam et al. (2022), FedRolex.

    Example:
        >>> RollingChannels()(8, 3, round_idx=7, generator=torch.Generator())
        tensor([7, 0, 1])
    """

    step: int = 1

    def __post_init__(self) -> None:
        check_fields(self, step=Whole(at_least=1))

    def __call__(self, num_channels: int, num_kept: int, round_idx: int, generator: torch.Generator) -> Tensor:
        return (round_idx * self.step + torch.arange(num_kept)) % num_channels


@dataclass(frozen=True)
class RandomChannels(ChannelChoice):
    """Random channels, drawn anew for each client and round.

    Reference:
        Caldas et al. (2018), Federated Dropout.

    Example:
        >>> RandomChannels()(8, 3, round_idx=7, generator=torch.Generator().manual_seed(0)).shape
        torch.Size([3])
    """

    def __call__(self, num_channels: int, num_kept: int, round_idx: int, generator: torch.Generator) -> Tensor:
        return torch.randperm(num_channels, generator=generator)[:num_kept]
