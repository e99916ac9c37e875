"""Fixed-size sampling designs: which terms come together in one client's shard."""

from lightning_spectral.designs.base import Design, FittedDesign
from lightning_spectral.designs.conditional_poisson import ConditionalPoisson
from lightning_spectral.designs.successive_sampling import SuccessiveSampling

__all__ = ["ConditionalPoisson", "Design", "FittedDesign", "SuccessiveSampling"]
