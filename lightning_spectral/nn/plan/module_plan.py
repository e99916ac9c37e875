"""The plan of a module: a user's choices, and which layers are sharded, and why, to read before any training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from torch import nn

from lightning_spectral.arguments import (
    Number,
    OneOf,
    Rule,
    Whole,
    as_patterns,
    check_fields,
    first_match,
    flag,
    matches_any,
)
from lightning_spectral.functional.spectra import GRANULARITY
from lightning_spectral.nn.layers.terms import WeightBlock, as_rows, by_parameter, join
from lightning_spectral.nn.layers.tucker import TuckerConv
from lightning_spectral.nn.plan.layer_types import ONE, ZERO, ShardedType
from lightning_spectral.tables import Block, Tabular


def _by_pattern(argument: str, given: Any, rule: Rule, what: str, example: str) -> dict[str, Any]:
    """A mapping from patterns to values that keep a rule."""
    if not isinstance(given, Mapping) or not all(isinstance(pattern, str) for pattern in given):
        raise ValueError(
            f"`{argument}` is a mapping from patterns to {what}, got {given!r}; write {argument}={example}."
        )
    return {pattern: rule(f"{argument}[{pattern!r}]", value) for pattern, value in given.items()}


CONVOLUTIONS = OneOf(("matrix", "spatial", "tucker"))
PARTS = Whole(at_least=2, hint="leave the pattern out to factorise the layer whole")
FACTOR = Number(above=0, hint="name the layers in `exclude` to leave them whole")
OUTPUT_RATIO = Number(above=0, at_most=1, hint="it is the share of output channels that a client computes")


@dataclass(frozen=True)
class LayerChoices:
    """Choices of the layers to shard, and of how finely, for all functions that use them.

    Patterns are shell-style and match dotted names, e.g. ``"head"`` or ``"blocks.*.proj"``; case matters.

    Args:
        exclude: Patterns of layers that stay dense.
        split: Maps patterns of layers to the number of linear layers packed into each, an integer of at least 2, e.g.
            ``{"*.qkv": 3}``. Each part is factorised separately.
        keep_first_and_last_dense: Keep the first and the last layer dense, in order of execution if a pass was traced,
            otherwise in order of registration. An embedding before the first affine layer counts as the first layer.
        ratio_factors: Maps patterns of layers to a factor on every client's keep ratio, e.g. ``{"*attn*": 5.0}`` for
            five times as many terms of attention, at most all; the first pattern that matches counts.
        term_granularity: Numbers of terms are rounded up to a multiple of this, but not beyond all terms of a layer:
            16 terms often take no more time than 7. If a layer has no more terms than this, every client holds all of
            them; this raises a warning, or an error if it applies to every layer.
        output_ratio: Share q of the output channels that a client computes of each linear layer or convolution that is
            sharded whole: the leading ceil(q c_out) channels; the others are zero.
        convolutions: How clients hold convolutions without groups whose kernel is larger than one position:
            ``"matrix"`` for terms of the matrix ``(c_out, c_in k^2)``; ``"spatial"`` for terms of ``(c_out k, c_in k)``
            in two dimensions, so one convolution along the rows of the image and one along its columns, with more and
            smaller terms; or ``"tucker"`` for Tucker-2 factors, three convolutions with as many values as the terms,
            which are averaged as they are. With the last two such a layer keeps all of its outputs.

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
    ratio_factors: Mapping[str, float] = field(default_factory=dict)
    term_granularity: int = 1
    output_ratio: float = 1.0
    convolutions: str = "matrix"

    def __post_init__(self) -> None:
        check_fields(
            self,
            exclude=as_patterns,
            split=partial(_by_pattern, rule=PARTS, what="numbers of parts", example="{'*.qkv': 3}"),
            keep_first_and_last_dense=flag,
            ratio_factors=partial(_by_pattern, rule=FACTOR, what="factors", example="{'*attn*': 5.0}"),
            term_granularity=GRANULARITY,
            output_ratio=OUTPUT_RATIO,
            convolutions=CONVOLUTIONS,
        )
        if self.convolutions == "tucker" and self.output_ratio != 1.0:
            raise ValueError(
                f"`output_ratio={self.output_ratio:g}` cuts the outputs of matrices, not Tucker factors; leave it out, "
                "or write convolutions='matrix'."
            )

    def excludes(self, name: str) -> bool:
        return matches_any(name, self.exclude)

    def num_parts(self, name: str) -> int:
        """Number of linear layers packed into the layer; 1 if no pattern matches it."""
        return first_match(name, self.split) or 1


@dataclass(frozen=True)
class LayerPlan:
    """The plan of one layer of a module: how clients hold it.

    Attributes:
        name: Dotted module name.
        type_name: Class of the layer.
        shapes: Shapes of its weights, in order; biases are not listed.
        blocks: The matrices that make up its weights, with names within the module; empty if it is not affine.
        sharded: The class that holds its sampled terms, or ``None`` if clients hold it dense.
        reason: The reason for this.
        in_forward: Whether the traced forward pass ran it; ``None`` if no pass was traced.
    """

    name: str
    type_name: str
    shapes: tuple[tuple[int, ...], ...]
    blocks: tuple[WeightBlock, ...]
    sharded: ShardedType | None
    reason: str
    in_forward: bool | None = None


@dataclass(frozen=True)
class BufferPlan:
    """The plan of one buffer of a module: what a federated run does with it.

    Its ``policy`` says what is done with the clients' values, such as ``"averaged"``, or why the buffer keeps the
    server's.
    """

    name: str
    shape: tuple[int, ...]
    policy: str


@dataclass(frozen=True)
class ModulePlan(Tabular):
    """The plan of every layer that has parameters, and of every buffer; ``print`` shows it as tables.

    Attributes:
        layers: In order of execution if a forward pass was traced, otherwise in order of registration.
        buffers: In order of registration.
        problems: Problems that have to be solved before training.
        choices: The user's choices, which determine the plan together with the module.
        note: In what a run without this plan would differ from it.
    """

    layers: tuple[LayerPlan, ...]
    buffers: tuple[BufferPlan, ...] = ()
    problems: tuple[str, ...] = ()
    choices: LayerChoices = LayerChoices()
    note: str = field(default="", compare=False)

    @property
    def sharded(self) -> Mapping[str, LayerPlan]:
        """The layers that are sharded, by name."""
        return {layer.name: layer for layer in self.layers if layer.sharded is not None}

    @property
    def missing_rank(self) -> Mapping[str, str]:
        """The layers that stay whole because their weights have at most one term, with the reasons."""
        return {layer.name: layer.reason for layer in self.layers if layer.reason.endswith((ZERO, ONE))}

    @property
    def tucker(self) -> Mapping[str, LayerPlan]:
        """The convolutions that are held as Tucker-2 factors, by name."""
        return {n: layer for n, layer in self.sharded.items() if issubclass(cast(type, layer.sharded), TuckerConv)}

    @property
    def matrices(self) -> Mapping[str, WeightBlock]:
        """The matrices of all sharded layers, by the name of the module that holds them in a sub-model."""
        return {block.name: block for layer in self.sharded.values() for block in layer.blocks}

    @property
    def blocks(self) -> Mapping[str, WeightBlock]:
        """Those of which clients hold singular terms."""
        factors = self.tucker
        return {name: block for name, block in self.matrices.items() if name not in factors}

    @property
    def whole(self) -> Mapping[str, int]:
        """The number of terms of each sharded matrix that every client holds whole, because of rounding up."""
        granularity = self.choices.term_granularity
        counts = {name: block.num_singular for name, block in self.blocks.items()}
        return {name: count for name, count in counts.items() if 1 < count <= granularity}

    @property
    def sharded_weights(self) -> tuple[str, ...]:
        """Names of the dense weights that are sharded, once each."""
        return tuple(dict.fromkeys(block.parameter for block in self.matrices.values()))

    def cut_biases(self, module: nn.Module) -> dict[str, int]:
        """The number of leading entries that clients hold of each bias that is cut; frozen biases are held whole."""
        cuts = {}
        for layer in self.sharded.values():
            bias, held = getattr(module.get_submodule(layer.name), "bias", None), layer.blocks[0].held_rows
            if held is not None and isinstance(bias, nn.Parameter) and bias.requires_grad:
                cuts[join(layer.name, "bias")] = held
        return cuts

    def keeping_dense(self, parameters: Collection[str], reason: str) -> ModulePlan:
        """This plan, but without sharding the layers that have one of the named parameters among their matrices."""
        if not parameters:
            return self
        return replace(
            self,
            layers=tuple(
                replace(layer, sharded=None, reason=reason)
                if layer.sharded and any(block.parameter in parameters for block in layer.blocks)
                else layer
                for layer in self.layers
            ),
        )

    def check(self) -> ModulePlan:
        """This plan; ``ValueError`` with all problems and the table, if it has any."""
        if self.problems:
            listed = "\n".join(f"- {problem}" for problem in self.problems)
            raise ValueError(f"This module cannot be sharded as asked:\n{listed}\n\n{self}")
        return self

    def check_module(self, module: nn.Module) -> None:
        """Raise ``ValueError`` if this is the plan of a module with other weights, or with others frozen."""
        own, difference = dict(module.named_parameters()), ""
        if missing := [name for name in self.sharded_weights if name not in own]:
            difference = f"this one has no weights {', '.join(missing)}"
        elif frozen := [name for name in self.sharded_weights if not own[name].requires_grad]:
            difference = f"in this one {', '.join(frozen)} would be sharded but is frozen"
        else:
            for name, blocks in by_parameter(list(self.matrices.values())):
                planned = blocks[-1].rows[1], blocks[0].shape[1]
                found = tuple(as_rows(own[name], blocks[0].transposed, blocks[0].spatial).shape)
                if not difference and found != planned:
                    difference = f"{name} is {found} as a matrix, not {planned}"
        if difference:
            raise ValueError(
                f"`layers` is the plan of another module: {difference}. Make one of this module with `validate`."
            )

    def _blocks(self) -> list[Block]:
        rows: list[Sequence[str]] = [("layer", "type", "weight", "N", "in forward", "held", "reason")]
        for layer in self.layers:
            held = "dense"
            if layer.sharded is not None:
                (rows_held, num_rows) = layer.blocks[0].held_rows, layer.blocks[0].shape[0]
                held = "sharded" if rows_held is None else f"sharded, {rows_held} of {num_rows} outputs"
                held = "Tucker factors" if issubclass(layer.sharded, TuckerConv) else held
            weights, counts = map(_size, layer.shapes), (str(block.num_singular) for block in layer.blocks)
            was_run = {None: "?", True: "yes", False: "no"}[layer.in_forward]
            rows.append((layer.name, layer.type_name, _counted(weights), _counted(counts), was_run, held, layer.reason))
        tables: list[Block] = [rows]
        if self.buffers:
            of_buffers = [(buffer.name, _size(buffer.shape), buffer.policy) for buffer in self.buffers]
            tables.append([("buffer", "shape", "policy"), *of_buffers])
        said = [f"PROBLEM: {problem}" for problem in self.problems], filter(None, [self.note])
        return [*tables, *filter(None, map("\n".join, said))]


def _counted(entries: Iterable[str]) -> str:
    """Equal entries once, with their number: ``3 * 64, 256``."""
    counts = Counter(entries)
    return ", ".join(entry if count == 1 else f"{count} * {entry}" for entry, count in counts.items()) or "-"


def _size(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
