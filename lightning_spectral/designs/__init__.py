"""Fixed-size sampling designs: which terms are drawn together in one client's shard."""

from lightning_spectral.designs.base import Design, FittedDesign, JointDesign
from lightning_spectral.designs.brewer import Brewer
from lightning_spectral.designs.conditional_poisson import ConditionalPoisson
from lightning_spectral.designs.coordinated import Coordinated
from lightning_spectral.designs.minimum_support import MinimumSupport
from lightning_spectral.designs.successive_sampling import SuccessiveSampling
from lightning_spectral.designs.systematic import RandomSystematic, Systematic

__all__ = [
    "Brewer",
    "ConditionalPoisson",
    "Coordinated",
    "Design",
    "FittedDesign",
    "JointDesign",
    "MinimumSupport",
    "RandomSystematic",
    "SuccessiveSampling",
    "Systematic",
]
