"""Contents of a dashboard, for any logger: histograms, tables and drawings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

Cell = str | float | int | None
NUM_BINS = 64


@dataclass(frozen=True)
class Histogram:
    """Numbers of values between edges.

    Attributes:
        name: The name under which a logger shows it.
        edges: Edges of the bins, ascending, shape ``(B + 1,)``; the last bin includes its right edge.
        counts: Number of values in each bin, shape ``(B,)``.
    """

    name: str
    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Table:
    """Rows of cells under the titles ``columns``, shown under a name; an unknown cell is ``None``."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, eq=False)
class Drawing:
    """A picture under a name, as bytes of red, green and blue, shape ``(height, width, 3)``."""

    name: str
    pixels: np.ndarray[Any, np.dtype[np.uint8]]


Shown = Histogram | Table | Drawing


def histogram(name: str, values: Tensor, *, num_bins: int = NUM_BINS) -> Histogram:
    """Count the finite ones of some values in bins of equal width between the smallest and the largest.

    Example:
        >>> histogram("p", torch.tensor([0.0, 0.2, 1.0, 1.0]), num_bins=2)
        Histogram(name='p', edges=(0.0, 0.5, 1.0), counts=(2, 2))
    """
    flat = values.detach().flatten().double().cpu()
    counts, edges = torch.histogram(flat[flat.isfinite()], num_bins)
    return Histogram(name, tuple(edges.tolist()), tuple(int(count) for count in counts))


def table(name: str, rows: Iterable[Mapping[str, Cell]]) -> Table:
    """Make a table of rows; its columns are those of all rows, in order of first appearance.

    Numbers that are not finite, such as a loss of NaN, become empty cells.

    Example:
        >>> table("clients", [{"client": 3, "loss": 0.5}, {"client": 4, "loss": float("nan")}])
        Table(name='clients', columns=('client', 'loss'), rows=((3, 0.5), (4, None)))
    """
    listed = list(rows)
    columns = tuple(dict.fromkeys(column for row in listed for column in row))
    return Table(name, columns, tuple(tuple(_cell(row.get(column)) for column in columns) for row in listed))


def _cell(value: Cell) -> Cell:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def of_model(model: str, records: Iterable[Shown]) -> list[Shown]:
    """The records of one of several models, with names that begin with the model's name."""
    return [replace(record, name=f"{model}/{record.name}") if model else record for record in records]
