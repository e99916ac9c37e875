"""The problems that prevent sharding a module as requested."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from lightning_spectral.arguments import unmatched
from lightning_spectral.nn.plan.choices import LayerChoices
from lightning_spectral.nn.plan.kept_whole import LOW_RANK
from lightning_spectral.nn.plan.layer_types import is_uninitialised, sharded_type
from lightning_spectral.nn.plan.module_plan import BufferPlan, LayerPlan

FROZEN = "frozen"


def problems_of(
    layers: Mapping[str, nn.Module], plans: Sequence[LayerPlan], buffers: Sequence[BufferPlan], choices: LayerChoices
) -> Iterator[str]:
    """One sentence with a remedy for each problem."""
    if lazy := [name for name, layer in layers.items() if is_uninitialised(layer)]:
        yield f"Lazy layers have no weight yet: {', '.join(lazy)}; run one forward pass first."
    yield from unmatched("exclude", choices.exclude, layers, "layer")
    yield from unmatched("split", choices.split, layers, "layer")
    yield from unmatched("keep_buffers", choices.keep_buffers, [buffer.name for buffer in buffers], "buffer")
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
