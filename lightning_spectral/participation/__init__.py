"""Which clients take part in a round, and which of several models they train."""

from lightning_spectral.participation.sampler import Assignment, Figure, Population, Sampler, outcome_to_assignment
from lightning_spectral.participation.samplers import (
    FullParticipation,
    LossVarianceReduced,
    RoundRobin,
    StaleUpdateVarianceReduced,
    Uniform,
    UpdateVarianceReduced,
)
from lightning_spectral.participation.uniform import Participation, UniformParticipation

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
