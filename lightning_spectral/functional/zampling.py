"""The mathematics of Zampling: weights as sparse random combinations of bits.

Links map scores to probabilities, from which bits are drawn. The influence matrix Q, whose sparse rows are drawn from a
seed and never sent, maps bits to weights.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_spectral.arguments import check_fields, flag
from lightning_spectral.functional.checks import has_values

if TYPE_CHECKING:
    from scipy.sparse import csr_array

__all__ = ["Clip", "Link", "Sigmoid"]


class Link(ABC):
    """Maps scores s, which an optimizer may move anywhere, to probabilities p in [0, 1]."""

    @abstractmethod
    def probs(self, scores: Tensor) -> Tensor:
        """Probabilities p = f(s)."""

    @abstractmethod
    def scores(self, probs: Tensor) -> Tensor:
        """Scores that have the given probabilities."""

    @abstractmethod
    def gradient(self, scores: Tensor, of_bits: Tensor) -> Tensor:
        """The gradient of the scores at which bits were drawn, from that of the loss for the bits, Q^T grad_w."""


@dataclass(frozen=True)
class Clip(Link):
    r"""The link of Zampling: :math:`f(s) = \min(\max(s, 0), 1)`, with the straight-through gradient within (0, 1).

    Args:
        absorbing: Whether a score at or beyond 0 or 1 has no gradient, as published; it then stays there for the rest
            of a client's turn, and from round to round. With ``False``, gradients that point back inside are kept.

    Reference:
        Villani, Natale & Mallmann-Trenn, section 1.3.

    Example:
        >>> scores, downhill = torch.tensor([-0.5, 0.3, 1.0]), torch.tensor([-1.0, -1.0, -1.0])
        >>> Clip().gradient(scores, downhill)
        tensor([-0., -1., -0.])
        >>> Clip(absorbing=False).gradient(scores, downhill)
        tensor([-1., -1., -0.])
    """

    absorbing: bool = True

    def __post_init__(self) -> None:
        check_fields(self, absorbing=flag)

    def probs(self, scores: Tensor) -> Tensor:
        return scores.clamp(0.0, 1.0)

    def scores(self, probs: Tensor) -> Tensor:
        return probs.clone()

    def gradient(self, scores: Tensor, of_bits: Tensor) -> Tensor:
        if self.absorbing:
            return of_bits * ((scores > 0) & (scores < 1))
        outwards = ((scores <= 0) & (of_bits > 0)) | ((scores >= 1) & (of_bits < 0))
        return of_bits * ~outwards


MARGIN = 0.01  # how far probabilities are kept from 0 and 1 when converted to scores, so that these are finite


@dataclass(frozen=True)
class Sigmoid(Link):
    r"""The link of the supermasks of Zhou et al. and of FedPM: :math:`f(s) = 1 / (1 + e^{-s})`.

    Args:
        straight_through: Whether p gets the same gradient as the bit. ``False`` gives the gradient of FedPM's code,
            which is p times as large.

    Reference:
        Zhou et al. (2019), Deconstructing lottery tickets; Isik et al. (2023), FedPM, whose code has a margin of 0.01.

    Example:
        >>> Sigmoid().probs(Sigmoid().scores(torch.tensor([0.0, 0.5, 1.0])))
        tensor([0.0100, 0.5000, 0.9900])
    """

    straight_through: bool = True

    def __post_init__(self) -> None:
        check_fields(self, straight_through=flag)

    def probs(self, scores: Tensor) -> Tensor:
        return torch.sigmoid(scores)

    def scores(self, probs: Tensor) -> Tensor:
        return torch.logit(probs, eps=MARGIN)

    def gradient(self, scores: Tensor, of_bits: Tensor) -> Tensor:
        p = torch.sigmoid(scores)
        slope = p * (1 - p)
        return of_bits * (slope if self.straight_through else slope * p)


def draw_bits(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw one bit for each probability, on the CPU and in float32, so that the bits do not depend on the device."""
    return uniforms(probs, torch.float32, generator) < probs


def pack_bits(bits: Tensor) -> Tensor:
    """Pack booleans, or zeros and ones, into bytes, the first bit highest, as ``numpy.packbits`` does."""
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -len(bits) % 8)).view(-1, 8)
    return (padded << _shifts(bits.device)).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, num_bits: int) -> Tensor:
    """Undo `pack_bits`, given the number of bits."""
    if packed.shape != (-(-num_bits // 8),) or packed.dtype != torch.uint8:
        raise ValueError(
            f"{num_bits} bits travel as {-(-num_bits // 8)} bytes, got shape {tuple(packed.shape)} of {packed.dtype}."
        )
    return ((packed[:, None] >> _shifts(packed.device)) & 1).view(-1)[:num_bits].bool()


def uniforms(probs: Tensor, dtype: torch.dtype, generator: torch.Generator | None) -> Tensor:
    """A number in [0, 1) for each probability, drawn on the CPU; sent without waiting, since local steps draw, too."""
    if not has_values(probs):
        return torch.empty_like(probs, dtype=dtype)
    drawn = torch.rand(len(probs), dtype=dtype, generator=generator)
    return drawn.to(probs.device, non_blocking=probs.device.type != "mps")  # which would not wait for the values either


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(7, -1, -1, dtype=torch.uint8, device=device)


Values = Literal["normal", "sign"]
BLOCK_ROWS = 2**14  # rows that are drawn together; changing the number would change the matrix


def draw_rows(
    seed: int, block: int, num_rows: int, num_columns: int, degree: int | None, values: Values = "normal"
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Draw one block of rows, each with ``degree`` distinct columns and values of variance 1.

    Uses only raw bits of the Philox generator, integer and exactly rounded arithmetic, and a table of quantiles on a
    coarse grid, so that the rows are the same in every process, on every platform and with every version of numpy.

    Args:
        seed: Seed of the rows of one layer, in ``[0, 2**64)``.
        block: Index of the block within the layer, from 0.
        num_rows: Number of rows in this block, at most `BLOCK_ROWS`; a smaller number gives the first of the same rows.
        num_columns: Number of columns.
        degree: Number d of non-zeros of a row; ``None`` for a diagonal matrix: column indices are then all 0, and the
            caller shifts them.
        values: ``"normal"`` for N(0, 1), ``"sign"`` for +1 or -1.

    Returns:
        Column indices, shape ``(num_rows, d)``, ascending in each row; values of the same shape.

    Reference:
        Villani, Natale & Mallmann-Trenn, equation (1).
    """
    width = 1 if degree is None else degree
    if degree is None:
        columns = np.zeros((num_rows, 1), np.int32)
    else:
        # uniform subsets by Floyd's algorithm, which draws each column once, for all rows at once
        uniforms = (_raw(seed, 2 * block, num_rows * width).reshape(num_rows, width) >> np.uint64(11)) * 2.0**-53
        columns = np.empty((num_rows, width), np.int32)
        for k, last in enumerate(range(num_columns - width, num_columns)):
            drawn = (uniforms[:, k] * (last + 1)).astype(np.int32)
            taken = (columns[:, :k] == drawn[:, None]).any(1)
            columns[:, k] = np.where(taken, last, drawn)
        columns.sort(axis=1)
    words = _raw(seed, 2 * block + 1, -(-num_rows * width // 4))
    pieces = np.stack([(words >> np.uint64(16 * k)) & np.uint64(0xFFFF) for k in range(4)], axis=1).reshape(-1)
    return columns, _table(values)[pieces[: num_rows * width]].reshape(num_rows, width)


def _raw(seed: int, stream: int, count: int) -> NDArray[np.uint64]:
    """Words of the stream of one block and purpose; raw streams never change between versions of numpy."""
    return np.random.Philox(key=seed, counter=np.array([0, 0, 0, stream], np.uint64)).random_raw(count)


@cache
def _table(values: Values) -> NDArray[np.float32]:
    """The values of all 2**16 equally likely pieces of 16 bits.

    Normal values are quantiles, scaled to variance 1 and rounded to multiples of 2**-20, so that the last digits of a
    platform's ``log`` make no difference.
    """
    from scipy.special import ndtri  # here, so that a device imports this file without scipy

    half = 2**15
    if values == "sign":
        return np.repeat(np.array([-1.0, 1.0], np.float32), half)
    upper = ndtri((np.arange(half, 2 * half) + 0.5) / (2 * half))
    upper = np.round(upper / np.sqrt(np.mean(upper**2)) * 2.0**20) / 2.0**20
    return np.concatenate([-upper[::-1], upper]).astype(np.float32)


BYTES_PER_ENTRY = 8  # a column index and a value
BYTES_PER_ROW = 4  # where its entries end


@dataclass(frozen=True)
class LayerRows:
    """The rows of Q that belong to one weight."""

    seed: int  # of the rows, in [0, 2**64)
    num_rows: int  # entries of the weight
    scale: float  # standard deviation of the rows' values


@dataclass(frozen=True)
class Block:
    """Some consecutive rows of one layer that are drawn together; ``first_row`` counts in the whole matrix."""

    layer: LayerRows
    index: int
    first_row: int
    num_rows: int


@dataclass(frozen=True)
class InfluenceMatrix:
    """The sparse m x n matrix that maps bits z, or probabilities p, to weights: w = Qz.

    It is drawn on first use. As many rows as fit into ``memory``, in bytes, are kept; the others are drawn again for
    every product. Pickling saves only the fields below.

    Args:
        layers: Rows of all weights, in order.
        num_columns: Number n of columns.
        degree: Number d of non-zeros of a row; ``None`` for a diagonal matrix, n = m.
        values: Distribution of the non-zeros, before they are scaled.

    Example:
        >>> Q = InfluenceMatrix((LayerRows(seed=1, num_rows=4, scale=0.5),), num_columns=3, degree=2)
        >>> Q.expand(torch.ones(3)).shape, Q.pull_back(torch.ones(4)).shape
        (torch.Size([4]), torch.Size([3]))
    """

    layers: tuple[LayerRows, ...]
    num_columns: int
    degree: int | None = 10
    values: Values = "normal"
    memory: int = 2**30

    def __post_init__(self) -> None:
        if self.degree is not None and not 1 <= self.degree <= self.num_columns:
            raise ValueError(
                f"`degree` must be between 1 and the number of columns, {self.num_columns}, got {self.degree}: each "
                "weight needs that many different columns. Lower the degree or the compression."
            )
        if self.degree is None and self.num_columns != self.num_rows:
            raise ValueError(f"A diagonal matrix of {self.num_rows} rows has {self.num_columns} columns.")

    @cached_property
    def num_rows(self) -> int:
        """Number m of rows, one for each weight."""
        return sum(layer.num_rows for layer in self.layers)

    @property
    def width(self) -> int:
        """Number of non-zeros of a row."""
        return 1 if self.degree is None else self.degree

    def expand(self, z: Tensor) -> Tensor:
        """Weights w = Qz, shape ``(m,)``, with the dtype of z, or float32 if that is not a floating-point dtype."""
        z = z if z.is_floating_point() else z.float()
        wide = _wide(z)
        if z.device.type != "cpu":
            return torch.mv(self._on_device(wide)[0], wide).to(z.dtype)
        weights = wide.new_empty(self.num_rows)  # torch's, so that it counts in what a step holds
        if has_values(wide):
            x = wide.numpy()
            np.concatenate([self._kept @ x, *(rows @ x for _, rows in self._drawn_again())], out=weights.numpy())
        return weights.to(z.dtype)

    def pull_back(self, gradient: Tensor) -> Tensor:
        """The gradient of z from that of the weights, Q^T grad_w, shape ``(n,)``, in the same dtype."""
        wide = _wide(gradient)
        if gradient.device.type != "cpu":
            return torch.mv(self._on_device(wide)[1], wide).to(gradient.dtype)
        total = wide.new_empty(self.num_columns)
        if has_values(wide):
            g, sums = wide.numpy(), total.numpy()
            sums[:] = self._kept.T @ g[: self._kept.shape[0]]
            for first_row, rows in self._drawn_again():
                sums += rows.T @ g[first_row : first_row + rows.shape[0]]
        return total.to(gradient.dtype)

    def entries(self) -> tuple[Tensor, Tensor]:
        """All columns, ascending in each row, and values, both ``(m, d)``; for small matrices."""
        whole = self._stacked(map(self._rows, self._blocks()))
        columns, values = torch.from_numpy(whole.indices).long(), torch.from_numpy(whole.data)
        return columns.view(-1, self.width), values.view(-1, self.width)

    def _blocks(self) -> Iterator[Block]:
        first_row = 0
        for layer in self.layers:
            for start in range(0, layer.num_rows, BLOCK_ROWS):
                num_rows = min(BLOCK_ROWS, layer.num_rows - start)
                yield Block(layer, start // BLOCK_ROWS, first_row + start, num_rows)
            first_row += layer.num_rows

    def _rows(self, block: Block) -> csr_array:
        from scipy.sparse import csr_array  # here, so that a device imports this file without scipy

        layer = block.layer
        columns, values = draw_rows(layer.seed, block.index, block.num_rows, self.num_columns, self.degree, self.values)
        if self.degree is None:
            columns = columns + np.arange(block.first_row, block.first_row + block.num_rows, dtype=np.int32)[:, None]
        ends = np.arange(0, columns.size + 1, self.width, dtype=np.int32)
        scaled = values * np.float32(layer.scale)
        return csr_array((scaled.ravel(), columns.ravel(), ends), shape=(block.num_rows, self.num_columns))

    def _stacked(self, rows: Iterable[csr_array]) -> csr_array:
        from scipy.sparse import csr_array, vstack

        return csr_array(vstack([csr_array((0, self.num_columns), dtype=np.float32), *rows], format="csr"))

    @cached_property
    def _num_kept(self) -> int:
        """Number of leading blocks that fit into the memory."""
        rows = max(0, self.memory - BYTES_PER_ROW) // (BYTES_PER_ENTRY * self.width + BYTES_PER_ROW)
        return sum(block.first_row + block.num_rows <= rows for block in self._blocks())

    @cached_property
    def _kept(self) -> csr_array:
        return self._stacked(map(self._rows, islice(self._blocks(), self._num_kept)))

    def _drawn_again(self) -> Iterator[tuple[int, csr_array]]:
        for block in islice(self._blocks(), self._num_kept, None):
            yield block.first_row, self._rows(block)

    def _on_device(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Q and its transpose as sparse torch matrices of a vector's type, which are kept for one device."""
        kept: dict[torch.dtype, tuple[Tensor, Tensor]] = self.__dict__.setdefault("_device_pairs", {})
        if any(pair[0].device != like.device for pair in kept.values()):
            kept.clear()
        if like.dtype not in kept:
            whole = self._stacked([self._kept, *(rows for _, rows in self._drawn_again())])
            kept[like.dtype] = _torch_csr(whole, like), _torch_csr(whole.T.tocsr(), like)
        return kept[like.dtype]

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def _wide(vector: Tensor) -> Tensor:
    """The values in a type that Q is multiplied with: at least 32 bits."""
    return vector.detach().to(torch.promote_types(vector.dtype, torch.float32))


def _torch_csr(matrix: csr_array, like: Tensor) -> Tensor:
    ends, columns, values = (torch.from_numpy(part) for part in (matrix.indptr, matrix.indices, matrix.data))
    options: dict[str, Any] = {"dtype": like.dtype, "device": like.device, "check_invariants": False}
    with warnings.catch_warnings():
        # torch 2.11 says the second although the checks are turned off by name
        beta, unchecked = "Sparse CSR tensor support is in beta", "Sparse invariant checks are implicitly disabled"
        warnings.filterwarnings("ignore", f"{beta}|{unchecked}", UserWarning)
        return torch.sparse_csr_tensor(ends, columns, values, matrix.shape, **options)
