"""What the clients of an algorithm cost, by capacity: counted in rounds on a copy of a module."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from torch import nn
from torch.optim import Optimizer

from lightning_spectral.algorithms.base import Algorithm
from lightning_spectral.algorithms.capabilities import CutsInto, HasCapacities, PlansAhead
from lightning_spectral.algorithms.turn_costs import turn_costs
from lightning_spectral.client.local_optimizer import check_optimizer, untrained_parameters
from lightning_spectral.client.training_checks import foreign_parameters
from lightning_spectral.errors import SpectralWarning, check_is
from lightning_spectral.functional.factors import KEEP_RATIO
from lightning_spectral.nn.cost.cost import Cost
from lightning_spectral.nn.plan.trace import Example, example_of
from lightning_spectral.protocol.kept_state import trying

PARTS = 1000  # keep ratios that are tried for an algorithm that does not say of how many parts it sends some


class Counted:
    """An algorithm on a module, which is put back: what its clients cost, and the capacities that differ."""

    def __init__(
        self, module: nn.Module, algorithm: Algorithm, example: Example, optimizer: Optimizer | None = None
    ) -> None:
        if optimizer is not None:
            check_optimizer_of(optimizer, module)
        self.optimizer = optimizer
        self.untrained = () if optimizer is None else untrained_parameters([optimizer], module)
        self.module = module
        if isinstance(algorithm, PlansAhead):
            with trying(module):
                if example is not None and example_of(module) is None:
                    module.example_input_array = example
                algorithm = algorithm.planned(module)
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
        with trying(self.module):
            with warnings.catch_warnings():  # what would make a poor run has a cost like any other
                warnings.simplefilter("ignore", SpectralWarning)
                choice.check(self.module)
            half = choice.bind(self.module, self._state(choice), untrained=self.untrained)
            moving = half.moving_tensors
            first = turn_costs(half, keep_ratios, example, 0, moving, self.optimizer)
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


def check_both(module: nn.Module, algorithm: Algorithm) -> None:
    """Raise ``TypeError`` unless a module and an algorithm are given."""
    check_is("module", module, nn.Module)
    check_is("algorithm", algorithm, Algorithm)


def _has_ratios(algorithm: Algorithm) -> bool:
    return type(algorithm).keep_ratios is not Algorithm.keep_ratios


def check_optimizer_of(optimizer: Optimizer, module: nn.Module) -> None:
    """Raise an error unless clients can step with an optimizer, and it is over a module's parameters."""
    check_is("optimizer", optimizer, Optimizer)
    if foreign := foreign_parameters(optimizer, module):
        raise ValueError(
            f"`optimizer` must train the parameters of the module, and {foreign[0][0]} is not among them; make it with "
            f"torch.optim.{type(optimizer).__name__}(module.parameters())."
        )
    check_optimizer(optimizer)


def fractions_of(sizes: Collection[float]) -> npt.NDArray[np.float64]:
    """The keep ratios at which a client gains another of N items, for any of the sizes N, ascending up to 1.

    Example:
        >>> fractions_of({2, 4})
        array([0.25, 0.5 , 0.75, 1.  ])
    """
    return np.unique(np.concatenate([np.arange(1, max(1, int(size)) + 1) / max(1, size) for size in {1, *sizes}]))
