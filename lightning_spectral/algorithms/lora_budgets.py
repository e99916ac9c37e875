"""The largest rank of federated LoRA that a device can afford."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from torch import nn

from lightning_spectral.algorithms.adapter_round import AdapterAggregation
from lightning_spectral.algorithms.lora import LoRA
from lightning_spectral.algorithms.lora_costs import rank_costs
from lightning_spectral.algorithms.sampled_terms import SampledTerms
from lightning_spectral.nn.adapters import adapted_layers
from lightning_spectral.nn.cost.budgets import NEEDS, Budget, only_budget
from lightning_spectral.nn.cost.costs import required_example
from lightning_spectral.nn.plan.trace import Example


def rank_for(
    module: nn.Module,
    example_input: Example = None,
    *,
    budget_bytes: Budget | None = None,
    budget_macs: Budget | None = None,
    budget_params: Budget | None = None,
    aggregation: AdapterAggregation | None = None,
    layers: Sequence[str] = ("*",),
    train: Sequence[str] = (),
    keep_buffers: Sequence[str] = (),
) -> int | list[int]:
    """The largest rank of `LoRA` whose cost fits a budget.

    Exactly one budget is given: a number, for clients of one rank; or a sequence with one for each client. A list of
    the answers is what `LoRA` takes as ``rank``; for a list, multipliers travel where the aggregation has them.

    Args:
        module: Any plain module; it is not changed. For adapters of PEFT choose its r instead.
        example_input: As in `cost_table`; needed for ``budget_macs`` alone.
        budget_bytes: Bytes that may travel in a round, down and up together, without the frozen base, which travels
            once.
        budget_macs: Multiply-accumulate operations of one forward pass of ``example_input``.
        budget_params: Number of parameters that a client's model may have, with the frozen ones.
        aggregation: This and what follows: as in `lora_cost_table`.
        layers: As there.
        train: As there.
        keep_buffers: As there.

    Returns:
        A rank of at most the smallest side of all adapted layers, or a list of them.

    Raises:
        ValueError: If not exactly one budget is given, nothing fits, the module has adapters of PEFT, or as
            `lora_cost_table`.

    Example:
        >>> mlp = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 32))  # a term has 320 + 288 values
        >>> rank_for(mlp, budget_bytes=[10_000, 100_000])  # and two multipliers, which go down alone
        [2, 20]
    """
    given = {"budget_bytes": budget_bytes, "budget_macs": budget_macs, "budget_params": budget_params}
    name, budget = only_budget(given)
    example = required_example(module, example_input) if name == "budget_macs" else None
    found = adapted_layers(module, layers, train)
    if any(layer.brings_factors for layer in found):
        raise ValueError("The module has adapters of PEFT, whose rank is their `r`; give `rank_for` the plain module.")
    most = min(min(layer.in_features, layer.out_features) for layer in found)

    def measured(ranks: Sequence[int]) -> list[int]:
        algorithm = LoRA(list(ranks), None, aggregation or SampledTerms(), layers, train, keep_buffers)
        return [NEEDS[name](cost) for cost in rank_costs(algorithm, module, example).values()]

    two = min(2, most)
    if isinstance(budget, Sequence):
        ends = measured([1, two])
        return [_largest(ends, most, name, entry) for entry in budget]
    return _largest([*measured([1]), *measured([two])], most, name, budget)


def _largest(ends: Sequence[int], most: int, name: str, budget: float) -> int:
    """The largest rank that fits, by what ranks 1 and 2 need; all else is on the line through these."""
    first, step = ends[0], ends[-1] - ends[0]
    rank = bisect_right(range(1, most + 1), budget, key=lambda rank: first + (rank - 1) * step)
    if rank == 0:
        raise ValueError(
            f"No rank fits `{name}={budget:,}`: rank 1 takes {first:,}. Raise the budget, or adapt fewer `layers`."
        )
    return rank
