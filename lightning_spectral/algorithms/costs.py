"""The cost to a client of each capacity, and the largest capacity for a budget, for any algorithm."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from torch import nn

from lightning_spectral.algorithms.base import Algorithm
from lightning_spectral.algorithms.capabilities import CutsInto, HasCapacities, MovesFrozenTensors, PlansAhead
from lightning_spectral.algorithms.turn_costs import turn_costs
from lightning_spectral.arguments import Number, each
from lightning_spectral.errors import SpectralWarning, check_is
from lightning_spectral.functional.factors import KEEP_RATIO
from lightning_spectral.nn.cost.cost import Cost, required_example, whole_cost
from lightning_spectral.nn.cost.table import CostTable
from lightning_spectral.nn.plan.trace import Example, example_of
from lightning_spectral.protocol.exchange import copy_module, kept_buffers

Budget: TypeAlias = float | Sequence[float]
BUDGET = Number(at_least=0, finite=False)
CAPACITY = Number(above=0)
PARTS = 1000  # keep ratios that are tried for an algorithm that does not say of how many parts it sends some

# All of them grow with the capacity, which the search relies on.
NEEDS: Mapping[str, Callable[[Cost], int]] = MappingProxyType(
    {
        "budget_bytes": lambda cost: cost.round_bytes,
        "budget_downlink_bytes": lambda cost: cost.downlink_bytes,
        "budget_uplink_bytes": lambda cost: cost.uplink_bytes,
        "budget_macs": lambda cost: cost.macs,
        "budget_params": lambda cost: cost.parameters,
    }
)


def cost_table(
    module: nn.Module, algorithm: Algorithm, capacities: Sequence[float], example_input: Example = None
) -> CostTable:
    """The cost of each capacity of any algorithm to a client, before any training.

    Two rounds are opened on a copy of the module. What the server sends, what the client holds and what it sends back
    are counted, as is one forward pass of the client's model. If the rounds differ, the larger cost counts.

    Activations and multiplications are those of ``example_input``, so give a batch like those that clients train on,
    and a module whose layers are in the mode in which they train. Kept values are those that autograd saves. What a
    kernel saves differs between devices, so count on the device used for training.

    Args:
        module: Any module; it is not changed.
        algorithm: The algorithm with the run's options; its own capacities make no difference.
        capacities: Keep ratios in ``(0, 1]``, or what else the algorithm's clients differ by: ranks of `LoRA`,
            compressions of `Zampling`. Where every client trains the whole model, only 1.
        example_input: One input, a tuple of them, or a dictionary of keyword arguments, on the module's device;
            ``None`` for the module's ``example_input_array``.

    Raises:
        TypeError: If ``algorithm`` is no algorithm.
        ValueError: If there is no example, or the algorithm refuses a capacity or the module.

    Note:
        Multiplications of normalisations, activations and other elementwise operations are not counted, as in
        `torch.utils.flop_counter`. Backward takes about twice as many as forward. Sub-models that draw a width for each
        step cost at most this much. With ``LoRA(merge_every=k)``, the adapted weights travel again in one of k rounds.

    Example:
        >>> import torch
        >>> from lightning_spectral.algorithms import SpectralSharding
        >>> mlp = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
        >>> table = cost_table(mlp, SpectralSharding(), [0.1, 0.5], torch.zeros(32, 64))
        >>> print(table)
        keep ratio  parameters     MACs           kept values    kept bytes       down            up
        full        85.0 k         2.70 M         16.4 k         64.0 KiB         332 KiB         332 KiB
        0.1         32.8 k (39%)   1.03 M (38%)   23.9 k (146%)  93.2 KiB (146%)  128 KiB (39%)   128 KiB (39%)
        0.5         85.0 k (100%)  2.70 M (100%)  53.2 k (325%)  208 KiB (325%)   333 KiB (100%)  332 KiB (100%)
        >>> table.at[0.1].parameters
        32778
    """
    _check(module, algorithm)
    capacities = each("capacities", capacities, CAPACITY)
    example = required_example(module, example_input)
    counted = _Counted(module, algorithm, example)
    costs = counted.at(capacities, example)  # first, because it says what is wrong with the algorithm
    kept = kept_buffers(module, getattr(algorithm, "keep_buffers", ()))
    return CostTable(whole_cost(module, example, kept), costs, counted.capacity)


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
) -> float | list[float]:
    """The largest capacity of an algorithm whose cost fits a budget: a keep ratio, a rank, or the least compression.

    Give exactly one budget: a number, or a sequence with one number for each client. The algorithm takes the result,
    also a list, in place of its own keep ratio, rank or compression.

    Args:
        module: Any module; it is not changed.
        algorithm: As in `cost_table`.
        example_input: As in `cost_table`; needed for ``budget_macs``, and where the algorithm plans with it.
        budget_bytes: Bytes that may be sent in a round, down and up together, without frozen parameters, which are sent
            only once.
        budget_downlink_bytes: Bytes that may be sent down.
        budget_uplink_bytes: Bytes that may be sent up.
        budget_macs: Multiply-accumulate operations of one forward pass of ``example_input``.
        budget_params: Number of parameters that a client's model may have.

    Raises:
        TypeError: If ``algorithm`` is no algorithm, or several budgets are given where all clients share one capacity.
        ValueError: If not exactly one budget is given, nothing fits, or `cost_table` would raise it.

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
    }
    _check(module, algorithm)
    name, budget = _only_budget(given)
    example = required_example(module, example_input) if name == "budget_macs" else example_input
    counted = _Counted(module, algorithm, example)
    if isinstance(budget, Sequence) and counted.is_shared:
        raise TypeError(f"`{name}` must be one number, since all clients share one {counted.capacity}; give the least.")
    candidates, one = counted.candidates(), not isinstance(budget, Sequence)

    @cache
    def needed(index: int) -> int:
        # clients of several capacities may be sent more than clients of one: multipliers, for example
        beside = [] if one else [candidates[0], candidates[min(1, len(candidates) - 1)]]
        capacities = list(dict.fromkeys([*beside, candidates[index]]))
        passed = example if name == "budget_macs" else None
        return NEEDS[name](counted.at(capacities, passed)[candidates[index]])

    def largest(budget: float) -> float:
        if needed(len(candidates) - 1) <= budget:
            return candidates[-1]
        if needed(0) > budget:
            raise ValueError(
                f"No {counted.capacity} fits `{name}={budget:,}`: the smallest sub-model takes {needed(0):,}. Raise "
                "the budget, or let the algorithm cut more layers."
            )
        return candidates[_last_fitting(needed, len(candidates) - 1, budget)]

    return largest(budget) if not isinstance(budget, Sequence) else [largest(entry) for entry in budget]


def round_bytes(module: nn.Module, algorithm: Algorithm, keep_ratios: Sequence[float]) -> dict[float, int]:
    """Bytes that a client of each of an algorithm's own keep ratios gets and sends in a round, without frozen ones.

    Args:
        module: Any module; it is not changed.
        algorithm: The algorithm with the run's options.
        keep_ratios: Some of its keep ratios.

    Example:
        >>> from lightning_spectral.algorithms import SpectralSharding
        >>> mlp = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 2))
        >>> round_bytes(mlp, SpectralSharding(keep_ratio={0.25: 0.5, 1.0: 0.5}), [0.25, 1.0])
        {0.25: 2592, 1.0: 5712}
    """
    counted = _Counted(module, algorithm, None)
    return {r: cost.round_bytes for r, cost in counted.of_own(keep_ratios).items()}


class _Counted:
    """An algorithm on a copy of a module: what its clients cost, and the capacities that differ."""

    def __init__(self, module: nn.Module, algorithm: Algorithm, example: Example) -> None:
        self.module = copy_module(module)
        if isinstance(algorithm, PlansAhead):
            planning = copy_module(module)
            if example is not None and example_of(planning) is None:
                planning.example_input_array = example
            algorithm = algorithm.planned(planning)
        self.algorithm = algorithm

    @property
    def capacity(self) -> str:
        return self.algorithm.capacity_name if isinstance(self.algorithm, HasCapacities) else "keep ratio"

    @property
    def is_shared(self) -> bool:
        return isinstance(self.algorithm, HasCapacities) and self.algorithm.capacity_is_shared

    def at(self, capacities: Sequence[float], example: Example) -> dict[float, Cost]:
        """The costs of some capacities; those of one federation are counted in the same rounds."""
        federations: dict[int, tuple[Algorithm, dict[float, float]]] = {}
        for capacity, (choice, keep_ratio) in self._choices(capacities).items():
            federations.setdefault(id(choice), (choice, {}))[1][capacity] = keep_ratio
        found: dict[float, Cost] = {}
        for choice, keep_ratios in federations.values():
            costs = self._costs(choice, list(dict.fromkeys(keep_ratios.values())), example)
            found |= {capacity: costs[keep_ratio] for capacity, keep_ratio in keep_ratios.items()}
        return {capacity: found[capacity] for capacity in capacities}

    def of_own(self, keep_ratios: Sequence[float]) -> dict[float, Cost]:
        """The costs of the algorithm's own keep ratios, without a pass."""
        return self._costs(self.algorithm, keep_ratios, None)

    def _choices(self, capacities: Sequence[float]) -> Mapping[float, tuple[Algorithm, float]]:
        """For each capacity, the choice that has it, and the keep ratio of its client."""
        algorithm = self.algorithm
        if isinstance(algorithm, HasCapacities):
            return algorithm.with_capacities(capacities)
        ratios = [KEEP_RATIO("capacities", capacity) for capacity in capacities]
        if not _has_ratios(algorithm) and {*ratios} != {1.0}:
            raise ValueError(
                f"`capacities` must be [1] with {type(algorithm).__name__}, whose clients all train the whole model; "
                f"got {list(capacities)}."
            )
        return {keep_ratio: (algorithm, keep_ratio) for keep_ratio in ratios}

    def _costs(self, choice: Algorithm, keep_ratios: Sequence[float], example: Example) -> dict[float, Cost]:
        """The larger costs of two rounds in a row."""
        with warnings.catch_warnings():  # what would make a poor run has a cost like any other
            warnings.simplefilter("ignore", SpectralWarning)
            choice.check(self.module)
        half = choice.bind(self.module, self._state(choice))
        moving = half.moving_tensors if isinstance(half, MovesFrozenTensors) else ()
        first = turn_costs(half, keep_ratios, example, 0, moving)
        second = first if half.rounds_are_alike else turn_costs(half, keep_ratios, None, 1, moving)
        return {r: a.or_more(b) for r, a, b in zip(keep_ratios, first, second, strict=True)}

    def _state(self, choice: Algorithm) -> nn.Module | None:
        """A new state, where a Trainer would move it: to the module's device."""
        state, parameter = choice.new_state(self.module, 0), next(self.module.parameters(), None)
        return state if state is None or parameter is None else state.to(parameter.device)

    def candidates(self) -> Sequence[float]:
        """All capacities that may differ in cost, from the smallest sub-model to the largest."""
        algorithm = self.algorithm
        if isinstance(algorithm, HasCapacities):
            return algorithm.all_capacities(self.module)
        if isinstance(algorithm, CutsInto):
            return list(map(float, fractions_of(algorithm.cut_sizes(self.module))))
        return list(map(float, fractions_of([PARTS]))) if _has_ratios(algorithm) else [1.0]


def _check(module: nn.Module, algorithm: Algorithm) -> None:
    check_is("module", module, nn.Module)
    check_is("algorithm", algorithm, Algorithm)


def _has_ratios(algorithm: Algorithm) -> bool:
    return type(algorithm).keep_ratios is not Algorithm.keep_ratios


def _only_budget(given: Mapping[str, Budget | None]) -> tuple[str, Budget]:
    budgets = [(name, budget) for name, budget in given.items() if budget is not None]
    if len(budgets) != 1:
        got = ", ".join(name for name, _ in budgets) or "none"
        raise ValueError(f"Give exactly one of {', '.join(given)}; got {got}.")
    name, budget = budgets[0]
    if isinstance(budget, Sequence) and not isinstance(budget, str):
        return name, [BUDGET(name, entry) for entry in budget]
    return name, BUDGET(name, budget)


def fractions_of(sizes: Collection[int]) -> npt.NDArray[np.float64]:
    """The keep ratios at which a client gains another of N items, for any of the sizes N, ascending up to 1.

    Example:
        >>> fractions_of({2, 4})
        array([0.25, 0.5 , 0.75, 1.  ])
    """
    return np.unique(np.concatenate([np.arange(1, size + 1) / size for size in {1, *sizes}]))


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
