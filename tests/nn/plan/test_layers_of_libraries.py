"""Layers of other packages that are named as torch's, and parameters that have no shape yet."""

import pytest
import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

import lightning_spectral as ls


class Linear(nn.Module):
    """A linear layer as in graph libraries: not a subclass of torch's, and perhaps without a shape yet."""

    __module__ = "graphs.nn.dense"

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        is_known = in_channels > 0
        self.weight = nn.Parameter(torch.ones(out_channels, in_channels)) if is_known else UninitializedParameter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


def test_a_layer_named_as_torchs_stays_dense_under_its_packages_name(capsys: pytest.CaptureFixture[str]) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), Linear(8, 8), nn.Linear(8, 8))
    plan = ls.validate(module, torch.zeros(2, 8))
    assert plan.sharded_weights == ("1.weight",)
    assert (plan.layers[2].type_name, plan.layers[2].reason) == ("graphs.Linear", "graphs.Linear is not supported")
    assert "graphs.Linear" in capsys.readouterr().out


def test_a_weight_without_a_shape_is_named() -> None:
    module = nn.Sequential(nn.Linear(8, 8), Linear(-1, 8), nn.Linear(8, 8))
    with pytest.raises(ValueError, match="Lazy layers have no weight yet: 1; run one forward pass first"):
        ls.SpectralSharding().check(module)
