"""Layers that hold sampled singular terms, and their exchange for a user's own layers."""

from lightning_spectral.nn.conv import SpectralShardedConv2d
from lightning_spectral.nn.linear import SpectralShardedLinear
from lightning_spectral.nn.replace import replace_layers, sharded_layers
from lightning_spectral.nn.report import LayerReport, LayerTreatment
from lightning_spectral.nn.sharded import SpectralShardedLayer
from lightning_spectral.nn.treatment import SHARDED_LAYERS, plan_layers, validate

__all__ = [
    "SHARDED_LAYERS",
    "LayerReport",
    "LayerTreatment",
    "SpectralShardedConv2d",
    "SpectralShardedLayer",
    "SpectralShardedLinear",
    "plan_layers",
    "replace_layers",
    "sharded_layers",
    "validate",
]
