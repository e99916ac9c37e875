"""Low-rank adapters on linear layers: which layers have or can have one, and how a device holds it."""

from lightning_spectral.nn.adapters.find import adapted_layers, matches
from lightning_spectral.nn.adapters.layer import AdaptedLayer, PeftLayer, factors_of

__all__ = ["AdaptedLayer", "PeftLayer", "adapted_layers", "factors_of", "matches"]
