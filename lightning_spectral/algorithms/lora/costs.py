"""The cost to a client of each rank of federated LoRA, as a table to print and log."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lightning_spectral.algorithms.base import ServerHalf
from lightning_spectral.algorithms.lora.aggregation import AdapterAggregation
from lightning_spectral.algorithms.lora.config import LoRA
from lightning_spectral.algorithms.lora.sampled_terms import SampledTerms
from lightning_spectral.algorithms.turn_costs import turn_cost
from lightning_spectral.arguments import Whole, each
from lightning_spectral.errors import check_is
from lightning_spectral.nn.cost.block_costs import Cost
from lightning_spectral.nn.cost.costs import required_example, whole_cost
from lightning_spectral.nn.cost.rows import CostRows
from lightning_spectral.nn.cost.table import COLUMNS
from lightning_spectral.nn.plan.trace import Example
from lightning_spectral.protocol.exchange import copy_module


class LoRACostTable(CostRows[Cost]):
    """The cost of `LoRA` to a client, for the whole model and at each rank; ``print`` shows it as a table.

    Attributes:
        full: The whole model, as `FedAvg` trains it.
        at: Maps ranks to costs, in the order in which they were given.
    """

    title = "rank"
    columns = COLUMNS


def lora_cost_table(
    module: nn.Module,
    ranks: Sequence[int] = (4, 8, 16),
    example_input: Example = None,
    *,
    aggregation: AdapterAggregation | None = None,
    layers: Sequence[str] = ("*",),
    train: Sequence[str] = (),
    keep_buffers: Sequence[str] = (),
) -> LoRACostTable:
    """The cost of each rank of `LoRA` to a client, before any training.

    A round is opened on a copy of the module. What it sends to clients of these ranks is counted, as is one forward
    pass of each.

    Args:
        module: Any module; it is not changed.
        ranks: The ranks in one federation: if they differ, multipliers travel if the aggregation has them. If the
            module has PEFT adapters, the largest is theirs.
        example_input: As in `cost_table`.
        aggregation: As for `LoRA`; ``None`` for `SampledTerms`.
        layers: As for `LoRA`.
        train: As for `LoRA`.
        keep_buffers: As for `LoRA`.

    Returns:
        The table. Parameters are all those of the client, including frozen ones. "Down" is what travels in each round,
        and "down once" the frozen base. If rounds differ, as in `AlternatingFactors`, the larger cost counts.

    Raises:
        ValueError: If a rank is below 1 or above that of a layer, there is no example, or `LoRA` would raise it.

    Note:
        With ``merge_every=k``, the adapted weights also travel in one of every k rounds.

    Example:
        >>> import torch
        >>> mlp = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
        >>> print(lora_cost_table(mlp, [2, 8], torch.zeros(32, 64), train=["4"]))
        rank  parameters     MACs           kept values    kept bytes       down            up              down once
        full  85.0 k         2.70 M         16.4 k         64.0 KiB         332 KiB         332 KiB         0 B
        2     86.7 k (102%)  2.76 M (102%)  16.5 k (101%)  64.5 KiB (101%)  16.6 KiB (5%)   16.5 KiB (5%)   322 KiB
        8     91.7 k (108%)  2.92 M (108%)  16.9 k (103%)  66.0 KiB (103%)  36.1 KiB (11%)  36.0 KiB (11%)  322 KiB
    """
    check_is("module", module, nn.Module)
    ranks = each("ranks", ranks, Whole(at_least=1))
    algorithm = LoRA(ranks, None, SampledTerms() if aggregation is None else aggregation, layers, train, keep_buffers)
    example = required_example(module, example_input)
    return LoRACostTable(whole_cost(module, example, keep_buffers), dict(rank_costs(algorithm, module, example)))


def rank_costs(algorithm: LoRA, module: nn.Module, example: Example) -> dict[float, Cost]:
    """The costs of the ranks of an algorithm, in their order; passes are counted only if there is an example."""
    server = copy_module(module)
    algorithm.check(server)
    ranks = list(dict.fromkeys(algorithm.rank if isinstance(algorithm.rank, Sequence) else [algorithm.max_rank]))
    half = algorithm.bind(server, algorithm.new_state(server, 0))
    return {rank: _costlier([_cost(algorithm, half, rank, index, example) for index in (0, 1)]) for rank in ranks}


def _costlier(costs: Sequence[Cost]) -> Cost:
    return Cost(*(max(values) for values in zip(*(vars(cost).values() for cost in costs), strict=True)))


def _cost(algorithm: LoRA, half: ServerHalf, rank: int, round_idx: int, example: Example) -> Cost:
    """The cost of one rank in one round; bases that every round adds to travel in each."""
    moves = "base" in algorithm.aggregation.steps(algorithm.is_mixed)
    bases = {layer.weight for layer in algorithm.adapted(half.server) if moves}
    return turn_cost(half, rank / algorithm.max_rank, example, round_idx, bases)
