"""Convolutions with a kernel of one: both ways compute the same, and each is taken where the rule says."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_spectral.nn import SpectralShardedConv2d
from lightning_spectral.nn.layers.conv import pointwise, products_are_faster
from lightning_spectral.testing import check_sharded_layer

CONVS: list[Any] = [(F.conv1d, (9,), (2,)), (F.conv2d, (7, 8), (2, 1)), (F.conv3d, (5, 6, 5), (1, 2, 3))]


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def refuse(*args: Any) -> Tensor:
    raise AssertionError("a convolution was called")


def dense(x: Tensor, matrix: Tensor, bias: Tensor | None, stride: tuple[int, ...]) -> Tensor:
    """The definition: skip positions, then the matrix at each of those that are left."""
    x = x[(..., *(slice(None, None, step) for step in stride))]
    out = torch.einsum("rc,bc...->br...", matrix, x)
    return out if bias is None else out + bias.view(-1, *(1,) * len(stride))


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("strided", [True, False])
@pytest.mark.parametrize(("conv", "sizes", "stride"), CONVS)
def test_products_compute_the_convolution(
    conv: Any, sizes: tuple[int, ...], stride: tuple[int, ...], strided: bool, with_bias: bool
) -> None:
    stride = stride if strided else (1,) * len(sizes)
    x, matrix, bias = rand(2, 3, *sizes), rand(4, 3), rand(4) if with_bias else None
    expected = dense(x, matrix, bias, stride)
    torch.testing.assert_close(pointwise(x, matrix, bias, stride, refuse), expected)
    torch.testing.assert_close(
        pointwise(x.transpose(-1, 1).contiguous().transpose(-1, 1), matrix, bias, stride, conv), expected
    )
    torch.testing.assert_close(pointwise(x[0], matrix, bias, stride, conv), expected[0])


def test_large_matrices_at_few_positions_are_convolved() -> None:
    x, matrix = rand(2, 200, 4, 4), rand(200, 200)
    assert not products_are_faster(matrix.numel(), 16)
    with pytest.raises(AssertionError, match="a convolution was called"):
        pointwise(x, matrix, None, (1, 1), refuse)
    torch.testing.assert_close(pointwise(x, matrix, None, (2, 2), F.conv2d), dense(x, matrix, None, (2, 2)))


def test_channels_last_memory_stays_channels_last() -> None:
    x = rand(2, 3, 8, 8).to(memory_format=torch.channels_last)
    out = pointwise(x, rand(4, 3), None, (1, 1), F.conv2d)
    assert out.is_contiguous(memory_format=torch.channels_last)


def test_an_empty_batch_has_an_empty_result() -> None:
    assert pointwise(rand(2, 3, 4, 4)[:0], rand(5, 3), None, (2, 2), F.conv2d).shape == (0, 5, 2, 2)


@pytest.mark.parametrize("size", [2, 24])
@pytest.mark.parametrize("kernel_size", [1, 3])
def test_a_convolution_rebuilds_its_weight_where_that_is_less_work_and_computes_the_same(
    size: int, kernel_size: int
) -> None:
    """At 24 x 24 positions all terms cost more than the weight; at 2 x 2 they do not."""
    conv = nn.Conv2d(6, 6, kernel_size, padding=kernel_size // 2, dtype=torch.float64)
    x = rand(1, 6, size, size)
    sharded = SpectralShardedConv2d.from_dense(conv, num_terms=6)
    assert ("MmBackward0" in graph(sharded(x))) == (size == 24)
    check_sharded_layer(SpectralShardedConv2d, conv, x)


def graph(output: Tensor) -> set[str]:
    """Names of the functions that made a tensor."""
    names, todo = set(), [output.grad_fn]
    while todo:
        if (node := todo.pop()) is not None:
            names.add(node.name())
            todo += [parent for parent, _ in node.next_functions]
    return names
