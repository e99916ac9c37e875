"""Decide, before any training, which layers of a module are sharded, and name what prevents it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from lightning_spectral.arguments import unmatched
from lightning_spectral.nn.layers.blocks import WeightBlock
from lightning_spectral.nn.plan.choices import LayerChoices
from lightning_spectral.nn.plan.layer_types import (
    LOW_RANK,
    ShardedType,
    is_affine,
    is_namesake,
    is_uninitialised,
    low_rank_factors,
    missing_rank,
    refusal,
    sharded_type,
    type_name,
)
from lightning_spectral.nn.plan.module_plan import BufferPlan, LayerPlan, ModulePlan
from lightning_spectral.nn.plan.trace import Example, example_of, execution_order
from lightning_spectral.protocol.buffer_rules import buffer_policies

FROZEN = "frozen"


def plan_layers(
    module: nn.Module,
    example_input: Example = None,
    choices: LayerChoices = LayerChoices(),
    missing_rank: Mapping[str, str] | None = None,
) -> ModulePlan:
    """Decide how clients hold every layer of ``module`` that has parameters, and collect all problems.

    A pure function: nothing is printed, changed or raised about the module.

    Args:
        module: The user's module; it is only read.
        example_input: As in `validate`.
        choices: The user's choices.
        missing_rank: The layers that lack rank, with the reasons, as in `ModulePlan.missing_rank` of the plan with
            which training began; ``None`` to look at the weights.

    Example:
        >>> plan = plan_layers(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 2)))
        >>> plan.sharded_weights
        ('1.weight',)
    """
    example = example_of(module) if example_input is None else example_input
    order = None if example is None else execution_order(module, example)
    layers = _in_order(dict(_layers(module)), order)
    factors = _factors(module, layers)
    ends = _ends(layers, order, factors) if choices.keep_first_and_last_dense else {}
    planner = _Planner(choices, order, ends, _ties(module), factors, missing_rank)
    plans = tuple(planner.plan(name, layer) for name, layer in layers.items())
    buffers = tuple(BufferPlan(*entry) for entry in buffer_policies(module, choices.buffers))
    return ModulePlan(plans, buffers, tuple(_problems(layers, plans, buffers, choices)), choices)


@dataclass(frozen=True)
class _Planner:
    """Everything that the plan of a layer depends on."""

    choices: LayerChoices
    order: tuple[str, ...] | None  # of first calls; None if no pass was traced
    ends: Mapping[str, str]  # the first and the last layer, with the reason that keeps them dense
    ties: Mapping[str, Sequence[str]]  # for each layer that shares a parameter, the names of the others
    factors: Collection[str]  # names of low-rank factors
    missing_rank: Mapping[str, str] | None  # with reasons; None to look at the weights

    def plan(self, name: str, layer: nn.Module) -> LayerPlan:
        parts, spatial = self.choices.num_parts(name), self.choices.spatial_convolutions
        reason = self._reason_to_stay_dense(name, layer)
        sharded = None if reason else sharded_type(layer, parts, spatial)
        in_forward = None if self.order is None else name in self.order
        factor, granularity = self.choices.ratio_factor(name), self.choices.term_granularity
        blocks = tuple(
            replace(block.within(name), ratio_factor=factor, granularity=granularity)
            for block in _blocks(layer, parts, spatial)
        )
        if sharded is not None and sharded.cuts_outputs:
            blocks = tuple(replace(block, held_rows=self.choices.held_rows(block.shape[0])) for block in blocks)
        what = "affine" + f", {parts} parts" * (parts > 1) + f", {factor:g} times the keep ratio" * (factor != 1)
        return LayerPlan(name, type_name(layer), _shapes(layer), blocks, sharded, reason or what, in_forward)

    def _reason_to_stay_dense(self, name: str, layer: nn.Module) -> str | None:
        if not name:
            return "the whole module: wrap it in another"
        if is_uninitialised(layer):
            return "lazy: no weight yet"
        if not is_affine(layer):
            return f"{type_name(layer)} is not supported" if is_namesake(layer) else "not an affine layer"
        if self.choices.excludes(name):
            return "excluded by name"
        if name in self.factors:
            return LOW_RANK
        if name in self.ends:
            return self.ends[name]
        if name in self.ties:
            return f"shares its weight with {' and '.join(map(repr, self.ties[name]))}"
        if reason := refusal(layer):
            return reason
        if _is_frozen(layer, _blocks(layer, 1)):
            return FROZEN
        if self.order is not None and name not in self.order:
            return "not in the forward pass"
        return self._missing_rank(name, layer)

    def _missing_rank(self, name: str, layer: nn.Module) -> str | None:
        if self.missing_rank is not None:
            return self.missing_rank.get(name)
        return missing_rank(layer, _blocks(layer, self.choices.num_parts(name), self.choices.spatial_convolutions))


def _layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, layer in module.named_modules():
        if next(layer.parameters(recurse=False), None) is not None:
            yield name, layer


def _in_order(layers: dict[str, nn.Module], order: Sequence[str] | None) -> dict[str, nn.Module]:
    """Executed layers first, in order of their first call; then those that never ran."""
    ran = [name for name in order or () if name in layers]
    return {name: layers[name] for name in dict.fromkeys([*ran, *layers])}


def _ends(layers: Mapping[str, nn.Module], order: Sequence[str] | None, factors: Collection[str]) -> dict[str, str]:
    names = [name for name in layers if (order is None or name in order) and name not in factors]
    weighted = [name for name in names if is_affine(layers[name]) or isinstance(layers[name], nn.Embedding)]
    affine = [name for name in weighted if is_affine(layers[name])]
    first = {weighted[0]: "first layer"} if affine and weighted[0] == affine[0] else {}
    return {affine[-1]: "last layer", **first} if affine else {}


def _factors(module: nn.Module, layers: Mapping[str, nn.Module]) -> frozenset[str]:
    shapes: dict[bool, dict[str, tuple[int, int]]] = {True: {}, False: {}}
    for name, layer in layers.items():
        if len(blocks := _blocks(layer, 1)) == 1:
            shapes[_is_frozen(layer, blocks)][name] = blocks[0].shape
    return low_rank_factors(module, trained=shapes[False], frozen=shapes[True])


def _is_frozen(layer: nn.Module, blocks: Iterable[WeightBlock]) -> bool:
    return not all(layer.get_parameter(block.parameter).requires_grad for block in blocks)


def _ties(module: nn.Module) -> dict[str, list[str]]:
    """For each layer name, the other layers that hold one of its parameters."""
    holders: dict[int, list[str]] = defaultdict(list)
    for name, layer in _layers(module):
        for parameter in layer.parameters(recurse=False):
            holders[id(parameter)].append(name)
    return {name: [n for n in names if n != name] for names in holders.values() if len(names) > 1 for name in names}


def _blocks(layer: nn.Module, num_parts: int, spatial: bool = False) -> tuple[WeightBlock, ...]:
    sharded: ShardedType | None = sharded_type(layer, num_parts, spatial) if is_affine(layer) else None
    if sharded is None or is_uninitialised(layer) or refusal(layer):
        return ()
    try:
        return sharded.blocks_of(layer, num_parts)
    except ValueError:  # the split does not divide the rows: one of the problems
        return sharded.blocks_of(layer, 1)


def _shapes(layer: nn.Module) -> tuple[tuple[int, ...], ...]:
    weights = (p for name, p in layer.named_parameters(recurse=False) if "bias" not in name)
    return () if is_uninitialised(layer) else tuple(tuple(weight.shape) for weight in weights)


def _problems(
    layers: Mapping[str, nn.Module], plans: Sequence[LayerPlan], buffers: Sequence[BufferPlan], choices: LayerChoices
) -> Iterator[str]:
    if lazy := [name for name, layer in layers.items() if is_uninitialised(layer)]:
        yield f"Lazy layers have no weight yet: {', '.join(lazy)}; run one forward pass first."
    yield from unmatched("exclude", choices.exclude, layers, "layer")
    yield from unmatched("split", choices.split, layers, "layer")
    yield from unmatched("ratio_factors", choices.ratio_factors, layers, "layer")
    yield from unmatched("buffers", choices.buffers, [buffer.name for buffer in buffers], "buffer")
    yield from _wrong_splits(layers, choices)
    sharded = [layer for layer in plans if layer.sharded is not None]
    if not sharded and not any(layer.reason in (FROZEN, LOW_RANK) for layer in plans):
        yield (
            "No layer of this module can be sharded; the first and the last layer stay dense unless "
            "`keep_first_and_last_dense=False`, and `exclude` takes layers out."
        )
    largest = max((block.num_singular for layer in sharded for block in layer.blocks), default=math.inf)
    if 1 < largest <= choices.term_granularity:
        yield (
            f"`term_granularity={choices.term_granularity}` rounds up to all terms of every sharded layer, of which "
            f"the largest has N = {largest}: every client would hold them all. Lower it far below that."
        )


def _wrong_splits(layers: Mapping[str, nn.Module], choices: LayerChoices) -> Iterator[str]:
    for name, layer in layers.items():
        if (parts := choices.num_parts(name)) == 1:
            continue
        sharded = sharded_type(layer, parts)
        if sharded is None:
            yield f"`split` is for linear layers; {name!r} is a {type(layer).__name__}."
            continue
        try:
            sharded.blocks_of(layer, parts)
        except ValueError as error:
            yield f"`split` of {name!r}: {error}"
