"""Products with Q against the dense matrix of its entries."""

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_spectral.functional.zampling import BLOCK_ROWS, InfluenceMatrix, LayerRows, draw_rows

LAYERS = (  # of several blocks, of a few rows, of one block exactly and a row more
    LayerRows(seed=1, num_rows=BLOCK_ROWS + 5, scale=0.5),
    LayerRows(seed=2, num_rows=7, scale=2.0),
    LayerRows(seed=2**64 - 1, num_rows=BLOCK_ROWS + 1, scale=1.0),
)
NUM_ROWS = sum(layer.num_rows for layer in LAYERS)
SMALL = (LayerRows(seed=3, num_rows=30, scale=0.3), LayerRows(seed=4, num_rows=11, scale=3.0))

MATRICES = {
    "blocks": InfluenceMatrix(LAYERS, num_columns=40, degree=5),
    "full": InfluenceMatrix(SMALL, num_columns=6, degree=6),
    "signs": InfluenceMatrix(SMALL, num_columns=20, degree=3, values="sign"),
    "diagonal": InfluenceMatrix(SMALL, num_columns=41, degree=None),
    "diagonal signs": InfluenceMatrix(SMALL, num_columns=41, degree=None, values="sign"),
}
named = pytest.mark.parametrize("name", list(MATRICES))
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def fresh(name: str, **changes: Any) -> InfluenceMatrix:
    """A copy that has drawn nothing yet."""
    return replace(MATRICES[name], **changes)


def dense(matrix: InfluenceMatrix) -> Tensor:
    columns, values = matrix.entries()
    return torch.zeros(matrix.num_rows, matrix.num_columns).double().scatter_(1, columns, values.double())


def vectors(matrix: InfluenceMatrix, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    z = torch.rand(matrix.num_columns, generator=generator, dtype=dtype)
    return z, torch.randn(matrix.num_rows, generator=generator, dtype=dtype)


def rounding(Q: Tensor, x: Tensor) -> Tensor:
    """What a sum of k products may lose, k eps sum |q x|, of each entry of Q x."""
    return (Q != 0).sum(1) * torch.finfo(x.dtype).eps * (Q.abs() @ x.double().abs())


@named
@dtypes
def test_products_are_those_of_the_dense_matrix(name: str, dtype: torch.dtype) -> None:
    matrix, Q = fresh(name), dense(fresh(name))
    z, g = vectors(matrix, dtype)
    weights, pulled = matrix.expand(z), matrix.pull_back(g)
    assert weights.dtype == pulled.dtype == dtype
    assert ((weights.double() - Q @ z.double()).abs() <= rounding(Q, z)).all()
    assert ((pulled.double() - Q.T @ g.double()).abs() <= rounding(Q.T, g)).all()
    # one is the adjoint of the other
    most = rounding(Q, z) @ g.double().abs() + rounding(Q.T, g) @ z.double().abs()
    assert abs(float(weights.double() @ g.double() - z.double() @ pulled.double())) <= float(most)


@named
def test_entries_are_the_rows_of_each_layer_scaled(name: str) -> None:
    matrix = fresh(name)
    columns, values = (part.split([layer.num_rows for layer in matrix.layers]) for part in matrix.entries())
    first_row = 0
    for layer, own_columns, own_values in zip(matrix.layers, columns, values, strict=True):
        for block, start in enumerate(range(0, layer.num_rows, BLOCK_ROWS)):
            size = min(BLOCK_ROWS, layer.num_rows - start)
            drawn = draw_rows(layer.seed, block, size, matrix.num_columns, matrix.degree, matrix.values)
            expected = (torch.from_numpy(part) for part in drawn)
            rows = slice(start, start + size)
            if matrix.degree is None:
                assert own_columns[rows].ravel().tolist() == list(range(first_row + start, first_row + start + size))
                next(expected)
            else:
                assert torch.equal(own_columns[rows], next(expected).long())
            assert torch.equal(own_values[rows], next(expected) * torch.tensor(layer.scale, dtype=torch.float32))
        first_row += layer.num_rows


@dtypes
def test_what_is_kept_changes_neither_products_nor_bounds_on_memory(dtype: torch.dtype) -> None:
    row, Q = 5 * 8 + 4, dense(MATRICES["blocks"])  # a column, a value, and where the row ends
    first_block = BLOCK_ROWS * row + 4
    kept_rows = {
        -1: 0,
        0: 0,
        first_block - 1: 0,
        first_block: BLOCK_ROWS,
        first_block + 12 * row: BLOCK_ROWS + 12,
        2**30: NUM_ROWS,
    }
    for memory, expected in kept_rows.items():
        matrix = fresh("blocks", memory=memory)
        z, g = vectors(matrix, dtype)
        assert ((matrix.expand(z).double() - Q @ z.double()).abs() <= rounding(Q, z)).all()
        assert ((matrix.pull_back(g).double() - Q.T @ g.double()).abs() <= rounding(Q.T, g)).all()
        kept = matrix._kept
        assert kept.shape[0] == expected
        if expected:
            assert kept.data.nbytes + kept.indices.nbytes + kept.indptr.nbytes <= memory


def test_rows_of_a_layer_do_not_depend_on_the_layers_before_it() -> None:
    alone = InfluenceMatrix(SMALL[1:], num_columns=20, degree=3)
    both = InfluenceMatrix(SMALL, num_columns=20, degree=3)
    for part, whole in zip(alone.entries(), both.entries(), strict=True):
        assert torch.equal(part, whole[SMALL[0].num_rows :])
    other_seed = InfluenceMatrix((replace(SMALL[1], seed=5),), num_columns=20, degree=3)
    assert not torch.equal(other_seed.entries()[1], alone.entries()[1])  # negative control


def test_pickled_it_is_its_description_alone_and_draws_the_same() -> None:
    matrix = fresh("blocks")
    z, g = vectors(matrix, torch.float32)
    weights, pulled = matrix.expand(z), matrix.pull_back(g)
    matrix._on_device(z)
    sent = pickle.dumps(matrix)
    assert len(sent) < 1000
    received = pickle.loads(sent)
    assert received == matrix
    assert torch.equal(received.expand(z), weights)
    assert torch.equal(received.pull_back(g), pulled)


@named
def test_sparse_products_of_torch_are_those_of_scipy(name: str) -> None:
    """What other devices use, on the CPU; some rows are kept, others drawn again."""
    matrix, Q = fresh(name, memory=BLOCK_ROWS * 44 + 4), dense(fresh(name))
    z, g = vectors(matrix, torch.float32)
    pair = matrix._on_device(z)
    assert matrix._on_device(z)[0] is pair[0]  # kept
    try:
        weights, pulled = torch.mv(pair[0], z), torch.mv(pair[1], g)
    except RuntimeError as error:
        pytest.skip(f"this build of torch multiplies no sparse matrices on the CPU: {error}")
    assert ((weights - matrix.expand(z)).abs() <= 2 * rounding(Q, z)).all()
    assert ((pulled - matrix.pull_back(g)).abs() <= 2 * rounding(Q.T, g)).all()
    assert matrix._on_device(z.to("meta"))[0].is_meta  # another device has its own


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_only_the_result_is_rounded(dtype: torch.dtype) -> None:
    matrix = fresh("signs")
    z, g = vectors(matrix, dtype)
    assert torch.equal(matrix.expand(z), matrix.expand(z.float()).to(dtype))
    assert torch.equal(matrix.pull_back(g), matrix.pull_back(g.float()).to(dtype))


def test_bits_may_be_booleans_or_floats_and_need_no_gradient() -> None:
    matrix = fresh("signs")
    bits = vectors(matrix, torch.float32)[0] < 0.5
    weights = matrix.expand(bits)
    assert weights.dtype == torch.float32
    assert torch.equal(weights, matrix.expand(bits.float().requires_grad_()))
    assert not weights.requires_grad


def test_a_degree_beyond_the_columns_and_a_diagonal_that_is_not_square_are_refused() -> None:
    for degree in (0, 7):
        with pytest.raises(ValueError, match=f"between 1 and the number of columns, 6, got {degree}: .* Lower the"):
            InfluenceMatrix(SMALL, num_columns=6, degree=degree)
    with pytest.raises(ValueError, match="diagonal matrix of 41 rows has 40 columns"):
        InfluenceMatrix(SMALL, num_columns=40, degree=None)
