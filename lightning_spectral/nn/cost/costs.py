"""The cost of a client's model, as a function of its keep ratio."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_spectral.errors import SpectralWarning
from lightning_spectral.functional.factors import num_terms_for
from lightning_spectral.nn.cost.block_costs import BlockUse, Cost
from lightning_spectral.nn.cost.counted_pass import CountedPass, LayerCall, count_pass
from lightning_spectral.nn.plan.choices import LayerChoices
from lightning_spectral.nn.plan.module_plan import ModulePlan
from lightning_spectral.nn.plan.swap import swap_layers
from lightning_spectral.nn.plan.trace import Example, example_of
from lightning_spectral.nn.plan.validate import difference_from_a_run, plan_of
from lightning_spectral.protocol.exchange import averaged_tensors, copy_module, travelling_tensors
from lightning_spectral.protocol.records import num_bytes

FEWEST_TERMS = 1e-6  # a keep ratio at which every block has as few terms as the granularity allows


@dataclass(frozen=True)
class Costs:
    """The cost of a module at any keep ratio.

    Attributes:
        full: The module as it is, trained and sent whole.
        fixed: The cost of a sub-model that does not depend on its numbers of terms.
        blocks: The blocks whose terms are sampled.
        term_granularity: Numbers of terms are rounded up to a multiple of this.
    """

    full: Cost
    fixed: Cost
    blocks: tuple[BlockUse, ...]
    term_granularity: int = 1

    def at(self, keep_ratio: float) -> Cost:
        """The cost of a sub-model with a keep ratio in ``(0, 1]``."""
        return self.fixed + _cost_of_terms(self.blocks, keep_ratio, self.term_granularity)


def costs_of(
    module: nn.Module, example_input: Example = None, layers: LayerChoices | ModulePlan = LayerChoices()
) -> Costs:
    """Count one pass of the module and one of its smallest sub-model; formulas give every other sub-model.

    The arguments and the exceptions are those of `cost_table`.

    Example:
        >>> import torch
        >>> mlp = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 2))
        >>> costs = costs_of(mlp, torch.zeros(1, 8))
        >>> costs.full.macs, costs.at(0.25).macs  # 4 of 16 terms: 4 * (16 + 16) instead of 16 * 16
        (416, 288)
    """
    example = required_example(module, example_input)
    plan = plan_of(module, layers, example)
    if difference := difference_from_a_run(module, plan, layers, example_input):
        remedy = "To count what a run does, give both the same plan, `layers=validate(module, example_input)`"
        warnings.warn(f"{difference} {remedy}, or set `example_input_array`.", SpectralWarning, stacklevel=3)
    return _count(module, example, plan)


def required_example(module: nn.Module, example_input: Example) -> Example:
    """The given example, or otherwise the module's own; ``ValueError`` if there is none."""
    example = example_of(module) if example_input is None else example_input
    if example is None:
        raise ValueError(
            "The cost of a module is counted in a forward pass: give `example_input`, a batch like those that clients "
            "train on, or set the module's `example_input_array`."
        )
    return example


def _count(module: nn.Module, example: Example, plan: ModulePlan) -> Costs:
    run, granularity = copy_module(module), plan.choices.term_granularity
    dense = count_pass(run, example)
    swap_layers(run, plan, lambda sharded, layer, num_terms: sharded.like(layer, num_terms), FEWEST_TERMS)
    smallest = count_pass(run, example, watched=plan.sharded)
    blocks = tuple(_uses(module, plan, smallest.calls))
    full = sent_whole(module, (), plan.kept_buffers) + passed(dense)
    rest = sent_whole(module, plan.sharded_weights, plan.kept_buffers) + passed(smallest) - _absent(module, plan)
    return Costs(full, rest - passed(_cost_of_terms(blocks, FEWEST_TERMS, granularity)), blocks, granularity)


def sent_whole(module: nn.Module, without: Collection[str], keep_buffers: Sequence[str]) -> Cost:
    """Parameters and bytes of a module without some parameters, computed by the functions that a round uses."""
    frozen = num_bytes({name: p for name, p in module.named_parameters() if not p.requires_grad})
    return Cost(
        parameters=sum(p.numel() for name, p in module.named_parameters() if name not in without),
        downlink_bytes=num_bytes(travelling_tensors(module, without)) - frozen,
        uplink_bytes=num_bytes(averaged_tensors(module, without, keep_buffers)),
        frozen_bytes=frozen,
    )


def whole_cost(module: nn.Module, example: Example, keep_buffers: Sequence[str] = ()) -> Cost:
    """The cost of a module as it is, trained and sent whole; one pass of a copy is counted."""
    return sent_whole(module, (), keep_buffers) + passed(count_pass(copy_module(module), example))


def _absent(module: nn.Module, plan: ModulePlan) -> Cost:
    """The cost of the bias entries that clients lack because they do not compute these outputs."""
    absent = {name: module.get_parameter(name)[held:] for name, held in plan.cut_biases(module).items()}
    return Cost(
        parameters=sum(entries.numel() for entries in absent.values()),
        downlink_bytes=num_bytes(absent),
        uplink_bytes=num_bytes(absent),
    )


def passed(counted: CountedPass | Cost) -> Cost:
    """The part of a cost that is counted in a forward pass."""
    return Cost(macs=counted.macs, kept_values=counted.kept_values, kept_bytes=counted.kept_bytes)


def _uses(module: nn.Module, plan: ModulePlan, calls: Iterable[LayerCall]) -> Iterator[BlockUse]:
    calls_of: dict[str, list[LayerCall]] = defaultdict(list)
    for call in calls:
        calls_of[call.layer].append(call)
    for name, layer in plan.sharded.items():
        assert layer.sharded is not None
        for i, block in enumerate(layer.blocks):
            value_bytes = module.get_parameter(block.parameter).element_size()
            block_calls = tuple(call.of_block(i) for call in calls_of[name])
            yield BlockUse(block, layer.sharded, value_bytes, block_calls)


def _cost_of_terms(blocks: Iterable[BlockUse], keep_ratio: float, granularity: int) -> Cost:
    costs = (use.cost(num_terms_for(use.block.num_singular, keep_ratio, granularity)) for use in blocks)
    return sum(costs, Cost())
