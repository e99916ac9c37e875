"""What happens to each layer of a module, and why, as a table to read before any training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerTreatment:
    """One layer of a module.

    Attributes:
        name: Dotted module name.
        type_name: Class of the layer.
        shape: Shape of its weight, or ``None`` where it has none.
        num_singular: Number N of singular terms, or ``None`` where the layer is not affine.
        sharded: Whether clients hold sampled terms of it; otherwise they hold it dense.
        reason: Why.
    """

    name: str
    type_name: str
    shape: tuple[int, ...] | None
    num_singular: int | None
    sharded: bool
    reason: str


@dataclass(frozen=True)
class LayerReport:
    """The treatment of every layer that has parameters; ``print`` shows it as a table."""

    layers: tuple[LayerTreatment, ...]

    @property
    def sharded_names(self) -> tuple[str, ...]:
        """Dotted names of the layers that are sharded, in order of registration."""
        return tuple(layer.name for layer in self.layers if layer.sharded)

    def __str__(self) -> str:
        header = ("layer", "type", "weight", "N", "treatment", "reason")
        return "\n".join(aligned([header, *(_row(layer) for layer in self.layers)]))


def aligned(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    """Lines of a plain-text table with columns padded to equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _row(layer: LayerTreatment) -> tuple[str, ...]:
    shape = "-" if layer.shape is None else "x".join(map(str, layer.shape))
    terms = "-" if layer.num_singular is None else str(layer.num_singular)
    return layer.name, layer.type_name, shape, terms, "sharded" if layer.sharded else "dense", layer.reason
