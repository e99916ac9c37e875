from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_spectral.nn import SpectralShardedConv2d, SpectralShardedLinear
from lightning_spectral.testing import check_sharded_layer

LINEAR = [(7, 4, True), (4, 7, False), (5, 5, True), (1, 3, True), (3, 1, False)]
CONV: list[dict[str, Any]] = [
    {"kernel_size": 3},
    {"kernel_size": 1, "bias": False},
    {"kernel_size": (3, 2), "stride": 2, "padding": (1, 0)},
    {"kernel_size": 3, "dilation": 2, "padding": 2},
    {"kernel_size": 3, "padding": 1, "padding_mode": "circular"},
    {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
    {"kernel_size": (2, 3), "padding": "same", "padding_mode": "replicate"},
    {"kernel_size": (5, 3), "padding": "same"},
    {"kernel_size": 3, "padding": "valid", "padding_mode": "circular"},
]


@pytest.mark.parametrize(("in_features", "out_features", "bias"), LINEAR)
def test_sharded_linear_stands_for_the_dense_layer(in_features: int, out_features: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    dense = nn.Linear(in_features, out_features, bias, dtype=torch.float64)
    x = torch.randn(2, 3, in_features, dtype=torch.float64, generator=generator)
    check_sharded_layer(SpectralShardedLinear, dense, x)


@pytest.mark.parametrize("options", CONV, ids=str)
@pytest.mark.parametrize("channels", [(3, 4), (2, 20)], ids=["wide", "tall"])
def test_sharded_convolution_stands_for_the_dense_layer(options: dict[str, Any], channels: tuple[int, int]) -> None:
    dense = nn.Conv2d(*channels, **options, dtype=torch.float64)
    x = torch.randn(2, channels[0], 7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    check_sharded_layer(SpectralShardedConv2d, dense, x)


@settings(max_examples=25, deadline=None)
@given(
    in_channels=st.integers(1, 5),
    out_channels=st.integers(1, 6),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.integers(1, 2),
    padding=st.integers(0, 2),
)
def test_convolutions_of_any_shape(
    in_channels: int, out_channels: int, kernel: tuple[int, int], stride: int, padding: int
) -> None:
    dense = nn.Conv2d(in_channels, out_channels, kernel, stride, padding, dtype=torch.float64)
    check_sharded_layer(SpectralShardedConv2d, dense, torch.randn(1, in_channels, 5, 6, dtype=torch.float64))


def test_weight_is_differentiable_and_reaches_the_factors() -> None:
    layer = SpectralShardedLinear.from_dense(nn.Linear(4, 3), num_terms=2)
    layer.weight.sum().backward()
    assert layer.u.grad is not None
    assert layer.v.grad is not None


@pytest.mark.parametrize("num_terms", [0, 4])
def test_number_of_terms_out_of_range_is_refused(num_terms: int) -> None:
    with pytest.raises(ValueError, match=rf"`num_terms` must be in \[1, N=3\], got {num_terms}"):
        SpectralShardedLinear(5, 3, num_terms)


def test_grouped_convolution_is_refused() -> None:
    with pytest.raises(ValueError, match="one group, got groups=2"):
        SpectralShardedConv2d.from_dense(nn.Conv2d(4, 4, 3, groups=2), num_terms=2)


def test_contract_check_finds_a_layer_that_forgets_its_multipliers() -> None:
    class Forgetful(SpectralShardedLinear):
        @property
        def weight(self) -> torch.Tensor:
            return self.u @ self.v

    with pytest.raises(AssertionError, match="the loaded terms are not the weight"):
        check_sharded_layer(Forgetful, nn.Linear(4, 3, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64))
