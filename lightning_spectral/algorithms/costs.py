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
from torch.optim import Optimizer

from lightning_spectral.algorithms.base import Algorithm
from lightning_spectral.algorithms.capabilities import CutsInto, HasCapacities, MovesFrozenTensors, PlansAhead
from lightning_spectral.algorithms.fed_avg import FedAvg
from lightning_spectral.algorithms.turn_costs import turn_costs
from lightning_spectral.arguments import Number, each
from lightning_spectral.client.local_optimizer import OptimizerRecipe
from lightning_spectral.client.training_checks import foreign_parameters
from lightning_spectral.client.user_optimizers import recipe_of, untrained_parameters
from lightning_spectral.errors import SpectralWarning, check_is
from lightning_spectral.functional.factors import KEEP_RATIO
from lightning_spectral.nn.cost.cost import Cost, required_example, whole_cost
from lightning_spectral.nn.cost.table import CostTable
from lightning_spectral.nn.cost.units import as_bytes, show_bytes
from lightning_spectral.nn.plan.trace import Example, example_of
from lightning_spectral.protocol.exchange import copy_module, kept_buffers

Budget: TypeAlias = float | Sequence[float]
MemoryBudget: TypeAlias = float | str | Sequence[float | str]
BUDGET = Number(at_least=0, finite=False)
CAPACITY = Number(above=0)
PARTS = 1000  # keep ratios that are tried for an algorithm that does not say of how many parts it sends some

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


def cost_table(
    module: nn.Module,
    algorithm: Algorithm,
    capacities: Sequence[float],
    example_input: Example = None,
    *,
    optimizer: Optimizer | None = None,
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
        optimizer: The optimizer with which clients train, over the module's parameters. With it, the memory of a local
            step is counted too: one step is taken, and the optimizer's state is what it makes.

    Raises:
        TypeError: If ``algorithm`` is no algorithm.
        ValueError: If there is no example, the algorithm refuses a capacity or the module, or clients cannot have such
            an optimizer.

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
        >>> adam = torch.optim.Adam(mlp.parameters())
        >>> cost_table(mlp, SpectralSharding(), [0.1], torch.zeros(32, 64), optimizer=adam).at[0.1].memory_bytes
        796416
    """
    _check(module, algorithm)
    capacities = each("capacities", capacities, CAPACITY)
    example = required_example(module, example_input)
    counted = _Counted(module, algorithm, example, optimizer)
    costs = counted.at(capacities, example)  # first, because it says what is wrong with the algorithm
    kept = kept_buffers(module, getattr(algorithm, "keep_buffers", ()))
    full = whole_cost(module, example, kept)
    if optimizer is not None:
        full = full.with_memory(_Counted(module, FedAvg(), example, optimizer).at([1.0], example)[1.0])
    return CostTable(full, costs, counted.capacity)


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
    _check(module, algorithm)
    name, budget = _only_budget(given)
    if name == "memory" and optimizer is None:
        raise ValueError(
            "The memory of training depends on the optimizer: give `optimizer`, such as "
            "torch.optim.Adam(module.parameters()), or what your `configure_optimizers()` returns."
        )
    example = required_example(module, example_input) if name in OF_A_PASS else example_input
    counted = _Counted(module, algorithm, example, optimizer if name == "memory" else None)
    if isinstance(budget, Sequence) and counted.is_shared:
        raise TypeError(f"`{name}` must be one number, since all clients share one {counted.capacity}; give the least.")
    candidates, one = counted.candidates(), not isinstance(budget, Sequence)

    @cache
    def needed(index: int) -> int:
        # clients of several capacities may be sent more than clients of one: multipliers, for example
        beside = [] if one else [candidates[0], candidates[min(1, len(candidates) - 1)]]
        capacities = list(dict.fromkeys([*beside, candidates[index]]))
        passed = example if name in OF_A_PASS else None
        return NEEDS[name](counted.at(capacities, passed)[candidates[index]])

    def largest(budget: float) -> float:
        if needed(len(candidates) - 1) <= budget:
            return candidates[-1]
        if needed(0) > budget:
            raise ValueError(_nothing_fits(name, counted.capacity, budget, needed(0)))
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

    def __init__(
        self, module: nn.Module, algorithm: Algorithm, example: Example, optimizer: Optimizer | None = None
    ) -> None:
        self.recipe = None if optimizer is None else _recipe(optimizer, module)
        self.untrained = () if optimizer is None else untrained_parameters([optimizer], module)
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
        half = choice.bind(self.module, self._state(choice), untrained=self.untrained)
        moving = half.moving_tensors if isinstance(half, MovesFrozenTensors) else ()
        first = turn_costs(half, keep_ratios, example, 0, moving, self.recipe)
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


def _recipe(optimizer: Optimizer, module: nn.Module) -> OptimizerRecipe:
    check_is("optimizer", optimizer, Optimizer)
    if foreign := foreign_parameters(optimizer, module):
        raise ValueError(
            f"`optimizer` must train the parameters of the module, and {foreign[0][0]} is not among them; make it with "
            f"torch.optim.{type(optimizer).__name__}(module.parameters())."
        )
    return recipe_of(optimizer, module)


def _nothing_fits(name: str, capacity: str, budget: float, least: int) -> str:
    shown, needed = f"{name}={budget:,}", f"{least:,}"
    remedy = "Raise the budget, or let the algorithm cut more layers."
    if name == "memory":
        shown, needed = f"memory={show_bytes(budget)!r}", show_bytes(least)
        remedy = "Raise the budget, take a smaller batch, or let the algorithm cut more layers."
    return f"No {capacity} fits `{shown}`: the smallest sub-model takes {needed}. {remedy}"


def _only_budget(given: Mapping[str, MemoryBudget | None]) -> tuple[str, Budget]:
    budgets = [(name, budget) for name, budget in given.items() if budget is not None]
    if len(budgets) != 1:
        got = ", ".join(name for name, _ in budgets) or "none"
        raise ValueError(f"Give exactly one of {', '.join(given)}; got {got}.")
    name, budget = budgets[0]
    rule = as_bytes if name == "memory" else BUDGET
    if isinstance(budget, Sequence) and not isinstance(budget, str):
        return name, [rule(name, entry) for entry in budget]
    return name, rule(name, budget)


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
