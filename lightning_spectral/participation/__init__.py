"""Which clients take part in a round, and which of several models they train."""

from lightning_spectral.participation.baselines import FullParticipation, RoundRobin, Uniform
from lightning_spectral.participation.population import Assignment, Population, outcome_to_assignment
from lightning_spectral.participation.sampler import Figure, Sampler
from lightning_spectral.participation.uniform import Participation, UniformParticipation
from lightning_spectral.participation.variance_reduced import (
    LossVarianceReduced,
    StaleUpdateVarianceReduced,
    UpdateVarianceReduced,
)

__all__ = [
    "Assignment",
    "Figure",
    "FullParticipation",
    "LossVarianceReduced",
    "Participation",
    "Population",
    "RoundRobin",
    "Sampler",
    "StaleUpdateVarianceReduced",
    "Uniform",
    "UniformParticipation",
    "UpdateVarianceReduced",
    "outcome_to_assignment",
]
