"""Blocks: the rows of a weight that are factorised together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_spectral.functional.spectra import num_terms_for, weight_to_matrix


@dataclass(frozen=True)
class WeightBlock:
    """A matrix that is factorised on its own: a whole weight, or one of equal parts of its rows, such as q, k or v.

    Attributes:
        name: Path of the module that holds its terms in a sub-model; ``""`` is the layer itself.
        parameter: Name of the dense weight.
        rows: First row of the matrix, and the row after its last.
        shape: Rows and columns of the matrix.
        transposed: Whether the dense weight is stored with one *column* per output.
        spatial: Whether a row is an output channel and a row of a kernel, a column an input channel and a column of it.
        held_rows: Number of leading rows of its left vectors that clients hold; ``None`` for all.
        ratio_factor: Factor on every client's keep ratio.
        granularity: Numbers of terms are rounded up to a multiple of this.
    """

    name: str
    parameter: str
    rows: tuple[int, int]
    shape: tuple[int, int]
    transposed: bool = False
    spatial: bool = False
    held_rows: int | None = None
    ratio_factor: float = 1.0
    granularity: int = 1

    @property
    def num_singular(self) -> int:
        """Number N of singular terms."""
        return min(self.shape)

    def num_terms(self, keep_ratio: float) -> int:
        """Number n of the terms that a client with this keep ratio holds."""
        return num_terms_for(self.num_singular, min(1.0, self.ratio_factor * keep_ratio), self.granularity)

    def within(self, path: str) -> WeightBlock:
        """The same block, named from a module that has this one at ``path``."""
        return replace(self, name=join(path, self.name), parameter=join(path, self.parameter))

    def matrix(self, weight: Tensor) -> Tensor:
        """The block of a dense weight, shape ``shape``; a view where possible.

        Example:
            >>> from torch import nn
            >>> conv = nn.Conv2d(4, 6, 3, groups=2)
            >>> row_blocks("weight", conv.weight, ["blocks.0", "blocks.1"])[1].matrix(conv.weight).shape
            torch.Size([3, 18])
        """
        return as_rows(weight, self.transposed, self.spatial)[slice(*self.rows)]


def row_blocks(
    parameter: str, weight: Tensor, names: Sequence[str], transposed: bool = False
) -> tuple[WeightBlock, ...]:
    """Equal parts of the rows of a weight, one for each name."""
    rows, columns = as_rows(weight, transposed).shape
    height, rest = divmod(rows, len(names))
    if rest:
        raise ValueError(f"A weight of {rows} rows cannot be split into {len(names)} equal parts.")
    return tuple(
        WeightBlock(name, parameter, (i * height, (i + 1) * height), (height, columns), transposed)
        for i, name in enumerate(names)
    )


def as_rows(weight: Tensor, transposed: bool = False, spatial: bool = False) -> Tensor:
    """A dense weight as a matrix with one row per output; or the spatial one, see `WeightBlock`."""
    if spatial:
        return weight.transpose(1, 2).flatten(2).flatten(0, 1)
    return weight.T if transposed else weight_to_matrix(weight)


def from_rows(rows: Tensor, shape: Sequence[int], transposed: bool = False, spatial: bool = False) -> Tensor:
    """The dense weight of a shape from its matrix: undoes `as_rows`."""
    if spatial:
        c_out, c_in, height, width = shape
        return rows.view(c_out, height, c_in, width).transpose(1, 2)
    return (rows.T if transposed else rows).reshape(tuple(shape))


def assemble(blocks: Sequence[WeightBlock], matrices: Sequence[Tensor], weight: Tensor) -> Tensor:
    """The matrices of all blocks of one weight, in order of their rows, joined in the shape of the weight."""
    rows = torch.cat(list(matrices)) if len(matrices) > 1 else matrices[0]
    return from_rows(rows, weight.shape, blocks[0].transposed, blocks[0].spatial)


def by_parameter(blocks: Sequence[WeightBlock]) -> Iterator[tuple[str, list[WeightBlock]]]:
    """The blocks of each weight, in order of rows."""
    grouped: dict[str, list[WeightBlock]] = {}
    for block in blocks:
        grouped.setdefault(block.parameter, []).append(block)
    yield from grouped.items()


def join(path: str, name: str) -> str:
    """A dotted name; either part may be empty."""
    return f"{path}.{name}" if path and name else path or name
