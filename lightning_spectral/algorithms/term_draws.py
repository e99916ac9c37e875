"""How the clients of a round draw terms of factorised matrices: probabilities, multipliers and fitted designs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_spectral.designs import Design, FittedDesign
from lightning_spectral.functional.checks import has_values
from lightning_spectral.functional.figures import group_discrepancy
from lightning_spectral.functional.spectra import TOLERANCE, absorb, leading_factors, num_terms_for
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.records import Key, WorkUnit
from lightning_spectral.protocol.rng import derived_generator
from lightning_spectral.sharding import ShardingStrategy, TopN

# The first terms alone are cheaper to find up to this share of all, whatever the shape (``benchmarks/refresh.py``).
FIRST_TERMS = 1 / 3
TINY = torch.finfo(torch.float64).tiny  # keeps the missing share of a weight of zeros at zero


@dataclass(frozen=True, eq=False)
class GroupPlan:
    """How the clients of one keep ratio draw their terms of one matrix.

    Attributes:
        inclusion_probs: Shape ``(N,)``, float64, on the CPU.
        multipliers: Shape ``(N,)``, float64, on the CPU.
        design: Fitted once; every client's draw comes from it.
        weights: The weights of the group's clients in the average over the cohort, which sum to one over all groups,
            shape ``(C,)``, float64.
        dealt: The terms of each unit, by its key, if they are drawn for the whole group at once, or certain.
    """

    inclusion_probs: Tensor
    multipliers: Tensor
    design: FittedDesign
    weights: Tensor
    dealt: Mapping[Key, Tensor] | None = None

    @property
    def num_terms(self) -> int:
        """Number n of terms that a client of the group holds."""
        return round(float(self.inclusion_probs.sum()))

    @property
    def num_clients(self) -> int:
        """Number of clients of the group."""
        return len(self.weights)


@dataclass(frozen=True, eq=False)
class TermDraws:
    """How the clients of a round draw terms of one factorised matrix: a layer's weight, or a block of it.

    Attributes:
        name: The matrix's dotted name.
        singular_values: Shape ``(N,)``, float64, on the CPU; those of terms that no client could hold may be given as
            their root mean square (`first_terms`).
        groups: A plan for each keep ratio of the round.
        strategy: Scales the drawn terms.
    """

    name: str
    singular_values: Tensor
    groups: Mapping[float, GroupPlan]
    strategy: ShardingStrategy

    @property
    def reach(self) -> Tensor:
        """What remains of each term where matrices are averaged: shape ``(N,)``, float64, on the CPU.

        With one group, 1 for terms that a client could hold, and 0 for others. With several, the mean over all clients
        of a term's expected multiplier, which is 0 for those who cannot hold it.
        """
        plans = list(self.groups.values())
        if len(plans) == 1:
            return (plans[0].inclusion_probs > 0).double()
        mean = torch.stack([plan.weights.sum() * plan.inclusion_probs * plan.multipliers for plan in plans]).sum(dim=0)
        return torch.where((mean - 1.0).abs() < TOLERANCE, 1.0, mean)

    def draw(self, cohort: Cohort, unit: WorkUnit) -> Tensor:
        """One unit's sorted term indices, shape ``(n,)``, on the CPU."""
        plan = self.groups[cohort.capacity_of(unit)]
        if plan.dealt is not None:
            return plan.dealt[unit.key]
        generator = derived_generator(cohort.seed, "terms", cohort.round_idx, *unit.ids, self.name)
        return plan.design.draw(1, generator)[0]

    def multipliers(self, keep_ratio: float, drawn: Tensor) -> Tensor:
        """The multipliers of a client's drawn terms, shape ``(n,)``, float64, on the CPU."""
        return self.strategy.drawn_multipliers(self.singular_values, self.groups[keep_ratio].multipliers, drawn)

    def client_errors(self) -> dict[float, float]:
        r"""Expected :math:`\|W - \hat W\|_F^2 / \|W\|_F^2` of a single client's sub-model, for each keep ratio.

        For `Scaled`, it is the error with the multipliers of the expected draw.
        """
        s = self.singular_values
        squared_norm = (s**2).sum().clamp(min=TINY)
        return {
            ratio: float(group_discrepancy(s, plan.inclusion_probs, plan.multipliers, cohort_size=1) / squared_norm)
            for ratio, plan in self.groups.items()
        }

    def missing_energy(self, keep_ratio: float) -> float:
        """Share of the squared norm beyond the n largest terms: the least error of a sub-model of that keep ratio."""
        squares = self.singular_values**2  # descending
        return float(squares[self.groups[keep_ratio].num_terms :].sum() / squares.sum().clamp(min=TINY))


def first_terms(
    matrix: Tensor, num_terms: Sequence[int], strategy: ShardingStrategy, cohort: Cohort
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The singular terms of a matrix without those that no client could hold, or ``None`` if there may be no such.

    With n the most terms that a client holds, the others are unknown but for their norm. No client could hold one if
    the strategy gives them probability 0, were each as large as this norm, and also with their root mean square, for
    which every sum of squares is right.

    Args:
        matrix: The weight, shape ``(c_out, c_in k)``.
        num_terms: Number of terms that the clients of each group hold.
        strategy: Gives probabilities.
        cohort: The clients that take part.

    Returns:
        Singular values, shape ``(N,)``, float64, the others as their root mean square; and left and right vectors of
        the first n, shapes ``(c_out, n)`` and ``(n, c_in k)``, as from `singular_terms`.
    """
    n, num_singular = max(num_terms), min(matrix.shape)
    if n > FIRST_TERMS * num_singular or not has_values(matrix):
        return None
    coefficients = coefficients_of(cohort)

    def are_unheld(first: Tensor, other: float) -> bool:
        spectrum = torch.cat([first, first.new_full((num_singular - n,), other)])
        return not any(probs[n:].any() for probs, _ in strategy.for_groups(spectrum, num_terms, coefficients))

    if not are_unheld(torch.ones(n, dtype=torch.float64), TOLERANCE):  # a strategy that draws from all terms
        return None
    found = leading_factors(matrix, n)
    if found is None:
        return None
    factors, rest = found
    first, typical = factors.s.cpu(), rest / (num_singular - n) ** 0.5
    if not (are_unheld(first, rest) and are_unheld(first, typical)):
        return None
    return F.pad(factors.s, (0, num_singular - n), value=typical), *absorb(factors, matrix.dtype)


def coefficients_of(cohort: Cohort) -> list[list[float]]:
    """The coefficients of each group's clients."""
    return [[unit.coefficient for unit in units] for units in cohort.groups.values()]


def plan_draws(
    spectra: Mapping[str, Tensor],
    strategy: ShardingStrategy,
    design: Design | None,
    cohort: Cohort,
    *,
    num_terms_of: Mapping[str, Callable[[float], int]] = MappingProxyType({}),
) -> dict[str, TermDraws]:
    """Plan every group's draws of several matrices, whose designs are fitted together.

    Args:
        spectra: Singular values of each matrix, by its name, shape ``(N,)``, descending.
        strategy: Gives probabilities and multipliers.
        design: Draws terms; ``None`` for the strategy's own.
        cohort: The clients that take part.
        num_terms_of: How many terms of a matrix clients of a keep ratio hold, by its name; ceil(r N) if it has none.
    """
    if not all(map(has_values, spectra.values())):  # only sizes are asked for, and those of any n terms are the same
        spectra = {name: torch.arange(len(s), 0, -1, dtype=torch.float64) for name, s in spectra.items()}
        strategy, design = TopN(), None
    spectra = {name: singular_values.cpu() for name, singular_values in spectra.items()}
    coefficients = coefficients_of(cohort)
    drafts: list[tuple[str, float, Tensor, Tensor, Design]] = []
    for name, s in spectra.items():
        count = num_terms_of.get(name, partial(num_terms_for, len(s)))
        num_terms = {ratio: count(ratio) for ratio in cohort.groups}
        with naming_layer(name):
            answers = strategy.for_groups(s, list(num_terms.values()), coefficients)
        for (ratio, n), (probs, omega) in zip(num_terms.items(), answers, strict=True):
            drafts.append((name, ratio, probs, omega, design if design is not None else strategy.own_design(s, n)))
    alike = [list(group) for _, group in groupby(drafts, key=lambda draft: id(draft[-1]))]
    designs = [fitted for group in alike for fitted in group[0][-1].fit_all([probs for _, _, probs, _, _ in group])]
    plans: dict[str, dict[float, GroupPlan]] = {name: {} for name in spectra}
    for (name, ratio, probs, omega, chosen), fitted in zip(drafts, designs, strict=True):
        units, dealt = cohort.groups[ratio], None
        if chosen.draws_cohort:
            generator = derived_generator(cohort.seed, "terms of a group", cohort.round_idx, str(ratio), name)
            dealt = dict(zip((unit.key for unit in units), fitted.draw(len(units), generator), strict=True))
        elif torch.equal(certain := probs == 1.0, probs > 0.0):  # nothing is left to chance
            dealt = dict.fromkeys((unit.key for unit in units), certain.nonzero().squeeze(1))
        multipliers = chosen.multipliers(probs, omega, len(units))
        plans[name][ratio] = GroupPlan(probs, multipliers, fitted, cohort.weights_of(units), dealt)
    return {name: TermDraws(name, s, plans[name], strategy) for name, s in spectra.items()}


@contextmanager
def naming_layer(name: str) -> Iterator[None]:
    """Name the layer in errors about its weight."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"Layer {name!r} cannot be factorised: {error}") from error


def places_of_terms(terms: Tensor, left: Tensor, right: Tensor, left_name: str, right_name: str) -> dict[str, Tensor]:
    """The places of terms in two flattened factors, ``(rows, N)`` and ``(N, columns)``, by the names of the factors."""
    (rows, number), columns = left.shape, right.shape[1]
    terms = terms.cpu()
    return {
        left_name: torch.arange(rows).unsqueeze(1) * number + terms,
        right_name: terms.unsqueeze(1) * columns + torch.arange(columns),
    }
