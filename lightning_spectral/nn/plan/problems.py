"""Everything that stands in the way of sharding a module as its user asks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from lightning_spectral.nn.plan.layer_types import sharded_type
from lightning_spectral.nn.plan.report import LayerTreatment


@dataclass(frozen=True)
class Choices:
    """What a user may decide about layers.

    Attributes:
        exclude: Patterns of names that stay dense.
        split: From a pattern of names to the number of packed linear layers.
    """

    exclude: Sequence[str]
    split: Mapping[str, int]

    def __post_init__(self) -> None:
        if isinstance(self.exclude, str):
            raise ValueError(
                f"`exclude` is a sequence of patterns, got the string {self.exclude!r}; write "
                f"exclude=({self.exclude!r},)."
            )
        if wrong := [parts for parts in self.split.values() if not (isinstance(parts, int) and parts >= 2)]:
            raise ValueError(f"`split` gives the number of parts of a layer, an integer of at least 2, got {wrong[0]}.")

    def excludes(self, name: str) -> bool:
        """Whether a pattern takes the layer out."""
        return any(fnmatchcase(name, pattern) for pattern in self.exclude)

    def num_parts(self, name: str) -> int:
        """Number of packed linear layers, 1 if no pattern says more."""
        return next((parts for pattern, parts in self.split.items() if fnmatchcase(name, pattern)), 1)


def problems_of(
    module: nn.Module, layers: Mapping[str, nn.Module], treatments: Sequence[LayerTreatment], choices: Choices
) -> Iterator[str]:
    """One sentence with a remedy for each problem.

    Args:
        module: The user's module.
        layers: Its layers by name.
        treatments: What was decided.
        choices: What the user asked for.
    """
    if lazy := [name for name, layer in layers.items() if isinstance(layer, LazyModuleMixin)]:
        yield f"Lazy layers have no weight yet: {', '.join(lazy)}; run one forward pass first."
    yield from _unmatched("exclude", choices.exclude, list(layers))
    yield from _unmatched("split", list(choices.split), list(layers))
    yield from _wrong_splits(layers, choices)
    sharded = [layer for layer in treatments if layer.sharded is not None]
    if not sharded:
        yield (
            "No layer of this module can be sharded; the first and the last layer stay dense unless "
            "`keep_first_and_last_dense=False`, and `exclude` takes layers out."
        )
    if zero := [layer.name for layer in sharded if _has_zero_block(module, layer)]:
        yield (
            f"Layers whose weight is zero have no singular terms that could train: {', '.join(zero)}. Keep them dense "
            "with `exclude=`, or initialise them otherwise."
        )


def _unmatched(argument: str, patterns: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            yield f"`{argument}` pattern {pattern!r} matches no layer; the layers are: {', '.join(names)}."


def _wrong_splits(layers: Mapping[str, nn.Module], choices: Choices) -> Iterator[str]:
    for name, layer in layers.items():
        if (parts := choices.num_parts(name)) == 1:
            continue
        kind = sharded_type(layer, parts)
        if kind is None:
            yield f"`split` is for linear layers; {name!r} is a {type(layer).__name__}."
            continue
        try:
            kind.blocks_of(layer, parts)
        except ValueError as error:
            yield f"`split` of {name!r}: {error}"


def _has_zero_block(module: nn.Module, layer: LayerTreatment) -> bool:
    return any(not bool(b.matrix(module.get_parameter(b.parameter).detach()).any()) for b in layer.blocks)
