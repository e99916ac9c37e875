"""The cost tables of 0.1, one for each kind of algorithm; until 0.2 they call the one that there is now."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

from torch import nn

from lightning_spectral.algorithms.base import Algorithm
from lightning_spectral.algorithms.budgets import largest_that_fits
from lightning_spectral.algorithms.costs import cost_table as new_table
from lightning_spectral.algorithms.lora import LoRA
from lightning_spectral.algorithms.spectral import SpectralSharding
from lightning_spectral.algorithms.zampling import Zampling
from lightning_spectral.nn.cost.cost import required_example
from lightning_spectral.nn.cost.table import CostTable
from lightning_spectral.nn.plan.choices import LayerChoices
from lightning_spectral.nn.plan.module_plan import ModulePlan
from lightning_spectral.nn.plan.trace import Example
from lightning_spectral.nn.plan.validate import plan_of

LoRACostTable = ZamplingCostTable = CostTable
BUDGETS = ("budget_bytes", "budget_downlink_bytes", "budget_uplink_bytes", "budget_macs", "budget_params")


def _now(old: str, new: str) -> None:
    warnings.warn(f"`{old}` is now `{new}`; the old one works until version 0.2.", FutureWarning, stacklevel=3)


def accepting_old_arguments(new: Callable[..., CostTable]) -> Callable[..., CostTable]:
    """Let `cost_table` take keep ratios in place of an algorithm, as it did when it knew spectral sharding alone."""

    @wraps(new)
    def cost_table(module: nn.Module, *arguments: Any, **named: Any) -> CostTable:
        if "algorithm" in named or (arguments and isinstance(arguments[0], Algorithm)):
            return new(module, *arguments, **named)
        if arguments and (isinstance(arguments[0], str) or not isinstance(arguments[0], Iterable)):
            return new(module, *arguments, **named)  # which says what is wrong
        _now("cost_table(module, keep_ratios)", "cost_table(module, SpectralSharding(), keep_ratios)")
        return _of_keep_ratios(module, *arguments, **named)

    return cost_table


def _of_keep_ratios(
    module: nn.Module,
    keep_ratios: Sequence[float] = (0.2, 0.4, 0.6, 0.8),
    example_input: Example = None,
    layers: LayerChoices | ModulePlan = LayerChoices(),
) -> CostTable:
    plan = plan_of(module, layers, required_example(module, example_input))
    return new_table(module, SpectralSharding(layers=plan), keep_ratios, example_input)


def keep_ratio_for(
    module: nn.Module,
    example_input: Example = None,
    *,
    layers: LayerChoices | ModulePlan = LayerChoices(),
    **budget: Any,
) -> float | list[float]:
    """Use `largest_that_fits`."""
    _now("keep_ratio_for(module, ...)", "algorithms.largest_that_fits(module, SpectralSharding(), ...)")
    plan = plan_of(module, layers, required_example(module, example_input))
    return largest_that_fits(module, SpectralSharding(layers=plan), example_input, **budget)


def sub_model_cost_table(
    module: nn.Module,
    algorithm: Algorithm,
    keep_ratios: Sequence[float] = (0.25, 0.5, 0.75),
    example_input: Example = None,
) -> CostTable:
    """Use `cost_table`."""
    _now("sub_model_cost_table(module, algorithm, ...)", "cost_table(module, algorithm, ...)")
    return new_table(module, algorithm, keep_ratios, example_input)


def sub_model_keep_ratio_for(
    module: nn.Module, algorithm: Algorithm, example_input: Example = None, **budget: Any
) -> float | list[float]:
    """Use `largest_that_fits`."""
    _now("sub_model_keep_ratio_for(module, algorithm, ...)", "algorithms.largest_that_fits(module, algorithm, ...)")
    return largest_that_fits(module, algorithm, example_input, **budget)


def lora_cost_table(
    module: nn.Module, ranks: Sequence[int] = (4, 8, 16), example_input: Example = None, **options: Any
) -> CostTable:
    """Use `cost_table`."""
    _now("lora_cost_table(module, ranks, ...)", "cost_table(module, LoRA(...), ranks)")
    return new_table(module, _lora(**options), ranks, example_input)


def rank_for(module: nn.Module, example_input: Example = None, **options: Any) -> float | list[float]:
    """Use `largest_that_fits`."""
    _now("rank_for(module, ...)", "algorithms.largest_that_fits(module, LoRA(...), ...)")
    budget = {name: options.pop(name) for name in BUDGETS if name in options}
    return largest_that_fits(module, _lora(**options), example_input, **budget)


def zampling_cost_table(
    module: nn.Module, compressions: Sequence[float] = (8, 32, 128), example_input: Example = None, **options: Any
) -> CostTable:
    """Use `cost_table`."""
    _now("zampling_cost_table(module, compressions, ...)", "cost_table(module, Zampling(...), compressions)")
    return new_table(module, Zampling(**options), compressions, example_input)


def compression_for(module: nn.Module, **options: Any) -> float | list[float]:
    """Use `largest_that_fits`."""
    _now("compression_for(module, ...)", "algorithms.largest_that_fits(module, Zampling(...), ...)")
    budget = {name: options.pop(name) for name in BUDGETS if name in options}
    return largest_that_fits(module, Zampling(**options), **budget)


def _lora(**options: Any) -> LoRA:
    return LoRA(**{name: value for name, value in options.items() if value is not None})
