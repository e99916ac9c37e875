"""The largest capacity for a budget, for any algorithm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, TypeAlias

from torch import nn
from torch.optim import Optimizer

from lightning_spectral.algorithms.base import Algorithm
from lightning_spectral.algorithms.counted import Counted, check_both
from lightning_spectral.arguments import Number
from lightning_spectral.nn.cost.cost import Cost, required_example
from lightning_spectral.nn.cost.units import as_bytes, show_bytes
from lightning_spectral.nn.plan.trace import Example

Budget: TypeAlias = float | Sequence[float]
MemoryBudget: TypeAlias = float | str | Sequence[float | str]
BUDGET = Number(at_least=0, finite=False)

# All of them grow with the capacity, which the search relies on; memory does not always.
NEEDS: Mapping[str, Callable[[Cost], int]] = MappingProxyType(
    {
        "budget_bytes": lambda cost: cost.round_bytes,
        "budget_downlink_bytes": lambda cost: cost.downlink_bytes,
        "budget_uplink_bytes": lambda cost: cost.uplink_bytes,
        "budget_macs": lambda cost: cost.macs,
        "budget_params": lambda cost: cost.parameters,
        "memory": lambda cost: cost.memory_bytes,
    }
)
OF_A_PASS = ("budget_macs", "memory")  # needs that are counted in a pass of the example


def largest_that_fits(
    module: nn.Module,
    algorithm: Algorithm,
    example_input: Example = None,
    *,
    budget_bytes: Budget | None = None,
    budget_downlink_bytes: Budget | None = None,
    budget_uplink_bytes: Budget | None = None,
    budget_macs: Budget | None = None,
    budget_params: Budget | None = None,
    memory: MemoryBudget | None = None,
    optimizer: Optimizer | None = None,
) -> float | list[float]:
    """The largest capacity of an algorithm whose cost fits a budget: a keep ratio, a rank, or the least compression.

    Give exactly one budget: a number, or a sequence with one number for each client. The algorithm takes the result,
    also a list, in place of its own keep ratio, rank or compression.

    Args:
        module: Any module; it is not changed.
        algorithm: As in `cost_table`.
        example_input: As in `cost_table`; needed for ``budget_macs`` and ``memory``, and where the algorithm plans with
            it.
        budget_bytes: Bytes that may be sent in a round, down and up together, without frozen parameters, which are sent
            only once.
        budget_downlink_bytes: Bytes that may be sent down.
        budget_uplink_bytes: Bytes that may be sent up.
        budget_macs: Multiply-accumulate operations of one forward pass of ``example_input``.
        budget_params: Number of parameters that a client's model may have.
        memory: Bytes that a client may need while it trains on batches like ``example_input``: a number, or a string
            such as ``"512 MB"`` or ``"0.5 GiB"``.
        optimizer: As in `cost_table`; needed for ``memory``.

    Raises:
        TypeError: If ``algorithm`` is no algorithm, or several budgets are given where all clients share one capacity.
        ValueError: If not exactly one budget is given, nothing fits, or `cost_table` would raise it.

    Note:
        Memory need not grow with the capacity: where a layer rebuilds its weight, it keeps fewer activations. The
        answer for ``memory`` fits, and the next larger capacity does not; one much larger may.

    Example:
        >>> import torch
        >>> from lightning_spectral.algorithms import LoRA, SpectralSharding
        >>> mlp = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 2))  # 178 parameters outside 16 x 16
        >>> largest_that_fits(mlp, SpectralSharding(), torch.zeros(1, 8), budget_params=[300, 400, 1000])
        [0.1875, 0.375, 1.0]
        >>> largest_that_fits(mlp, LoRA(train=["2"]), budget_bytes=[1_000, 1_800])  # a term has 24 + 32 values
        [1, 3]
    """
    given = {
        "budget_bytes": budget_bytes,
        "budget_downlink_bytes": budget_downlink_bytes,
        "budget_uplink_bytes": budget_uplink_bytes,
        "budget_macs": budget_macs,
        "budget_params": budget_params,
        "memory": memory,
    }
    check_both(module, algorithm)
    name, as_given, one = _only_budget(given)
    budgets = [(as_bytes if name == "memory" else BUDGET)(name, entry) for entry in as_given]
    if name == "memory" and optimizer is None:
        raise ValueError(
            "`memory` depends on the optimizer of clients: give `optimizer`, such as "
            "torch.optim.Adam(module.parameters()), or what your `configure_optimizers()` returns."
        )
    example = required_example(module, example_input) if name in OF_A_PASS else example_input
    counted = Counted(module, algorithm, example, optimizer if name == "memory" else None)
    if counted.is_shared and not one:
        raise TypeError(f"`{name}` must be one number, since all clients share one {counted.capacity}; give the least.")
    candidates = counted.candidates()

    @cache
    def needed(index: int) -> int:
        # clients of several capacities may be sent more than clients of one: multipliers, for example
        beside = [] if one else [candidates[0], candidates[min(1, len(candidates) - 1)]]
        capacities = list(dict.fromkeys([*beside, candidates[index]]))
        passed = example if name in OF_A_PASS else None
        return NEEDS[name](counted.at(capacities, passed)[candidates[index]])

    def largest(budget: float, as_given: float | str) -> float:
        if needed(len(candidates) - 1) <= budget:
            return candidates[-1]
        if needed(0) > budget:
            raise ValueError(_nothing_fits(name, counted.capacity, as_given, needed(0)))
        return candidates[_last_fitting(needed, len(candidates) - 1, budget)]

    found = [largest(*entry) for entry in zip(budgets, as_given, strict=True)]
    return found[0] if one else found


def _nothing_fits(name: str, capacity: str, budget: float | str, least: int) -> str:
    shown, needed = f"{budget!r}" if isinstance(budget, str) else f"{budget:,}", f"{least:,}"
    remedy = "Raise the budget, or let the algorithm cut more layers."
    if name == "memory":
        needed, remedy = show_bytes(least), remedy.replace("or let", "take a smaller batch, or let")
    return f"No {capacity} fits `{name}={shown}`: the smallest sub-model takes {needed}. {remedy}"


def _only_budget(given: Mapping[str, MemoryBudget | None]) -> tuple[str, Sequence[Any], bool]:
    """The name of the budget that was given, its entries, and whether it is one for all."""
    budgets = [(name, budget) for name, budget in given.items() if budget is not None]
    if len(budgets) != 1:
        got = ", ".join(name for name, _ in budgets) or "none"
        raise ValueError(f"Give exactly one of {', '.join(given)}; got {got}.")
    name, budget = budgets[0]
    if isinstance(budget, Sequence) and not isinstance(budget, str):
        return name, budget, False
    return name, [budget], True


def _last_fitting(needed: Callable[[int], int], high: int, budget: float) -> int:
    """The largest index whose need fits, by linear interpolation and bisection in turn.

    Counting a need may take a round, and most needs are nearly linear. That of 0 fits, and that of ``high`` does not.
    """
    low, on_line = 0, True
    while high - low > 1:
        share = (budget - needed(low)) / (needed(high) - needed(low)) if on_line else 0.5
        guess = min(max(low + int(share * (high - low)), low + 1), high - 1)
        low, high = (guess, high) if needed(guess) <= budget else (low, guess)
        on_line = not on_line
    return low
