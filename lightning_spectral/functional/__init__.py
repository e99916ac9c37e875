"""The mathematics as plain functions on tensors: no modules, no Lightning, no global random state."""

from lightning_spectral.functional import zampling as zampling
from lightning_spectral.functional.images import standardize_images

__all__ = ["standardize_images", "zampling"]
