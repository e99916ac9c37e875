"""A user's choices about the layers and buffers of a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lightning_spectral.arguments import Number, Whole, as_patterns, check_fields, first_match, flag, matches_any
from lightning_spectral.functional.spectra import GRANULARITY, num_terms_for
from lightning_spectral.protocol.buffer_rules import Rules, as_rules

T = TypeVar("T")
OUTPUT_RATIO = Number(above=0, at_most=1, hint="it is the share of output channels that a client computes")


@dataclass(frozen=True)
class LayerChoices:
    """Choices of the layers to shard, of how finely, and of the rules of buffers, for all functions that use them.

    Patterns are shell-style and match dotted names, e.g. ``"head"`` or ``"blocks.*.proj"``; case matters.

    Args:
        exclude: Patterns of layers that stay dense.
        split: Maps patterns of layers to the number of linear layers packed into each, an integer of at least 2, e.g.
            ``{"*.qkv": 3}``. Each part is factorised separately.
        keep_first_and_last_dense: Keep the first and the last layer dense, in order of execution if a pass was traced,
            otherwise in order of registration. An embedding before the first affine layer counts as the first layer.
        buffers: Rules for buffers, by patterns: ``"mean"`` for the clients' average, the default for floating-point
            numbers; ``"min"`` or ``"max"`` for the clients' smallest or largest value of each entry; ``"server"`` to
            keep the server's value, the default for all others. The first pattern that matches counts.
        ratio_factors: Maps patterns of layers to a factor on every client's keep ratio, e.g. ``{"*attn*": 5.0}`` for
            five times as many terms of attention, at most all; the first pattern that matches counts.
        term_granularity: Numbers of terms are rounded up to a multiple of this, but not beyond all terms of a layer:
            16 terms often take no more time than 7. If a layer has no more terms than this, every client holds all of
            them; this raises a warning, or an error if it applies to every layer.
        output_ratio: Share q of the output channels that a client computes of each linear layer or convolution that is
            sharded whole: the leading ceil(q c_out) channels; the others are zero.
        spatial_convolutions: Factorise each two-dimensional convolution without groups into one along the rows of the
            image and one along its columns: its matrix is ``(c_out k, c_in k)``, with more and smaller terms. Such a
            layer keeps all of its outputs.

    Reference:
        Korzhenkov & Louizos (2024), section 4.1, keep the first and the last layer dense. Niu et al. (2023), section
        3.2.1, cut outputs. Yao et al. (2021), FedHM, have spatial convolutions.

    Example:
        >>> choices = LayerChoices(exclude=["*.proj"], split={"*.qkv": 3})
        >>> choices.excludes("blocks.0.proj"), choices.num_parts("blocks.0.qkv")
        (True, 3)
    """

    exclude: Sequence[str] = ()
    split: Mapping[str, int] = field(default_factory=dict)
    keep_first_and_last_dense: bool = True
    buffers: Rules = field(default_factory=dict)
    ratio_factors: Mapping[str, float] = field(default_factory=dict)
    term_granularity: int = 1
    output_ratio: float = 1.0
    spatial_convolutions: bool = False

    def __post_init__(self) -> None:
        check_fields(
            self,
            exclude=as_patterns,
            buffers=as_rules,
            split=_plain_split,
            keep_first_and_last_dense=flag,
            ratio_factors=_plain_factors,
            term_granularity=GRANULARITY,
            output_ratio=OUTPUT_RATIO,
            spatial_convolutions=flag,
        )

    def excludes(self, name: str) -> bool:
        return matches_any(name, self.exclude)

    def held_rows(self, num_rows: int) -> int | None:
        """Number of output channels that a client computes of a layer with ``num_rows``; ``None`` for all."""
        held = num_terms_for(num_rows, self.output_ratio)
        return None if held == num_rows else held

    def ratio_factor(self, name: str) -> float:
        """The factor on the keep ratio in a layer; 1 if no pattern matches it."""
        return first_match(name, self.ratio_factors) or 1.0

    def num_parts(self, name: str) -> int:
        """Number of linear layers packed into the layer; 1 if no pattern matches it."""
        return first_match(name, self.split) or 1


def _plain_factors(argument: str, factors: object) -> dict[str, float]:
    positive = Number(above=0, hint="name the layers in `exclude` to leave them whole")
    return _by_pattern(argument, factors, positive, "factors", "{'*attn*': 5.0}")


def _plain_split(argument: str, split: object) -> dict[str, int]:
    num_parts = Whole(at_least=2, hint="leave the pattern out to factorise the layer whole")
    return _by_pattern(argument, split, num_parts, "numbers of parts", "{'*.qkv': 3}")


def _by_pattern(argument: str, given: object, rule: Callable[[str, Any], T], what: str, example: str) -> dict[str, T]:
    """A mapping from patterns to values that keep a rule."""
    if not isinstance(given, Mapping) or not all(isinstance(pattern, str) for pattern in given):
        raise ValueError(
            f"`{argument}` is a mapping from patterns to {what}, got {given!r}; write {argument}={example}."
        )
    return {pattern: rule(f"{argument}[{pattern!r}]", value) for pattern, value in given.items()}
