"""The plan of a module: which layers are sharded, and why, as a table to read before any training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from torch import nn

from lightning_spectral.nn.layers.blocks import WeightBlock, as_rows, by_parameter, join
from lightning_spectral.nn.plan.choices import LayerChoices
from lightning_spectral.nn.plan.layer_types import ShardedType, is_missing_rank
from lightning_spectral.tables import Block, as_html, as_text


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
class ModulePlan:
    """The plan of every layer that has parameters, and of every buffer; ``print`` shows it as tables.

    Attributes:
        layers: In order of execution if a forward pass was traced, otherwise in order of registration.
        buffers: In order of registration.
        problems: Problems that have to be solved before training.
        choices: The user's choices, which determine the plan together with the module.
    """

    layers: tuple[LayerPlan, ...]
    buffers: tuple[BufferPlan, ...] = ()
    problems: tuple[str, ...] = ()
    choices: LayerChoices = LayerChoices()

    @property
    def sharded(self) -> Mapping[str, LayerPlan]:
        """The layers that are sharded, by name."""
        return {layer.name: layer for layer in self.layers if layer.sharded is not None}

    @property
    def missing_rank(self) -> Mapping[str, str]:
        """The layers that stay whole because their weights have at most one term, with the reasons."""
        return {layer.name: layer.reason for layer in self.layers if is_missing_rank(layer.reason)}

    @property
    def blocks(self) -> Mapping[str, WeightBlock]:
        """The matrices that are sharded, by the name of the module that holds their terms in a sub-model."""
        return {block.name: block for layer in self.sharded.values() for block in layer.blocks}

    @property
    def whole(self) -> Mapping[str, int]:
        """The number of terms of each sharded matrix that every client holds whole, because of rounding up."""
        granularity = self.choices.term_granularity
        counts = {name: block.num_singular for name, block in self.blocks.items()}
        return {name: count for name, count in counts.items() if 1 < count <= granularity}

    @property
    def sharded_weights(self) -> tuple[str, ...]:
        """Names of the dense weights that are sharded, once each."""
        return tuple(dict.fromkeys(block.parameter for block in self.blocks.values()))

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
        own = dict(module.named_parameters())
        if missing := [name for name in self.sharded_weights if name not in own]:
            raise ValueError(_of_another_module(f"this one has no weights {', '.join(missing)}"))
        if frozen := [name for name in self.sharded_weights if not own[name].requires_grad]:
            raise ValueError(_of_another_module(f"in this one {', '.join(frozen)} would be sharded but is frozen"))
        for name, blocks in by_parameter(list(self.blocks.values())):
            planned = blocks[-1].rows[1], blocks[0].shape[1]
            if (found := tuple(as_rows(own[name], blocks[0].transposed, blocks[0].spatial).shape)) != planned:
                raise ValueError(_of_another_module(f"{name} is {found} as a matrix, not {planned}"))

    def __str__(self) -> str:
        return as_text(self._blocks())

    def _repr_html_(self) -> str:
        return as_html(self._blocks())

    def _blocks(self) -> list[Block]:
        header = ("layer", "type", "weight", "N", "in forward", "held", "reason")
        blocks: list[Block] = [[header, *(_row(layer) for layer in self.layers)]]
        if self.buffers:
            rows = [(buffer.name, _size(buffer.shape), buffer.policy) for buffer in self.buffers]
            blocks.append([("buffer", "shape", "policy"), *rows])
        if self.problems:
            blocks.append("\n".join(f"PROBLEM: {problem}" for problem in self.problems))
        return blocks


def _of_another_module(difference: str) -> str:
    return f"`layers` is the plan of another module: {difference}. Make one of this module with `validate`."


def _row(layer: LayerPlan) -> tuple[str, ...]:
    return (
        layer.name,
        layer.type_name,
        _counted(_size(shape) for shape in layer.shapes),
        _counted(str(block.num_singular) for block in layer.blocks),
        {None: "?", True: "yes", False: "no"}[layer.in_forward],
        _held(layer),
        layer.reason,
    )


def _held(layer: LayerPlan) -> str:
    if layer.sharded is None:
        return "dense"
    held_rows = layer.blocks[0].held_rows
    return "sharded" if held_rows is None else f"sharded, {held_rows} of {layer.blocks[0].shape[0]} outputs"


def _counted(entries: Iterable[str]) -> str:
    """Equal entries once, with their number: ``3 * 64, 256``."""
    counts = Counter(entries)
    return ", ".join(entry if count == 1 else f"{count} * {entry}" for entry, count in counts.items()) or "-"


def _size(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
