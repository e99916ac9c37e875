"""The cost to a client of each keep ratio of `WidthSharding` and `FIARSE`, and the largest ratio for a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import nn

from lightning_spectral.algorithms.fiarse import FIARSE
from lightning_spectral.algorithms.turn_costs import turn_cost
from lightning_spectral.algorithms.width import WidthSharding
from lightning_spectral.arguments import each
from lightning_spectral.errors import check_is
from lightning_spectral.functional.factors import KEEP_RATIO
from lightning_spectral.nn.cost.block_costs import Cost
from lightning_spectral.nn.cost.budgets import Budget, fractions_of, largest_ratios, only_budget
from lightning_spectral.nn.cost.costs import required_example, whole_cost
from lightning_spectral.nn.cost.table import CostTable
from lightning_spectral.nn.plan.trace import Example, example_of
from lightning_spectral.protocol.exchange import copy_module, kept_buffers

SubModels: TypeAlias = WidthSharding | FIARSE


def sub_model_cost_table(
    module: nn.Module,
    algorithm: SubModels,
    keep_ratios: Sequence[float] = (0.25, 0.5, 0.75),
    example_input: Example = None,
) -> CostTable:
    """The cost of each keep ratio of `WidthSharding` or `FIARSE` to a client, before any training.

    For each, a round is opened on a copy of the module. What the server sends, what the client holds and what it sends
    back are counted, as is one forward pass of the client's model.

    Args:
        module: Any module; it is not changed.
        algorithm: The algorithm with the run's options; its own keep ratio makes no difference.
        keep_ratios: Each in ``(0, 1]``.
        example_input: As in `cost_table`. It also serves to find channels that belong together if the module has no
            ``example_input_array`` and the algorithm no plan.

    Raises:
        TypeError: If it is another algorithm.
        ValueError: If a ratio is out of range, there is no example, or the algorithm refuses the module.

    Note:
        Sub-models that draw a width for each step cost at most this much: costs are counted at the client's own width.

    Example:
        >>> import torch
        >>> mlp = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
        >>> print(sub_model_cost_table(mlp, WidthSharding(), [0.25, 0.5], torch.zeros(32, 64)))
        keep ratio  parameters    MACs          kept values   kept bytes      down            up
        full        85.0 k        2.70 M        16.4 k        64.0 KiB        332 KiB         332 KiB
        0.25        8.97 k (11%)  283 k (10%)   4.10 k (25%)  16.0 KiB (25%)  35.0 KiB (11%)  35.0 KiB (11%)
        0.5         26.1 k (31%)  827 k (31%)   8.19 k (50%)  32.0 KiB (50%)  102 KiB (31%)   102 KiB (31%)
    """
    ratios = each("keep_ratios", keep_ratios, KEEP_RATIO)
    example = required_example(module, example_input)
    cost_at, _ = _prepared(module, algorithm, example, example)
    full = whole_cost(module, example, kept_buffers(module, algorithm.keep_buffers))
    return CostTable(full, {keep_ratio: cost_at(keep_ratio) for keep_ratio in ratios})


def sub_model_keep_ratio_for(
    module: nn.Module,
    algorithm: SubModels,
    example_input: Example = None,
    *,
    budget_bytes: Budget | None = None,
    budget_macs: Budget | None = None,
    budget_params: Budget | None = None,
) -> float | list[float]:
    """The largest keep ratio of `WidthSharding` or `FIARSE` whose sub-model fits a budget.

    Give exactly one budget: a number, or a sequence with one entry per client. Both algorithms take the resulting list
    as ``keep_ratio``.

    Args:
        module: Any module; it is not changed.
        algorithm: As in `sub_model_cost_table`.
        example_input: As there; `FIARSE` needs it only for ``budget_macs``.
        budget_bytes: Number of bytes that may travel in a round, down and up together, without what travels once.
        budget_macs: Number of multiply-accumulate operations of one forward pass of ``example_input``. With `FIARSE`
            they are the whole model's, whatever the keep ratio.
        budget_params: Number of parameters that the sub-model may have; with `FIARSE`, likewise the whole model's.

    Returns:
        A keep ratio in ``(0, 1]``, or a list of them.

    Raises:
        TypeError: If it is another algorithm.
        ValueError: If not exactly one budget is given, nothing fits, or `sub_model_cost_table` would raise it.

    Example:
        >>> import torch
        >>> mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
        >>> sub_model_keep_ratio_for(mlp, WidthSharding(), torch.zeros(2, 8), budget_macs=[200, 416])  # of 832
        [0.375, 0.625]
    """
    given = {"budget_bytes": budget_bytes, "budget_macs": budget_macs, "budget_params": budget_params}
    name, budget = only_budget(given)
    example = required_example(module, example_input) if name == "budget_macs" else example_input
    cost_at, prepared = _prepared(module, algorithm, example, example if name == "budget_macs" else None)
    return largest_ratios(cost_at, fractions_of(prepared.cut_sizes(module)), name, budget, "cut more layers")


def _prepared(
    module: nn.Module, algorithm: SubModels, example: Example, counted: Example
) -> tuple[Callable[[float], Cost], SubModels]:
    """The cost as a function of the keep ratio, and the algorithm with its plan."""
    if not isinstance(algorithm, SubModels):
        raise TypeError(
            f"`algorithm` must be a WidthSharding or a FIARSE, got {algorithm!r}. SpectralSharding, LoRA and Zampling "
            "have tables of their own: `cost_table`, `lora_cost_table`, `zampling_cost_table`."
        )
    check_is("module", module, nn.Module)
    server: Any = copy_module(module)
    if example_of(server) is None:
        server.example_input_array = example
    planned = algorithm.planned(server) if isinstance(algorithm, WidthSharding) else algorithm
    planned.check(server)
    half = planned.bind(server, planned.new_state(server, 0))
    return lambda keep_ratio: turn_cost(half, keep_ratio, counted), planned
