"""Who takes part: samplers that draw the cohort of each round, and what they know of the clients."""

from lightning_spectral.participation import samplers
from lightning_spectral.participation.samplers import *  # noqa: F403

__all__ = samplers.__all__
