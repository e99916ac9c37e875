"""What happens to each layer of a module, and why, as a table to read before any training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_spectral.nn.layers.blocks import WeightBlock
from lightning_spectral.nn.plan.layer_types import ShardedType
from lightning_spectral.protocol.exchange import AVERAGED


@dataclass(frozen=True)
class LayerTreatment:
    """One layer of a module.

    Attributes:
        name: Dotted module name.
        type_name: Class of the layer.
        shapes: Shapes of its weights, in order; biases are not listed.
        blocks: The matrices that make up its weights, by names within the module; empty if it is not affine.
        sharded: The class that holds sampled terms of it, or ``None`` where clients hold it dense.
        reason: Why.
        in_forward: Whether one forward pass ran it; ``None`` if none was traced.
    """

    name: str
    type_name: str
    shapes: tuple[tuple[int, ...], ...]
    blocks: tuple[WeightBlock, ...]
    sharded: ShardedType | None
    reason: str
    in_forward: bool | None = None


@dataclass(frozen=True)
class BufferTreatment:
    """One buffer of a module.

    Attributes:
        name: Dotted name.
        shape: Its shape.
        policy: What a federated run does with it.
    """

    name: str
    shape: tuple[int, ...]
    policy: str


@dataclass(frozen=True)
class LayerReport:
    """The treatment of every layer that has parameters, and of every buffer; ``print`` shows it as tables.

    Attributes:
        layers: In order of execution where a forward pass was traced, else in order of registration.
        buffers: In order of registration.
        problems: What has to be solved before training.
    """

    layers: tuple[LayerTreatment, ...]
    buffers: tuple[BufferTreatment, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def sharded(self) -> Mapping[str, LayerTreatment]:
        """The layers that are sharded, by name."""
        return {layer.name: layer for layer in self.layers if layer.sharded is not None}

    @property
    def blocks(self) -> Mapping[str, WeightBlock]:
        """The matrices that are sharded, by the name of the module that holds their terms in a sub-model."""
        return {block.name: block for layer in self.sharded.values() for block in layer.blocks}

    @property
    def sharded_weights(self) -> tuple[str, ...]:
        """Names of the dense weights that are sharded, once each."""
        return tuple(dict.fromkeys(block.parameter for block in self.blocks.values()))

    @property
    def kept_buffers(self) -> tuple[str, ...]:
        """Names of the buffers that keep the server's value."""
        return tuple(buffer.name for buffer in self.buffers if buffer.policy != AVERAGED)

    def check(self) -> LayerReport:
        """This report, if it has no problems.

        Raises:
            ValueError: With all problems, and the table.
        """
        if self.problems:
            listed = "\n".join(f"- {problem}" for problem in self.problems)
            raise ValueError(f"This module cannot be sharded as asked:\n{listed}\n\n{self}")
        return self

    def __str__(self) -> str:
        header = ("layer", "type", "weight", "N", "in forward", "treatment", "reason")
        lines = list(aligned([header, *(_row(layer) for layer in self.layers)]))
        if self.buffers:
            rows = [(buffer.name, _size(buffer.shape), buffer.policy) for buffer in self.buffers]
            lines += ["", *aligned([("buffer", "shape", "policy"), *rows])]
        if self.problems:
            lines += ["", *(f"PROBLEM: {problem}" for problem in self.problems)]
        return "\n".join(lines)


def aligned(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    """Lines of a plain-text table with columns padded to equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _row(layer: LayerTreatment) -> tuple[str, ...]:
    return (
        layer.name,
        layer.type_name,
        _counted(_size(shape) for shape in layer.shapes),
        _counted(str(block.num_singular) for block in layer.blocks),
        {None: "?", True: "yes", False: "no"}[layer.in_forward],
        "dense" if layer.sharded is None else "sharded",
        layer.reason,
    )


def _counted(entries: Iterable[str]) -> str:
    """Equal entries once, with their number: ``3 * 64, 256``."""
    counts = Counter(entries)
    return ", ".join(entry if count == 1 else f"{count} * {entry}" for entry, count in counts.items()) or "-"


def _size(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
