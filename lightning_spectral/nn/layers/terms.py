"""Matrices of weights that are factorised together, and the n singular terms of one that a client trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_spectral.arguments import Whole
from lightning_spectral.functional.spectra import num_terms_for, singular_terms, weight_to_matrix
from lightning_spectral.nn.layers.leading_channels import LeadingChannels, leading_channels


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
        """The block of a dense weight, shape ``shape``; a view where possible."""
        return as_rows(weight, self.transposed, self.spatial)[slice(*self.rows)]


def row_blocks(
    parameter: str, weight: Tensor, names: Sequence[str], transposed: bool = False
) -> tuple[WeightBlock, ...]:
    """Equal parts of the rows of a weight, one for each name."""
    rows, *others = reversed(weight.shape) if transposed else weight.shape  # of the matrix, without making it
    columns = math.prod(others)
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


class SingularTerms(nn.Module):
    r"""A matrix :math:`W = U\,\mathrm{diag}(\omega)\,V` with n terms, ``1 <= n <= min(shape)``.

    Training and evaluation compute the same. There are ``n (rows + columns)`` trainable values.

    Attributes:
        u: Parameter of shape ``(rows, n)``; column i is :math:`\sqrt{s_i}\,u_i`.
        v: Parameter of shape ``(n, columns)``; row i is :math:`\sqrt{s_i}\,v_i^T`.
        omega: Buffer of shape ``(n,)``: the auxiliary multipliers, frozen while a client trains.
        num_rows: Number of rows. ``u`` may hold only the leading ones; the matrix is zero in the others.
        multiplies: Whether multipliers may differ from 1; whoever has looked may say that they do not.
        rebuilds: Decides where the matrix is rebuilt; whoever counts may listen.

    Example:
        >>> terms = SingularTerms((4, 3), num_terms=1)
        >>> terms.load_matrix(torch.ones(4, 3))
        >>> torch.allclose(terms.matrix(), torch.ones(4, 3))
        True
    """

    u: nn.Parameter
    v: nn.Parameter
    omega: Tensor
    multiplies = True
    rebuilds: Callable[[int, int, int, int], bool]

    def __init__(
        self,
        shape: tuple[int, int],
        num_terms: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        rows, columns = shape
        self.num_rows = rows
        self.rebuilds = rebuilding_is_cheaper
        num_terms = Whole(at_least=1, at_most=min(shape), hint="a matrix has as many terms as its shorter side")(
            "num_terms", num_terms
        )
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.u = nn.Parameter(torch.zeros(rows, num_terms, **where))
        self.v = nn.Parameter(torch.zeros(num_terms, columns, **where))
        self.register_buffer("omega", torch.ones(num_terms, **where))

    @property
    def num_terms(self) -> int:
        """Number n of singular terms held."""
        return self.v.shape[0]

    @property
    def has_all_rows(self) -> bool:
        return len(self.u) == self.num_rows

    def matrix(self) -> Tensor:
        """The effective matrix, differentiable, shape ``(rows, columns)``."""
        held = self.scaled_u() @ self.v
        return held if self.has_all_rows else F.pad(held, (0, 0, 0, self.num_rows - len(held)))

    def scaled_u(self) -> Tensor:
        """``U diag(omega)``, differentiable, with the rows that ``u`` holds; shape ``(rows, n)`` if it holds all."""
        return self.u * self.omega if self.multiplies else self.u

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x W^T + bias`` by two thin products, or through the matrix where that is less work.

        ``x`` has the shape ``(..., columns)`` and the result ``(..., rows)``; it is `LeadingChannels` if ``u`` does not
        hold all rows.
        """
        x, v = self._leading(x, -1)
        held = bias if bias is None or self.has_all_rows else bias[: len(self.u)]
        if self.rebuilds(x.numel() // x.shape[-1], self.num_terms, self.u.shape[0], v.shape[1]):
            out = F.linear(x, self.scaled_u() @ v, held)
        else:
            out = F.linear(F.linear(x, v), self.scaled_u(), held)
        return out if self.has_all_rows else leading_channels(out, self.num_rows, -1)

    def _leading(self, x: Tensor, channel_dim: int) -> tuple[Tensor, Tensor]:
        """An input and ``v``, both without the parts that belong to channels known to be zero."""
        if not isinstance(x, LeadingChannels) or x.channel_dim != channel_dim:
            return x, self.v
        num_columns = self.v.shape[1] * x.held.shape[channel_dim] // x.num_channels
        return x.held, self.v[:, :num_columns]

    @torch.no_grad()
    def load_terms(self, u: Tensor, v: Tensor, multipliers: Tensor) -> None:
        """Overwrite the terms in place, so that optimizers and hooks stay valid.

        Singular values are absorbed in ``u``, shape ``(rows, n)``, and ``v``, shape ``(n, columns)``.
        """
        self.u.copy_(u)
        self.v.copy_(v)
        self.omega.copy_(multipliers)
        self.multiplies = True

    @torch.no_grad()
    def load_matrix(self, matrix: Tensor) -> None:
        """Load the n largest terms of a matrix with multipliers 1: its best approximation of rank n."""
        _, u, v = singular_terms(matrix)
        self.load_terms(u[:, : self.num_terms], v[: self.num_terms], torch.ones_like(self.omega))


def sharded_layers(module: nn.Module) -> dict[str, SingularTerms]:
    """The modules that hold singular terms, by dotted name: sharded layers, or blocks within them.

    Example:
        >>> list(sharded_layers(nn.Sequential(nn.Linear(3, 2), SingularTerms((4, 3), num_terms=1))))
        ['1']
    """
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, SingularTerms)}


def rebuilding_is_cheaper(num_positions: int, num_terms: int, rows: int, columns: int) -> bool:
    """Whether rebuilding the matrix, then one product, takes fewer multiplications than two thin products.

    The factors cost ``P n (rows + columns)`` and the matrix ``n rows columns + P rows columns``, where P is the number
    of positions. The matrix can only be cheaper if the factors hold more values than it does.
    """
    return num_positions * num_terms * (rows + columns) > (num_positions + num_terms) * rows * columns
