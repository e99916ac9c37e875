"""Fixed-size sampling designs: which terms are drawn together in one client's shard."""

from lightning_spectral.designs.base import Design, FittedDesign, JointDesign
from lightning_spectral.designs.conditional_poisson import ConditionalPoisson
from lightning_spectral.designs.coordinated import Coordinated
from lightning_spectral.designs.few_samples import MinimumSupport, RandomSystematic, Systematic
from lightning_spectral.designs.one_by_one import Brewer, SuccessiveSampling

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
