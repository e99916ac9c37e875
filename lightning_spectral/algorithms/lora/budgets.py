"""The largest rank of federated LoRA that a device can afford."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from lightning_spectral.algorithms.lora.aggregation import AdapterAggregation
from lightning_spectral.algorithms.lora.config import LoRA
from lightning_spectral.algorithms.lora.costs import rank_costs
from lightning_spectral.algorithms.lora.sampled_terms import SampledTerms
from lightning_spectral.errors import check_is
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

    Give exactly one budget: a number, for clients of equal rank, or a sequence with one entry per client. `LoRA` takes
    the resulting list as ``rank``; for a list, multipliers travel if the aggregation has them.

    Args:
        module: Any plain module; it is not changed. With PEFT adapters, choose PEFT's ``r`` instead.
        example_input: As in `cost_table`; needed only for ``budget_macs``.
        budget_bytes: Number of bytes that may travel in a round, down and up together, without the frozen base, which
            travels once.
        budget_macs: Number of multiply-accumulate operations of one forward pass of ``example_input``.
        budget_params: Number of parameters that a client's model may have, including frozen ones.
        aggregation: As for `LoRA`; ``None`` for `SampledTerms`.
        layers: As for `LoRA`.
        train: As for `LoRA`.
        keep_buffers: As for `LoRA`.

    Returns:
        A rank of at most the smallest side of all adapted layers, or a list of them.

    Raises:
        ValueError: If not exactly one budget is given, nothing fits, the module has PEFT adapters, or `lora_cost_table`
            would raise it.

    Example:
        >>> mlp = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 32))  # a term has 320 + 288 values
        >>> rank_for(mlp, budget_bytes=[10_000, 100_000])  # and two multipliers, which go down alone
        [2, 20]
    """
    given = {"budget_bytes": budget_bytes, "budget_macs": budget_macs, "budget_params": budget_params}
    name, budget = only_budget(given)
    check_is("module", module, nn.Module)
    example = required_example(module, example_input) if name == "budget_macs" else None
    plain = LoRA(1, None, SampledTerms() if aggregation is None else aggregation, layers, train, keep_buffers)
    found = adapted_layers(module, plain.layers, plain.train)
    if any(layer.brings_factors for layer in found):
        raise ValueError("The module has adapters of PEFT, whose rank is their `r`; give `rank_for` the plain module.")
    most = min(min(layer.in_features, layer.out_features) for layer in found)

    def measured(ranks: Sequence[int]) -> list[int]:
        return [NEEDS[name](cost) for cost in rank_costs(replace(plain, rank=list(ranks)), module, example).values()]

    two = min(2, most)
    if isinstance(budget, Sequence):
        ends = measured([1, two])
        return [_largest(ends, most, name, entry) for entry in budget]
    return _largest([*measured([1]), *measured([two])], most, name, budget)


def _largest(ends: Sequence[int], most: int, name: str, budget: float) -> int:
    """The largest rank that fits, from the needs of ranks 1 and 2: the cost is linear in the rank."""
    first, step = ends[0], ends[-1] - ends[0]
    rank = bisect_right(range(1, most + 1), budget, key=lambda rank: first + (rank - 1) * step)
    if rank == 0:
        raise ValueError(
            f"No rank fits `{name}={budget:,}`: rank 1 takes {first:,}. Raise the budget, or adapt fewer `layers`."
        )
    return rank
