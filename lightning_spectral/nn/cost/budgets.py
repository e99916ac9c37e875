"""The largest sub-model that a device can afford."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from torch import nn

from lightning_spectral.arguments import Number
from lightning_spectral.nn.cost.block_costs import Cost
from lightning_spectral.nn.cost.costs import costs_of
from lightning_spectral.nn.plan.choices import LayerChoices
from lightning_spectral.nn.plan.module_plan import ModulePlan
from lightning_spectral.nn.plan.trace import Example

Budget = float | Sequence[float]
Ratios: TypeAlias = npt.NDArray[np.float64]
BUDGET = Number(at_least=0, finite=False)

# All of them grow with the keep ratio below 1, which the search relies on.
NEEDS: Mapping[str, Callable[[Cost], int]] = MappingProxyType(
    {
        "budget_bytes": lambda cost: cost.round_bytes,
        "budget_macs": lambda cost: cost.macs,
        "budget_params": lambda cost: cost.parameters,
    }
)


def keep_ratio_for(
    module: nn.Module,
    example_input: Example = None,
    *,
    budget_bytes: Budget | None = None,
    budget_macs: Budget | None = None,
    budget_params: Budget | None = None,
    layers: LayerChoices | ModulePlan = LayerChoices(),
) -> float | list[float]:
    """The largest keep ratio whose sub-model fits a budget.

    Give exactly one budget: a number, or a sequence with one number for each client. The resulting list of keep ratios
    can be passed to `SpectralSharding` as ``keep_ratio``.

    Args:
        module: Any module; it is not changed.
        example_input: As in `cost_table`.
        budget_bytes: Bytes that may be sent in a round, down and up together, without frozen parameters, which are sent
            only once.
        budget_macs: Multiply-accumulate operations of one forward pass of ``example_input``.
        budget_params: Number of parameters that the sub-model may have.
        layers: As in `cost_table`.

    Returns:
        A keep ratio in ``(0, 1]``, or a list of them.

    Example:
        >>> import torch
        >>> mlp = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 2))  # 178 parameters outside 16 x 16
        >>> keep_ratio_for(mlp, torch.zeros(1, 8), budget_params=[300, 400, 1000])  # 3, 6 and 16 terms of 32
        [0.1875, 0.375, 1.0]
    """
    given = {"budget_bytes": budget_bytes, "budget_macs": budget_macs, "budget_params": budget_params}
    name, budget = only_budget(given)
    costs = costs_of(module, example_input, layers)
    candidates = fractions_of({use.block.num_singular for use in costs.blocks})
    return largest_ratios(costs.at, candidates, name, budget, "shard more layers")


def only_budget(given: Mapping[str, Budget | None]) -> tuple[str, Budget]:
    """The name and the value of the one budget that is given; ``ValueError`` unless exactly one is given."""
    budgets = [(name, budget) for name, budget in given.items() if budget is not None]
    if len(budgets) != 1:
        got = ", ".join(name for name, _ in budgets) or "none"
        raise ValueError(f"Give exactly one of {', '.join(given)}; got {got}.")
    name, budget = budgets[0]
    if isinstance(budget, Sequence) and not isinstance(budget, str):
        return name, [BUDGET(name, entry) for entry in budget]
    return name, BUDGET(name, budget)


def fractions_of(sizes: Collection[int]) -> Ratios:
    """The keep ratios at which a client gains another of N items, for any of the sizes N, ascending up to 1.

    Example:
        >>> fractions_of({2, 4})
        array([0.25, 0.5 , 0.75, 1.  ])
    """
    return np.unique(np.concatenate([np.arange(1, size + 1) / size for size in {1, *sizes}]))


def largest_ratios(
    cost_at: Callable[[float], Cost], candidates: Ratios, name: str, budget: Budget, remedy: str
) -> float | list[float]:
    """The largest of ascending keep ratios, the last of which is 1, that fits a budget; or one for each of several.

    ``cost_at`` maps keep ratios to costs, which grow with the keep ratio below 1; ``remedy`` is what to do if nothing
    fits, other than raising the budget.
    """
    needed = cache(lambda keep_ratio: NEEDS[name](cost_at(keep_ratio)))

    def largest(budget: float) -> float:
        if needed(1.0) <= budget:  # may need less than a nearly whole model, which may have to say what it lacks
            return 1.0
        if needed(candidates[0]) > budget:
            raise ValueError(
                f"No sub-model fits `{name}={budget:,}`: the smallest takes {needed(candidates[0]):,}. Raise the "
                f"budget, or {remedy}."
            )
        return float(candidates[_last_fitting(lambda index: needed(candidates[index]), len(candidates) - 1, budget)])

    return [largest(entry) for entry in budget] if isinstance(budget, Sequence) else largest(budget)


def _last_fitting(needed: Callable[[int], int], high: int, budget: float) -> int:
    """The largest index whose need fits, by linear interpolation and bisection in turn.

    Counting a need may take a forward pass, and most needs are nearly linear. That of 0 fits, and that of ``high`` does
    not.
    """
    low, on_line = 0, True
    while high - low > 1:
        share = (budget - needed(low)) / (needed(high) - needed(low)) if on_line else 0.5
        guess = min(max(low + int(share * (high - low)), low + 1), high - 1)
        low, high = (guess, high) if needed(guess) <= budget else (low, guess)
        on_line = not on_line
    return low
