"""The cost to a client of each capacity, for any algorithm: counted on the sub-models that rounds would send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from lightning_spectral.algorithms.base import Algorithm
from lightning_spectral.algorithms.capabilities import HasCapacities, MovesFrozenTensors
from lightning_spectral.algorithms.turn_costs import turn_cost
from lightning_spectral.arguments import Number, each
from lightning_spectral.errors import check_is
from lightning_spectral.functional.factors import KEEP_RATIO
from lightning_spectral.nn.cost.block_costs import Cost
from lightning_spectral.nn.cost.costs import required_example, whole_cost
from lightning_spectral.nn.cost.rows import CostRows
from lightning_spectral.nn.cost.table import COLUMNS
from lightning_spectral.nn.plan.trace import Example, example_of
from lightning_spectral.protocol.exchange import copy_module, kept_buffers


class CapacityTable(CostRows[Cost]):
    """The cost of an algorithm to a client, for the whole model and at each capacity; ``print`` shows it as a table.

    Attributes:
        full: The whole model, as `FedAvg` trains it.
        at: Maps capacities to costs, in the order given.
    """

    title = "capacity"
    columns = COLUMNS


def cost_table(
    module: nn.Module, algorithm: Algorithm, capacities: Sequence[float], example_input: Example = None
) -> CapacityTable:
    """The cost of each capacity of any algorithm to a client, before any training.

    For each, rounds are opened on a copy of the module. What the server sends, what the client holds and what it sends
    back are counted, as is one forward pass of the client's model. If rounds differ, the larger cost counts.

    Args:
        module: Any module; it is not changed.
        algorithm: The algorithm with the run's options; its own capacities make no difference.
        capacities: Keep ratios in ``(0, 1]``, or what else the algorithm's clients differ by: ranks of `LoRA`,
            compressions of `Zampling`. Where every client trains the whole model, only 1.
        example_input: One input, a tuple of them, or a dictionary of keyword arguments, on the module's device;
            ``None`` for the module's ``example_input_array``.

    Raises:
        ValueError: If there is no example, or the algorithm refuses a capacity or the module.

    Example:
        >>> import torch
        >>> from lightning_spectral.algorithms import Zampling
        >>> table = cost_table(nn.Linear(15, 10), Zampling(degree=2, coordinated=True), [2], torch.zeros(1, 15))
        >>> table.at[2].downlink_bytes, table.at[2].uplink_bytes  # 80 probabilities and a place in the round; 80 bits
        (328, 10)
    """
    check_is("module", module, nn.Module)
    check_is("algorithm", algorithm, Algorithm)
    example = required_example(module, example_input)
    choices = _choices(algorithm, each("capacities", capacities, Number(above=0)))
    kept = kept_buffers(module, getattr(algorithm, "keep_buffers", ()))
    costs = {capacity: _cost(module, *choice, example) for capacity, choice in choices.items()}
    return CapacityTable(whole_cost(module, example, kept), costs)


def _choices(algorithm: Algorithm, capacities: Sequence[float]) -> Mapping[float, tuple[Algorithm, float]]:
    """For each capacity, the choice that has it, and the keep ratio of its client."""
    if isinstance(algorithm, HasCapacities):
        return algorithm.with_capacities(capacities)
    ratios = [KEEP_RATIO("capacities", capacity) for capacity in capacities]
    if type(algorithm).keep_ratios is Algorithm.keep_ratios and {*ratios} != {1.0}:
        raise ValueError(
            f"`capacities` must be [1] with {type(algorithm).__name__}, whose clients all train the whole model; got "
            f"{list(capacities)}."
        )
    return {keep_ratio: (algorithm, keep_ratio) for keep_ratio in ratios}


def _cost(module: nn.Module, algorithm: Algorithm, keep_ratio: float, example: Example) -> Cost:
    """The larger cost of two rounds in a row."""
    server = copy_module(module)
    if example_of(server) is None:
        server.example_input_array = example
    algorithm.check(server)
    half = algorithm.bind(server, algorithm.new_state(server, 0))
    moving = half.moving_tensors if isinstance(half, MovesFrozenTensors) else ()
    costs = [turn_cost(half, keep_ratio, example, round_idx, moving) for round_idx in (0, 1)]
    return Cost(*(max(values) for values in zip(*(vars(cost).values() for cost in costs), strict=True)))
