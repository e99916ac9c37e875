"""Fixed-size sampling designs: which terms are drawn together in one client's shard."""

from lightning_spectral.designs.base import Design, FittedDesign, JointDesign
from lightning_spectral.designs.fixed_size import (
    Brewer,
    ConditionalPoisson,
    Coordinated,
    MinimumSupport,
    RandomSystematic,
    SuccessiveSampling,
    Systematic,
)

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
