"""Rows of Zampling's influence matrix Q, a sparse random matrix that is drawn from a seed and never sent."""

from __future__ import annotations

from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

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
        columns = _distinct_columns(_raw(seed, 2 * block, num_rows * width), num_rows, num_columns, degree)
    words = _raw(seed, 2 * block + 1, -(-num_rows * width // 4))
    pieces = np.stack([(words >> np.uint64(16 * k)) & np.uint64(0xFFFF) for k in range(4)], axis=1).reshape(-1)
    return columns, _table(values)[pieces[: num_rows * width]].reshape(num_rows, width)


def _raw(seed: int, stream: int, count: int) -> NDArray[np.uint64]:
    """Words of the stream of one block and purpose; raw streams never change between versions of numpy."""
    generator = np.random.Philox(key=seed, counter=np.array([0, 0, 0, stream], np.uint64))
    words: NDArray[np.uint64] = generator.random_raw(count)
    return words


def _distinct_columns(words: NDArray[np.uint64], num_rows: int, num_columns: int, degree: int) -> NDArray[np.int32]:
    """Uniform subsets by Floyd's algorithm, which draws each column once, for all rows at once."""
    uniforms = (words.reshape(num_rows, degree) >> np.uint64(11)) * 2.0**-53
    chosen = np.empty((num_rows, degree), np.int32)
    for k, last in enumerate(range(num_columns - degree, num_columns)):
        drawn = (uniforms[:, k] * (last + 1)).astype(np.int32)
        taken = (chosen[:, :k] == drawn[:, None]).any(1)
        chosen[:, k] = np.where(taken, last, drawn)
    chosen.sort(axis=1)
    return chosen


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
    table: NDArray[np.float32] = np.concatenate([-upper[::-1], upper]).astype(np.float32)
    return table
