"""The problems that prevent sharding a module as requested."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from lightning_spectral.nn.plan.choices import LayerChoices
from lightning_spectral.nn.plan.layer_types import sharded_type
from lightning_spectral.nn.plan.low_rank import LOW_RANK
from lightning_spectral.nn.plan.module_plan import LayerPlan

FROZEN = "frozen"


def problems_of(
    module: nn.Module, layers: Mapping[str, nn.Module], plans: Sequence[LayerPlan], choices: LayerChoices
) -> Iterator[str]:
    """One sentence with a remedy for each problem.

    Args:
        module: The user's module.
        layers: Its layers by name.
        plans: How clients hold each layer.
        choices: The user's choices.
    """
    if lazy := [name for name, layer in layers.items() if isinstance(layer, LazyModuleMixin)]:
        yield f"Lazy layers have no weight yet: {', '.join(lazy)}; run one forward pass first."
    yield from _unmatched("exclude", choices.exclude, list(layers))
    yield from _unmatched("split", list(choices.split), list(layers))
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
    if zero := [layer.name for layer in sharded if _has_zero_block(module, layer)]:
        yield (
            f"Layers whose weight is zero have no singular terms that could train: {', '.join(zero)}. Keep them dense "
            "with `exclude=`, or initialise them differently."
        )


def _unmatched(argument: str, patterns: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            yield f"`{argument}` pattern {pattern!r} matches no layer; the layers are: {', '.join(names)}."


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


def _has_zero_block(module: nn.Module, layer: LayerPlan) -> bool:
    return any(not bool(b.matrix(module.get_parameter(b.parameter).detach()).any()) for b in layer.blocks)
